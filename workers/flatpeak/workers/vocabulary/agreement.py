"""What the ranks tell each other before the ring starts, and the errors they then all raise alike.

One small all-reduce carries every rank's facts, among them whether it has a problem; only then a
second one carries the problem's words. All checks read what was gathered alone, so either every
rank raises the same error or every rank enters the ring with the same plan.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatpeak.workers.errors import DataError, InputError
from flatpeak.workers.progress import waiting
from flatpeak.workers.vocabulary.arguments import DTYPES, SCHEDULES, Inputs, first_problem
from flatpeak.workers.vocabulary.ring import Ring

DEVICES = ("another device", "cpu", "cuda")
MOST_WORDS_BYTES = 1000

# What decides the traffic must not differ. Gradients count: a rank that runs no backward would
# leave the others waiting. So does the loss itself: ranks that minimise different ones would go
# unnoticed.
_COMMON = (
    "width",
    "hidden_dtype",
    "device",
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


@dataclass(frozen=True)
class Facts:
    """One rank's part of a call; 0 stands for whatever a rank with a problem cannot tell."""

    has_problem: int
    tokens: int = 0
    width: int = 0
    hidden_dtype: int = 0
    device: int = 0
    vocab_size: int = 0
    token_tile: int | None = 0
    schedule: int = 0
    logit_scale: float = 0
    soft_cap: float | None = 0
    z_loss: float = 0
    label_smoothing: float = 0
    needs_hidden_grad: int = 0
    needs_shard_grad: int = 0
    bad_targets: int = 0
    bad_position: int = 0
    bad_value: int = 0
    bad_weights: int = 0
    bad_weight_position: int = 0
    bad_weight: float = 0


_FLOATS = ("logit_scale", "soft_cap", "z_loss", "label_smoothing", "bad_weight")
_CODED = {"hidden_dtype": DTYPES, "device": DEVICES, "schedule": SCHEDULES}
_NOTHING = -1  # as a float, the bits of a NaN that no computation yields


def agree(ring: Ring, inputs: Inputs) -> list[Facts]:
    """The facts of all ranks, in rank order; the one place where this loss waits for the device.

    Raises InputError or DataError, the same on every rank, if the call cannot be carried out.
    """
    problem = first_problem(inputs, rank=ring.rank, ranks=ring.size, devices=_devices(ring))
    given = (inputs.hidden, inputs.targets, inputs.shard)
    if any(isinstance(x, FakeTensor) for x in given):
        # Simulation: tensors have no values, so take every rank to be like this one.
        if problem is not None:
            raise InputError(problem)
        return [_facts(_known(inputs))] * ring.size
    facts = [_facts(row) for row in _gathered(_row(inputs, problem), ring)]
    _check_problems(facts, problem, ring)
    _check_common(facts)
    _check_values(facts)
    return facts


def _devices(ring: Ring) -> tuple[str, ...]:
    """The types of device that the ring's group has a backend for; none without a group."""
    if ring.group is None:
        return ()
    # Like "cpu:gloo,cuda:nccl".
    backends = dist.get_backend_config(ring.group).split(",")
    return tuple(backend.partition(":")[0] for backend in backends)


def _gathered(row: Tensor, ring: Ring) -> list[list[int]]:
    """The rows of all ranks, int64 and equally long."""
    if ring.size > 1:
        rows = row.new_zeros((ring.size, row.numel()), device=_meeting_place(ring))
        rows[ring.rank] = row
        # A sum of rows that are zero elsewhere: a gather that every backend has.
        with waiting():
            dist.all_reduce(rows, group=ring.group)
        return rows.tolist()
    return [row.tolist()]


def _meeting_place(ring: Ring) -> torch.device:
    # Of the group, not of the inputs: a rank whose inputs are elsewhere would not be met.
    kinds = _devices(ring)
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _row(inputs: Inputs, problem: str | None) -> Tensor:
    if problem is not None:
        return torch.tensor([1] + [0] * (len(fields(Facts)) - 1))
    values = torch.cat((_bad_targets(inputs), _bad_weights(inputs)))
    known = torch.tensor(_known(inputs)).to(values.device, non_blocking=True)
    return torch.cat((known, values))


def _known(inputs: Inputs) -> list[int]:
    """What needs no look at the device, in the order of the fields of Facts."""
    tile, device = inputs.token_tile, inputs.hidden.device.type
    return [
        0,
        *inputs.hidden.shape,
        DTYPES.index(inputs.hidden.dtype),
        DEVICES.index(device) if device in DEVICES else 0,
        int(inputs.vocab_size),
        _NOTHING if tile is None else int(tile),
        SCHEDULES.index(inputs.schedule),
        _packed(inputs.logit_scale),
        _packed(inputs.soft_cap),
        _packed(inputs.z_loss),
        _packed(inputs.label_smoothing),
        int(inputs.needs_hidden_grad),
        int(inputs.needs_shard_grad),
    ]


def _packed(number: float | None) -> int:
    """A float as the integer of its bits."""
    if number is None:
        return _NOTHING
    # Adding 0 makes -0.0 the 0.0 that it is equal to.
    return struct.unpack("q", struct.pack("d", float(number) + 0.0))[0]


def _unpacked(bits: int) -> float | None:
    return None if bits == _NOTHING else struct.unpack("d", struct.pack("q", bits))[0]


def _facts(row: Sequence[int]) -> Facts:
    names = (field.name for field in fields(Facts))
    values: dict[str, Any] = dict(zip(names, row, strict=False))  # the last ones have defaults
    for name in values.keys() & _FLOATS:
        values[name] = _unpacked(values[name])
    if values.get("token_tile") == _NOTHING:
        values["token_tile"] = None
    return Facts(**values)


def _bad_targets(inputs: Inputs) -> Tensor:
    """How many targets lie outside the vocabulary, and the first one's position and value."""
    targets = inputs.targets
    if targets.numel() == 0:
        return targets.new_zeros(3)
    bad = (targets < 0) | (targets >= inputs.vocab_size)
    bad &= targets != inputs.ignore_index
    first = bad.to(torch.int8).argmax()
    return torch.stack((bad.sum(), first, targets[first]))


def _bad_weights(inputs: Inputs) -> Tensor:
    """How many weights are not finite, and the first one's position and bits."""
    weights = inputs.token_weights
    if weights is None or weights.numel() == 0:
        return inputs.targets.new_zeros(3)
    bad = ~weights.isfinite()
    first = bad.to(torch.int8).argmax()
    return torch.stack((bad.sum(), first, weights.detach()[first].double().view(torch.long)))


def _check_problems(facts: Sequence[Facts], problem: str | None, ring: Ring) -> None:
    troubled = [rank for rank, own in enumerate(facts) if own.has_problem]
    if not troubled:
        return
    # All ranks are here, as all have the same facts. The first one with a problem tells it.
    words = torch.zeros(MOST_WORDS_BYTES, dtype=torch.long)
    if ring.rank == troubled[0]:
        assert problem is not None
        text = list(problem.encode()[:MOST_WORDS_BYTES])
        words[: len(text)] = torch.tensor(text)
    told = bytes(_gathered(words, ring)[troubled[0]]).rstrip(b"\0").decode(errors="ignore")
    where = f"rank {troubled[0]} of {ring.size}: " if ring.size > 1 else ""
    raise InputError(where + told)


def _check_common(facts: Sequence[Facts]) -> None:
    for name in _COMMON:
        values = [getattr(own, name) for own in facts]
        if len(set(values)) > 1:
            if name in _CODED:
                values = [str(_CODED[name][value]) for value in values]
            raise InputError(
                f"{name} differs between the ranks of the vocabulary group: {values} in rank order;"
                " pass the same on all of them"
            )


def _check_values(facts: Sequence[Facts]) -> None:
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
