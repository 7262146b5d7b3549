"""The fused strip, interpreted on the CPU, against dense fp64 and the plain reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flatpeak.kernels import vocabulary_strip
from flatpeak.kernels.vocabulary_strip import reference
from flatpeak.kernels.vocabulary_strip.triton import FOLDED_BLOCKS, Blocks, span_of
from interpreted import interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["m", "r", "y", "s", "e", "residual"]
Shape = tuple[float, float | None]
"""The scale of the products, and the soft cap."""
PLAIN: Shape = (1.0, None)
OUTSIDE = -(2**40) + 1  # an ignored id; its low 32 bits are those of column 1


def make_inputs(t: int, v: int, h: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Inputs surrounded by NaN, so that whoever reads beyond an end is caught."""
    make = torch.Generator().manual_seed(seed)

    def inside_nan(rows: int) -> Tensor:
        matrix = torch.full((rows + 2, h + 3), float("nan"), dtype=dtype)[:rows, :h]
        return matrix.copy_(torch.randn(rows, h, generator=make))

    columns = torch.randint(-v, 2 * v, (t,), generator=make)
    columns[0] = OUTSIDE
    p_scale, y_scale, flat = torch.randn(3, t, generator=make)
    x, w = inside_nan(t), inside_nan(v).mul_(h**-0.5)
    return {
        "x": x,
        "w": w,
        "columns": columns,
        "top": dense_logits(x, w, *PLAIN).amax(1).float(),
        "p_scale": p_scale,
        "y_scale": y_scale,
        "flat": flat,
    }


def dense_logits(x: Tensor, w: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    products = scale * (x.double() @ w.double().T)
    return products if soft_cap is None else soft_cap * torch.tanh(products / soft_cap)


def outputs(kernels: Any, inputs: dict[str, Tensor], shape: Shape, optional: bool):
    """The state's columns and the residual, as `kernels` computes them."""
    x, w, columns = inputs["x"], inputs["w"], inputs["columns"]
    options = dict(zip(("scale", "soft_cap"), shape, strict=True))
    state = kernels.strip_state(x, w, columns, **options, moments=optional)
    scales = [inputs[name] for name in ("top", "p_scale", "y_scale")]
    flat = inputs["flat"] if optional else None
    residual = kernels.strip_residual(x, w, columns, *scales, flat, **options)
    return dict(zip(NAMES, state.unbind(1), strict=False)) | {"residual": residual}


def fused_outputs(inputs: dict[str, Tensor], shape: Shape, optional: bool):
    from flatpeak.kernels.vocabulary_strip import triton

    return outputs(triton, inputs, shape, optional)


class Dense:
    """The formulas in fp64."""

    @staticmethod
    def strip_state(x, w, columns, *, scale, soft_cap, moments) -> Tensor:
        logits = dense_logits(x, w, scale, soft_cap)
        y = (logits * onehot(columns, len(w))).sum(1)
        m = logits.amax(1)
        below = logits - m.unsqueeze(1)
        r = below.exp().sum(1) - 1
        sums = (m, r, y, logits.sum(1), (below.exp() * below).sum(1))
        return torch.stack(sums[: 5 if moments else 3], dim=1)

    @staticmethod
    def strip_residual(x, w, columns, top, p_scale, y_scale, flat, *, scale, soft_cap) -> Tensor:
        logits = dense_logits(x, w, scale, soft_cap)
        top, p_scale, y_scale = (scale.double().unsqueeze(1) for scale in (top, p_scale, y_scale))
        residual = p_scale * (logits - top).exp() - y_scale * onehot(columns, len(w))
        if flat is not None:
            residual -= flat.unsqueeze(1)
        return residual if soft_cap is None else residual * (1 - (logits / soft_cap) ** 2)


def onehot(columns: Tensor, v: int) -> Tensor:
    return (columns.unsqueeze(1) == torch.arange(v)).double()


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the difference, relative to what is expected or to usual elements all over."""
    usual = dict.fromkeys(NAMES, 1.0) | {"residual": 0.01}
    return {
        name: float((x.double() - expected[name]).norm())
        / max(float(expected[name].norm()), usual[name] * x.numel() ** 0.5)
        for name, x in actual.items()
    }


@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(1, 36),
    v=st.integers(1, 70),
    h=st.integers(1, 36),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.25, 1 / 6]),
    soft_cap=st.none() | st.floats(0.5, 50.0),
    optional=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_dense(t, v, h, dtype, scale, soft_cap, optional, seed):
    inputs, shape = make_inputs(t, v, h, dtype, seed), (scale, soft_cap)
    expected = outputs(Dense, inputs, shape, optional)
    actual = interpreted(fused_outputs, inputs, shape, optional)
    assert actual["residual"].dtype == (dtype if dtype == torch.bfloat16 else torch.float32)
    for name, error in errors(actual, expected).items():
        assert error <= (2**-8 if actual[name].dtype == torch.bfloat16 else 1e-6), name


@pytest.mark.parametrize("optional", [False, True], ids=["plain", "optional"])
@pytest.mark.parametrize(
    "shape", [PLAIN, (1 / 6, None), (1.0, 2.0)], ids=["plain", "scaled", "capped"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_the_error_does_not_exceed_that_of_the_reference(dtype, shape, optional):
    inputs = make_inputs(48, 200, 100, dtype)
    expected = outputs(Dense, inputs, shape, optional)
    plain = outputs(reference, inputs, shape, optional)
    fused = interpreted(fused_outputs, inputs, shape, optional)
    # The reference's residual is narrowed where it is multiplied.
    plain["residual"] = plain["residual"].to(fused["residual"].dtype)
    allowed = errors(plain, expected)
    # Units in the last place come and go with the order of the sums.
    for name, error in errors(fused, expected).items():
        assert error <= max(1.01 * allowed[name], 2**-23), name


def tanh_and_slope(u: Tensor) -> tuple[Tensor, Tensor]:
    """Both as the residual's kernel finds them, of u [t, 1]: products with a weight of one row."""
    from flatpeak.kernels.vocabulary_strip import triton

    one, column = torch.ones(1, 1), torch.full((len(u),), 5)
    share = triton.strip_state(u, one, column, soft_cap=1.0)[:, 0]
    ones = torch.ones(len(u))
    slope = triton.strip_residual(u, one, column, share, ones, ones, soft_cap=1.0)[:, 0]
    return share, slope


def test_the_soft_cap_and_its_slope_are_exact_near_and_far_from_zero():
    sizes = torch.cat((torch.logspace(-6, 1.5, 500), torch.linspace(0.9, 1.1, 100)))
    u = torch.cat((sizes, -sizes, torch.zeros(1))).unsqueeze(1)
    share, slope = interpreted(tanh_and_slope, u)
    wide = u.squeeze(1).double()
    torch.testing.assert_close(share.double(), wide.tanh(), rtol=1.5e-7, atol=0.0)
    # 1 - tanh^2 as it is written loses all digits where tanh rounds to 1.
    torch.testing.assert_close(slope.double(), wide.cosh() ** -2.0, rtol=1e-6, atol=0.0)


def confident_state(seed: int) -> Tensor:
    from flatpeak.kernels.vocabulary_strip import triton

    return triton.strip_state(*confident_input(seed), moments=True)


def confident_input(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of which one is far above the others, at any place of the vocabulary."""
    make = torch.Generator().manual_seed(seed)
    w = torch.randn(100, 1, generator=make)
    w[seed] = 40.0
    return torch.ones(3, 1), w, torch.tensor([seed, 0, 500])


@pytest.mark.parametrize("place", [0, 17, 99])
def test_what_is_beside_the_maximum_is_exact_however_small(place: int):
    x, w, columns = confident_input(place)
    expected = Dense.strip_state(
        x, torch.cat((w[:place], w[place + 1 :])), columns, scale=1.0, soft_cap=None, moments=True
    )
    r, e = interpreted(confident_state, place)[:, [1, 4]].double().unbind(1)
    shift = expected[:, 0] - 40.0
    z = shift.exp() * (1 + expected[:, 1])
    torch.testing.assert_close(r, z, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(e, shift.exp() * expected[:, 4] + shift * z, rtol=1e-5, atol=0.0)


def test_rows_may_lie_anywhere_in_memory():
    inputs = make_inputs(20, 35, 18, torch.float32)
    expected = outputs(reference, inputs, PLAIN, True)
    apart = torch.full((35, 18, 2), float("nan"))
    apart[..., 0] = inputs["w"]
    inputs |= {"x": inputs["x"].t().contiguous().t(), "w": apart[..., 0]}
    actual = interpreted(fused_outputs, inputs, PLAIN, True)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name])


def large_logits() -> tuple[Tensor, Tensor]:
    from flatpeak.kernels.vocabulary_strip import triton

    x = torch.tensor([[3e4], [-3e4]])
    w = torch.linspace(-1, 1, 70).unsqueeze(1)
    columns = torch.tensor([69, 0])
    state = triton.strip_state(x, w, columns, moments=True)
    ones = torch.ones(2)
    shares = ones / (1.0 + state[:, 1])
    return state, triton.strip_residual(x, w, columns, state[:, 0], shares, ones)


def test_large_logits_neither_overflow_nor_give_nan():
    state, residual = interpreted(large_logits)
    assert state[:, :3].tolist() == [[3e4, 0.0, 3e4]] * 2
    assert state.isfinite().all()
    assert residual.tolist() == [[0.0] * 70] * 2


def no_tokens() -> tuple[Tensor, Tensor]:
    from flatpeak.kernels.vocabulary_strip import triton

    x, none = torch.empty(0, 4), torch.empty(0)
    state = triton.strip_state(x, torch.ones(3, 4), none.long())
    return state, triton.strip_residual(x, torch.ones(3, 4), none.long(), none, none, none)


def test_no_tokens_give_empty_results():
    state, residual = interpreted(no_tokens)
    assert state.shape == (0, 3)
    assert residual.shape == (0, 3)


@pytest.mark.parametrize(
    ("t", "v", "processors", "expected"),
    [
        pytest.param(4096, 4096, 132, 128, id="one-block-a-program"),
        pytest.param(65_536, 4096, 132, 11 * 128, id="many-tokens"),
        pytest.param(2**20, 200_000, 132, 63 * 128, id="no-more-than-fp32-can-fold"),
        pytest.param(1, 1, 132, 128, id="nothing-to-split"),
        pytest.param(0, 7, 132, 128, id="no-tokens"),
    ],
)
def test_the_vocabulary_is_split_until_every_processor_has_programs(t, v, processors, expected):
    blocks = Blocks(tokens=256, vocabulary=128, hidden=64, num_warps=8, num_stages=4)
    assert span_of(t, v, blocks, processors) == expected
    assert expected <= FOLDED_BLOCKS * blocks.vocabulary


def test_cpus_and_fake_tensors_of_gpus_take_the_reference():
    assert vocabulary_strip._kernels(torch.empty(1)) is reference
    with FakeTensorMode():
        assert vocabulary_strip._kernels(torch.empty(1, device="cuda")) is reference


def fused_state(x: Tensor, w: Tensor, columns: Tensor, moments: bool) -> Tensor:
    from flatpeak.kernels.vocabulary_strip import triton

    return triton.strip_state(x, w, columns, moments=moments)


@pytest.mark.parametrize("moments", [False, True], ids=["loss", "moments"])
@pytest.mark.parametrize("v", [1, 20])
def test_logits_of_minus_infinity_count_nothing_and_nan_stays(v: int, moments: bool):
    x = torch.tensor([[1e20, 0.0], [1.0, 0.0], [float("nan"), 0.0]])
    w = torch.full((v, 2), -1e20)
    w[1:, 0] = torch.linspace(-1e-20, 1e-20, max(0, v - 1))
    columns = torch.full((3,), -1)
    found = interpreted(fused_state, x, w, columns, moments)
    wanted = reference.strip_state(x, w, columns, moments=moments)
    # In the maximum or in r, from where it reaches all that they are merged with.
    assert found[2, :2].isnan().any()
    assert wanted[2, :2].isnan().any()
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-6, atol=1e-6)
    if v == 1 and not moments:
        assert found[0, 1] == -1.0
