"""What the ranks tell each other before the ring starts, and the errors they then all raise alike.

One small all-reduce carries every rank's facts. All checks read the gathered facts only, so either
every rank raises the same error or every rank enters the ring with the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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

# What decides the traffic must not differ. Gradients count: a rank that runs no backward would
# leave the others waiting.
_COMMON = (
    "width",
    "hidden_dtype",
    "vocab_size",
    "token_tile",
    "schedule",
    "needs_hidden_grad",
    "needs_shard_grad",
)


@dataclass(frozen=True)
class Facts:
    """One rank's part of a call, in integers; -1 stands for what is not as it should be."""

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
    needs_hidden_grad: int
    needs_shard_grad: int
    bad_targets: int = 0
    bad_position: int = 0
    bad_value: int = 0


def _code(options: Sequence[object], value: object) -> int:
    return options.index(value) if value in options else -1


def _matrix(x: Tensor) -> tuple[int, int]:
    return (x.shape[0], x.shape[1]) if x.dim() == 2 else (-1, -1)


def _bad_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """How many targets lie outside the vocabulary, and the first one's position and value."""
    if targets.numel() == 0:
        return targets.new_zeros(3, dtype=torch.long)
    bad = ((targets < 0) | (targets >= vocab_size)) & (targets != ignore_index)
    first = bad.to(torch.int8).argmax()
    return torch.stack((bad.sum(), first, targets.flatten()[first]))


def gather_facts(
    ring: Ring,
    hidden: Tensor,
    targets: Tensor,
    shard: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    token_tile: int | None,
    schedule: str,
    wants_shard_grad: bool,
) -> list[Facts]:
    """The facts of all ranks, in rank order; the one place where this loss waits for the device."""
    grads = torch.is_grad_enabled()
    known = [
        *_matrix(hidden),
        targets.shape[0] if targets.dim() == 1 and targets.dtype == torch.long else -1,
        *_matrix(shard),
        _code(DTYPES, hidden.dtype),
        _code(DTYPES, shard.dtype),
        vocab_size,
        NO_TILE if token_tile is None else max(token_tile, 0),
        _code(SCHEDULES, schedule),
        int(grads and hidden.requires_grad),
        int(grads and wants_shard_grad),
    ]
    if isinstance(hidden, FakeTensor):
        # Simulation: tensors have no values, so take every rank to be like this one.
        return _assume_alike(Facts(*known), ring)
    row = torch.tensor(known, device=hidden.device)
    row = torch.cat((row, _bad_targets(targets, vocab_size, ignore_index)))
    rows = row.new_zeros((ring.size, row.numel()))
    rows[ring.rank] = row
    if ring.size > 1:
        # A sum of rows that are zero elsewhere: a gather that every backend has.
        dist.all_reduce(rows, group=ring.group)
    return [Facts(*values) for values in rows.tolist()]


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
        if own.bad_targets:
            where = f" on rank {rank} of {len(facts)}" if len(facts) > 1 else ""
            raise DataError(
                f"target {own.bad_value} at position {own.bad_position}{where} is outside the"
                f" vocabulary of {own.vocab_size} ({own.bad_targets} such targets there);"
                f" use ids 0 to {own.vocab_size - 1}, or ignore_index to leave a position out"
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
