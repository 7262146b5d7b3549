"""All ranks agree on the sizes of every chunk, and the receive cap holds for any routing."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_peers import Recorder, Replay
from flatpeak.workers.dispatch import DispatchOptions, Routing, assumed_routing, make_routing
from flatpeak.workers.dispatch.agreement import agree
from flatpeak.workers.dispatch.assignment import DispatchPlan
from flatpeak.workers.dispatch.counting import steps_at_once
from flatpeak.workers.dispatch.cutting import Bounds, Extent
from flatpeak.workers.dispatch.routing import Chunk
from flatpeak.workers.errors import InputError
from moe_families import random_ids
from ranks import run_ranks


@st.composite
def routed_ranks(draw: st.DrawFn) -> tuple[int, list[torch.Tensor]]:
    """The number of experts, and expert ids [N, k] of each rank; a token may repeat an expert."""
    ranks, experts, k = (draw(st.integers(1, most)) for most in (5, 9, 4))
    hot = draw(st.integers(1, experts))

    def ids(tokens: int) -> torch.Tensor:
        size = tokens * k
        flat = draw(st.lists(st.integers(0, hot - 1), min_size=size, max_size=size))
        return torch.tensor(flat, dtype=torch.long).view(tokens, k)

    return experts, [ids(draw(st.integers(0, 9))) for _ in range(ranks)]


options = st.builds(
    DispatchOptions,
    tokens_per_chunk=st.one_of(st.none(), st.integers(1, 5)),
    max_chunks=st.integers(1, 4),
    receive_rows=st.one_of(st.none(), st.integers(1, 6)),
    min_chunk=st.just(1),
    balance_above=st.sampled_from([1.0, 1.5]),
    max_foreign_experts=st.integers(0, 3),
)


def routings(experts: int, ids: list[torch.Tensor], chosen: DispatchOptions) -> list[Routing]:
    return [
        assumed_routing(ids, rank=rank, experts=experts, options=chosen) for rank in range(len(ids))
    ]


@settings(deadline=None, max_examples=150)
@given(routed_ranks(), options)
def test_what_one_rank_sends_is_what_the_other_expects_and_no_route_is_lost(
    routed: tuple[int, list[torch.Tensor]], chosen: DispatchOptions
):
    experts, ids = routed
    views = routings(experts, ids, chosen)
    assert len({len(view.chunks) for view in views}) == 1
    assert len({view.plan for view in views}) == 1
    for at_once in zip(*(view.chunks for view in views), strict=True):
        for source, sender in enumerate(at_once):
            for target, receiver in enumerate(at_once):
                assert sender.send[target] == receiver.receive[source]
        if chosen.receive_rows is not None:
            assert all(sum(chunk.receive) <= chosen.receive_rows for chunk in at_once)
    computed = sum(
        sum(chunk.own_routes) + sum(chunk.landed_routes) for v in views for chunk in v.chunks
    )
    assert computed == sum(each.numel() for each in ids)


def expected_labels(plan: DispatchPlan, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """The instance of every route, one at a time, in the global order of each expert's routes."""
    labels = [torch.empty_like(each) for each in ids]
    queues = [
        [plan.instance(expert, rank) for rank, routes in pieces for _ in range(routes)]
        for expert, pieces in enumerate(plan.segments)
    ]
    for each, of_rank in zip(ids, labels, strict=True):
        for place, expert in enumerate(each.flatten().tolist()):
            of_rank.view(-1)[place] = queues[expert].pop(0)
    assert not any(queues)
    return labels


@settings(deadline=None, max_examples=150)
@given(routed_ranks(), options)
def test_every_size_is_what_counting_the_labels_gives(
    routed: tuple[int, list[torch.Tensor]], chosen: DispatchOptions
):
    assert_counted(*routed, chosen)


@pytest.mark.parametrize("foreign", [0, 2], ids=["native", "weights move"])
def test_a_layer_of_more_chunks_than_are_counted_at_once_is_counted_whole(foreign: int):
    ids = [random_ids(n, 900, 4, seed=n) for n in (23, 0, 9)]
    chosen = DispatchOptions(
        tokens_per_chunk=1, balance_above=1.0, min_chunk=1, max_foreign_experts=foreign
    )
    assert steps_at_once(900 + 3) < 23
    assert_counted(900, ids, chosen)


def taken(chunk: Chunk, tokens: int) -> list[int]:
    return chunk.share.positions(tokens, torch.device("cpu")).tolist()


def part(rows: torch.Tensor, view: Routing, number: int) -> torch.Tensor:
    return rows[taken(view.chunks[number], len(rows))]


def assert_counted(experts: int, ids: list[torch.Tensor], chosen: DispatchOptions) -> None:
    views = routings(experts, ids, chosen)
    labels = expected_labels(views[0].plan, ids)
    owners = views[0].owners(torch.device("cpu")).tolist()
    for rank, view in enumerate(views):
        assert torch.equal(view.label(ids[rank]).long(), labels[rank])
        local = range(view.first_instance, view.first_instance + view.instances)
        for number, chunk in enumerate(view.chunks):
            rows = [
                [{owners[label] for label in token} for token in part(each, v, number).tolist()]
                for each, v in zip(labels, views, strict=True)
            ]
            routes = [
                part(label, v, number).flatten().tolist()
                for label, v in zip(labels, views, strict=True)
            ]
            elsewhere = [other for other in range(len(views)) if other != rank]
            for other in elsewhere:
                assert chunk.send[other] == sum(other in visited for visited in rows[rank])
                assert chunk.receive[other] == sum(rank in visited for visited in rows[other])
            assert chunk.send[rank] == chunk.receive[rank] == 0
            assert chunk.own_routes == tuple(map(routes[rank].count, local))
            landed = [label for other in elsewhere for label in routes[other]]
            assert chunk.landed_routes == tuple(map(landed.count, local))


@pytest.mark.parametrize(
    ("chosen", "rounds"),
    [
        (DispatchOptions(balance_above=9.0), 1),
        (DispatchOptions(max_foreign_experts=0), 1),
        (DispatchOptions(max_foreign_experts=0, tokens_per_chunk=20), 1),
        (DispatchOptions(max_foreign_experts=0, tokens_per_chunk=8), 2),
        (DispatchOptions(max_foreign_experts=0, receive_rows=100), 2),
        (DispatchOptions(max_foreign_experts=0, receive_rows=7), 4),
        (DispatchOptions(balance_above=1.0, min_chunk=1), 2),
    ],
    ids=[
        "balanced",
        "nothing may move",
        "one chunk is enough",
        "one rank needs two chunks",
        "within the receive cap",
        "cut under the receive cap",
        "weights move",
    ],
)
def test_a_native_layer_of_one_chunk_takes_one_round_and_a_bound_one_more(
    chosen: DispatchOptions, rounds: int
):
    ids, experts = [random_ids(n, 6, 2, seed=n) % 5 for n in (16, 4, 0)], 6
    together, bounds = Recorder(), Bounds(chosen, None)
    expected = agree(dict(enumerate(ids)), together, len(ids), experts, bounds)
    for rank in range(len(ids)):
        replay = Replay(rank, together.made)
        alone = agree({rank: ids[rank]}, replay, len(ids), experts, bounds)
        assert alone == {rank: expected[rank]}
        assert replay.rounds == len(together.made) == rounds


@pytest.mark.parametrize("tokens", [0, 3], ids=["no tokens", "every token to every expert"])
def test_extreme_routings_are_agreed_on(tokens: int):
    ids = [torch.arange(4).repeat(tokens, 1)] * 3
    chosen = DispatchOptions(tokens_per_chunk=2, max_foreign_experts=0)
    for view in routings(4, ids, chosen):
        assert view.plan.loads == (6 * tokens, 3 * tokens, 3 * tokens)
        assert sum(sum(chunk.receive) for chunk in view.chunks) == 2 * tokens


@settings(deadline=None)
@given(routed_ranks(), options)
def test_the_chunks_of_a_rank_cover_its_tokens_once(
    routed: tuple[int, list[torch.Tensor]], chosen: DispatchOptions
):
    experts, ids = routed
    for rank, view in enumerate(routings(experts, ids, chosen)):
        tokens = range(len(ids[rank]))
        covered = [position for chunk in view.chunks for position in taken(chunk, len(tokens))]
        assert sorted(covered) == list(tokens)


def test_a_token_travels_once_to_a_rank_that_has_several_of_its_experts():
    ids = [torch.tensor([[4, 5, 6, 7]]), torch.tensor([[0, 4, 5, 6]])]
    first, second = routings(8, ids, DispatchOptions(max_foreign_experts=0))
    assert first.chunks[0].send == (0, 1)
    assert second.chunks[0].send == (1, 0)
    assert sum(second.chunks[0].landed_routes) == 4


def test_chunks_are_as_many_as_the_fullest_rank_needs_but_no_more_than_allowed():
    ids = [random_ids(3, 4, 1), random_ids(40, 4, 1)]
    for most, expected in ((8, 8), (64, 10)):
        chosen = DispatchOptions(tokens_per_chunk=4, max_chunks=most)
        assert {len(view.chunks) for view in routings(4, ids, chosen)} == {expected}


def _agree(rank: int, ids: list[torch.Tensor], chosen: DispatchOptions) -> Routing:
    return make_routing(ids[rank], experts=6, group=dist.group.WORLD, options=chosen)


def test_processes_agree_on_what_the_simulation_assumes():
    ids = [random_ids(n, 6, 2, seed=n) for n in (9, 0, 14)]
    chosen = DispatchOptions(
        tokens_per_chunk=4, receive_rows=3, min_chunk=1, balance_above=1.0, max_foreign_experts=2
    )
    assert run_ranks(3, _agree, ids, chosen) == routings(6, ids, chosen)


def test_an_id_far_beyond_any_count_is_named_in_full():
    ids = [torch.tensor([[2**40 + 1]])]
    with pytest.raises(InputError, match=f"expert ids {2**40 + 1} to {2**40 + 1}"):
        assumed_routing(ids, rank=0, experts=4, options=DispatchOptions())


def _message_for_bad_ids(rank: int) -> str:
    ids = torch.tensor([[rank * 6]])
    with pytest.raises(InputError) as error:
        make_routing(ids, experts=6, group=dist.group.WORLD, options=DispatchOptions())
    return str(error.value)


def test_an_id_without_an_expert_on_one_rank_is_refused_on_all_ranks():
    messages = run_ranks(2, _message_for_bad_ids)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0]
    assert "ids must lie in [0, 5]" in messages[0]


def _message_for_other_terms(rank: int) -> str:
    with pytest.raises(InputError) as error:
        make_routing(
            torch.zeros(2, 1 + (rank == 1), dtype=torch.long),
            experts=6,
            group=dist.group.WORLD,
            options=DispatchOptions(),
            alike={"dtype": torch.float32, "k": 1 + (rank == 1)},
        )
    return str(error.value)


def test_terms_that_differ_between_ranks_are_refused_on_all_of_them():
    first, second, third = run_ranks(3, _message_for_other_terms)
    assert first.startswith("k is 1 on rank 0 of the expert group, but something else on rank 1;")
    assert second.startswith(
        "k is 2 on rank 1 of the expert group, but something else on rank 0, 2;"
    )
    assert third.startswith("k is 1 on rank 2 of the expert group, but something else on rank 1;")


def test_options_that_differ_between_ranks_are_refused():
    messages = run_ranks(2, _message_for_other_options)
    for rank, message in enumerate(messages):
        assert f"dispatch option max_foreign_experts is {rank} on rank {rank}" in message


def _message_for_other_options(rank: int) -> str:
    options = DispatchOptions(max_foreign_experts=rank)
    ids = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(InputError) as error:
        make_routing(ids, experts=6, group=dist.group.WORLD, options=options)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "smallest"),
    [
        ("tokens_per_chunk", 0, "1"),
        ("receive_rows", 0, "1"),
        ("max_chunks", 0, "1"),
        ("min_chunk", 0, "1"),
        ("max_foreign_experts", -1, "0"),
        ("capacity_factor", 0.9, "1.0"),
        ("balance_above", float("nan"), "1.0"),
        ("capacity_factor", float("inf"), "1.0"),
        ("balance_above", 10**400, "1.0"),
        ("budget_bytes", 0, "1"),
        ("tokens_per_chunk", "4", "1"),
        ("max_chunks", 2.0, "1"),
        ("max_foreign_experts", True, "0"),
    ],
)
def test_an_option_below_its_range_is_refused_with_the_smallest_legal_value(
    name: str, value: float, smallest: str
):
    with pytest.raises(
        InputError, match=f"{name} is {value!r}; .* smallest legal value is {smallest}$"
    ):
        DispatchOptions(**{name: value})  # type: ignore[arg-type]


def test_the_bytes_of_a_cut_are_asked_for_once():
    asked = []

    def footprint(extent: Extent) -> int:
        asked.append(extent)
        return extent.computed

    ids = [random_ids(40, 4, 2)] * 2
    chosen = DispatchOptions(budget_bytes=30, max_foreign_experts=0)
    view = assumed_routing(ids, rank=0, experts=4, options=chosen, footprint=footprint)
    assert len(view.chunks) > 1
    assert view.planned_bytes == view.extent(40).computed <= 30
    assert len(asked) == len(set(asked)) > 2
