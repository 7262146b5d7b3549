"""The measured baselines, plain expert parallelism and LLEP both ways, equal dense results."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from expert_parallel import expert_parallel, expert_parallel_autograd
from flatpeak.workers.dispatch.assignment import plan_least_loaded, plan_native
from moe_families import (
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

LEAST_LOADED = partial(plan_least_loaded, capacity_factor=1.0, min_chunk=1, max_foreign=99)
METHODS = {
    "plain": partial(expert_parallel, planner=plan_native),
    "llep": partial(expert_parallel, planner=LEAST_LOADED),
    "llep by autograd": partial(expert_parallel_autograd, planner=LEAST_LOADED),
}


def _results(rank: int, method: str, experts: int, tokens: list[Tokens]) -> Results:
    module = slice_of(make_experts("plain", experts), rank, len(tokens))
    buffers = {name: torch.zeros_like(p) for name, p in module.named_parameters()}

    def forward(module, t: Tokens) -> torch.Tensor:
        return METHODS[method](
            module,
            t.hidden,
            t.ids,
            t.weights,
            group=dist.group.WORLD if len(tokens) > 1 else None,
            gradients=[buffers["gate_up_proj"], buffers["down_proj"]],
        )

    results = results_of(module, tokens[rank], forward)
    assert not results.parameters, "weight gradients go to the buffers alone"
    results.parameters.update(buffers)
    return results


# The second token of profile 50/2 names one expert twice.
ROUTINGS = {
    "random": lambda tokens, experts, rank: random_ids(tokens, experts, 4, seed=rank),
    "skewed": lambda tokens, experts, rank: profile(tokens, experts, 4, 80, 5),
    "one expert twice": lambda tokens, experts, rank: profile(tokens, experts, 4, 50, 2),
    "all to one": lambda tokens, experts, rank: profile(tokens, experts, 4, 100, 1),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("lengths", "experts"),
    [((17,), 8), ((16, 16), 8), ((13, 0, 21, 7), 10)],
    ids=["one rank", "even", "ragged, indivisible"],
)
def test_a_baseline_equals_dense(method: str, routing: str, lengths: tuple[int, ...], experts: int):
    tokens = [
        make_tokens(ROUTINGS[routing](length, experts, rank), seed=rank)
        for rank, length in enumerate(lengths)
    ]
    results = run_ranks(len(lengths), _results, method, experts, tokens)
    assert_equals_dense(make_experts("plain", experts), tokens, results)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("experts", [8, 1], ids=["some experts each", "a rank without"])
def test_no_tokens_at_all_give_zero_gradients(method: str, experts: int):
    tokens = [make_tokens(random_ids(0, 8, 4)) for _ in range(2)]
    for results in run_ranks(2, _results, method, experts, tokens):
        assert results.output.shape == (0, 12)
        for gradient in results.parameters.values():
            assert torch.equal(gradient, torch.zeros_like(gradient))
