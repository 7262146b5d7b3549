"""Plain torch: the update of `kernels.adamw`, whose new state replaces the old."""

from torch import Tensor

from flatpeak.kernels.adamw import Coefficients, adamw


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weights: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """Update the fp32 state [n] in place, and write rounded masters into `weights` [n] if given."""
    state = master, exp_avg, exp_avg_sq
    adamw(*state, gradient, *state, weights, coefficients)
