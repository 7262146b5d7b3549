"""Fused AdamW: one pass over state and gradient, with rounded weights out.

Same function, shapes and meanings as in reference.py. Every element is read and written once, so
the kernel is bound by memory: 12 bytes of state both ways, gradient in and weights out.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatpeak.kernels.adamw import Coefficients

BLOCK = 1024
# So many elements a thread are one load of 16 bytes of each array of fp32.
ELEMENTS_PER_THREAD = 4


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weights: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """As in reference.py."""
    n = master.numel()
    if n == 0:
        return
    tensors = (master, exp_avg, exp_avg_sq, gradient, weights)
    assert all(t is None or (t.is_contiguous() and t.numel() == n) for t in tensors), "[n] alike"
    kernel: Any = _kernel  # its launch takes options that are not parameters
    with torch.cuda.device_of(master):
        kernel[(triton.cdiv(n, BLOCK),)](
            *tensors,
            n,
            *scalars(coefficients),
            BLOCK=BLOCK,
            num_warps=num_warps(64 if torch.version.hip else 32),
        )


def num_warps(threads: int) -> int:
    """Warps of a program where a warp has so many threads."""
    return BLOCK // ELEMENTS_PER_THREAD // threads


def scalars(coefficients: Coefficients) -> tuple[float, ...]:
    """The kernel's fp32 arguments: values, not constants, so that no step compiles anew."""
    c = coefficients
    # 1 - beta loses digits in fp32, where beta itself is rounded first.
    decays = 1 - c.beta1, c.beta2, 1 - c.beta2
    return c.clip_factor, c.keep, *decays, c.step_size, c.correction, c.eps


@triton.jit
def _kernel(
    master,
    exp_avg,
    exp_avg_sq,
    gradient,
    weights,
    n,
    clip_factor,
    keep,
    in_avg,
    beta2,
    in_avg_sq,
    step_size,
    correction,
    eps,
    BLOCK: tl.constexpr,
):
    # Only the distance between blocks may need more than 32 bits.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    arrays = (master + start, exp_avg + start, exp_avg_sq + start, gradient + start)
    rounded = weights if weights is None else weights + start
    numbers = (clip_factor, keep, in_avg, beta2, in_avg_sq, step_size, correction, eps)
    place = tl.arange(0, BLOCK)
    # Under a mask an array is read element by element, unless 16 divides n.
    if start + BLOCK <= n:
        _update(arrays, rounded, numbers, place, None)
    else:
        _update(arrays, rounded, numbers, place, place < n - start)


@triton.jit
def _update(arrays, weights, numbers, place, inside):
    master, exp_avg, exp_avg_sq, gradient = arrays
    clip_factor, keep, in_avg, beta2, in_avg_sq, step_size, correction, eps = numbers
    p = tl.load(master + place, mask=inside)
    m = tl.load(exp_avg + place, mask=inside)
    v = tl.load(exp_avg_sq + place, mask=inside)
    g = tl.load(gradient + place, mask=inside).to(tl.float32) * clip_factor
    # From the nearer end, as in torch.lerp: from the other one, digits cancel.
    change = g - m
    m = tl.where(in_avg < 0.5, m + change * in_avg, g - change * (1.0 - in_avg))
    v = v * beta2 + g * g * in_avg_sq
    # The rounded root and quotient: the fast ones are off by more, and flush small numbers.
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + eps
    p = p * keep - step_size * tl.div_rn(m, denominator)
    tl.store(master + place, p, mask=inside)
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)
    if weights is not None:
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=inside)
