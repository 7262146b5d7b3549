"""The figures that a run reports of its dispatch are those of what was done."""

import pytest
import torch

from flatpeak.workers.dispatch import (
    DispatchOptions,
    DispatchReport,
    assumed_routing,
    moe_forward,
    worst_of,
)
from flatpeak.workers.memory import PeakMeter
from moe_families import PlainExperts, profile

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
    assert owner.planned_bytes == 0  # there is no budget


def test_several_reports_are_one_of_the_highest_figures():
    owner, helper = report_of(0), report_of(3)
    figures = worst_of([owner, helper]).figures()
    assert figures["foreign_experts"] == helper.foreign_experts
    assert figures["received_rows"] == max(owner.received_rows, helper.received_rows)


@pytest.mark.parametrize(("budget", "chunks"), [(400_000, 1), (150_000, 3), (100_000, 4)])
def test_the_planned_bytes_are_what_the_budget_bounds(budget: int, chunks: int):
    module, agreed = PlainExperts(EXPERTS, hidden=64), []
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)

    hidden = torch.randn(TOKENS, 64, requires_grad=True)
    weights = torch.rand(TOKENS, K, requires_grad=True)
    with PeakMeter() as meter:
        output = moe_forward(
            module,
            hidden,
            profile(TOKENS, EXPERTS, K, 0, 1),
            weights,
            group=None,
            options=DispatchOptions(budget_bytes=budget),
            grad_sink=lambda parameter, gradient: None,
            on_routing=agreed.append,
        )
        output.backward(torch.ones_like(output))
        peak = meter.peaks()["dispatch"]
    report = DispatchReport().including(*agreed)
    results = output.nbytes + hidden.nbytes + weights.nbytes
    results += sum(parameter.nbytes for parameter in module.parameters())
    assert peak - results <= report.planned_bytes <= 1.05 * (peak - results)
    assert report.chunks == chunks
    assert report.planned_bytes <= budget
