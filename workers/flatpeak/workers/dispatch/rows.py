"""What travels and what is computed of one chunk: rows of tokens, and routes grouped by expert.

A token has one row on each rank that computes any of its routes, however many they are. Rows of the
rank's own tokens are read in place, those of others where they landed. In tables over all rows of a
chunk the own ones come first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from flatpeak.workers.dispatch.routing import LABEL, Chunk, Routing, visits

# Rows start where any dtype may.
ALIGNMENT = 16


@dataclass(frozen=True)
class RowFormat:
    """The bytes of one travelling row: values [H] one after the other, then the route weights [k]
    and the instances [k] that compute them."""

    hidden: int
    k: int
    values: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    @cached_property
    def _starts(self) -> list[int]:
        widths = [self.hidden * self.dtype.itemsize] * self.values
        widths += [self.k * self.weight_dtype.itemsize, self.k * LABEL.itemsize]
        starts = [0]
        for width in widths:
            starts.append(starts[-1] + aligned(width))
        return starts

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def value(self, rows: torch.Tensor, which: int) -> torch.Tensor:
        return self._view(rows, which, self.hidden, self.dtype)

    def route_weights(self, rows: torch.Tensor) -> torch.Tensor:
        return self._view(rows, self.values, self.k, self.weight_dtype)

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        return self._view(rows, self.values + 1, self.k, LABEL)

    def _view(self, rows: torch.Tensor, part: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._starts[part]
        return rows[:, start : start + size * dtype.itemsize].view(dtype)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Journey:
    """Which own tokens of a chunk travel, and where what comes back is added."""

    def __init__(
        self, positions: torch.Tensor, ranks_of: torch.Tensor, routing: Routing, chunk: Chunk
    ) -> None:
        """`positions` [n] of the chunk's own tokens in the layer, and `ranks_of` [n, k]: the rank
        that computes each of their routes."""
        self.positions = positions
        self._chunk = chunk
        travels = visits(ranks_of, routing.plan.ranks, routing.rank)
        # Stable, so rows to one rank keep the order of their tokens.
        order = torch.argsort((~travels.T).flatten().to(torch.int8), stable=True)
        self._numbers = order[: sum(chunk.send)] % max(1, len(ranks_of))
        self._places = positions[self._numbers]

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the travelling rows of the layer-sized `table` [N, ...] into `rows`."""
        torch.index_select(table, 0, self._places, out=rows)

    def scatter(
        self, total: torch.Tensor, returned: torch.Tensor, *, chunk_sized: bool = False
    ) -> None:
        """Add what came back to `total` [N, ...], or to that of the chunk alone.

        Rank by rank: a token occurs once in each, so no two additions race on any device.
        """
        send, tokens = self._chunk.send, self._numbers if chunk_sized else self._places
        for numbers, rows in zip(tokens.split(send), returned.split(send), strict=True):
            if len(rows):
                total.index_add_(0, numbers, rows.to(total.dtype))


@dataclass(frozen=True)
class Block:
    """Routes that are computed together, grouped by instance, own tokens first in each."""

    routes: torch.Tensor
    """Positions in the flattened [rows, k] tables of the chunk."""
    rows: torch.Tensor
    """Numbers of the own tokens in the chunk, and of the landed rows."""
    places: torch.Tensor
    """The same with own tokens as positions in the layer."""
    instances: tuple[int, ...]
    sizes: tuple[int, ...]
    """Routes of each of the instances."""
    runs: tuple[tuple[bool, int], ...]
    """(whether of own tokens, routes): within one instance and source no token occurs twice."""

    def take(self, own: torch.Tensor, landed: torch.Tensor) -> torch.Tensor:
        """One row a route, from the layer-sized `own` and the chunk's `landed`."""
        taken = own.new_empty((len(self.rows), own.shape[1]))
        for is_own, place, part in self._runs(self.places, taken):
            torch.index_select(own if is_own else landed, 0, place, out=part)
        return taken

    def add(
        self, own: torch.Tensor, landed: torch.Tensor, values: torch.Tensor, *, chunk_sized: bool
    ) -> None:
        """Add each route's row of `values` to that of its token; `own` may be `chunk_sized`.

        Run by run, so that no two additions race on any device.
        """
        rows = self.rows if chunk_sized else self.places
        for is_own, row, part in self._runs(rows, values):
            (own if is_own else landed).index_add_(0, row, part)

    def _runs(
        self, rows: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
        sides, sizes = zip(*self.runs, strict=True)
        parts = (torch.split_with_sizes(each, sizes) for each in (rows, values))
        return zip(sides, *parts, strict=True)


def blocks(
    labels: torch.Tensor, positions: torch.Tensor, routing: Routing, chunk: Chunk, *, size: int
) -> Iterator[Block]:
    """This rank's routes among `labels` [rows, k], at most `size` in a block.

    Labels of own tokens, whose `positions` in the layer are given, come first. Native and foreign
    instances never share a block.
    """
    local = labels.flatten() - routing.first_instance
    elsewhere = routing.instances
    local = torch.where((local >= 0) & (local < elsewhere), local, elsewhere)
    computed = sum(chunk.own_routes) + sum(chunk.landed_routes)
    routes = torch.argsort(local, stable=True)[:computed]
    del local
    rows = routes // labels.shape[1]
    places = torch.cat([positions, torch.arange(sum(chunk.receive), device=rows.device)])[rows]
    landed = rows - len(positions)
    rows = torch.where(landed < 0, rows, landed)
    del landed
    natives = len(routing.plan.natives[routing.rank])
    start = 0
    for pieces in _packed(chunk, natives, size):
        stop = start + sum(own + landed for _, own, landed in pieces)
        yield Block(
            routes[start:stop],
            rows[start:stop],
            places[start:stop],
            instances=tuple(instance for instance, _, _ in pieces),
            sizes=tuple(own + landed for _, own, landed in pieces),
            runs=tuple(run for piece in pieces for run in _runs(piece)),
        )
        start = stop


# (instance, own routes, landed routes)
_Piece = tuple[int, int, int]


def _packed(chunk: Chunk, natives: int, size: int) -> Iterator[list[_Piece]]:
    """The routes of each instance in turn, as many to a block as fit."""
    block: list[_Piece] = []
    room = size
    for instance, counts in enumerate(zip(chunk.own_routes, chunk.landed_routes, strict=True)):
        for own, landed in _pieces(*counts, size):
            if block and (own + landed > room or (instance >= natives) != (block[0][0] >= natives)):
                yield block
                block, room = [], size
            block.append((instance, own, landed))
            room -= own + landed
    if block:
        yield block


def _pieces(own: int, landed: int, size: int) -> Iterator[tuple[int, int]]:
    """One instance's routes in pieces of at most `size`, own ones first."""
    for done in range(0, own + landed, size):
        piece = min(size, own + landed - done)
        of_own = min(max(own - done, 0), piece)
        yield of_own, piece - of_own


def _runs(piece: _Piece) -> Iterator[tuple[bool, int]]:
    _, own, landed = piece
    if own:
        yield True, own
    if landed:
        yield False, landed
