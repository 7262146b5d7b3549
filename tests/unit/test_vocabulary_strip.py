"""The strip's states and residual against dense fp64 formulas and autograd."""

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.vocabulary_strip import merge_, strip_residual, strip_state

T, V, H = 6, 11, 5
SHAPES = pytest.mark.parametrize(
    ("scale", "soft_cap"),
    [(1.0, None), (0.3, None), (1.0, 1.5), (3.0, 1.5)],
    ids=["plain", "scaled", "capped", "both"],
)


def strip_input(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, H, generator=make), torch.randn(V, H, generator=make)
    return x, w, torch.tensor([0, V - 1, V, -1, 3, -(2**40)])  # three belong to other tiles


def logits_of(products: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    products = products * scale
    return products if soft_cap is None else soft_cap * torch.tanh(products / soft_cap)


def dense_state(logits: Tensor, columns: Tensor) -> Tensor:
    inside = (columns >= 0) & (columns < V)
    y = logits.gather(1, columns.clamp(0, V - 1).unsqueeze(1)).squeeze(1) * inside
    m = logits.amax(1)
    below = logits - m.unsqueeze(1)
    sums = (below.exp().sum(1) - 1, y, logits.sum(1), (below.exp() * below).sum(1))
    return torch.stack((m, *sums), dim=1)


@SHAPES
@pytest.mark.parametrize("moments", [False, True], ids=["loss", "moments"])
def test_a_state_holds_the_sums_over_its_logits(
    moments: bool, scale: float, soft_cap: float | None
):
    x, w, columns = strip_input()
    expected = dense_state(logits_of(x.double() @ w.double().T, scale, soft_cap), columns)
    actual = strip_state(x, w, columns, scale=scale, soft_cap=soft_cap, moments=moments)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected[:, : actual.shape[1]].float())


def nothing_seen(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([[float("-inf"), -1.0, 0.0, 0.0, 0.0][:width]], dtype=dtype)


@pytest.mark.parametrize("width", [3, 5], ids=["loss", "moments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_states_of_disjoint_rows_merge_into_the_state_of_all(width: int, dtype: torch.dtype):
    x, w, columns = strip_input()
    whole = strip_state(x, w, columns, moments=width == 5)
    merged = nothing_seen(width, dtype).repeat(T, 1)
    for start, stop in ((0, 4), (4, 5), (5, V)):
        merge_(merged, strip_state(x, w[start:stop], columns - start, moments=width == 5))
    torch.testing.assert_close(merged.float(), whole)


@pytest.mark.parametrize("width", [3, 5], ids=["loss", "moments"])
def test_merging_what_has_seen_nothing_changes_nothing(width: int):
    nothing = nothing_seen(width)
    state = nothing.clone()
    merge_(state, nothing)
    assert torch.equal(state, nothing)
    seen = torch.full((1, width), 2.0)
    merge_(state, seen)
    merge_(state, nothing)
    assert torch.equal(state, seen)


def test_tens_of_thousands_of_merges_into_fp64_lose_no_digit_of_fp32():
    logits = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(0))
    state, zero = nothing_seen(3, torch.float64).repeat(4, 1), torch.zeros(4)
    for column in logits.unbind(1):
        merge_(state, torch.stack((column, zero, zero), dim=1))
    lse = state[:, 0] + state[:, 1].log1p()
    torch.testing.assert_close(lse, logits.double().logsumexp(1), rtol=1e-12, atol=0.0)


@SHAPES
def test_the_residual_is_the_gradient_of_any_loss_of_lse_target_and_mean(
    scale: float, soft_cap: float | None
):
    x, w, columns = strip_input()
    make = torch.Generator().manual_seed(1)
    p_scale, y_scale, flat = torch.randn(3, T, generator=make)
    products = (scale * (x.double() @ w.double().T)).requires_grad_()
    logits = logits_of(products, 1.0, soft_cap)
    lse = logits.logsumexp(1)
    y = dense_state(logits, columns)[:, 2]
    (p_scale * lse - y_scale * y - flat * logits.sum(1)).sum().backward()
    top = logits.detach().amax(1)
    p_scale = p_scale * (top - lse.detach()).exp().float()
    shape = {"scale": scale, "soft_cap": soft_cap}
    actual = strip_residual(x, w, columns, top.float(), p_scale, y_scale, flat, **shape)
    assert products.grad is not None
    torch.testing.assert_close(actual, products.grad.float())


@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0])
def test_what_is_beside_the_maximum_is_exact_however_small(gap: float):
    x, w = torch.ones(1, 1), torch.tensor([[0.0], [gap], [0.25], [-1.0]])
    state = nothing_seen(5, torch.float64)
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        columns = torch.tensor([1 - start])
        merge_(state, strip_state(x, w[start:stop], columns, moments=True))
    others = torch.tensor([0.0, 0.25, -1.0], dtype=torch.float64) - gap
    torch.testing.assert_close(state[0, 1], others.exp().sum(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(state[0, 4], (others.exp() * others).sum(), rtol=1e-6, atol=0.0)


def test_equal_maxima_count_but_for_one():
    state = strip_state(torch.ones(1, 1), torch.ones(3, 1), torch.tensor([0]), moments=True)
    merge_(state, strip_state(torch.ones(1, 1), torch.ones(2, 1), torch.tensor([9]), moments=True))
    assert state.tolist() == [[1.0, 4.0, 1.0, 5.0, 0.0]]
