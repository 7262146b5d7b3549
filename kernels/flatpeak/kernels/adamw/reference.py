"""One AdamW update of a flat run of parameters, in plain torch: what the others must equal.

All tensors are [n] and contiguous. Old and new state may be the same tensors or share none.
"""

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Self

import torch
from torch import Tensor

# Elements of a block and thread: the arrays of an update then stay in a core's cache. Also torch's
# own grain: fewer elements are never split over threads.
_BLOCK = 32768


@dataclass(frozen=True)
class Coefficients:
    """The numbers of one update, computed in fp64 and used in fp32."""

    clip_factor: float
    keep: float
    """What decay leaves of a master."""
    beta1: float
    beta2: float
    step_size: float
    correction: float
    """By which the root of the second moment is divided."""
    eps: float

    @classmethod
    def of(
        cls,
        *,
        updates: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        clip_factor: float = 1.0,
    ) -> Self:
        """Those of `torch.optim.AdamW` for its update number `updates`, from 1."""
        assert updates >= 1, f"update {updates} has no bias correction"
        beta1, beta2 = betas
        return cls(
            clip_factor=clip_factor,
            keep=1 - lr * decay,
            beta1=beta1,
            beta2=beta2,
            step_size=lr / (1 - beta1**updates),
            correction=math.sqrt(1 - beta2**updates),
            eps=eps,
        )


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    new_master: Tensor,
    new_exp_avg: Tensor,
    new_exp_avg_sq: Tensor,
    weights: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """Write the state after one update, and the rounded masters into `weights` if there are any.

    State is fp32, the gradient fp32 or bf16, the weights bf16. The operations are those of
    `torch.optim.AdamW`, each in fp32. On the host the bits are those of its `fused=True`, which
    rounds the last elements of a tensor of odd size otherwise; without `fused`, torch may take
    roots from a library that does not round all of them to the nearest.
    """
    c = coefficients
    block = _BLOCK * torch.get_num_threads()
    arrays = [master, exp_avg, exp_avg_sq, gradient, new_master, new_exp_avg, new_exp_avg_sq]
    rounded = repeat(None) if weights is None else weights.split(block)
    # One scratch for all blocks: fresh ones cost more in page faults than the arithmetic.
    scratch = torch.empty(2, min(block, len(master)), device=master.device)
    roots = torch.empty(min(block, len(master)), device=master.device, dtype=torch.float64)
    blocks = (array.split(block) for array in arrays)
    for p, m, v, g, new_p, new_m, new_v, out in zip(*blocks, rounded, strict=False):
        scaled, denominator = scratch[:, : len(g)]
        root = roots[: len(g)]
        g = scaled.copy_(g).mul_(c.clip_factor)
        torch.mul(p, c.keep, out=new_p)
        torch.lerp(m, g, 1 - c.beta1, out=new_m)
        torch.mul(v, c.beta2, out=new_v).addcmul_(g, g, value=1 - c.beta2)
        # A root in fp64 is the nearest in fp32 once rounded, whatever its own last bit.
        denominator.copy_(root.copy_(new_v).sqrt_()).div_(c.correction).add_(c.eps)
        new_p.addcdiv_(new_m, denominator, value=-c.step_size)
        if out is not None:
            out.copy_(new_p)
