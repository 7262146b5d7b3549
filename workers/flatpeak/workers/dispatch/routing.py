"""Every counted size of one layer's dispatch, as Python ints, agreed by all ranks.

The ranks gather small tables of counts: tokens and routes per expert, from which the plan follows.
Then each tells each other rank the rows and routes per chunk that concern the two, from which all
buffers follow; the first table is already that of a layer in one chunk without foreign experts.
Where a bound holds, each rank asks for the cut that its own sizes need, and the finest is taken.
Whatever decides reads only gathered tables and launch options: all ranks decide alike. Each table
is read by the host once, and nothing below this module reads a size from a tensor.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from flatpeak.workers.dispatch.assignment import DispatchPlan, native_experts, plan_dispatch
from flatpeak.workers.dispatch.cutting import Bounds, Cut, Extent, Footprint, first_cut
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.errors import InputError

Group = dist.ProcessGroup | None

# Labels are kept for the layer and travel with every row: two bytes hold any sensible layer.
LABEL = torch.int16
_NO_TERMS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Chunk:
    """The part of the layer that is on its way at once, as one rank sees it."""

    tokens: slice
    """This rank's token positions: a strided slice, so that every chunk is like the whole."""
    send: tuple[int, ...]
    """Rows to each rank; none to itself, they are read in place."""
    receive: tuple[int, ...]
    own_routes: tuple[int, ...]
    """Routes of own tokens to each local instance."""
    landed_routes: tuple[int, ...]
    """Routes of received rows to each local instance."""


@dataclass(frozen=True)
class Routing:
    rank: int
    plan: DispatchPlan
    splits: tuple[tuple[int, int], ...]
    """(instance, routes) of this rank's routes, ordered by expert, then by token position."""
    chunks: tuple[Chunk, ...]
    planned_bytes: int = 0
    """What dispatch takes on this rank above its inputs and results; 0 without a footprint."""

    @property
    def first_instance(self) -> int:
        return self.plan.first_instance[self.rank]

    @property
    def instances(self) -> int:
        return self.plan.first_instance[self.rank + 1] - self.first_instance

    def extent(self, tokens: int) -> Extent:
        """The sizes of this rank, which has `tokens` tokens in the layer."""
        chunks = self.chunks
        computed = [list(map(sum, zip(c.own_routes, c.landed_routes, strict=True))) for c in chunks]
        return Extent(
            tokens=max(len(range(tokens)[chunk.tokens]) for chunk in chunks),
            sent=max(sum(chunk.send) for chunk in chunks),
            sent_to_one=max(max(chunk.send) for chunk in chunks),
            received=max(sum(chunk.receive) for chunk in chunks),
            computed=max(map(sum, computed)),
            computed_by_one=max(max(routes, default=0) for routes in computed),
            chunks=len(chunks),
            layer_tokens=tokens,
            foreign=len(self.plan.foreign[self.rank]),
            most_foreign=max(map(len, self.plan.foreign)),
            leaving=self.plan.leaving(self.rank),
            ranks=self.plan.ranks,
            instances=self.plan.first_instance[-1],
            held=self.instances,
        )

    def label(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The instance that computes each route, [N, k] of `LABEL`."""
        experts = expert_ids.to(LABEL)
        if not self.plan.moves_weights:
            return experts  # the only instances are the experts in their order
        flat = experts.flatten()
        instances, routes = zip(*self.splits, strict=True) if self.splits else ((), ())
        by_expert = torch.repeat_interleave(
            _on(flat.device, np.array(instances, dtype=np.int16)),
            _on(flat.device, np.array(routes, dtype=np.int64)),
            output_size=flat.numel(),
        )
        # Stable: routes of one expert keep the order of their tokens, on which the splits count.
        order = torch.argsort(flat, stable=True)
        return torch.empty_like(by_expert).scatter_(0, order, by_expert).view(expert_ids.shape)

    def owners(self, device: torch.device) -> torch.Tensor:
        """The rank that holds each instance, [instances] int64."""
        return _owners(np.diff(self.plan.first_instance), device)


def make_routing(
    expert_ids: torch.Tensor,
    *,
    experts: int,
    group: Group,
    options: DispatchOptions,
    footprint: Footprint | None = None,
    alike: Mapping[str, object] = _NO_TERMS,
) -> Routing:
    """Agree with the ranks of `group` on one layer's routing. Collective.

    `footprint` gives the bytes that dispatch takes for given sizes, the same on all ranks; without
    it `options.budget_bytes` bounds nothing. `alike` has, by name, what else must be equal on all
    ranks, or their exchanges would not match.

    Raises `InputError` on all ranks if any rank has an id outside [0, experts), if ranks differ in
    what must be alike, or if the layer exceeds the budget with one token a rank at a time.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    bounds = Bounds(options, footprint)
    alike = {"dispatch options": options, **alike}
    return agree({rank: expert_ids}, _Group(group), ranks, experts, bounds, alike)[rank]


def assumed_routing(
    expert_ids: Sequence[torch.Tensor],
    *,
    rank: int,
    experts: int,
    options: DispatchOptions,
    footprint: Footprint | None = None,
) -> Routing:
    """What `make_routing` would agree on if rank r held `expert_ids[r]`, for simulation.

    Needs no process group, and real tensors: leave fake-tensor mode for this call.
    """
    held = dict(enumerate(expert_ids))
    bounds = Bounds(options, footprint)
    return agree(held, Together(), len(held), experts, bounds)[rank]


class Peers(Protocol):
    """How the tables of the ranks reach each other. Of each rank that is at hand it is given one
    table, in rank order. All ranks call it equally often."""

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        """Equally shaped rows of all ranks, [ranks, ...]."""
        ...

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        """Give each rank r the next `widths[r]` rows of every table [sum of widths, n]: for each
        rank at hand what it got, [ranks, widths[r], n]."""
        ...


def agree(
    held: Mapping[int, torch.Tensor],
    peers: Peers,
    ranks: int,
    experts: int,
    bounds: Bounds,
    alike: Mapping[str, object] = _NO_TERMS,
) -> dict[int, Routing]:
    """The routing of each rank that is at hand, from the expert ids [N, k] that it holds."""
    terms = [zlib.crc32(repr(value).encode()) for value in alike.values()]
    natives = [len(owned) for owned in native_experts(experts, ranks)]
    summaries = peers.gather(
        [_summary(ids, r, natives, terms, bounds.options) for r, ids in held.items()]
    )
    facts, table = np.split(summaries, [_FACTS + len(terms)], axis=1)
    _check_alike(alike, facts[:, _FACTS:], next(iter(held)))
    _check_ids(facts, experts)
    most = int(facts[:, 2].max())
    columns = _Columns(natives)
    counts = table[:, columns.instances]
    plan = plan_dispatch(counts, bounds.options)
    limit = torch.iinfo(LABEL).max
    assert plan.first_instance[-1] + ranks <= limit, f"more than {limit} instances on {ranks} ranks"
    views = {r: Routing(r, plan, tuple(plan.splits(counts, r)), ()) for r in held}
    cut = first_cut(most, bounds.options)
    if cut.chunks == 1 and not plan.moves_weights:
        counted = [_Counted.of(table, columns, r) for r in held]
    else:
        counted = _count(held, views, peers, cut)
    while True:
        views = {
            r: replace(view, chunks=sizes.chunks(plan, cut, r))
            for (r, view), sizes in zip(views.items(), counted, strict=True)
        }
        finer = _finer(held, views, peers, cut, bounds, most) if bounds.exist else None
        if finer is None:
            break
        cut, counted = finer, _count(held, views, peers, finer)
    if bounds.footprint is None:
        return views
    planned = {r: bounds.footprint(view.extent(len(held[r]))) for r, view in views.items()}
    return {r: replace(view, planned_bytes=planned[r]) for r, view in views.items()}


# Smallest id, largest id, tokens.
_FACTS = 3


def _summary(
    expert_ids: torch.Tensor,
    rank: int,
    natives: Sequence[int],
    terms: Sequence[int],
    options: DispatchOptions,
) -> torch.Tensor:
    """[smallest id, largest id, tokens, *terms, *native table of one chunk], int64.

    A rank that needs several chunks leaves the rows zero, as no rank will read them.
    """
    ids, tokens = expert_ids.long(), len(expert_ids)
    low, high = ids.aminmax() if ids.numel() else (ids.new_zeros(()), ids.new_zeros(()))
    device = ids.device
    known = torch.tensor([tokens, *terms]).to(device, non_blocking=True)
    owners = _owners(natives, device)
    ids = ids.clamp(0, len(owners) - 1)
    one_chunk = first_cut(tokens, options).chunks == 1
    table = _count_table(ids, owners, rank, len(natives), steps=1, with_rows=one_chunk)
    return torch.cat([torch.stack([low, high]), known, table.flatten()])


def _check_alike(alike: Mapping[str, object], terms: np.ndarray, rank: int) -> None:
    for (name, value), found in zip(alike.items(), terms.T, strict=True):
        others = np.flatnonzero(found != found[rank]).tolist()
        if others:
            raise InputError(
                f"{name}: {value} on rank {rank} of the expert group, but something else on "
                f"rank {', '.join(map(str, others))}; pass the same on all ranks"
            )


def _check_ids(facts: np.ndarray, experts: int) -> None:
    for rank, (smallest, largest) in enumerate(facts[:, :2].tolist()):
        if smallest < 0 or largest >= experts:
            raise InputError(
                f"rank {rank} of the expert group routes to expert ids {smallest} to {largest}, "
                f"but the layer has {experts} experts: ids must lie in [0, {experts - 1}]"
            )


class _Columns:
    """Where a table of counts has what: for each rank the rows that travel to it, and after them
    the routes to each of its instances, so that its part of the table is consecutive."""

    def __init__(self, held: Sequence[int]) -> None:
        """`held`: the instances of each rank."""
        self.widths = [1 + count for count in held]
        self.starts = [0, *accumulate(self.widths)][:-1]
        ranks = np.repeat(np.arange(len(held)), held)
        self.instances = np.arange(len(ranks)) + ranks + 1


def _count(
    held: Mapping[int, torch.Tensor], views: Mapping[int, Routing], peers: Peers, cut: Cut
) -> list["_Counted"]:
    """Count every chunk of `cut` and tell each rank what concerns it."""
    plan = next(iter(views.values())).plan
    columns = _Columns(np.diff(plan.first_instance).tolist())
    labels = {r: views[r].label(ids) for r, ids in held.items()}
    # A layer of many chunks is counted in turns, so that its tables take no more than one of few.
    at_once = steps_at_once(sum(columns.widths))
    turns = []
    for first in range(0, cut.steps, at_once):
        steps = range(first, min(first + at_once, cut.steps))
        tables = [_step_table(view, labels[r], steps, cut) for r, view in views.items()]
        dealt = peers.deal(tables, columns.widths)
        turns.append(
            [
                _Counted(_to_host(table)[columns.starts], got)
                for table, got in zip(tables, dealt, strict=True)
            ]
        )
    return [_Counted.joined(of_rank) for of_rank in zip(*turns, strict=True)]


# Numbers in the table of a rank.
_CELLS = 4096


def steps_at_once(columns: int) -> int:
    """Chunks that are counted in one turn, of a table with so many columns."""
    return max(1, _CELLS // columns)


def _step_table(view: Routing, labels: torch.Tensor, steps: range, cut: Cut) -> torch.Tensor:
    """The part of the table for `steps` of those of `cut`."""
    ranks = view.plan.ranks
    turns = -(-len(labels) // cut.steps)
    # A token that is missing has a label behind all others, see `_count_table`.
    missing = turns * cut.steps - len(labels)
    nowhere = view.plan.first_instance[-1] + ranks - view.rank - 1
    labels = F.pad(labels, (0, 0, 0, missing), value=nowhere)
    labels = labels.unflatten(0, (turns, cut.steps))[:, steps.start : steps.stop]
    labels = labels.long().flatten(0, 1)
    return _count_table(labels, view.owners(labels.device), view.rank, ranks, steps=len(steps))


def _count_table(
    labels: torch.Tensor,
    owners: torch.Tensor,
    rank: int,
    ranks: int,
    *,
    steps: int,
    with_rows: bool = True,
) -> torch.Tensor:
    """[columns, steps] int32, see `_Columns`, for tokens whose positions go through the steps in
    turn. Overwrites `labels` [n, k] int64."""
    columns = len(owners) + ranks
    # What is nowhere stays at home and counts in a column behind all others.
    ranks_of = F.pad(owners, (0, ranks - rank), value=rank).take(labels)
    table = labels.new_zeros((columns + 1, steps), dtype=torch.int32)
    if with_rows:
        turns = len(labels) // steps
        travels = visits(ranks_of, ranks, rank).view(turns, steps, ranks)
        starts = torch.searchsorted(owners, torch.arange(ranks, device=owners.device))
        starts += torch.arange(ranks, device=owners.device)
        table.index_copy_(0, starts, travels.sum(0, dtype=torch.int32).T)
        del travels
    cells = labels.add_(ranks_of).add_(1)
    del ranks_of
    if steps > 1:
        step = torch.arange(len(labels), device=labels.device) % steps
        cells = cells.mul_(steps).add_(step[:, None])
    cells = cells.flatten()
    table.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
    return table[:columns]


def visits(ranks_of: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """[n, ranks] bool: whether a token of `rank` travels to each other rank, from [n, k] ranks."""
    travels = torch.zeros(len(ranks_of), ranks, dtype=torch.bool, device=ranks_of.device)
    travels.scatter_(1, ranks_of, True)
    travels[:, rank] = False
    return travels


@dataclass(frozen=True)
class _Counted:
    """Sizes of the chunks of one rank, [..., steps], in groups of senders taken together."""

    sent: np.ndarray
    """[ranks, steps] rows to each rank"""
    landed: np.ndarray
    """[ranks, 1 + instances, steps] rows from each rank, and its routes to each local instance"""

    @staticmethod
    def of(tables: np.ndarray, columns: _Columns, rank: int) -> "_Counted":
        """From the tables [ranks, columns] of all ranks, of one step."""
        mine = slice(columns.starts[rank], columns.starts[rank] + columns.widths[rank])
        return _Counted(tables[rank, columns.starts, None], tables[:, mine, None])

    @staticmethod
    def joined(turns: Sequence["_Counted"]) -> "_Counted":
        sent, landed = ([getattr(turn, name) for turn in turns] for name in ("sent", "landed"))
        return _Counted(np.concatenate(sent, -1), np.concatenate(landed, -1))

    def chunks(self, plan: DispatchPlan, cut: Cut, rank: int) -> tuple[Chunk, ...]:
        # [ranks, groups]: who sends.
        sends = np.arange(plan.ranks)[:, None] % cut.groups == np.arange(cut.groups)
        received, routes = self.landed[:, 0, :, None], self.landed[:, 1:, :, None]
        routes = routes * sends[:, None, None]
        own = routes[rank]
        landed = routes.sum(0) - own
        total = int(own.sum() + landed.sum())
        assert total == plan.loads[rank], f"{total} routes arrive of {plan.loads[rank]} planned"
        sizes = (self.sent[:, :, None] * sends[rank], received * sends[:, None], own, landed)
        by_chunk = (each.reshape(len(each), cut.chunks).T.tolist() for each in sizes)
        return tuple(
            Chunk(cut.tokens(number, rank), *map(tuple, chunk))
            for number, chunk in enumerate(zip(*by_chunk, strict=True))
        )


def _finer(
    held: Mapping[int, torch.Tensor],
    views: Mapping[int, Routing],
    peers: Peers,
    cut: Cut,
    bounds: Bounds,
    most: int,
) -> Cut | None:
    rows = []
    for r, ids in held.items():
        demand = bounds.demand(cut, views[r].extent(len(ids)), tokens=most)
        rows.append(torch.tensor(demand).to(ids.device, non_blocking=True))
    return bounds.settle(peers.gather(rows))


class _Group:
    """The ranks of a process group, of which this process is one."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        (row,) = rows
        if self._group is None:
            return _to_host(row)[None]
        gathered = row.new_empty((self._group.size(), *row.shape))
        dist.all_gather(list(gathered.unbind(0)), row, group=self._group)
        return _to_host(gathered)

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        (table,) = tables
        if self._group is None:
            return [_to_host(table)[None]]
        ranks, mine = self._group.size(), widths[self._group.rank()]
        landed = table.new_empty((ranks * mine, table.shape[1]))
        dist.all_to_all_single(landed, table, [mine] * ranks, list(widths), group=self._group)
        return [_to_host(landed).reshape(ranks, mine, -1)]


class Together:
    """All ranks in one process."""

    def gather(self, rows: list[torch.Tensor]) -> np.ndarray:
        return _to_host(torch.stack(rows))

    def deal(self, tables: list[torch.Tensor], widths: Sequence[int]) -> list[np.ndarray]:
        parts = zip(*(table.split(list(widths)) for table in tables), strict=True)
        return [_to_host(torch.stack(part)) for part in parts]


def _owners(held: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """The rank of each instance, when rank r holds the next `held[r]` ones."""
    return _on(device, np.repeat(np.arange(len(held)), held))


def _on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    # Pageable memory is staged before the call returns; waiting for the copy would stall the host.
    return torch.from_numpy(values).to(device, non_blocking=True)


def _to_host(table: torch.Tensor) -> np.ndarray:
    return table.cpu().numpy()
