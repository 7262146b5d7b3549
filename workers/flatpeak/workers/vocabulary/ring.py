"""The ring: pieces of a tensor visit every rank, and what they accumulate travels behind them.

Each rank cuts its own tensor into pieces of at most `tile` rows. Piece 0 of every rank makes a full
tour of the ring, then piece 1, and so on, so that the moving buffers hold pieces, never the whole
tensor. While a piece is worked on, the next one is already in flight. Its carry (an fp32
accumulator) follows one visit later, since the rank before has to finish it first, and makes one
hop more to come home.

Every size is known on every rank beforehand, so all ranks post the same hops in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flatpeak.workers.errors import InputError
from flatpeak.workers.progress import waiting

Bounds = tuple[int, int]


class Hop:
    """Transfers under way. Their buffers may be read or written again only after `wait`."""

    def __init__(self, works: Sequence[dist.Work] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        with waiting():
            for work in self._works:
                work.wait()
        self._works = ()


class Ring:
    """The ranks of `group` in a circle; without a group, one rank that never communicates."""

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is not None and not isinstance(group, ProcessGroup):
            # torch gives something else to ranks outside a new group. Nobody there to tell.
            raise InputError(
                f"group is of type {type(group).__name__}; it must be a process group that this"
                " rank belongs to, or None for one rank alone"
            )
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def owner(self, step: int) -> int:
        """Whose piece is here at this step of a tour; pieces move to the next higher rank."""
        return (self.rank - step) % self.size

    def hop(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Hop:
        """Start to send to the next rank and to receive from the previous one."""
        after, before = self._peer(1), self._peer(-1)
        # Neither side posts an empty tensor: both know its size.
        ops = [dist.P2POp(dist.isend, x, after, self.group) for x in outgoing if x.numel()]
        ops += [dist.P2POp(dist.irecv, x, before, self.group) for x in incoming if x.numel()]
        return Hop(dist.batch_isend_irecv(ops)) if ops else Hop()

    def _peer(self, offset: int) -> int:
        assert self.group is not None, "a ring of one rank has no neighbours"
        return dist.get_global_rank(self.group, (self.rank + offset) % self.size)


class _Turns:
    """Two buffers of `tile` rows like each of `models`, used in turn and made on first use."""

    def __init__(self, models: Sequence[Tensor], tile: int, dtype: torch.dtype | None = None):
        self._models = models
        self._tile = tile
        self._dtype = dtype
        self._buffers: dict[int, list[Tensor]] = {}

    def take(self, turn: int, rows: int) -> list[Tensor]:
        if turn % 2 not in self._buffers:
            self._buffers[turn % 2] = [
                x.new_empty((self._tile, *x.shape[1:]), dtype=self._dtype) for x in self._models
            ]
        return [buffer[:rows] for buffer in self._buffers[turn % 2]]


class Carry:
    """The accumulator of each piece, which visits the ring behind its piece.

    `home` [rows, width] holds the initial values of this rank's rows and, after the tour, what all
    ranks added to them. If it is narrower than fp32, pieces leave from and land in fp32 buffers.
    """

    def __init__(self, ring: Ring, home: Tensor, tile: int) -> None:
        self._ring = ring
        self._home = home
        wide = torch.promote_types(home.dtype, torch.float32)
        self._staged = home.dtype != wide
        self._visiting = _Turns([home], tile, wide)
        self._landings = _Turns([home], tile, wide)
        self._here = self._landing = home[:0]
        self._hop = Hop()
        self._homecoming: tuple[Hop, Tensor, Bounds] | None = None

    def here(self) -> Tensor:
        """The carry of the piece that is visiting now, to be added to in place."""
        self._hop.wait()
        return self._here

    def arrive(self, piece: int, step: int, bounds: Sequence[Bounds]) -> None:
        if step > 0:
            return  # it is on its way since the step before was left
        start, stop = bounds[self._ring.rank]
        self._landing = self._home[start:stop]
        if self._staged:
            # In turn: the piece before may still be on its way home.
            staged = self._landings.take(piece, stop - start)[0]
            self._landing = staged.copy_(self._landing)
        self._here, self._hop = self._landing, Hop()

    def leave(self, step: int, bounds: Sequence[Bounds]) -> None:
        self._hop.wait()
        self.settle()  # frees the visiting buffer that the piece before went home from
        last = step + 1 == self._ring.size
        if last:
            coming = self._landing
        else:
            start, stop = bounds[self._ring.owner(step + 1)]
            coming = self._visiting.take(step + 1, stop - start)[0]
        self._hop = self._ring.hop([self._here], [coming]) if self._ring.size > 1 else Hop()
        self._here = coming
        if last:
            self._homecoming = (self._hop, self._landing, bounds[self._ring.rank])

    def settle(self) -> None:
        """Wait for the piece that is on its way home, if any, and store it."""
        if self._homecoming is None:
            return
        hop, landed, (start, stop) = self._homecoming
        hop.wait()
        if self._staged:
            self._home[start:stop].copy_(landed)
        self._homecoming = None


@dataclass(frozen=True)
class Visit:
    """A piece, rows [start, stop) of its owner's tensors, that is on this rank now."""

    owner: int
    start: int
    stop: int
    payload: list[Tensor]


def tour(
    ring: Ring, rows: Sequence[int], tile: int, own: Sequence[Tensor], carry: Carry | None = None
) -> Iterator[Visit]:
    """Every visit that this rank receives, in order, its own pieces included.

    `rows` [P] are the row counts of all ranks, `own` this rank's tensors, which move together.
    """
    turns = _Turns(own, tile)
    for piece in range(-(-max(rows) // tile)):
        bounds = [(min(piece * tile, n), min((piece + 1) * tile, n)) for n in rows]
        start, stop = bounds[ring.rank]
        payload = [x[start:stop].contiguous() for x in own]
        for step in range(ring.size):
            owner = ring.owner(step)
            hop, coming = Hop(), payload
            if step + 1 < ring.size:
                start, stop = bounds[ring.owner(step + 1)]
                coming = turns.take(step + 1, stop - start)
                hop = ring.hop(payload, coming)
            if carry is not None:
                carry.arrive(piece, step, bounds)
            yield Visit(owner, *bounds[owner], payload)
            if carry is not None:
                carry.leave(step, bounds)
            hop.wait()
            payload = coming
    if carry is not None:
        carry.settle()
