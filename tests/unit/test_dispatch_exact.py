"""Dispatched experts equal the dense layer: outputs and every gradient, whatever the routing."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flatpeak.workers.dispatch import DispatchOptions, moe_forward
from flatpeak.workers.dispatch.experts import block_routes
from moe_families import (
    FAMILIES,
    Results,
    Tokens,
    assert_equals_dense,
    make_experts,
    make_tokens,
    profile,
    random_ids,
    results_of,
    slice_of,
)
from ranks import run_ranks

MOVING = DispatchOptions(tokens_per_chunk=5, min_chunk=1, balance_above=1.0, max_foreign_experts=3)
OPTIONS = {
    "whole layer at once, no moves": DispatchOptions(max_foreign_experts=0),
    "chunks and moves": MOVING,
    "three rows at once": replace(MOVING, receive_rows=3),
    "one row at once": replace(MOVING, receive_rows=1),
}


def _run(
    rank: int, family: str, experts: int, tokens: list[Tokens], options: DispatchOptions
) -> Results:
    module = slice_of(make_experts(family, experts), rank, len(tokens))
    return results_of(
        module,
        tokens[rank],
        lambda m, t: moe_forward(
            m, t.hidden, t.ids, t.weights, group=dist.group.WORLD, options=options
        ),
    )


def check(
    ids: list[torch.Tensor],
    *,
    family: str = "plain",
    experts: int = 8,
    options: DispatchOptions = MOVING,
) -> None:
    tokens = [make_tokens(each, seed=rank) for rank, each in enumerate(ids)]
    results = run_ranks(len(ids), _run, family, experts, tokens, options)
    assert_equals_dense(make_experts(family, experts), tokens, results)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_dense(family: str, ranks: int):
    check([random_ids(13, 8, 3, seed=rank) for rank in range(ranks)], family=family)


PROFILES = {
    "balanced": (0, 1),
    "30/16": (30, 16),
    "50/16": (50, 16),
    "80/16": (80, 16),
    "95/16": (95, 16),
    "30/4": (30, 4),
    "50/4": (50, 4),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", PROFILES)
def test_published_profiles_equal_dense(name: str, options: DispatchOptions):
    # 50/4 and 30/4 with k = 8 send one token to an expert twice.
    check([profile(20, 32, 8, *PROFILES[name])] * 4, experts=32, options=options)


def _run_each(
    rank: int, cases: list[list[Tokens]], experts: int, options: DispatchOptions
) -> list[Results]:
    return [_run(rank, "plain", experts, tokens, options) for tokens in cases]


@pytest.mark.parametrize("name", ["whole layer at once, no moves", "chunks and moves"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_published_profiles_equal_dense_on_any_number_of_ranks(ranks: int, name: str):
    cases = [
        [make_tokens(profile(20, 32, 8, *hot), seed=rank) for rank in range(ranks)]
        for hot in PROFILES.values()
    ]
    by_rank = run_ranks(ranks, _run_each, cases, 32, OPTIONS[name])
    module = make_experts("plain", 32)
    for tokens, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_equals_dense(module, tokens, list(results))


def test_experts_with_more_routes_than_a_block_and_with_fewer_equal_dense():
    # 60 % of 1000 tokens a rank share experts 0 to 2, the others spread over five.
    ids = [profile(1000, 8, 3, 60, 3)] * 2
    block = block_routes(torch.device("cpu"))
    counts = torch.cat(ids).flatten().bincount()
    assert counts[0] > 2 * block
    assert counts[3] < block
    for options in (
        OPTIONS["whole layer at once, no moves"],
        replace(MOVING, tokens_per_chunk=500),
    ):
        check(ids, options=options)


def every_route_to(experts: list[int], tokens: int, k: int) -> torch.Tensor:
    return torch.tensor(experts).repeat(tokens * k)[: tokens * k].view(tokens, k)


EDGES = {
    "all to one expert": [every_route_to([0], 7, 1)] * 4,
    "all to the last expert, twice a token": [every_route_to([7], 7, 2)] * 4,
    "all to rank 0": [every_route_to([0, 1], 9, 2)] * 4,
    "rank 3 receives none": [random_ids(9, 6, 2, seed=rank) for rank in range(4)],
    "each chunk goes to one rank": [torch.arange(20)[:, None] % 4 * 2 + torch.arange(2)] * 4,
    "tokens differ": [random_ids(n, 8, 3, seed=n) for n in (1, 17, 4, 9)],
    "rank 1 has no tokens": [random_ids(n, 8, 3, seed=n) for n in (6, 0, 3, 11)],
    "only rank 2 has a token": [random_ids(n, 8, 3, seed=n) for n in (0, 0, 1, 0)],
    "no rank has tokens": [random_ids(0, 8, 3)] * 4,
    "k is 1": [random_ids(11, 8, 1, seed=rank) for rank in range(4)],
    "k is every expert": [random_ids(6, 8, 8, seed=rank) for rank in range(4)],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ids", EDGES.values(), ids=EDGES)
def test_edges_equal_dense(ids: list[torch.Tensor], options: DispatchOptions):
    check(ids, options=options)


@pytest.mark.parametrize(
    ("experts", "ranks"),
    [(7, 2), (7, 4), (3, 4), (1, 2)],
    ids=lambda value: str(value),
)
def test_experts_that_do_not_divide_by_the_ranks_equal_dense(experts: int, ranks: int):
    check([random_ids(8, experts, 1, seed=rank) for rank in range(ranks)], experts=experts)


def test_eight_ranks_equal_dense():
    check([profile(12, 16, 4, 80, 4)] * 8, experts=16)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_process_without_a_group_equals_dense(options: DispatchOptions):
    experts, tokens = make_experts("plain", 8), make_tokens(random_ids(23, 8, 3))
    results = results_of(
        make_experts("plain", 8),
        tokens,
        lambda m, t: moe_forward(m, t.hidden, t.ids, t.weights, group=None, options=options),
    )
    assert_equals_dense(experts, [tokens], [results])
