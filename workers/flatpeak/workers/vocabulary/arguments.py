"""What one rank was given, and what is wrong with it: nothing here raises, waits or communicates.

The functions of this module take arguments of any type and value, so that whatever a rank was given
it comes as far as telling the others, who would wait for it otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flatpeak.workers.partition import part

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEDULES = ("auto", "weights", "activations")
LARGEST_INT = torch.iinfo(torch.long).max
# A scale over a cap, and a z-loss times a log-sum-exp, are fp32 numbers still.
LARGEST = 1e18


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of one rank's call, of the types below once `first_problem` finds none."""

    hidden: Tensor
    targets: Tensor
    shard: Tensor
    vocab_size: int
    ignore_index: int
    token_tile: int | None
    schedule: str
    logit_scale: float = 1.0
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    token_weights: Tensor | None = None
    grad_sink: Any = None
    nll_sink: Any = None
    backward: bool = False
    """Whether a backward pass may follow."""

    @property
    def needs_hidden_grad(self) -> bool:
        return self.backward and self.hidden.requires_grad

    @property
    def needs_shard_grad(self) -> bool:
        return self.backward and (self.shard.requires_grad or self.grad_sink is not None)


def first_problem(inputs: Inputs, *, rank: int, ranks: int, devices: tuple[str, ...]) -> str | None:
    """What keeps this rank from the call, in a sentence with the fix; None where nothing does.

    `devices` are the types of device between which the group can move tensors; none means any.
    Values of targets and token weights are not looked at.
    """
    return next(_problems(inputs, rank, ranks, devices), None)


def _problems(inputs: Inputs, rank: int, ranks: int, devices: tuple[str, ...]) -> Iterator[str]:
    # Each check may rely on those before it: only the first problem is asked for.
    yield from _tensor_problems(inputs, devices)
    yield from _size_problems(inputs)
    yield from _shape_problems(inputs, rank, ranks)
    yield from _option_problems(inputs)


def _tensor_problems(inputs: Inputs, devices: tuple[str, ...]) -> Iterator[str]:
    tensors: dict[str, Any] = {
        "hidden": inputs.hidden,
        "targets": inputs.targets,
        "weight_shard": inputs.shard,
    }
    if inputs.token_weights is not None:
        tensors["token_weights"] = inputs.token_weights
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            yield f"{name} is {shown(x)}; it must be a tensor"
        elif isinstance(x, DTensor):
            yield f"{name} is a DTensor; pass this rank's part of it, {name}.to_local()"
        elif x.is_nested:
            yield f"{name} is a nested tensor; pass the rows of all its parts as one"
        elif x.layout != torch.strided:
            yield f"{name} has the layout {x.layout}; it must be strided, as {name}.to_dense() is"
        elif x.device.type == "meta":
            yield f"{name} is on the meta device, where tensors have no values; pass a real one"
        elif x.numel() and not x.untyped_storage().nbytes():
            yield f"{name} has no storage any more; gather or materialise it before the call"
        elif x.device != inputs.hidden.device:
            yield (
                f"{name} is on {x.device}, but hidden is on {inputs.hidden.device}; pass"
                f" {name}.to(hidden.device)"
            )
    where = inputs.hidden.device.type
    if devices and where not in devices:
        yield (
            f"hidden is on {where}, but its process group communicates between devices of type"
            f" {' or '.join(devices)}; move the inputs there"
        )


def _size_problems(inputs: Inputs) -> Iterator[str]:
    yield from _integer("vocab_size", inputs.vocab_size, 1, "32000")
    yield from _integer("ignore_index", inputs.ignore_index, -LARGEST_INT - 1, "-100")
    if inputs.token_tile is not None:
        yield from _integer(
            "token_tile", inputs.token_tile, 1, "1024, or None to choose it by bytes"
        )
    if not isinstance(inputs.schedule, str) or inputs.schedule not in SCHEDULES:
        yield f"schedule is {shown(inputs.schedule)}; it must be one of {', '.join(SCHEDULES)}"


def _shape_problems(inputs: Inputs, rank: int, ranks: int) -> Iterator[str]:
    hidden, targets, shard = inputs.hidden, inputs.targets, inputs.shard
    if hidden.dim() != 2:
        yield f"hidden must have two dimensions, [tokens, hidden width], not {_shape(hidden)}"
    if hidden.dtype not in DTYPES:
        yield f"hidden is {hidden.dtype}; it must be one of {', '.join(map(str, DTYPES))}"
    tokens, width = hidden.shape
    yield from _one_a_token("targets", targets, torch.long, tokens)
    if shard.dtype != hidden.dtype:
        yield (
            f"weight_shard is {shard.dtype} and hidden {hidden.dtype}; cast one of them, for"
            " instance weight_shard.to(hidden.dtype)"
        )
    start, stop = part(int(inputs.vocab_size), ranks, rank)
    if shard.shape != (stop - start, width):
        yield (
            f"weight_shard has shape {_shape(shard)}, but rows {start} to {stop} of the head weight"
            f" have [{stop - start}, {width}]; cut it with"
            f" part({inputs.vocab_size}, {ranks}, {rank})"
        )
    if inputs.token_weights is not None:
        yield from _one_a_token("token_weights", inputs.token_weights, torch.float32, tokens)


def _one_a_token(name: str, x: Tensor, dtype: torch.dtype, tokens: int) -> Iterator[str]:
    if x.dtype != dtype or x.shape != (tokens,):
        yield (
            f"{name} must be {dtype} of shape [{tokens}], one for each row of hidden, not"
            f" {x.dtype} of shape {_shape(x)}"
        )


def _option_problems(inputs: Inputs) -> Iterator[str]:
    weights = inputs.token_weights
    if inputs.backward and weights is not None and weights.requires_grad:
        yield "token_weights requires a gradient and would get none; pass token_weights.detach()"
    for name in ("grad_sink", "nll_sink"):
        sink = getattr(inputs, name)
        if sink is not None and not callable(sink):
            yield f"{name} is {shown(sink)}; it must be a function of a tensor, or None"
    scale, cap = inputs.logit_scale, inputs.soft_cap
    if not _is_number(scale) or not 1 / LARGEST <= abs(scale) <= LARGEST:
        yield (
            f"logit_scale is {shown(scale)}; it must be a number other than 0, from {1 / LARGEST}"
            f" to {LARGEST} or the negative of one, for instance 0.0625, or 1.0 for none"
        )
    if cap is not None and (not _is_number(cap) or not 1 / LARGEST <= cap <= LARGEST):
        yield (
            f"soft_cap is {shown(cap)}; it must be a number from {1 / LARGEST} to {LARGEST}, for"
            " instance 30.0, or None for no cap"
        )
    if not _is_number(inputs.z_loss) or not 0 <= inputs.z_loss <= LARGEST:
        yield (
            f"z_loss is {shown(inputs.z_loss)}; it must be a number from 0 to {LARGEST}, for"
            " instance 1e-4, or 0.0 for none"
        )
    smoothing = inputs.label_smoothing
    if not _is_number(smoothing) or not 0 <= smoothing < 1:
        yield (
            f"label_smoothing is {shown(smoothing)}; it must be at least 0 and below 1, for"
            " instance 0.1, or 0.0 for none"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _integer(name: str, value: Any, least: int, example: str) -> Iterator[str]:
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or not least <= int(value) <= LARGEST_INT:
        yield (
            f"{name} is {shown(value)}; it must be an integer of 64 bits, at least {least}, for"
            f" instance {example}"
        )


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def shown(value: object) -> str:
    """`value` in a few words, whatever it is."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        # Python refuses to write thousands of digits.
        bits = value.bit_length()
        return str(value) if bits <= 64 else f"an integer of {bits} bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "...")
    return f"of type {type(value).__name__}"
