"""The strip's states and residual against dense fp64 formulas and autograd."""

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.vocabulary_strip import merge_, strip_residual, strip_state

T, V, H = 6, 11, 5
CAPS = pytest.mark.parametrize("soft_cap", [None, 1.5], ids=["uncapped", "capped"])


def strip_input(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, H, generator=make), torch.randn(V, H, generator=make)
    return x, w, torch.tensor([0, V - 1, V, -1, 3, -(2**40)])  # three belong to other tiles


def capped(products: Tensor, soft_cap: float | None) -> Tensor:
    return products if soft_cap is None else soft_cap * torch.tanh(products / soft_cap)


def dense_state(logits: Tensor, columns: Tensor) -> Tensor:
    inside = (columns >= 0) & (columns < V)
    y = logits.gather(1, columns.clamp(0, V - 1).unsqueeze(1)).squeeze(1) * inside
    m = logits.amax(1)
    weights = (logits - m.unsqueeze(1)).exp()
    return torch.stack((m, weights.sum(1), y, logits.sum(1), (weights * logits).sum(1)), dim=1)


@CAPS
@pytest.mark.parametrize("moments", [False, True], ids=["loss", "moments"])
def test_a_state_holds_the_sums_over_its_logits(moments: bool, soft_cap: float | None):
    x, w, columns = strip_input()
    expected = dense_state(capped(x.double() @ w.double().T, soft_cap), columns)
    actual = strip_state(x, w, columns, soft_cap=soft_cap, moments=moments)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected[:, : actual.shape[1]].float())


@pytest.mark.parametrize("width", [3, 5], ids=["loss", "moments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_states_of_disjoint_rows_merge_into_the_state_of_all(width: int, dtype: torch.dtype):
    x, w, columns = strip_input()
    whole = strip_state(x, w, columns, moments=width == 5)
    merged = torch.zeros(T, width, dtype=dtype)
    merged[:, 0] = float("-inf")
    for start, stop in ((0, 4), (4, 5), (5, V)):
        merge_(merged, strip_state(x, w[start:stop], columns - start, moments=width == 5))
    torch.testing.assert_close(merged.float(), whole)


@pytest.mark.parametrize("width", [3, 5], ids=["loss", "moments"])
def test_merging_what_has_seen_nothing_changes_nothing(width: int):
    nothing = torch.zeros(1, width)
    nothing[:, 0] = float("-inf")
    state = nothing.clone()
    merge_(state, nothing)
    assert torch.equal(state, nothing)
    seen = torch.full((1, width), 2.0)
    merge_(state, seen)
    merge_(state, nothing)
    assert torch.equal(state, seen)


def test_tens_of_thousands_of_merges_into_fp64_lose_no_digit_of_fp32():
    logits = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(0))
    state = torch.tensor([[float("-inf"), 0.0, 0.0]], dtype=torch.float64).repeat(4, 1)
    one, zero = torch.ones(4), torch.zeros(4)
    for column in logits.unbind(1):
        merge_(state, torch.stack((column, one, zero), dim=1))
    lse = state[:, 0] + state[:, 1].log()
    torch.testing.assert_close(lse, logits.double().logsumexp(1), rtol=1e-12, atol=0.0)


@CAPS
def test_the_residual_is_the_gradient_of_any_loss_of_lse_target_and_mean(soft_cap: float | None):
    x, w, columns = strip_input()
    make = torch.Generator().manual_seed(1)
    p_scale, y_scale, flat = torch.randn(3, T, generator=make)
    products = (x.double() @ w.double().T).requires_grad_()
    logits = capped(products, soft_cap)
    lse = logits.logsumexp(1)
    y = dense_state(logits, columns)[:, 2]
    (p_scale * lse - y_scale * y - flat * logits.sum(1)).sum().backward()
    lse = lse.detach().float()
    actual = strip_residual(x, w, columns, lse, p_scale, y_scale, flat, soft_cap=soft_cap)
    assert products.grad is not None
    torch.testing.assert_close(actual, products.grad.float())
