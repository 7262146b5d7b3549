"""The planning bench runs, and notices a plan that is not exact."""

from dataclasses import replace
from pathlib import Path

import torch

from flatpeak.controller.bench import load_bench, run_bench
from flatpeak.workers.dispatch import DispatchOptions, assumed_routing
from flatpeak.workers.dispatch.assignment import plan_dispatch
from moe_families import random_ids

ROOT = Path(__file__).parents[2]


def test_every_profile_and_size_is_measured_and_exact():
    small = {"experts": 80, "ranks": 4, "top_k": 2, "tokens": "3,40", "chunks": "1,4"}
    words = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    report = run_bench("planning", [*words, "--repeats", "2"], start=ROOT)
    assert report.exact
    assert set(report.ratios) == {"plan_ms_max", "routing_ms_max"}
    sizes = [(row["profile"], row["tokens"], row["chunks"]) for row in report.rows]
    assert sizes == [
        (profile, tokens, chunks)
        for profile in ("balanced", "80/16", "zipf")
        for tokens, chunks in ((3, 1), (3, 3), (40, 1), (40, 4))
    ]
    for row in report.rows:
        assert row["plan_ms"] > 0
        assert row["routing_ms"] > 0
        assert row["imbalance"] <= row["imbalance_native"]
        if row["profile"] == "80/16":
            assert row["foreign_experts"] > 0


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
