"""Every counted size of one layer's dispatch, as Python ints, agreed by all ranks.

The ranks exchange two small tables of counts: routes per expert, from which the plan follows, and
rows and routes per chunk, from which all buffers follow. Whatever decides (plan, number of chunks,
cuts under the receive cap) reads only gathered tables and launch options: all ranks decide alike.
Nothing below this module reads a size from a tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.assignment import Counts, DispatchPlan, plan_dispatch
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.errors import InputError

Group = dist.ProcessGroup | None

# Labels are kept for the layer and travel with every row: two bytes hold any sensible layer.
LABEL = torch.int16


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

    @property
    def first_instance(self) -> int:
        return self.plan.first_instance[self.rank]

    @property
    def instances(self) -> int:
        return self.plan.first_instance[self.rank + 1] - self.first_instance

    def label(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The instance that computes each route, [N, k] of `LABEL`."""
        flat = expert_ids.flatten()
        instances, routes = zip(*self.splits, strict=True) if self.splits else ((), ())
        by_expert = torch.repeat_interleave(
            torch.tensor(instances, dtype=LABEL, device=flat.device),
            torch.tensor(routes, dtype=torch.long, device=flat.device),
            output_size=flat.numel(),
        )
        # Stable: routes of one expert keep the order of their tokens, on which the splits count.
        order = torch.argsort(flat, stable=True)
        return torch.empty_like(by_expert).scatter_(0, order, by_expert).view(expert_ids.shape)

    def owners(self, device: torch.device) -> torch.Tensor:
        """The rank that holds each instance, [instances] int64."""
        bounds = enumerate(pairwise(self.plan.first_instance))
        ranks = [rank for rank, (start, stop) in bounds for _ in range(start, stop)]
        return torch.tensor(ranks, device=device)


@dataclass(frozen=True)
class _Cut:
    """How each rank's tokens are cut into chunks.

    Chunk number `t * groups + g` takes token positions t, t + steps, ... of each rank that is g
    modulo `groups`. Groups exceed 1 only where one token a rank is already above the receive cap.
    """

    steps: int
    groups: int = 1

    @property
    def chunks(self) -> int:
        return self.steps * self.groups

    def tokens(self, chunk: int, rank: int) -> slice:
        step, group = divmod(chunk, self.groups)
        return slice(step, None, self.steps) if rank % self.groups == group else slice(0, 0)


def make_routing(
    expert_ids: torch.Tensor, *, experts: int, group: Group, options: DispatchOptions
) -> Routing:
    """Agree with the ranks of `group` on one layer's routing. Collective.

    Raises `InputError` on all ranks if any rank has an id outside [0, experts).
    """
    rank = 0 if group is None else dist.get_rank(group)

    def chunk_tables(plan: DispatchPlan, counts: Counts, cut: _Cut) -> torch.Tensor:
        return _gather(_chunk_table(expert_ids, plan, counts, cut, rank), group)

    summaries = _gather(_summary(expert_ids, experts), group)
    return _route(summaries, chunk_tables, rank=rank, experts=experts, options=options)


def assumed_routing(
    expert_ids: Sequence[torch.Tensor], *, rank: int, experts: int, options: DispatchOptions
) -> Routing:
    """What `make_routing` would agree on if rank r held `expert_ids[r]`, for simulation.

    Needs no process group, and real tensors: leave fake-tensor mode for this call.
    """

    def chunk_tables(plan: DispatchPlan, counts: Counts, cut: _Cut) -> torch.Tensor:
        tables = [
            _chunk_table(ids, plan, counts, cut, source) for source, ids in enumerate(expert_ids)
        ]
        return torch.stack(tables)

    summaries = torch.stack([_summary(ids, experts) for ids in expert_ids])
    return _route(summaries, chunk_tables, rank=rank, experts=experts, options=options)


ChunkTables = Callable[[DispatchPlan, Counts, _Cut], torch.Tensor]


def _route(
    summaries: torch.Tensor,
    chunk_tables: ChunkTables,
    *,
    rank: int,
    experts: int,
    options: DispatchOptions,
) -> Routing:
    counts, tokens = _read_summaries(summaries.tolist(), experts)
    plan = plan_dispatch(counts, options)
    instances, most = plan.first_instance[-1], torch.iinfo(LABEL).max
    assert instances <= most, f"{instances} experts, foreign ones counted, of at most {most}"
    cut = _first_cut(max(tokens), options)
    while True:
        table = chunk_tables(plan, counts, cut)
        if options.receive_rows is None:
            break
        worst = int(table[:, :, : plan.ranks].sum(0).amax())
        if worst <= options.receive_rows:
            break
        cut = _cut_further(cut, worst, max(tokens), plan.ranks, options.receive_rows)
    chunks = _read_chunks(table, plan, cut, rank)
    return Routing(rank, plan, tuple(plan.splits(counts, rank)), chunks)


def _first_cut(tokens: int, options: DispatchOptions) -> _Cut:
    if options.tokens_per_chunk is None:
        return _Cut(1)
    wanted = max(1, ceil(tokens / options.tokens_per_chunk))
    return _Cut(min(wanted, options.max_chunks))


def _cut_further(cut: _Cut, worst: int, tokens: int, ranks: int, cap: int) -> _Cut:
    """The next finer cut after one whose fullest chunk has `worst` > `cap` received rows."""
    if cut.steps < tokens:
        proportional = ceil(cut.steps * worst / cap)
        return _Cut(min(max(cut.steps + 1, proportional), tokens))
    # One token a rank and still too many rows: let fewer ranks send at once. At most `cap` of them
    # then do, each one row, so this cut holds.
    return _Cut(cut.steps, ceil(ranks / cap))


def _summary(expert_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[smallest id, largest id, tokens, routes to each expert], int64."""
    flat = expert_ids.flatten().long()
    bounds = torch.tensor([0, 0, expert_ids.shape[0]], device=flat.device)
    if flat.numel():
        torch.stack(flat.aminmax(), out=bounds[:2])
    counts = flat.new_zeros(experts)
    counts.scatter_add_(0, flat.clamp(0, experts - 1), torch.ones_like(flat))
    return torch.cat([bounds, counts])


def _read_summaries(summaries: list[list[int]], experts: int) -> tuple[Counts, list[int]]:
    for rank, (smallest, largest, *_) in enumerate(summaries):
        if smallest < 0 or largest >= experts:
            raise InputError(
                f"rank {rank} of the expert group routes to expert ids {smallest} to {largest}, "
                f"but the layer has {experts} experts: ids must lie in [0, {experts - 1}]"
            )
    return [row[3:] for row in summaries], [row[2] for row in summaries]


def _chunk_table(
    expert_ids: torch.Tensor,
    plan: DispatchPlan,
    counts: Counts,
    cut: _Cut,
    rank: int,
) -> torch.Tensor:
    """[chunks, ranks + instances] int64: rows to each other rank, routes to each instance."""
    routing = Routing(rank, plan, tuple(plan.splits(counts, rank)), ())
    labels = routing.label(expert_ids)
    owners = routing.owners(labels.device)
    chunks = (labels[cut.tokens(chunk, rank)] for chunk in range(cut.chunks))
    return torch.stack([_table_row(chunk, owners, routing) for chunk in chunks])


def _table_row(labels: torch.Tensor, owners: torch.Tensor, routing: Routing) -> torch.Tensor:
    plan = routing.plan
    rows = visits(owners[labels.long()], plan.ranks, routing.rank).sum(0)
    routes = rows.new_zeros(plan.first_instance[-1])
    flat = labels.flatten().long()
    return torch.cat([rows, routes.scatter_add_(0, flat, torch.ones_like(flat))])


def visits(ranks_of: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """[n, ranks] bool: whether a token of `rank` travels to each other rank, from [n, k] ranks."""
    travels = torch.zeros(len(ranks_of), ranks, dtype=torch.bool, device=ranks_of.device)
    travels.scatter_(1, ranks_of, True)
    travels[:, rank] = False
    return travels


def _read_chunks(
    table: torch.Tensor, plan: DispatchPlan, cut: _Cut, rank: int
) -> tuple[Chunk, ...]:
    first, stop = (plan.ranks + plan.first_instance[rank + i] for i in (0, 1))
    mine = table[:, :, first:stop]
    own = mine[rank]
    columns = [table[rank, :, : plan.ranks], table[:, :, rank].T, own, mine.sum(0) - own]
    sizes: list[list[int]] = torch.cat(columns, dim=1).tolist()
    chunks: list[Chunk] = []
    for number, row in enumerate(sizes):
        values = iter(row)
        send, receive, own_routes, landed_routes = (
            tuple(next(values) for _ in range(column.shape[1])) for column in columns
        )
        tokens = cut.tokens(number, rank)
        chunks.append(Chunk(tokens, send, receive, own_routes, landed_routes))
    computed = sum(sum(chunk.own_routes) + sum(chunk.landed_routes) for chunk in chunks)
    assert computed == plan.loads[rank], f"{computed} routes arrive of {plan.loads[rank]} planned"
    return tuple(chunks)


def _gather(row: torch.Tensor, group: Group) -> torch.Tensor:
    """Stack one equally shaped tensor of every rank, in rank order."""
    if group is None:
        return row.unsqueeze(0)
    gathered = row.new_empty((dist.get_world_size(group), *row.shape))
    dist.all_gather(list(gathered.unbind(0)), row.contiguous(), group=group)
    return gathered
