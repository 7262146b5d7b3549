"""The AdamW update of a flat run of parameters on the device that holds them, in place.

On GPUs it is one fused pass; everywhere else it is the update of `kernels.adamw`.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from flatpeak.kernels.adamw import Coefficients
from flatpeak.kernels.adamw_device import reference

__all__ = ["Coefficients", "adamw_"]


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weights: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """Update the fp32 state [n] in place, and write rounded masters into `weights` [n] if given.

    The gradient [n] is fp32 or bf16, the weights too. All are contiguous and on one device.
    """
    kernels = _fused() if master.is_cuda else None
    (kernels or reference).adamw_(master, exp_avg, exp_avg_sq, gradient, weights, coefficients)


@cache
def _fused() -> Any:
    # Imported late: Triton is not there on every system, and takes a while where it is.
    if find_spec("triton") is None:
        return None
    return import_module("flatpeak.kernels.adamw_device.triton")
