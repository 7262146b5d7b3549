"""Who owns which arena, for any observation."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatpeak.controller.ownership import HeldArena, Ownership, assign_arenas, slowest


def loads(arenas, actors, ownership):
    return [sum(arenas[n].nbytes for n in ownership.of(actor)) for actor in range(len(actors))]


def moved(arenas, owners):
    """How many arenas change hands that might have stayed."""
    return sum(a.owner is not None and a.owner != o for a, o in zip(arenas, owners, strict=True))


@st.composite
def observations(draw):
    """Arenas of two nodes with owners that may be gone, and the actors that are to be."""
    actors = ["a", "b", *draw(st.lists(st.sampled_from("ab"), max_size=4))]
    before = ["a", "b", *draw(st.lists(st.sampled_from("ab"), max_size=4))]
    arenas = []
    for node in draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=10)):
        owners = [index for index, home in enumerate(before) if home == node]
        owner = draw(st.one_of(st.none(), st.sampled_from(owners)))
        arenas.append(HeldArena(draw(st.integers(0, 50)), node, owner))
    return arenas, actors


@settings(deadline=None)
@given(observations())
def test_every_arena_has_an_owner_on_its_node(observed):
    arenas, actors = observed
    ownership = assign_arenas(arenas, actors)
    assert [actors[owner] for owner in ownership.owners] == [arena.node for arena in arenas]
    assert sum(map(len, map(ownership.of, range(len(actors))))) == len(arenas)


@settings(deadline=None)
@given(observations())
def test_no_arena_could_relieve_its_owner_by_half_of_it_any_more(observed):
    arenas, actors = observed
    ownership = assign_arenas(arenas, actors)
    held = loads(arenas, actors, ownership)
    for arena, owner in zip(arenas, ownership.owners, strict=True):
        for other, node in enumerate(actors):
            if node == arena.node and other != owner and arena.nbytes:
                assert held[owner] - held[other] < 1.5 * arena.nbytes


@settings(deadline=None)
@given(observations())
def test_the_same_actors_asked_again_hand_nothing_over(observed):
    arenas, actors = observed
    ownership = assign_arenas(arenas, actors)
    settled = [
        HeldArena(arena.nbytes, arena.node, owner)
        for arena, owner in zip(arenas, ownership.owners, strict=True)
    ]
    assert assign_arenas(settled, actors) == ownership


@st.composite
def rated_observations(draw):
    """The same, with the rate of each actor, as far as it has one."""
    arenas, actors = draw(observations())
    rates = st.one_of(st.none(), st.floats(1e3, 1e9))
    return arenas, actors, draw(st.lists(rates, min_size=len(actors), max_size=len(actors)))


def in_mean_rates(rates):
    known = [rate for rate in rates if rate is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [1.0 if rate is None else rate / mean for rate in rates]


@settings(deadline=None)
@given(rated_observations())
def test_with_rates_no_arena_could_relieve_its_owner_by_half_of_its_time_either(observed):
    arenas, actors, rates = observed
    ownership = assign_arenas(arenas, actors, rates)
    speeds, held = in_mean_rates(rates), loads(arenas, actors, ownership)
    assert [actors[owner] for owner in ownership.owners] == [arena.node for arena in arenas]
    for arena, owner in zip(arenas, ownership.owners, strict=True):
        if len(ownership.of(owner)) == 1 or not arena.nbytes:
            continue
        for other, node in enumerate(actors):
            if node == arena.node and other != owner:
                after = (held[other] + arena.nbytes) / speeds[other]
                half = 0.5 * arena.nbytes / speeds[owner]
                assert held[owner] / speeds[owner] - after < half * (1 + 1e-9)


@settings(deadline=None)
@given(rated_observations())
def test_with_rates_the_same_actors_asked_again_hand_nothing_over_either(observed):
    arenas, actors, rates = observed
    ownership = assign_arenas(arenas, actors, rates)
    settled = [
        HeldArena(arena.nbytes, arena.node, owner)
        for arena, owner in zip(arenas, ownership.owners, strict=True)
    ]
    assert assign_arenas(settled, actors, rates) == ownership


@settings(deadline=None)
@given(rated_observations(), st.floats(1e-3, 1e3))
def test_equal_rates_are_as_good_as_none_and_only_ratios_count(observed, factor):
    arenas, actors, rates = observed
    assert assign_arenas(arenas, actors, [factor] * len(actors)) == assign_arenas(arenas, actors)
    scaled = [None if rate is None else 1024 * rate for rate in rates]
    assert assign_arenas(arenas, actors, scaled) == assign_arenas(arenas, actors, rates)


@settings(deadline=None)
@given(rated_observations())
def test_a_new_assignment_by_rates_is_never_slower_than_the_old_one(observed):
    arenas, actors, rates = observed
    before = assign_arenas(arenas, actors).owners  # as if all were alike
    held = [HeldArena(a.nbytes, a.node, owner) for a, owner in zip(arenas, before, strict=True)]
    after = assign_arenas(held, actors, rates).owners
    times = [slowest(arenas, owners, len(actors), rates) for owners in (before, after)]
    assert times[1] <= times[0] * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(1.0, 8.0), min_size=2, max_size=3),
    st.lists(st.integers(30, 50), min_size=4, max_size=6),
)
def test_the_slowest_actor_takes_little_longer_than_in_the_best_assignment(rates, sizes):
    arenas = [HeldArena(size, "a") for size in sizes]
    found = assign_arenas(arenas, ["a"] * len(rates), rates).owners
    best = min(
        slowest(arenas, owners, len(rates), rates)
        for owners in product(range(len(rates)), repeat=len(sizes))
    )
    assert slowest(arenas, found, len(rates), rates) <= 1.5 * best


def test_an_actor_of_a_third_of_the_rate_has_a_third_of_the_arenas():
    settled = [HeldArena(100, "a", number % 2) for number in range(8)]
    found = assign_arenas(settled, ["a", "a"], [1e6, 3e6])
    assert [len(found.of(actor)) for actor in (0, 1)] == [2, 6]
    assert moved(settled, found.owners) == 2


def test_an_actor_without_a_rate_counts_with_the_mean_and_keeps_its_last_arena():
    arenas = [HeldArena(100, "a") for _ in range(6)]
    found = assign_arenas(arenas, ["a"] * 3, [1e6, 3e6, None])
    assert [len(found.of(actor)) for actor in range(3)] == [1, 3, 2]
    pair = [HeldArena(100, "a", 0), HeldArena(100, "a", 1)]
    assert assign_arenas(pair, ["a", "a"], [1.0, 1e6]).owners == (0, 1)


@pytest.mark.parametrize("count", [1, 4, 6])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_of_arenas_of_like_sizes_the_fewest_change_hands_that_balance(count, before, after):
    sizes = [1000 + 7 * number % 5 for number in range(count)]
    settled = assign_arenas([HeldArena(size, "a") for size in sizes], ["a"] * before)
    arenas = [HeldArena(*of) for of in zip(sizes, "a" * count, settled.owners, strict=True)]
    found = assign_arenas(arenas, ["a"] * after)
    balanced = [
        owners
        for owners in product(range(after), repeat=count)
        if {owners.count(actor) for actor in range(after)} <= {count // after, -(-count // after)}
    ]
    assert found.owners in balanced
    assert moved(arenas, found.owners) == min(moved(arenas, owners) for owners in balanced)


def test_large_arenas_go_first_and_to_the_emptiest():
    sizes = [5, 9, 4, 8]
    found = assign_arenas([HeldArena(size, "a") for size in sizes], ["a", "a"])
    assert found.owners == (1, 0, 0, 1)


def test_gains_and_losses_are_seen_from_an_actor():
    before, after = Ownership((0, 0, 1, 1)), Ownership((0, 2, 1, 2))
    assert [after.gained(actor, since=before) for actor in range(3)] == [[], [], [1, 3]]
    assert [after.lost(actor, since=before) for actor in range(3)] == [[1], [3], []]
