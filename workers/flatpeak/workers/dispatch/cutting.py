"""How a layer's tokens are cut into chunks: as many as the receive cap and the byte budget ask for.

Everything here is a pure function of tables that all ranks have gathered and of launch options, so
all ranks cut alike.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np

from flatpeak.workers.dispatch.assignment import DispatchPlan
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.errors import InputError

# Strided chunks resemble each other, up to this much.
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


Footprint = Callable[[Extent], int]
"""Bytes that dispatch takes on a rank, the same function on all ranks."""


@dataclass(frozen=True)
class Cut:
    """How each rank's tokens are cut into chunks.

    Chunk number `t * groups + g` takes token positions t, t + steps, ... of each rank that is g
    modulo `groups`. Groups exceed 1 only where one token a rank is already too many.
    """

    steps: int
    groups: int = 1

    @property
    def chunks(self) -> int:
        return self.steps * self.groups

    def tokens(self, chunk: int, rank: int) -> slice:
        step, group = divmod(chunk, self.groups)
        return slice(step, None, self.steps) if rank % self.groups == group else slice(0, 0)


def first_cut(tokens: int, options: DispatchOptions) -> Cut:
    """The cut that the options alone ask for when the fullest rank has `tokens`."""
    if options.tokens_per_chunk is None:
        return Cut(1)
    wanted = max(1, ceil(tokens / options.tokens_per_chunk))
    return Cut(min(wanted, options.max_chunks))


@dataclass(frozen=True)
class Bounds:
    """What the chunks of a layer are held to."""

    options: DispatchOptions
    footprint: Footprint | None

    def finer(
        self, cut: Cut, table: np.ndarray, plan: DispatchPlan, tokens: Sequence[int]
    ) -> Cut | None:
        """The next cut to try where a chunk exceeds a bound on some rank, else None.

        `table` [ranks, chunks, ranks + instances]: what each rank sends and computes in each chunk
        of `cut`; `tokens`: each rank's in the layer.

        Raises `InputError` if one token at a time is still too much.
        """
        if self.options.receive_rows is None and self._budget is None:
            return None
        # Ranks alike are looked at once.
        worst = list(dict.fromkeys(_extents(cut, table, plan, tokens)))
        if all(self._holds(extent) for extent in worst):
            return None
        most = max(tokens)
        if cut.steps < most:
            # Fewer steps than these cannot do, unless chunks differ by more than they should.
            steps = bisect_left(
                range(most),
                True,
                cut.steps + 1,
                key=lambda s: all(self._holds(_estimate(e, cut.steps, s)) for e in worst),
            )
            return Cut(steps)
        if cut.groups < plan.ranks:
            return Cut(cut.steps, min(plan.ranks, 2 * cut.groups))
        raise InputError(self._refusal(worst))

    @property
    def _budget(self) -> int | None:
        return None if self.footprint is None else self.options.budget_bytes

    def _holds(self, extent: Extent) -> bool:
        rows, budget = self.options.receive_rows, self._budget
        if rows is not None and extent.received > rows:
            return False
        return budget is None or self.footprint is None or self.footprint(extent) <= budget

    def _refusal(self, worst: Sequence[Extent]) -> str:
        assert self.footprint is not None, f"{worst} exceeds a cap of rows with one sender"
        needed = max(map(self.footprint, worst))
        return (
            f"dispatch budget_bytes is {self.options.budget_bytes}, but one token at a time takes "
            f"{needed}; the smallest legal value is {needed}, less with fewer max_foreign_experts"
        )


def _extents(
    cut: Cut, table: np.ndarray, plan: DispatchPlan, tokens: Sequence[int]
) -> list[Extent]:
    """The sizes of every rank."""
    ranks, firsts = plan.ranks, plan.first_instance
    rows = table[:, :, :ranks]
    routes = [table[:, :, ranks + a : ranks + b].sum(0) for a, b in pairwise(firsts)]
    sent, received = rows.sum(2).max(1).tolist(), rows.sum(0).max(0).tolist()
    sent_to_one = rows.max((1, 2)).tolist()
    most_foreign = max(map(len, plan.foreign))
    return [
        Extent(
            tokens=ceil(tokens[rank] / cut.steps),
            sent=sent[rank],
            sent_to_one=sent_to_one[rank],
            received=received[rank],
            computed=int(routes[rank].sum(1).max()),
            computed_by_one=int(routes[rank].max(initial=0)),
            chunks=cut.chunks,
            layer_tokens=tokens[rank],
            foreign=len(plan.foreign[rank]),
            most_foreign=most_foreign,
            leaving=plan.leaving(rank),
            ranks=ranks,
            instances=firsts[-1],
        )
        for rank in range(ranks)
    ]


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
