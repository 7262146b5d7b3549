"""Plain torch strip: what one token tile and one vocabulary tile contribute to loss and gradient.

Shapes: t tokens of the tile, v vocabulary rows of the tile, h hidden width. All sums are fp32.
`columns` [t] int64 are the targets counted from the tile's first row; a target of another tile
falls outside [0, v) and contributes nothing. Logits are `scale * x w^T`, after a soft cap
`cap * tanh(scale * x w^T / cap)`.

A state [t, 3] holds, per token, the maximum logit m, r = sum of exp(logit - m) - 1, and the
target's logit y, over the vocabulary seen so far; r is -1 where nothing has been seen. With moments
it is [t, 5]: also s = sum of the logits and e = sum of exp(logit - m) * (logit - m), and r is
summed without the maximum itself, so that it is exact however small it is.
"""

import torch
from torch import Tensor

from flatpeak.kernels.vocabulary_strip.simulated import gpu_of

# Rows or columns of a product that has another one beside it in memory at little cost.
THIN = 16


def strip_state(
    x: Tensor,
    w: Tensor,
    columns: Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    moments: bool = False,
) -> Tensor:
    """The fp32 state [t, 3], or [t, 5] with moments, of x [t, h] against a non-empty w [v, h]."""
    logits = _logits(x, w, scale, soft_cap)
    inside, index = _targets_inside(columns, w.shape[0])
    y = logits.gather(1, index).squeeze(1).masked_fill_(~inside, 0.0)
    if not moments:
        m = logits.amax(1)
        # Logits of -inf alone are as good as unseen.
        top = m.masked_fill(m == float("-inf"), 0.0)
        r = logits.sub_(top.unsqueeze(1)).exp_().sum(1).sub_(1.0)
        return torch.stack((m, r, y), dim=1)
    # A probability of 0 counts 0, as often as its logarithm.
    logits.clamp_(min=torch.finfo(logits.dtype).min)
    s = logits.sum(1)
    m, top = logits.max(1, keepdim=True)
    weights = logits.sub_(m).exp().scatter_(1, top, 0.0)
    r = weights.sum(1)
    e = weights.mul_(logits).sum(1)
    return torch.stack((m.squeeze(1), r, y, s, e), dim=1)


def merge_(state: Tensor, other: Tensor) -> None:
    """Add to `state` in place what `other` has seen; where m is -inf, nothing has been seen yet.

    Computes in the dtype of `state`. Let it be fp64 where many strips are merged: fp32 loses a
    digit in some ten thousand merges.
    """
    other = other.to(state.dtype)
    first = state[:, :1] >= other[:, :1]
    upper, lower = torch.where(first, state, other), torch.where(first, other, state)
    unseen = lower[:, 0] == float("-inf")  # and perhaps both: -inf - -inf would be NaN
    shift = (lower[:, 0] - upper[:, 0]).masked_fill_(unseen, 0.0)
    scale = shift.exp()
    z = (lower[:, 1] + 1.0).mul_(scale)
    state[:, 0] = upper[:, 0]
    state[:, 1] = z + upper[:, 1]
    state[:, 2:4].add_(other[:, 2:4])
    if state.shape[1] == 5:
        state[:, 4] = shift.mul_(z).add_(upper[:, 4]).addcmul_(scale, lower[:, 4])


def strip_residual(
    x: Tensor,
    w: Tensor,
    columns: Tensor,
    top: Tensor,
    p_scale: Tensor,
    y_scale: Tensor,
    flat: Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """The gradient [t, v] by `scale * x w^T`, before the soft cap, in fp32.

    `cap'(scale * x w^T) * (p_scale * exp(logit - top) - y_scale * onehot - flat)`, where top,
    p_scale, y_scale and flat are fp32 [t]: the token's maximum logit over the whole vocabulary, and
    what the loss makes of exp(logit - top), of the target's logit and of every logit. The maximum,
    not the log-sum-exp: that has digits of its own beside it, which fp32 drops where logits are
    large, while the maximum is itself a logit, and each difference to it is exact or nearly so.
    """
    logits = _logits(x, w, scale, soft_cap)
    # With a cap its derivative needs the logits again.
    residual = logits.clone() if soft_cap is not None else logits
    residual.sub_(top.unsqueeze(1)).exp_().mul_(p_scale.unsqueeze(1))
    inside, index = _targets_inside(columns, w.shape[0])
    residual.scatter_add_(1, index, y_scale.neg().masked_fill_(~inside, 0.0).unsqueeze(1))
    if flat is not None:
        residual.sub_(flat.unsqueeze(1))
    if soft_cap is not None:
        residual.mul_(logits.div_(soft_cap).square_().neg_().add_(1.0))
    return residual


def accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b` in fp32; the residual among the factors is cast to the other's dtype."""
    narrow = b.dtype
    if _multiplies_narrow(b):
        torch.addmm(total, a.to(narrow), b, out_dtype=torch.float32, out=total)
    elif min(total.shape) <= THIN:
        # BLAS takes other paths here, which lose digits in long sums on some CPUs: it adds term by
        # term to what is in `total`, 3e-6 off where a product added as a whole is by 7e-8, and a
        # single row is multiplied worse than the same row beside a second one.
        rows = a.float()
        product = torch.mm(rows.expand(2, -1) if len(rows) == 1 else rows, b.float())
        total.add_(product[: len(rows)])
    else:
        total.addmm_(a.float(), b.float())


def _logits(x: Tensor, w: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    logits = _product(x, w.t())
    if soft_cap is not None:
        logits.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    elif scale != 1.0:
        logits.mul_(scale)
    return logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    if _multiplies_narrow(b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _multiplies_narrow(operand: Tensor) -> bool:
    # Tensor cores multiply bf16 into fp32. fp16 is widened: a mean's upstream underflows in it.
    on_gpu = operand.is_cuda or gpu_of(operand) is not None
    return operand.dtype == torch.bfloat16 and on_gpu


def _targets_inside(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    inside = (columns >= 0) & (columns < width)
    return inside, columns.clamp(0, width - 1).unsqueeze(1)
