"""Which rank computes which routes: the native plan and the least-loaded plan.

A plan is a pure function of the gathered counts, in integers, so every rank derives the same one
without another exchange.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.errors import InputError
from flatpeak.workers.partition import parts

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DispatchPlan:
    """How the routes of each expert are cut over ranks.

    `segments[e]` lists (rank, routes > 0) by rising rank: consecutive intervals of the expert's
    global route order, which is by source rank, then by token position. An *instance* is an expert
    on a rank that may compute it: every native one, and the foreign ones that have a segment.
    Instances are numbered rank by rank, natives before foreigners.
    """

    ranks: int
    segments: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def experts(self) -> int:
        return len(self.segments)

    @cached_property
    def natives(self) -> tuple[range, ...]:
        return tuple(range(*bounds) for bounds in parts(self.experts, self.ranks))

    def owner(self, expert: int) -> int:
        """The rank that natively has the expert."""
        return next(rank for rank, owned in enumerate(self.natives) if expert in owned)

    @cached_property
    def foreign(self) -> tuple[tuple[int, ...], ...]:
        """Experts of other ranks that each rank computes, by rising number, hence by owner."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert, pieces in enumerate(self.segments):
            for rank, _ in pieces:
                if expert not in self.natives[rank]:
                    found[rank].append(expert)
        return tuple(map(tuple, found))

    @cached_property
    def moves_weights(self) -> bool:
        return any(self.foreign)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Routes that each rank computes."""
        loads = [0] * self.ranks
        for pieces in self.segments:
            for rank, routes in pieces:
                loads[rank] += routes
        return tuple(loads)

    @cached_property
    def first_instance(self) -> tuple[int, ...]:
        """Number of each rank's first instance, and the count of all instances at the end."""
        held = (len(n) + len(f) for n, f in zip(self.natives, self.foreign, strict=True))
        return tuple(accumulate(held, initial=0))

    def instance(self, expert: int, rank: int) -> int:
        natives = self.natives[rank]
        if expert in natives:
            return self.first_instance[rank] + expert - natives.start
        return self.first_instance[rank] + len(natives) + self.foreign[rank].index(expert)

    def splits(self, counts: Counts, source: int) -> list[tuple[int, int]]:
        """(instance, routes > 0) of one source rank, by expert, then by position of the token."""
        found: list[tuple[int, int]] = []
        for expert, pieces in enumerate(self.segments):
            start = sum(counts[rank][expert] for rank in range(source))
            stop = start + counts[source][expert]
            begin = 0
            for rank, routes in pieces:
                inside = min(stop, begin + routes) - max(start, begin)
                if inside > 0:
                    found.append((self.instance(expert, rank), inside))
                begin += routes
        return found


def plan_native(counts: Counts) -> DispatchPlan:
    """Every route is computed by the rank that owns its expert."""
    ranks, experts = len(counts), len(counts[0])
    owners = (rank for rank, bounds in enumerate(parts(experts, ranks)) for _ in range(*bounds))
    totals = (sum(column) for column in zip(*counts, strict=True))
    pieces = (
        ((owner, total),) if total else () for owner, total in zip(owners, totals, strict=True)
    )
    return DispatchPlan(ranks, tuple(pieces))


def plan_least_loaded(
    counts: torch.Tensor | Counts, *, capacity_factor: float, min_chunk: int, max_foreign: int
) -> DispatchPlan:
    """Move routes of overloaded ranks to the least loaded ones (least-loaded assignment, LLA).

    `counts` [E_p, E]: routes of each source rank to each expert. A rank is overloaded above
    `capacity_factor` times the mean load. No rank gets more than `max_foreign` foreign experts, and
    no piece that moves has fewer than `min_chunk` routes, or an eighth of the capacity if that is
    less. No helper ends above the capacity by a whole piece; an owner stays above it only where
    `max_foreign` or the least piece forbids the move.

    Raises `InputError` for a capacity factor below 1, where not all routes find a place.
    """
    if capacity_factor < 1:
        raise InputError(f"capacity_factor is {capacity_factor}; the smallest legal value is 1.0")
    table: Counts = counts.tolist() if isinstance(counts, torch.Tensor) else counts
    native = plan_native(table)
    # Loads as they will be if nothing else moves: what is assigned plus native load still pending.
    loads = list(native.loads)
    capacity = math.ceil(capacity_factor * sum(loads) / native.ranks)
    # A fixed least piece above the capacity would refuse every helper: scale it with the load.
    piece = max(1, min(min_chunk, capacity // 8))
    slots = [max_foreign] * native.ranks

    shares = [dict(pieces) for pieces in native.segments]
    owners = [rank for rank, owned in enumerate(native.natives) for _ in owned]
    heaviest = [(-loaded[owners[e]], e) for e, loaded in enumerate(shares) if loaded]
    heapq.heapify(heaviest)
    while heaviest:
        kept, expert = heapq.heappop(heaviest)
        owner, share = owners[expert], shares[expert]
        overflow = min(loads[owner] - capacity, -kept)
        helper = _least_loaded(loads, slots, share)
        if overflow < piece or helper is None or loads[helper] >= capacity:
            continue
        taken = min(overflow, max(capacity - loads[helper], piece))
        slots[helper] -= helper not in share
        share[helper] = share.get(helper, 0) + taken
        share[owner] -= taken
        loads[helper] += taken
        loads[owner] -= taken
        # What this helper could not take waits its turn: it may stay native once others moved.
        if share[owner]:
            heapq.heappush(heaviest, (-share[owner], expert))
    segments = (tuple((rank, n) for rank, n in sorted(share.items()) if n) for share in shares)
    return DispatchPlan(native.ranks, tuple(segments))


def _least_loaded(loads: list[int], slots: list[int], share: dict[int, int]) -> int | None:
    """The rank with the lowest load among those that hold the expert or may take one more."""
    able = (rank for rank in range(len(loads)) if slots[rank] or rank in share)
    return min(able, key=lambda rank: (loads[rank], rank), default=None)


def plan_dispatch(counts: Counts, options: DispatchOptions) -> DispatchPlan:
    """The plan of one layer: native while the load is balanced or nothing may move."""
    native = plan_native(counts)
    balanced = max(native.loads) * native.ranks <= options.balance_above * sum(native.loads)
    if balanced or options.max_foreign_experts == 0:
        return native
    return plan_least_loaded(
        counts,
        capacity_factor=options.capacity_factor,
        min_chunk=options.min_chunk,
        max_foreign=options.max_foreign_experts,
    )
