"""When there should be more or fewer processes, for any observation."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatpeak.controller.autoscaling import (
    Decision,
    Observation,
    ObservedStep,
    WorkersObservation,
    allowed_workers,
    busy_share,
    rebalanced,
    room_for_workers,
    waited,
    wanted_optimizers,
    wanted_workers,
)
from flatpeak.controller.spec import AutoscaleSpec, parse_spec, resolve_parallel
from flatpeak.workers.errors import SpecError

SETTINGS = AutoscaleSpec(optimizers=(1, 8), workers=(1, 8), window_steps=4, workers_free_s=60.0)
WAITING = ObservedStep(1.0, 0.2, 0.6)
IDLE = ObservedStep(1.0, 0.0, 0.1)


def seen(*steps, present=2, arenas=8, strained=inf) -> Observation:
    """Arenas of one size, on one node."""
    slowest = {count: float(-(-arenas // count)) for count in range(1, arenas + 1)}
    return Observation(steps, present, slowest, strained)


def wanted(*steps, **more) -> int | None:
    return wanted_optimizers(seen(*steps, **more), SETTINGS).wanted


def test_forward_passes_that_wait_in_every_step_of_a_window_bring_one_more_actor():
    decision = wanted_optimizers(seen(*[WAITING] * 4), SETTINGS)
    assert decision.wanted == 3
    assert decision.reason == (
        "in 4 steps forward passes waited for updates for more than 5.0% of a step, 0.200 s"
    )
    assert wanted(*[WAITING] * 3) is None
    assert wanted(WAITING, WAITING, ObservedStep(1.0, 0.04, 0.6), WAITING) is None
    assert wanted(IDLE, *[WAITING] * 4) == 3


def test_a_number_that_divides_the_arenas_no_better_is_passed_over():
    assert wanted(*[WAITING] * 4, present=4) == 8
    assert wanted(*[WAITING] * 4, present=2, arenas=4) == 4


@pytest.mark.parametrize(
    ("steps", "present", "reason"),
    [
        (ObservedStep(1.0, 0.2, 0.05), 2, "but the actors took only 0.050 s for them"),
        (WAITING, 8, "but more actors would not be done sooner"),
        (IDLE, 1, "these are the fewest that there may be"),
        (ObservedStep(1.0, 0.0, 0.55), 2, "the actors are busy for 0.550 of 1.000 s"),
        (ObservedStep(1.0, 0.03, 0.3), 2, "with 1, forward passes would wait for 33.0% of a step"),
    ],
)
def test_where_no_change_would_help_the_reason_is_said(steps, present, reason):
    decision = wanted_optimizers(seen(*[steps] * 4, present=present), SETTINGS)
    assert decision.wanted is None
    assert reason in decision.reason


def test_actors_that_are_idle_most_of_the_time_become_fewer():
    assert wanted(*[IDLE] * 4) == 1
    assert wanted(*[IDLE] * 4, present=5) == 4
    assert wanted(*[IDLE] * 4, strained=0.5) == 1
    assert wanted(*[IDLE] * 4, strained=0.3) is None


@pytest.mark.parametrize(("present", "bounds", "expected"), [(5, (1, 3), 3), (1, (2, 3), 2)])
def test_a_number_outside_the_range_comes_back_into_it(present, bounds, expected):
    settings = SETTINGS.model_copy(update={"optimizers": bounds})
    steps = [ObservedStep(1.0, 0.02, 0.3)] * 4
    assert wanted_optimizers(seen(*steps, present=present), settings).wanted == expected


def test_without_a_range_nothing_is_wanted():
    off = AutoscaleSpec()
    assert wanted_optimizers(seen(*[WAITING] * 8), off).wanted is None
    assert wanted_workers(WorkersObservation(1, [1, 2], [(0, 9), (999, 9)]), off).wanted is None


@st.composite
def plants(draw):
    """Seconds of a step without waiting, of all updating, hidden, and waited for in any case."""
    base = draw(st.floats(0.1, 100.0))
    work, hidden = base * draw(st.floats(0.0, 8.0)), base * draw(st.floats(0.0, 0.6))
    return base, work, hidden, base * draw(st.floats(0.0, 0.1))


@settings(deadline=None, max_examples=300)
@given(plants(), st.integers(1, 8), st.integers(0, 8), st.lists(st.floats(0.97, 1.03), min_size=64))
def test_any_plant_comes_to_rest_after_at_most_one_turn(plant, present, extra_arenas, noise):
    base, work, hidden, least = plant
    arenas, now = 8 + extra_arenas, iter(noise * 200)
    strained, numbers = inf, [present]
    for _ in range(30):
        update = work * -(-arenas // present) / arenas
        exposed = max(least, update - hidden)
        steps = [
            ObservedStep((base + exposed) * next(now), exposed * next(now), update * next(now))
            for _ in range(SETTINGS.window_steps)
        ]
        if waited(steps, SETTINGS):
            strained = busy_share(steps)
        observation = seen(*steps, present=present, arenas=arenas, strained=strained)
        present = wanted_optimizers(observation, SETTINGS).wanted or present
        numbers.append(present)
    assert len({*numbers[-10:]}) == 1, numbers
    turns = [after - before for before, after in pairwise(numbers)]
    ups = [number for number, change in enumerate(turns) if change > 0]
    downs = [number for number, change in enumerate(turns) if change < 0]
    assert not ups or not downs or max(downs) < min(ups), numbers


def test_the_slowest_actor_has_to_take_much_longer_for_arenas_to_change_hands():
    steps = [ObservedStep(1.0, 0.0, 0.3)] * 4
    assert rebalanced(steps, now=1.2, better=1.0) is None
    assert rebalanced(steps, now=1.6, better=1.0) == (
        "the slowest actor updated for 0.300 of 1.000 s, 1.6 times as long as it would with other "
        "arenas"
    )
    assert rebalanced([ObservedStep(1.0, 0.0, 0.05)] * 4, now=1.6, better=1.0) is None
    assert rebalanced(steps, now=0.0, better=0.0) is None


def rooms(*found: tuple[float, int], present: int = 1) -> Decision:
    return wanted_workers(WorkersObservation(present, [1, 2, 4, 8, 16], found), SETTINGS)


def test_more_workers_come_when_there_was_room_for_them_all_the_time():
    assert rooms((0, 3), (30, 3), (60, 3)) == Decision(
        4, "for 60 s there has been room for 3 more workers"
    )
    assert rooms((0, 3), (30, 1), (60, 3)).wanted == 2
    assert rooms((0, 0), (10, 0), (20, 7), (50, 7), (80, 7)).wanted == 8
    assert rooms((0, 99), (60, 99)).wanted == 8, "the range ends there"


@pytest.mark.parametrize(
    ("found", "present", "reason"),
    [
        ((), 1, "watched for less than 60 s"),
        (((0, 3), (59, 3)), 1, "watched for less than 60 s"),
        (((0, 0), (60, 9)), 1, "room for 0 more workers, and no number that suits"),
        (((0, 3), (60, 3)), 4, "room for 3 more workers, and no number that suits"),
        (((0, 99), (60, 99)), 8, "and no number that suits"),
    ],
)
def test_workers_stay_as_many_as_they_are_otherwise(found, present, reason):
    decision = rooms(*found, present=present)
    assert decision.wanted is None
    assert reason in decision.reason


@given(
    st.lists(st.tuples(st.floats(0, 200), st.integers(0, 20)), max_size=8),
    st.integers(1, 8),
    st.sets(st.integers(1, 12)),
)
def test_fewer_workers_are_never_wanted_nor_more_than_suit(found, present, allowed):
    seen = WorkersObservation(present, sorted(allowed), sorted(found, key=lambda room: room[0]))
    wanted = wanted_workers(seen, SETTINGS).wanted
    assert wanted is None or (present < wanted <= 8 and wanted in allowed)


def test_room_is_where_all_of_a_worker_fits_beside_an_optimizer_actor():
    free = {
        "a": {"GPU": 2.0, "CPU": 9.0},
        "b": {"GPU": 2.0, "CPU": 5.0},
        "c": {"CPU": 64.0},
        "d": {"GPU": 1.0, "CPU": 1.0},
    }
    needs = {"worker": {"GPU": 1.0, "CPU": 2.0}, "optimizer": {"CPU": 2.0}}
    assert room_for_workers(free, **needs, served=["a"]) == 2 + 1
    assert room_for_workers(free, **needs, served=["a", "b"]) == 2 + 2
    assert room_for_workers({}, **needs, served=[]) == 0


def test_numbers_of_workers_suit_the_batch_the_degrees_and_the_model():
    asked = parse_spec(
        {
            "run": "a",
            "model": {"path": "/models/x"},
            "train": {"sequences_per_step": 12},
            "cluster": {"workers": 2, "autoscale": {"workers": [2, 12]}},
            "parallel": {"sequence": 1, "vocabulary": 2},
        }
    )

    def suits(spec):
        try:
            resolve_parallel(spec, experts=4, heads=4)
        except SpecError:
            return False
        return True

    assert allowed_workers(asked, suits) == (2, 4, 6, 12)
    assert allowed_workers(asked, lambda spec: spec.cluster.workers != 6) == (2, 4, 12)
    off = parse_spec({"run": "a", "model": {"path": "/models/x"}})
    assert allowed_workers(off, suits) == ()
