"""Plain torch strip: what one token tile and one vocabulary tile contribute to loss and gradient.

Shapes: t tokens of the tile, v vocabulary rows of the tile, h hidden width. All sums are fp32.
`columns` [t] int64 are the targets counted from the tile's first row; a target of another tile
falls outside [0, v) and contributes nothing.

A state [t, 3] fp32 holds, per token, the maximum logit m, z = sum of exp(logit - m), and the
target's logit y, over the vocabulary seen so far.
"""

import torch
from torch import Tensor


def strip_state(x: Tensor, w: Tensor, columns: Tensor) -> Tensor:
    """The state [t, 3] of the logits `x w^T` alone, for x [t, h] and a non-empty w [v, h]."""
    logits = _product(x, w.t())
    inside, index = _targets_inside(columns, w.shape[0])
    y = logits.gather(1, index).squeeze(1).masked_fill_(~inside, 0.0)
    m = logits.amax(1)
    z = logits.sub_(m.unsqueeze(1)).exp_().sum(1)
    return torch.stack((m, z, y), dim=1)


def merge_(state: Tensor, other: Tensor) -> None:
    """Add to `state` in place what `other` has seen; m may be -inf in `state`, not in `other`."""
    m, z, y = state.unbind(1)
    m_other, z_other, y_other = other.unbind(1)
    top = torch.maximum(m, m_other)
    z.mul_((m - top).exp_()).add_(z_other * (m_other - top).exp_())
    y.add_(y_other)
    m.copy_(top)


def strip_residual(x: Tensor, w: Tensor, columns: Tensor, lse: Tensor, upstream: Tensor) -> Tensor:
    """The logits' gradient [t, v]: `upstream * (exp(x w^T - lse) - onehot)`, in fp32."""
    residual = _product(x, w.t())
    residual.sub_(lse.unsqueeze(1)).exp_()
    inside, index = _targets_inside(columns, w.shape[0])
    residual.scatter_add_(1, index, -inside.to(residual.dtype).unsqueeze(1))
    return residual.mul_(upstream.unsqueeze(1))


def accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b` in fp32; the residual among the factors is cast to the other's dtype."""
    narrow = b.dtype
    if _multiplies_narrow(b):
        torch.addmm(total, a.to(narrow), b, out_dtype=torch.float32, out=total)
    elif len(a) == 1:
        # For a single row BLAS takes another path, which loses digits in long sums on some CPUs:
        # 7e-6 where the same row beside a second one was off by 2e-7.
        total.add_(torch.mm(a.float().expand(2, -1), b.float())[:1])
    else:
        total.addmm_(a.float(), b.float())


def _product(a: Tensor, b: Tensor) -> Tensor:
    if _multiplies_narrow(b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _multiplies_narrow(operand: Tensor) -> bool:
    # Tensor cores multiply bf16 into fp32. fp16 is widened: a mean's upstream underflows in it.
    return operand.dtype == torch.bfloat16 and operand.is_cuda


def _targets_inside(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    inside = (columns >= 0) & (columns < width)
    return inside, columns.clamp(0, width - 1).unsqueeze(1)
