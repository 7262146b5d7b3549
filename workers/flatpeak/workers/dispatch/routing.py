"""Every counted size of one layer's dispatch, as Python ints, agreed by all ranks.

The ranks exchange small tables of counts: routes per expert, from which the plan follows, then rows
and routes per chunk, from which all buffers follow. The first table is already the second one of a
layer in one chunk without foreign experts. Whatever decides (plan, number of chunks, cuts under the
receive cap) reads only gathered tables and launch options: all ranks decide alike. Each gathered
table is read by the host once, and nothing below this module reads a size from a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
) -> Routing:
    """Agree with the ranks of `group` on one layer's routing. Collective.

    `footprint` gives the bytes that dispatch takes for given sizes, the same on all ranks; without
    it `options.budget_bytes` bounds nothing.

    Raises `InputError` on all ranks if any rank has an id outside [0, experts), or if the layer
    exceeds the budget with one token a rank at a time.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def gather(tables: list[torch.Tensor]) -> torch.Tensor:
        (own,) = tables
        return _gather(own, group)

    bounds = Bounds(options, footprint)
    return agree({rank: expert_ids}, gather, rank, ranks, experts, bounds)


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
    return agree(held, torch.stack, rank, len(held), experts, bounds)


Gather = Callable[[list[torch.Tensor]], torch.Tensor]


def agree(
    held: Mapping[int, torch.Tensor],
    gather: Gather,
    rank: int,
    ranks: int,
    experts: int,
    bounds: Bounds,
) -> Routing:
    """The routing of `rank`.

    `held` has the expert ids [N, k] of each rank that is at hand, and `gather` makes of one table
    for each of those the stack of all ranks' tables. All ranks call it equally often.
    """
    summaries = _read(
        gather([_summary(ids, r, ranks, experts, bounds.options) for r, ids in held.items()])
    )
    _check_ids(summaries, experts)
    tokens, native_table = summaries[:, 2].tolist(), summaries[:, None, 3:]
    counts = native_table[:, 0, ranks:]
    plan = plan_dispatch(counts, bounds.options)
    instances, most = plan.first_instance[-1], torch.iinfo(LABEL).max
    assert instances <= most, f"{instances} experts, foreign ones counted, of at most {most}"
    views = {r: Routing(r, plan, tuple(plan.splits(counts, r)), ()) for r in {rank, *held}}

    def chunk_tables(cut: Cut) -> np.ndarray:
        labelled = ((views[r], views[r].label(ids)) for r, ids in held.items())
        return _read(gather([_chunk_table(view, labels, cut) for view, labels in labelled]))

    cut = first_cut(max(tokens), bounds.options)
    known = cut.chunks == 1 and not plan.moves_weights
    table = native_table if known else chunk_tables(cut)
    while (finer := bounds.finer(cut, table, plan, tokens)) is not None:
        cut, table = finer, chunk_tables(finer)
    return replace(views[rank], chunks=_read_chunks(table, plan, cut, rank))


def _summary(
    expert_ids: torch.Tensor, rank: int, ranks: int, experts: int, options: DispatchOptions
) -> torch.Tensor:
    """[smallest id, largest id, tokens, *native table of one chunk], int64.

    A rank that needs several chunks leaves the rows zero, as no rank will read them.
    """
    ids, tokens = expert_ids.long(), len(expert_ids)
    low, high = ids.aminmax() if ids.numel() else (ids.new_zeros(()), ids.new_zeros(()))
    bounds = torch.stack([low, high, ids.new_full((), tokens)])
    ids = ids.clamp(0, experts - 1)
    if first_cut(tokens, options).chunks > 1:
        rows = ids.new_zeros(1, ranks)
    else:
        natives = [len(held) for held in native_experts(experts, ranks)]
        rows = _count_rows(ids, _owners(natives, ids.device), rank, ranks, steps=1)
    return torch.cat([bounds, rows[0], _count_routes(ids, experts, steps=1)[0]])


def _check_ids(summaries: np.ndarray, experts: int) -> None:
    for rank, (smallest, largest) in enumerate(summaries[:, :2].tolist()):
        if smallest < 0 or largest >= experts:
            raise InputError(
                f"rank {rank} of the expert group routes to expert ids {smallest} to {largest}, "
                f"but the layer has {experts} experts: ids must lie in [0, {experts - 1}]"
            )


def _chunk_table(view: Routing, labels: torch.Tensor, cut: Cut) -> torch.Tensor:
    """[chunks, ranks + instances] int32: rows to each other rank, routes to each instance."""
    labels, owners, ranks = labels.long(), view.owners(labels.device), view.plan.ranks
    rows = _count_rows(labels, owners, view.rank, ranks, cut.steps)
    routes = _count_routes(labels, len(owners), cut.steps)
    table = rows.new_zeros(cut.steps, cut.groups, ranks + len(owners))
    table[:, view.rank % cut.groups] = torch.cat([rows, routes], dim=1)
    return table.flatten(0, 1)


def _count_rows(
    labels: torch.Tensor, owners: torch.Tensor, rank: int, ranks: int, steps: int
) -> torch.Tensor:
    """[steps, ranks] int32, for the instances `labels` [N, k] int64 on the ranks `owners`."""
    travels = visits(owners.take(labels), ranks, rank)
    turns = -(-len(labels) // steps)
    travels = F.pad(travels, (0, 0, 0, turns * steps - len(labels)))
    return travels.view(turns, steps, ranks).sum(0, dtype=torch.int32)


def _count_routes(labels: torch.Tensor, instances: int, steps: int) -> torch.Tensor:
    """[steps, instances] int32."""
    step = torch.arange(len(labels), device=labels.device) % steps
    cells = (labels + (step * instances)[:, None]).flatten()
    routes = torch.zeros(steps * instances, dtype=torch.int32, device=labels.device)
    routes.scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
    return routes.view(steps, instances)


def visits(ranks_of: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """[n, ranks] bool: whether a token of `rank` travels to each other rank, from [n, k] ranks."""
    travels = torch.zeros(len(ranks_of), ranks, dtype=torch.bool, device=ranks_of.device)
    travels.scatter_(1, ranks_of, True)
    travels[:, rank] = False
    return travels


def _read_chunks(table: np.ndarray, plan: DispatchPlan, cut: Cut, rank: int) -> tuple[Chunk, ...]:
    first, stop = (plan.ranks + plan.first_instance[rank + i] for i in (0, 1))
    mine = table[:, :, first:stop]
    own, computed = mine[rank], mine.sum(0)
    routes = int(computed.sum())
    assert routes == plan.loads[rank], f"{routes} routes arrive of {plan.loads[rank]} planned"
    columns = (table[rank, :, : plan.ranks], table[:, :, rank].T, own, computed - own)
    sizes = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(
        Chunk(cut.tokens(number, rank), *map(tuple, chunk)) for number, chunk in enumerate(sizes)
    )


def _owners(held: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """The rank of each instance, when rank r holds the next `held[r]` ones."""
    return _on(device, np.repeat(np.arange(len(held)), held))


def _on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    # Pageable memory is staged before the call returns; waiting for the copy would stall the host.
    return torch.from_numpy(values).to(device, non_blocking=True)


def _read(table: torch.Tensor) -> np.ndarray:
    return table.cpu().numpy()


def _gather(row: torch.Tensor, group: Group) -> torch.Tensor:
    """Stack one equally shaped tensor of every rank, in rank order."""
    if group is None:
        return row.unsqueeze(0)
    gathered = row.new_empty((dist.get_world_size(group), *row.shape))
    dist.all_gather(list(gathered.unbind(0)), row.contiguous(), group=group)
    return gathered
