"""How a layer's tokens are cut into chunks: as many as the receive cap and the byte budget ask for.

Each rank asks for a cut from its own sizes; the finest that any of them asks for is taken by all.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np

from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.dispatch.shares import Share
from flatpeak.workers.errors import InputError

# Chunks resemble each other, up to this much.
_UNEVENNESS = 1.03


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The most that one chunk of a layer, and the layer, hold on one rank."""

    tokens: int
    """Own tokens of a chunk."""
    sent: int
    """Rows that leave."""
    sent_to_one: int
    """Rows that leave for the rank that is sent most."""
    received: int
    """Rows that arrive."""
    computed: int
    """Routes of all these rows that are computed here."""
    computed_by_one: int
    """Those of the expert with most."""
    chunks: int
    layer_tokens: int
    foreign: int
    """Foreign experts."""
    most_foreign: int
    """Those of the rank with most of them."""
    leaving: int
    """Own experts that other ranks compute too."""
    ranks: int
    instances: int
    """Experts of all ranks, foreign ones counted."""
    held: int
    """Those of this rank."""


Footprint = Callable[[Extent], int]
"""Bytes that dispatch takes on a rank, the same function on all ranks."""


@dataclass(frozen=True)
class Cut:
    """How each rank's tokens are cut into chunks.

    Chunk number `t * groups + g` takes step t of each rank that is g modulo `groups`, see `Share`.
    Groups exceed 1 only where one token a rank is already too many.
    """

    steps: int
    groups: int = 1

    @property
    def chunks(self) -> int:
        return self.steps * self.groups

    def share(self, chunk: int, rank: int) -> Share:
        step, group = divmod(chunk, self.groups)
        return Share(step, self.steps) if rank % self.groups == group else Share()


def first_cut(tokens: int, options: DispatchOptions) -> Cut:
    """The cut that the options alone ask for when the fullest rank has `tokens`."""
    if options.tokens_per_chunk is None:
        return Cut(1)
    wanted = max(1, ceil(tokens / options.tokens_per_chunk))
    return Cut(min(wanted, options.max_chunks))


class Demand(NamedTuple):
    """What one rank asks of the next cut: nothing where it can live with this one."""

    steps: int = 0
    groups: int = 0
    needed_bytes: int = 0
    """What one token at a time takes, where that is still above the budget."""


@dataclass(frozen=True)
class Bounds:
    """What the chunks of a layer are held to."""

    options: DispatchOptions
    footprint: Footprint | None

    @property
    def exist(self) -> bool:
        return self.options.receive_rows is not None or self._budget is not None

    def demand(self, cut: Cut, extent: Extent, *, tokens: int) -> Demand:
        """What a rank with `extent` under `cut` asks for; the fullest rank has `tokens`."""
        if self._holds(extent):
            return Demand()
        if cut.steps < tokens:
            # Fewer steps than these cannot do, unless chunks differ by more than they should.
            steps = bisect_left(
                range(tokens),
                True,
                cut.steps + 1,
                key=lambda s: self._holds(_estimate(extent, cut.steps, s)),
            )
            return Demand(steps, 1)
        if cut.groups < extent.ranks:
            return Demand(cut.steps, min(extent.ranks, 2 * cut.groups))
        assert self.footprint is not None, f"{extent} exceeds a cap of rows with one sender"
        return Demand(cut.steps, cut.groups, self.footprint(extent))

    def settle(self, demands: np.ndarray) -> Cut | None:
        """The next cut, from the demands of all ranks [ranks, 3]; None where all can live with the
        present one. All ranks were at the same cut, so they ask for steps alike or groups alike.

        Raises `InputError` if one token at a time is still too much.
        """
        steps, groups, needed = demands.max(0).tolist()
        if needed:
            foreign = self.options.max_foreign_experts
            fewer = f", less with fewer max_foreign_experts than {foreign}" if foreign else ""
            raise InputError(
                f"dispatch budget_bytes is {self.options.budget_bytes}, but one token at a time "
                f"takes {needed} with the routing of this layer; set it to at least {needed}{fewer}"
            )
        return Cut(steps, groups) if steps else None

    @property
    def _budget(self) -> int | None:
        return None if self.footprint is None else self.options.budget_bytes

    def _holds(self, extent: Extent) -> bool:
        rows, budget = self.options.receive_rows, self._budget
        if rows is not None and extent.received > rows:
            return False
        return budget is None or self.footprint is None or self.footprint(extent) <= budget


def _estimate(extent: Extent, steps: int, finer: int) -> Extent:
    """What `extent`, of a cut in `steps`, will be in `finer` ones."""

    def scaled(size: int) -> int:
        return ceil(size * _UNEVENNESS * steps / finer)

    return replace(
        extent,
        tokens=ceil(extent.layer_tokens / finer),
        sent=scaled(extent.sent),
        sent_to_one=scaled(extent.sent_to_one),
        received=scaled(extent.received),
        computed=scaled(extent.computed),
        computed_by_one=scaled(extent.computed_by_one),
        chunks=finer,
    )
