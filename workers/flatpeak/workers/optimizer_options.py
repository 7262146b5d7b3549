"""What the stand-alone optimizer accepts; all else is refused before anything changes."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import Tensor

from flatpeak.workers.arena import SUFFIX
from flatpeak.workers.errors import InputError


def check_group(options: Mapping[str, Any], where: str = "") -> None:
    """Raises InputError for `lr`, `betas`, `eps` or `weight_decay` that AdamW cannot work with.

    `where` names the parameter group at the start of the message.
    """
    for name, example in (("lr", 1e-3), ("eps", 1e-8), ("weight_decay", 0.01)):
        if not 0 <= _number(options[name]) < math.inf:
            raise InputError(
                f"{where}{name} is {options[name]!r}; it must be a finite number from 0 up, "
                f"for instance {example:g}"
            )
    betas = options["betas"]
    paired = isinstance(betas, Sequence) and len(betas) == 2
    if not paired or not all(0 <= _number(beta) < 1 for beta in betas):
        raise InputError(
            f"{where}betas is {betas!r}; it must be two numbers from 0 to below 1, "
            "for instance (0.9, 0.999)"
        )


def check_clip(clip: Any) -> float | None:
    """`clip` as a number, None for no clipping; raises InputError for a closure and the rest."""
    if clip is None:
        return None
    if callable(clip):
        raise InputError(
            "step() takes no closure, since gradients leave during backward: call backward() "
            "first and then step(), or step(clip=1.0)"
        )
    norm = _number(clip)
    if not norm > 0:
        raise InputError(
            f"clip is {clip!r}; it must be a number above 0, for instance 1.0, "
            "or None for no clipping"
        )
    return norm


def check_count(name: str, value: Any, example: int) -> None:
    """Raises InputError for an argument that is no whole number from 1 up."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(
            f"{name} is {value!r}; it must be a whole number from 1 up, for instance {example}"
        )


def check_arena(path: str | Path | None) -> None:
    """Raises InputError for a file that nobody would recognise as an arena left behind."""
    if path is not None and Path(path).suffix != SUFFIX:
        raise InputError(f"arena: {path} must end in {SUFFIX}, for instance {Path(path)}{SUFFIX}")


def _number(value: Any) -> float:
    """NaN for what is no number: every comparison refuses it. Learning rates may be tensors."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
