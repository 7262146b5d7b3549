"""AdamW over flat fp32 state, with rounded weights out."""

from flatpeak.kernels.adamw.reference import Coefficients, adamw

__all__ = ["Coefficients", "adamw"]
