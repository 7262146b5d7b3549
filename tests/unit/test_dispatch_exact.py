"""Dispatched experts equal the dense layer: outputs and every gradient, whatever the routing."""

import pytest
import torch
import torch.distributed as dist
from flatpeak.workers.dispatch import DispatchOptions, moe_forward
from moe_families import (
    FAMILIES,
    Results,
    Tokens,
    assert_equals_dense,
    make_experts,
    make_tokens,
    random_ids,
    results_of,
    slice_of,
)
from ranks import run_ranks

MOVING = DispatchOptions(tokens_per_chunk=5, min_chunk=1, balance_above=1.0, max_foreign_experts=3)


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
    family: str = "qwen3-moe",
    experts: int = 8,
    options: DispatchOptions = MOVING,
) -> None:
    tokens = [make_tokens(each, seed=rank) for rank, each in enumerate(ids)]
    results = run_ranks(len(ids), _run, family, experts, tokens, options)
    assert_equals_dense(make_experts(family, experts), tokens, results)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_family_equals_dense(family: str, ranks: int):
    check([random_ids(13, 8, 3, seed=rank) for rank in range(ranks)], family=family)
