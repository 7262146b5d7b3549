"""What the ranks tell each other before the ring starts, and the errors they then all raise alike.

One small all-reduce carries every rank's facts. All checks read the gathered facts only, so either
every rank raises the same error or every rank enters the ring with the same plan.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatpeak.workers.errors import DataError, InputError
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary.ring import Ring

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEDULES = ("auto", "weights", "activations")
NO_TILE = -1
NO_NUMBER = -1

# What decides the traffic must not differ. Gradients count: a rank that runs no backward would
# leave the others waiting. So does the loss itself: ranks that minimise different ones would go
# unnoticed.
_COMMON = (
    "width",
    "hidden_dtype",
    "vocab_size",
    "token_tile",
    "schedule",
    "logit_scale",
    "soft_cap",
    "z_loss",
    "label_smoothing",
    "needs_hidden_grad",
    "needs_shard_grad",
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of one rank's call."""

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
    needs_hidden_grad: bool = False
    needs_shard_grad: bool = False


@dataclass(frozen=True)
class Facts:
    """One rank's part of a call; -1 stands for what is not as it should be."""

    tokens: int
    width: int
    targets: int
    shard_rows: int
    shard_width: int
    hidden_dtype: int
    shard_dtype: int
    vocab_size: int
    token_tile: int
    schedule: int
    logit_scale: float | None
    soft_cap: float | None
    z_loss: float | None
    label_smoothing: float | None
    token_weights: int
    needs_hidden_grad: int
    needs_shard_grad: int
    bad_targets: int = 0
    bad_position: int = 0
    bad_value: int = 0
    bad_weights: int = 0
    bad_weight_position: int = 0
    bad_weight: float | None = 0.0


_NUMBERS = ("logit_scale", "soft_cap", "z_loss", "label_smoothing", "bad_weight")


def _packed(value: object) -> int:
    """A float as the integer of its bits; what is no number is NaN."""
    if value is None:
        return NO_NUMBER  # the bits of a NaN that no computation yields
    number = float(value) if isinstance(value, Real) else math.nan
    return struct.unpack("q", struct.pack("d", number))[0]


def _unpacked(bits: int) -> float | None:
    return None if bits == NO_NUMBER else struct.unpack("d", struct.pack("q", bits))[0]


def _facts(row: Sequence[int]) -> Facts:
    names = (field.name for field in fields(Facts))
    values: dict[str, Any] = {
        name: _unpacked(value) if name in _NUMBERS else value
        for name, value in zip(names, row, strict=False)  # the last ones have defaults
    }
    return Facts(**values)


def _code(options: Sequence[object], value: object) -> int:
    return options.index(value) if value in options else -1


def _matrix(x: Tensor) -> tuple[int, int]:
    return (x.shape[0], x.shape[1]) if x.dim() == 2 else (-1, -1)


def _vector(x: Tensor, dtype: torch.dtype) -> int:
    return x.shape[0] if x.dim() == 1 and x.dtype == dtype else -1


def _bad_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """How many targets lie outside the vocabulary, and the first one's position and value."""
    if targets.numel() == 0:
        return targets.new_zeros(3, dtype=torch.long)
    bad = ((targets < 0) | (targets >= vocab_size)) & (targets != ignore_index)
    first = bad.to(torch.int8).argmax()
    # Targets of a wrong dtype are refused later: what the ranks exchange stays in integers.
    return torch.stack((bad.sum(), first, targets.flatten()[first].long()))


def _bad_weights(weights: Tensor | None, like: Tensor) -> Tensor:
    """How many weights are not finite, and the first one's position and bits."""
    if weights is None or weights.numel() == 0:
        return like.new_zeros(3)
    bad = ~weights.isfinite()
    first = bad.to(torch.int8).argmax()
    value = weights.detach().flatten()[first].double().view(torch.long)
    return torch.stack((bad.sum(), first, value))


def gather_facts(ring: Ring, inputs: Inputs) -> list[Facts]:
    """The facts of all ranks, in rank order; the one place where this loss waits for the device."""
    hidden, targets, shard = inputs.hidden, inputs.targets, inputs.shard
    tokens, width = _matrix(hidden)
    weights, tile = inputs.token_weights, inputs.token_tile
    known = [
        tokens,
        width,
        _vector(targets, torch.long),
        *_matrix(shard),
        _code(DTYPES, hidden.dtype),
        _code(DTYPES, shard.dtype),
        inputs.vocab_size,
        NO_TILE if tile is None else max(tile, 0),
        _code(SCHEDULES, inputs.schedule),
        _packed(inputs.logit_scale),
        _packed(inputs.soft_cap),
        _packed(inputs.z_loss),
        _packed(inputs.label_smoothing),
        tokens if weights is None else _vector(weights, torch.float32),
        int(inputs.needs_hidden_grad),
        int(inputs.needs_shard_grad),
    ]
    if isinstance(hidden, FakeTensor):
        # Simulation: tensors have no values, so take every rank to be like this one.
        return _assume_alike(_facts(known), ring)
    row = torch.tensor(known, device=hidden.device)
    bad_targets = _bad_targets(targets, inputs.vocab_size, inputs.ignore_index)
    row = torch.cat((row, bad_targets, _bad_weights(weights, like=row)))
    rows = row.new_zeros((ring.size, row.numel()))
    rows[ring.rank] = row
    if ring.size > 1:
        # A sum of rows that are zero elsewhere: a gather that every backend has.
        dist.all_reduce(rows, group=ring.group)
    return [_facts(values) for values in rows.tolist()]


def _assume_alike(own: Facts, ring: Ring) -> list[Facts]:
    facts = []
    for rank in range(ring.size):
        start, stop = part(own.vocab_size, ring.size, rank)
        facts.append(own if rank == ring.rank else replace(own, shard_rows=stop - start))
    return facts


def check_facts(facts: Sequence[Facts]) -> None:
    """Raise InputError or DataError, the same on every rank, if the call cannot be carried out."""
    for rank, own in enumerate(facts):
        where = f"rank {rank} of {len(facts)}: " if len(facts) > 1 else ""
        for problem in _problems(own, rank, len(facts)):
            raise InputError(where + problem)
    for name in _COMMON:
        values = [getattr(own, name) for own in facts]
        if len(set(values)) > 1:
            raise InputError(
                f"{name} differs between the ranks of the vocabulary group: {values} in rank order;"
                " pass the same on all of them"
            )
    for rank, own in enumerate(facts):
        where = f" on rank {rank} of {len(facts)}" if len(facts) > 1 else ""
        if own.bad_targets:
            raise DataError(
                f"target {own.bad_value} at position {own.bad_position}{where} is outside the"
                f" vocabulary of {own.vocab_size} ({own.bad_targets} such targets there);"
                f" use ids 0 to {own.vocab_size - 1}, or ignore_index to leave a position out"
            )
        if own.bad_weights:
            raise DataError(
                f"token weight {own.bad_weight} at position {own.bad_weight_position}{where} is"
                f" not finite ({own.bad_weights} such weights there); use 0.0 to leave a token out"
            )


def _problems(own: Facts, rank: int, ranks: int) -> Iterator[str]:
    if own.tokens < 0:
        yield "hidden must have two dimensions, [tokens, hidden width]"
    if own.targets != own.tokens:
        yield f"targets must be int64 of shape [{own.tokens}], one for each row of hidden"
    if own.hidden_dtype < 0:
        yield f"hidden must have one of the dtypes {', '.join(map(str, DTYPES))}"
    if own.shard_dtype != own.hidden_dtype:
        yield (
            "weight_shard and hidden differ in dtype; cast one of them, for instance"
            " weight_shard.to(hidden.dtype)"
        )
    if own.vocab_size < 1:
        yield f"vocab_size is {own.vocab_size}; it must be at least 1"
        return
    start, stop = part(own.vocab_size, ranks, rank)
    if (own.shard_rows, own.shard_width) != (stop - start, own.width):
        yield (
            f"weight_shard has shape [{own.shard_rows}, {own.shard_width}], but rows {start} to"
            f" {stop} of the head weight have [{stop - start}, {own.width}]; cut it with"
            f" part({own.vocab_size}, {ranks}, {rank})"
        )
    if own.token_tile == 0:
        yield "token_tile must be at least 1, for instance 1024, or None to choose it by bytes"
    if own.schedule < 0:
        yield f"schedule must be one of {', '.join(SCHEDULES)}"
    yield from _bad_options(own)


def _bad_options(own: Facts) -> Iterator[str]:
    if own.token_weights != own.tokens:
        yield (
            f"token_weights must be float32 of shape [{own.tokens}], one for each row of hidden,"
            " or None"
        )
    if own.logit_scale is None or not 0 < abs(own.logit_scale) < math.inf:
        yield (
            f"logit_scale is {own.logit_scale}; it must be a finite number other than 0, for"
            " instance 0.0625, or 1.0 for none"
        )
    if own.soft_cap is not None and not 0 < own.soft_cap < math.inf:
        yield (
            f"soft_cap is {own.soft_cap}; it must be a finite number above 0, for instance 30.0,"
            " or None for no cap"
        )
    if own.z_loss is None or not 0 <= own.z_loss < math.inf:
        yield (
            f"z_loss is {own.z_loss}; it must be a finite number from 0 up, for instance 1e-4,"
            " or 0.0 for none"
        )
    if own.label_smoothing is None or not 0 <= own.label_smoothing <= 1:
        yield (
            f"label_smoothing is {own.label_smoothing}; it must be from 0 to 1, for instance 0.1,"
            " or 0.0 for none"
        )
