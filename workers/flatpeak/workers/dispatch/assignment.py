"""Which rank computes which routes: the native plan and the least-loaded plan.

A plan is a pure function of the gathered counts, in integers, so every rank derives the same one
without another exchange.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch

from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.errors import InputError
from flatpeak.workers.partition import parts

# Sizes are alike to the planner when the smaller is at least this part of the larger. Experts are
# told apart more finely than rooms: to give a light one first may cost a foreign place.
_ALIKE_EXPERTS, _ALIKE_ROOMS = 63 / 64, 15 / 16

_Entry = TypeVar("_Entry", tuple[int, int], tuple[int, int, int])

# [E_p, E]: routes of each source rank to each expert.
Counts = Sequence[Sequence[int]] | np.ndarray


@cache
def native_experts(experts: int, ranks: int) -> tuple[range, ...]:
    """The experts whose weights each rank holds for good."""
    return tuple(range(*bounds) for bounds in parts(experts, ranks))


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
        return native_experts(self.experts, self.ranks)

    def owner(self, expert: int) -> int:
        """The rank that natively has the expert."""
        return next(rank for rank, owned in enumerate(self.natives) if expert in owned)

    @cached_property
    def foreign(self) -> tuple[tuple[int, ...], ...]:
        """Experts of other ranks that each rank computes, by rising number, hence by owner."""
        natives = self.natives
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert, pieces in enumerate(self.segments):
            for rank, _ in pieces:
                if expert not in natives[rank]:
                    found[rank].append(expert)
        return tuple(map(tuple, found))

    def leaving(self, rank: int) -> int:
        """How many of the rank's own experts other ranks compute too."""
        return len({expert for held in self.foreign for expert in held} & {*self.natives[rank]})

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
    def native_loads(self) -> tuple[int, ...]:
        """Routes that each rank would compute if none moved."""
        totals = [sum(routes for _, routes in pieces) for pieces in self.segments]
        return tuple(sum(totals[owned.start : owned.stop]) for owned in self.natives)

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
        table = _table(counts)
        first, own = table[:source].sum(0), table[source]
        intervals = zip(self.segments, first.tolist(), (first + own).tolist(), strict=True)
        found: list[tuple[int, int]] = []
        for expert, (pieces, start, stop) in enumerate(intervals):
            if start == stop:
                continue
            begin = 0
            for rank, routes in pieces:
                inside = min(stop, begin + routes) - max(start, begin)
                if inside > 0:
                    found.append((self.instance(expert, rank), inside))
                begin += routes
        return found


def plan_native(counts: Counts) -> DispatchPlan:
    """Every route is computed by the rank that owns its expert."""
    table = _table(counts)
    ranks, experts = table.shape
    totals = table.sum(0).tolist()
    natives = enumerate(native_experts(experts, ranks))
    owned = ((rank, totals[expert]) for rank, held in natives for expert in held)
    return DispatchPlan(ranks, tuple((piece,) if piece[1] else () for piece in owned))


def plan_least_loaded(
    counts: torch.Tensor | Counts, *, capacity_factor: float, min_chunk: int, max_foreign: int
) -> DispatchPlan:
    """Move routes of overloaded ranks to those with room (least-loaded assignment, LLA).

    `counts` [E_p, E]: routes of each source rank to each expert. The capacity of a rank is
    `capacity_factor` times the mean load; a *piece* is `min_chunk` routes, or an eighth of the
    capacity if that is less. For any counts:

    * No rank has more than `max_foreign` foreign experts, nor less than a piece of one.
    * Foreign routes raise no load above the largest native one, nor to the capacity plus a piece.
    * What an owner above the capacity could give next, the less of its overflow and its heaviest
      expert, is below a piece, or below `1 / max_foreign` of the largest room any rank had.

    With pieces of one route no rank exceeds the capacity if there are places for all experts, or if
    no rank owns two (one place is then enough, as in the alias method: Vose, 1991). Between these,
    whether a plan within the capacity exists is a packing problem, and this rule may miss one.

    Raises `InputError` for a capacity factor below 1, where not all routes find a place.
    """
    if capacity_factor < 1:
        raise InputError(f"capacity_factor is {capacity_factor}; the smallest legal value is 1.0")
    table = counts.cpu().numpy() if isinstance(counts, torch.Tensor) else counts
    return _level(plan_native(table), capacity_factor, min_chunk, max_foreign)


def plan_dispatch(counts: Counts, options: DispatchOptions) -> DispatchPlan:
    """The plan of one layer: native while the load is balanced or nothing may move."""
    native = plan_native(counts)
    balanced = max(native.loads) * native.ranks <= options.balance_above * sum(native.loads)
    if balanced or options.max_foreign_experts == 0:
        return native
    return _level(native, options.capacity_factor, options.min_chunk, options.max_foreign_experts)


def _table(counts: Counts) -> np.ndarray:
    return np.asarray(counts, dtype=np.int64)


def _level(
    native: DispatchPlan, capacity_factor: float, min_chunk: int, max_foreign: int
) -> DispatchPlan:
    capacity = math.ceil(capacity_factor * sum(native.loads) / native.ranks)
    # A fixed least piece above the capacity would refuse every helper: scale it with the load.
    piece = max(1, min(min_chunk, capacity // 8))
    leveller = _Leveller(native, capacity, max_foreign, piece)
    while leveller.move():
        pass
    return leveller.plan()


class _Leveller:
    """Routes on their way from overloaded ranks to ranks with room, one piece at a time.

    Of sizes that are alike, the one of the lowest number is taken: a handful of routes more or less
    must not turn one plan into quite another, with other peaks.
    """

    def __init__(self, native: DispatchPlan, capacity: int, max_foreign: int, piece: int) -> None:
        self._native = native
        self._capacity = capacity
        self._piece = piece
        self._loads = list(native.loads)
        self._places = [max_foreign] * native.ranks
        self._kept = [pieces[0][1] if pieces else 0 for pieces in native.segments]
        self._moved: dict[int, list[tuple[int, int]]] = {}
        # What each overloaded rank would give next, smallest first: (routes, -owner, expert).
        self._offers: list[tuple[int, int, int]] = []
        # What each rank would take that has a foreign place, smallest first: (routes, -rank).
        self._rooms: list[tuple[int, int]] = []
        for rank in range(native.ranks):
            self._queue(rank)

    def _queue(self, rank: int) -> None:
        room = self._capacity - self._loads[rank]
        natives = self._native.natives[rank]
        if room > 0 and self._places[rank]:
            insort(self._rooms, (room, -rank))
        elif room < 0 and natives:
            kept = self._kept[natives.start : natives.stop]
            heavy = self._least_alike(max(kept))
            place = next(place for place, routes in enumerate(kept) if routes >= heavy)
            insort(self._offers, (min(-room, kept[place]), -rank, natives[place]))

    def _least_alike(self, size: int) -> int:
        """The least size that may be taken for `size`; a piece is not exchanged for less."""
        return min(size, max(self._piece, math.ceil(_ALIKE_EXPERTS * size)))

    def move(self) -> bool:
        """Give a largest offer, or what fits of it, to one rank. False if none is left to give.

        A rank takes an expert once: either it is full then, or nothing of the expert is left over.
        """
        if not (self._offers and self._rooms and self._offers[-1][0] >= self._piece):
            return False
        least = self._least_alike(self._offers[-1][0])
        offer, owner, expert = _lowest(self._offers, bisect_left(self._offers, (least,)))
        room, helper = self._take_room(offer)
        owner, helper = -owner, -helper
        # Room beside a rank's last foreign expert is lost to other owners, so that one fills it. An
        # owner that gives more than its overflow for this has room itself, and places of its own.
        fills = self._places[helper] == 1 and self._offers
        routes = min(self._kept[expert] if fills else offer, max(room, self._piece))
        self._places[helper] -= 1
        self._kept[expert] -= routes
        self._loads[owner] -= routes
        self._loads[helper] += routes
        self._moved.setdefault(expert, []).append((helper, routes))
        self._queue(owner)
        self._queue(helper)
        return True

    def _take_room(self, offer: int) -> tuple[int, int]:
        """Large offers fill the emptiest rank; one that fits whole goes where it leaves least."""
        tightest = bisect_left(self._rooms, (offer,))
        if tightest < len(self._rooms):
            most = int(self._rooms[tightest][0] / _ALIKE_ROOMS)
            return _lowest(self._rooms, tightest, bisect_right(self._rooms, (most, 1)))
        least = math.ceil(_ALIKE_ROOMS * self._rooms[-1][0])
        return _lowest(self._rooms, bisect_left(self._rooms, (least,)))

    def plan(self) -> DispatchPlan:
        segments = list(self._native.segments)
        for expert, pieces in self._moved.items():
            ((owner, _),) = segments[expert]
            kept = [(owner, self._kept[expert])] if self._kept[expert] else []
            segments[expert] = tuple(sorted(pieces + kept))
        return DispatchPlan(self._native.ranks, tuple(segments))


def _lowest(entries: list[_Entry], start: int, stop: int | None = None) -> _Entry:
    """Take the entry of the lowest rank, which is negative, among entries [start, stop)."""
    stop = len(entries) if stop is None else stop
    return entries.pop(max(range(start, stop), key=lambda place: entries[place][1]))
