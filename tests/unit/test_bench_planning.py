"""The planning bench runs, and notices a plan that is not exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flatpeak.controller.bench import load_bench, run_bench
from flatpeak.workers.dispatch import DispatchOptions, assumed_routing
from flatpeak.workers.dispatch.assignment import plan_dispatch
from flatpeak.workers.errors import InputError
from moe_families import random_ids

ROOT = Path(__file__).parents[2]


SMALL = ["--experts=80", "--ranks=4", "--top-k=2", "--repeats=2"]


def test_every_profile_and_size_is_measured_and_exact():
    words = ["--tokens=3,40", "--chunks=1,4", "--budget-share=0.5"]
    # Tokens weigh, next to so small experts.
    report = run_bench("planning", [*SMALL, *words, "--hidden=64", "--intermediate=1"], start=ROOT)
    assert report.exact
    assert set(report.ratios) == {"plan_ms_max", "routing_ms_max", "sized_ms_max"}
    chunked = [row for row in report.rows if row["budget_bytes"] is None]
    sized = [row for row in report.rows if row["budget_bytes"] is not None]
    assert [(row["profile"], row["tokens"], row["chunks"]) for row in chunked] == [
        (profile, tokens, chunks)
        for profile in ("balanced", "80/16", "zipf")
        for tokens, chunks in ((3, 1), (3, 3), (40, 1), (40, 4))
    ]
    assert [row["tokens"] for row in sized] == [3, 40] * 3
    assert all(row["chunks"] > 1 for row in sized if row["tokens"] == 40)
    for figure, other, rows in (
        ("routing_ms", "sized_ms", chunked),
        ("sized_ms", "routing_ms", sized),
    ):
        assert all(row[figure] > 0 and row[other] is None for row in rows)
    for row in report.rows:
        assert row["plan_ms"] > 0
        assert row["imbalance"] <= row["imbalance_native"]
        if row["profile"] == "80/16":
            assert row["foreign_experts"] > 0


def test_equal_budgets_are_measured_once():
    report = run_bench("planning", [*SMALL, "--tokens=3", "--chunks=1"], start=ROOT)
    # Both shares are less than what any routing takes.
    assert [row["budget_bytes"] is None for row in report.rows] == [True, False] * 3


@pytest.mark.parametrize(
    ("option", "legal"),
    [
        *(
            (f"{name}=0", f"--{name} 0: should be 1 or more")
            for name in ("ranks", "experts", "tokens", "chunks", "hidden", "min-chunk", "repeats")
        ),
        ("tokens=8,-1", "--tokens -1: should be 1 or more"),
        ("top-k=81", "--top-k 81: should be from 1 to 80"),
        ("max-foreign-experts=-1", "--max-foreign-experts -1: should be 0 or more"),
        ("budget-share=2", "--budget-share 2.0: should be from 0 to 1"),
        ("tokens=8;9", "--tokens 8;9: should be a whole number, like 128"),
    ],
)
def test_an_option_out_of_range_is_refused(option: str, legal: str):
    with pytest.raises(InputError) as refused:
        run_bench("planning", [*SMALL, f"--{option}"], start=ROOT)
    assert str(refused.value) == legal


def test_a_plan_that_loses_a_route_or_moves_too_much_is_not_exact():
    bench = load_bench(ROOT, "planning")
    counts = torch.tensor([[40, 0, 3, 1], [50, 2, 0, 0]])
    options = DispatchOptions(min_chunk=1, balance_above=1.0, max_foreign_experts=1)
    plan = plan_dispatch(counts.numpy(), options)
    assert bench.is_valid(plan, counts, options)
    assert not bench.is_valid(plan, counts, replace(options, max_foreign_experts=0))
    (rank, routes), *others = plan.segments[0]
    lost = replace(plan, segments=(((rank, routes - 1), *others), *plan.segments[1:]))
    assert not bench.is_valid(lost, counts, options)


def test_a_routing_that_sends_a_row_too_many_is_not_exact():
    bench = load_bench(ROOT, "planning")
    ids = [random_ids(9, 6, 2, seed=rank) for rank in range(3)]
    routing = assumed_routing(ids, rank=1, experts=6, options=DispatchOptions())
    assert bench.counts_every_row(routing, ids)
    (chunk,) = routing.chunks
    more = replace(chunk, send=(chunk.send[0] + 1, *chunk.send[1:]))
    assert not bench.counts_every_row(replace(routing, chunks=(more,)), ids)
