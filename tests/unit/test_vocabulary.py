"""Ring-DTP equals dense fp64 cross entropy in loss and gradients, whatever the ring."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy
from ranks import run_ranks
from torch import Tensor

IGNORED = -100


@dataclass
class Case:
    """A whole batch in fp64: one entry a rank for the tokens, one head weight for all."""

    hidden: list[Tensor]
    targets: list[Tensor]
    upstream: list[Tensor]
    weight: Tensor


def make_case(tokens: list[int], vocab: int, width: int = 24, seed: int = 0) -> Case:
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        # Representable in fp32, so that both sides see the same input.
        return torch.randn(shape, generator=make).double()

    targets = [torch.randint(vocab, (n,), generator=make) for n in tokens]
    for ids in targets:
        ids[::5] = IGNORED
    return Case(
        hidden=[normal(n, width) for n in tokens],
        targets=targets,
        upstream=[normal(n) for n in tokens],
        weight=normal(vocab, width) * 0.2,
    )


def dense(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor]:
    hidden = [x.clone().requires_grad_() for x in case.hidden]
    weight = case.weight.clone().requires_grad_()
    losses = [
        F.cross_entropy(x @ weight.T, t, reduction="none", ignore_index=IGNORED)
        for x, t in zip(hidden, case.targets, strict=True)
    ]
    torch.autograd.backward(losses, case.upstream)
    return (
        [loss.detach() for loss in losses],
        [x.grad if x.grad is not None else torch.zeros_like(x) for x in hidden],
        weight.grad if weight.grad is not None else torch.zeros_like(weight),
    )


def ring(rank: int, world: int, case: Case, options: dict, dtype: torch.dtype = torch.float32):
    """Loss, dX and dW of this rank under the sharded vocabulary."""
    start, stop = part(case.weight.shape[0], world, rank)
    hidden = case.hidden[rank].to(dtype).requires_grad_()
    shard = case.weight[start:stop].to(dtype).requires_grad_()
    loss = ring_cross_entropy(
        hidden,
        case.targets[rank],
        shard,
        group=dist.group.WORLD if world > 1 else None,
        vocab_size=case.weight.shape[0],
        **options,
    )
    loss.backward(case.upstream[rank].float())
    assert hidden.grad is not None
    assert shard.grad is not None
    return loss.detach(), hidden.grad, shard.grad


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    assert [x.shape for x in actual] == [x.shape for x in expected]
    error = (torch.cat(actual).double() - torch.cat(expected)).norm()
    assert error <= tolerance * torch.cat(expected).norm()


def check(world: int, case: Case, **options: Any) -> None:
    loss, d_hidden, d_weight = dense(case)
    if world == 1:
        results = [ring(0, 1, case, options)]
    else:
        results = run_ranks(world, ring, world, case, options)
    assert_close([result[0] for result in results], loss)
    assert_close([result[1] for result in results], d_hidden)
    assert_close([torch.cat([result[2] for result in results])], [d_weight])


SCHEDULES = ["weights", "activations"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("vocab", [5, 257, 1003])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_loss_and_gradients_equal_dense(world: int, vocab: int, schedule: str):
    tokens = [(7 * rank + 11) % 20 for rank in range(world)]
    check(world, make_case(tokens, vocab), schedule=schedule, token_tile=4)
