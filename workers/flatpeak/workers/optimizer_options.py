"""What the stand-alone optimizer accepts; all else is refused before anything changes."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import Tensor

from flatpeak.workers.arena import SUFFIX
from flatpeak.workers.errors import CheckpointError, InputError


def check_group(options: Mapping[str, Any], where: str = "") -> None:
    """Raises InputError for `lr`, `betas`, `eps` or `weight_decay` that AdamW cannot work with, and
    for options of `torch.optim.AdamW` that change the update and are not done here.

    `where` names the parameter group at the start of the message.
    """
    for name, usual in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
        if options.get(name, usual) != usual:
            raise InputError(
                f"{where}{name} is {options[name]!r}, which is not done here; leave it"
            )
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


def check_parameters(parameters: Sequence[Any], where: str) -> None:
    """Raises InputError for a parameter that a group holds twice, or that has no memory."""
    if any(parameter.is_meta for parameter in parameters):
        raise InputError(
            f"{where}a parameter is on the meta device; give it memory and values first, e.g. with "
            "module.to_empty(device=...)"
        )
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise InputError(f"{where}a parameter is given twice; give each of them once")


def check_state(number: int, entry: Any, parameter: Tensor) -> None:
    """Raises CheckpointError for what is no state of AdamW for `parameter`, which has `number`."""
    if not isinstance(entry, Mapping) or not {"step", "exp_avg", "exp_avg_sq"} <= entry.keys():
        raise CheckpointError(
            f"the state of parameter {number} is not AdamW's, with step, exp_avg and exp_avg_sq"
        )
    shape = list(local_part(parameter).shape)
    for name in ("exp_avg", "exp_avg_sq", "master"):
        found = list(local_part(entry[name]).shape) if name in entry else shape
        if found != shape:
            raise CheckpointError(
                f"{name} of parameter {number} has the shape {found}, but the parameter has "
                f"{shape}: it belongs to another model"
            )


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's own part, as the same storage; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor).detach()


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
