"""How far a gradient of the vocabulary loss in fp32 may be from the exact one.

dX = G W and dW = G^T X are sums whose terms cancel: over a small vocabulary, or with a head whose
rows sum to nearly nothing, the sum can be a thousandth of its terms. What rounding leaves is a
share of the terms, |G| |W|, however small the sum: two rows of W that are nearly alike and G =
(g, -g) leave the last digits of g times a row, on any way to compute it in fp32.
"""

from collections.abc import Sequence

from torch import Tensor

TOLERANCE = 1e-6
# What a norm of terms counts beside the norm of their sum: unless more than three quarters of the
# terms cancel, errors are relative to the sum.
OF_TERMS = 0.25


def terms_of(
    residuals: Sequence[Tensor], hidden: Sequence[Tensor], weight: Tensor
) -> tuple[list[Tensor], Tensor]:
    """What is added up without its signs, of each rank's dX [n, H] and of dW [V, H].

    `residuals` [n, V] are the gradients G of each rank's loss by `hidden @ weight.T`.
    """
    sizes = [g.abs() for g in residuals]
    of_weight = weight.new_zeros(weight.shape)
    for g, x in zip(sizes, hidden, strict=True):
        of_weight += g.T @ x.detach().abs()
    return [g @ weight.detach().abs() for g in sizes], of_weight


def scale_of(exact: Tensor, terms: Tensor) -> float:
    """What the norm of an error is compared with, of `exact`, which is the sum of such terms."""
    return max(exact.norm().item(), OF_TERMS * terms.norm().item())
