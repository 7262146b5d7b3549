"""The fused AdamW, interpreted on the CPU, against fp64 and the plain reference."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatpeak.kernels.adamw import Coefficients
from flatpeak.kernels.adamw_device import reference
from interpreted import interpreted

TINY = 2.0**-149  # the smallest fp32 above zero
NAMES = ("master", "exp_avg", "exp_avg_sq", "weights")
USUAL = Coefficients.of(
    updates=7, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip_factor=0.37
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def make_inputs(
    n: int,
    *,
    gradient: torch.dtype = torch.float32,
    weights: torch.dtype | None = torch.bfloat16,
    scale: float = 1.0,
    offset: int = 0,
    seed: int = 0,
) -> list[Tensor | None]:
    """State, gradient and weights, each surrounded by NaN that must neither be read nor changed."""
    make = torch.Generator().manual_seed(seed)

    def inside_nan(dtype: torch.dtype) -> Tensor:
        values = torch.full((offset + n + 5,), math.nan, dtype=dtype)[offset : offset + n]
        return values.copy_(torch.randn(n, generator=make))

    master, exp_avg = inside_nan(torch.float32), inside_nan(torch.float32).mul_(scale)
    exp_avg_sq = inside_nan(torch.float32).mul_(scale).square_()
    out = None if weights is None else inside_nan(weights).fill_(math.nan)
    return [master, exp_avg, exp_avg_sq, inside_nan(gradient).mul_(scale), out]


def updated(kernels, inputs, coefficients) -> dict[str, Tensor]:
    """What the update makes of copies; around them everything must stay NaN."""
    wide = [None if x is None else x.new_full((len(x) + 10,), math.nan) for x in inputs]
    inner = [None if w is None else w[5:-5].copy_(x) for w, x in zip(wide, inputs, strict=True)]
    kernels.adamw_(*inner, coefficients)
    for around in wide:
        assert around is None or (around[:5].isnan().all() and around[-5:].isnan().all())
    *state, _, weights = inner
    return {name: x for name, x in zip(NAMES, (*state, weights), strict=True) if x is not None}


def fused(inputs, coefficients) -> dict[str, Tensor]:
    from flatpeak.kernels.adamw_device import triton

    return updated(triton, inputs, coefficients)


def exact(inputs, c: Coefficients) -> dict[str, Tensor]:
    """The formulas of AdamW in fp64."""
    p, m, v, g = (x.double() for x in inputs[:4])
    g = g * c.clip_factor
    m = m + (1 - c.beta1) * (g - m)
    v = c.beta2 * v + (1 - c.beta2) * g * g
    p = p * c.keep - c.step_size * m / (v.sqrt() / c.correction + c.eps)
    return dict(zip(NAMES, (p, m, v, p), strict=True))


def error(x: Tensor, wanted: Tensor) -> float:
    return float((x.double() - wanted).norm() / wanted.norm().clamp(min=TINY))


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 3000),
    gradient=dtypes,
    weights=st.none() | dtypes,
    offset=st.integers(0, 3),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    clip_factor=st.floats(0, 1),
    updates=st.integers(1, 10**6),
    seed=st.integers(0, 1000),
)
def test_any_size_and_rate_equals_the_formulas(
    n, gradient, weights, offset, betas, clip_factor, updates, seed
):
    inputs = make_inputs(n, gradient=gradient, weights=weights, offset=offset, seed=seed)
    c = Coefficients.of(
        updates=updates, lr=1e-2, betas=betas, eps=1e-8, decay=0.1, clip_factor=clip_factor
    )
    found, wanted = interpreted(fused, inputs, c), exact(inputs, c)
    for name, x in found.items():
        assert error(x, wanted[name]) <= (2**-8 if x.dtype == torch.bfloat16 else 1e-6), name
    if weights is not None:
        assert torch.equal(found["weights"], found["master"].to(weights))


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("updates", [1, 1000], ids=["first", "thousandth"])
def test_the_error_does_not_exceed_that_of_the_reference(gradient, updates):
    inputs = make_inputs(20_000, gradient=gradient)
    c = Coefficients.of(
        updates=updates, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip_factor=0.37
    )
    wanted = exact(inputs, c)
    plain, found = updated(reference, inputs, c), interpreted(fused, inputs, c)
    for name, x in found.items():
        assert error(x, wanted[name]) <= 1.01 * error(plain[name], wanted[name]), name


@pytest.mark.parametrize("scale", [1e-25, 1e-38, 1e-42], ids=["v", "m", "m and g"])
def test_denormal_state_is_neither_flushed_nor_off(scale):
    c = replace(USUAL, eps=1e-30)
    inputs = make_inputs(2000, scale=scale)
    wanted, plain = exact(inputs, c), updated(reference, inputs, c)
    found = interpreted(fused, inputs, c)
    for name in ("exp_avg", "exp_avg_sq"):
        # Rounding to a denormal is off by up to half of the smallest one, in each operation.
        allowed = 1e-6 * wanted[name].abs().max() + 2 * TINY
        assert (found[name].double() - wanted[name]).abs().max() <= allowed
        assert found[name][wanted[name].abs() > 2 * TINY].all()
        assert error(found[name], wanted[name]) <= 1.01 * error(plain[name], wanted[name]) + 1e-6
    assert found["exp_avg"].any()
    assert found["master"].isfinite().all()


def test_nothing_but_zeros_stays_zero():
    inputs = [torch.zeros(100) for _ in range(4)] + [torch.full((100,), math.nan).bfloat16()]
    assert not any(x.any() for x in interpreted(fused, inputs, USUAL).values())


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025])
def test_sizes_at_the_edges_of_a_block(n):
    inputs = make_inputs(n)
    plain = updated(reference, inputs, USUAL)
    for name, x in interpreted(fused, inputs, USUAL).items():
        torch.testing.assert_close(x, plain[name], rtol=1e-6, atol=1e-7)
