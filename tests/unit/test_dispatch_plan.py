"""The least-loaded plan: every route has one place, within the caps, the same for everyone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatpeak.workers.dispatch import DispatchOptions, plan_least_loaded
from flatpeak.workers.dispatch.assignment import DispatchPlan, plan_dispatch, plan_native
from flatpeak.workers.errors import InputError


@st.composite
def count_tables(draw: st.DrawFn) -> list[list[int]]:
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    # A few experts much hotter than the rest, as routers draw them.
    count = st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 2000))
    row = st.lists(count, min_size=experts, max_size=experts)
    return draw(st.lists(row, min_size=ranks, max_size=ranks))


def totals(counts: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def capacity(counts: list[list[int]], factor: float) -> int:
    return math.ceil(factor * sum(totals(counts)) / len(counts))


factors = st.sampled_from([1.0, 1.1, 1.5])
pieces = st.sampled_from([1, 7, 1024])


@settings(deadline=None)
@given(count_tables(), factors, pieces, st.integers(0, 4))
def test_every_route_is_assigned_once_and_no_rank_exceeds_its_foreign_cap(
    counts: list[list[int]], factor: float, piece: int, max_foreign: int
):
    plan = plan_least_loaded(
        counts, capacity_factor=factor, min_chunk=piece, max_foreign=max_foreign
    )
    for segments, total in zip(plan.segments, totals(counts), strict=True):
        ranks = [rank for rank, _ in segments]
        assert ranks == sorted(set(ranks))
        assert all(routes > 0 for _, routes in segments)
        assert sum(routes for _, routes in segments) == total
    assert all(len(foreign) <= max_foreign for foreign in plan.foreign)


@settings(deadline=None)
@given(count_tables(), factors)
def test_no_rank_exceeds_the_capacity_when_everything_may_move(
    counts: list[list[int]], factor: float
):
    experts = len(counts[0])
    plan = plan_least_loaded(counts, capacity_factor=factor, min_chunk=1, max_foreign=experts)
    assert max(plan.loads) <= capacity(counts, factor)


@settings(deadline=None)
@given(count_tables(), factors, pieces, st.integers(0, 3))
def test_a_plan_never_makes_the_busiest_rank_busier(
    counts: list[list[int]], factor: float, piece: int, max_foreign: int
):
    plan = plan_least_loaded(
        counts, capacity_factor=factor, min_chunk=piece, max_foreign=max_foreign
    )
    limit = capacity(counts, factor)
    scaled = max(1, min(piece, limit // 8))
    assert max(plan.loads) <= max(*plan_native(counts).loads, limit + scaled - 1)


@settings(deadline=None)
@given(count_tables())
def test_the_splits_of_all_sources_make_up_the_segments(counts: list[list[int]]):
    plan = plan_least_loaded(counts, capacity_factor=1.0, min_chunk=1, max_foreign=3)
    computed = [0] * plan.first_instance[-1]
    for source, row in enumerate(counts):
        splits = plan.splits(counts, source)
        assert sum(routes for _, routes in splits) == sum(row)
        for instance, routes in splits:
            computed[instance] += routes
    for expert, segments in enumerate(plan.segments):
        for rank, routes in segments:
            assert computed[plan.instance(expert, rank)] == routes


@settings(deadline=None)
@given(count_tables())
def test_a_tensor_and_a_list_of_the_same_counts_give_the_same_plan(counts: list[list[int]]):
    def plan(table: list[list[int]] | torch.Tensor) -> DispatchPlan:
        return plan_least_loaded(table, capacity_factor=1.0, min_chunk=4, max_foreign=2)

    assert plan(counts) == plan(torch.tensor(counts))


def test_one_expert_with_every_route_is_shared_by_all_ranks():
    counts = [[10, 0, 0, 0], [10, 0, 0, 0], [10, 0, 0, 0], [11, 0, 0, 0]]
    plan = plan_least_loaded(counts, capacity_factor=1.0, min_chunk=1, max_foreign=1)
    assert plan.segments[0] == ((0, 11), (1, 11), (2, 11), (3, 8))


def test_a_least_piece_above_the_capacity_still_spreads_the_overflow():
    plan = plan_least_loaded([[64, 0], [0, 0]], capacity_factor=1.0, min_chunk=4096, max_foreign=1)
    assert plan.loads == (32, 32)


def test_a_balanced_load_moves_nothing():
    counts = [[5, 4], [5, 6]]
    options = DispatchOptions(balance_above=1.1, min_chunk=1, max_foreign_experts=1)
    assert not plan_dispatch(counts, options).moves_weights


def test_a_capacity_factor_below_one_is_refused():
    with pytest.raises(InputError, match=r"capacity_factor is 0.5; the smallest legal value is 1"):
        plan_least_loaded([[1]], capacity_factor=0.5, min_chunk=1, max_foreign=1)
