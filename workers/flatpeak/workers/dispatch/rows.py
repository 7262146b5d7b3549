"""The rows of one chunk on one rank: own tokens, read in place, and rows received from others.

Rows are numbered own first, then landed in order of their source rank. Within one rank a token has
one row, however many of its experts live there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flatpeak.workers.dispatch.exchange import Arriving, exchange
from flatpeak.workers.dispatch.routing import LABEL, Chunk, Group, Routing, visits

# Enough rows for a matrix product at full speed; more would only cost memory. Under skew one expert
# may get every row of a chunk.
BLOCK_ROUTES = 1024


class Rows:
    """One value a row, in two places: `own` may be a strided view of a layer-sized tensor."""

    def __init__(self, own: torch.Tensor, landed: torch.Tensor) -> None:
        self.own = own
        self.landed = landed

    def take(self, block: "Block") -> torch.Tensor:
        taken = self.own.new_empty((len(block.rows), *self.own.shape[1:]))
        own, landed = self._halves(block)
        torch.index_select(self.own, 0, own, out=taken[: block.own])
        torch.index_select(self.landed, 0, landed, out=taken[block.own :])
        return taken

    def add(self, block: "Block", values: torch.Tensor) -> None:
        own, landed = self._halves(block)
        self.own.index_add_(0, own, values[: block.own].to(self.own.dtype))
        self.landed.index_add_(0, landed, values[block.own :].to(self.landed.dtype))

    def _halves(self, block: "Block") -> tuple[torch.Tensor, torch.Tensor]:
        return block.rows[: block.own], block.rows[block.own :] - len(self.own)


@dataclass(frozen=True)
class Block:
    """Routes of one instance that are computed together."""

    instance: int
    own: int
    """How many of them, the first ones, belong to own tokens."""
    routes: torch.Tensor
    """Positions in the flattened [rows, k] tables of the chunk."""
    rows: torch.Tensor


def blocks(labels: torch.Tensor, routing: Routing, chunk: Chunk) -> Iterator[Block]:
    """This rank's routes among `labels` [rows, k], grouped by instance, own tokens first."""
    local = labels - routing.first_instance
    elsewhere = routing.instances
    local = torch.where((local >= 0) & (local < elsewhere), local, elsewhere)
    order = torch.argsort(local.flatten(), stable=True)
    start = 0
    for instance, (own, landed) in enumerate(
        zip(chunk.own_routes, chunk.landed_routes, strict=True)
    ):
        for done in range(0, own + landed, BLOCK_ROUTES):
            size = min(BLOCK_ROUTES, own + landed - done)
            routes = order[start + done : start + done + size]
            of_own = min(max(own - done, 0), size)
            yield Block(instance, of_own, routes, routes // labels.shape[1])
        start += own + landed


class Journey:
    """The rows of one chunk that leave this rank, and the way back for what comes of them."""

    def __init__(
        self, ranks_of: torch.Tensor, routing: Routing, chunk: Chunk, group: Group
    ) -> None:
        """`ranks_of` [n, k]: the rank that computes each route of the chunk's own tokens."""
        self._chunk = chunk
        self._group = group
        travels = visits(ranks_of, routing.plan.ranks, routing.rank)
        # Stable, so rows to one rank keep the order of their tokens.
        order = torch.argsort(~travels.T.flatten(), stable=True)[: sum(chunk.send)]
        self._tokens = order % max(1, len(ranks_of))

    def send(self, values: torch.Tensor) -> Arriving:
        """Dispatch the chunk's travelling rows of `values` [n, ...]."""
        rows = values.index_select(0, self._tokens)
        return exchange(rows, self._chunk.send, self._chunk.receive, self._group)

    def send_back(self, values: torch.Tensor) -> Arriving:
        """Return one row for each landed one."""
        return exchange(values, self._chunk.receive, self._chunk.send, self._group)

    def add_returned(self, total: torch.Tensor, returned: torch.Tensor) -> None:
        """Add what came back to the chunk's tokens `total` [n, ...].

        Rank by rank: a token occurs once in each, so no two additions race on any device.
        """
        by_rank = zip(
            self._tokens.split(self._chunk.send), returned.split(self._chunk.send), strict=True
        )
        for tokens, rows in by_rank:
            total.index_add_(0, tokens, rows.to(total.dtype))


def pack(labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Both tables of a route as bytes of one row, so that they travel together."""
    tables = (labels.contiguous(), weights.contiguous())
    return torch.cat([table.view(torch.uint8) for table in tables], dim=1)


def unpack(packed: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = like.shape[1] * LABEL.itemsize
    halves = (packed[:, :width], packed[:, width:])
    labels, weights = (half.clone(memory_format=torch.contiguous_format) for half in halves)
    return labels.view(LABEL), weights.view(like.dtype)
