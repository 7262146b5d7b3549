"""The figures that a run reports of its dispatch are those of what was done."""

from flatpeak.workers.dispatch import (
    DispatchOptions,
    DispatchReport,
    assumed_routing,
    worst_of,
)
from moe_families import profile

EXPERTS, K, TOKENS = 16, 4, 96
MOVING = DispatchOptions(tokens_per_chunk=32, min_chunk=1, max_foreign_experts=2)


def report_of(rank: int) -> DispatchReport:
    """Of a layer in which all tokens choose the experts of rank 0 of four."""
    ids = [profile(TOKENS, EXPERTS, K, 100, 4)] * 4
    routing = assumed_routing(ids, rank=rank, experts=EXPERTS, options=MOVING)
    return DispatchReport().including(routing)


def test_a_rank_reports_its_own_part_of_a_layer():
    owner, helper = report_of(0), report_of(3)
    assert owner.imbalance_before == 4
    assert 1 <= owner.imbalance_after < 4
    assert (owner.chunks, owner.foreign_experts) == (3, 0)
    assert owner.imbalance_after == helper.imbalance_after
    assert 1 <= helper.foreign_experts <= MOVING.max_foreign_experts


def test_several_reports_are_one_of_the_highest_figures():
    owner, helper = report_of(0), report_of(3)
    figures = worst_of([owner, helper]).figures()
    assert figures["foreign_experts"] == helper.foreign_experts
    assert figures["received_rows"] == max(owner.received_rows, helper.received_rows)
