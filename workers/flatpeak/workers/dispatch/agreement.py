"""How the ranks of an expert group come to one routing: every counted size, as Python ints.

The ranks gather small tables of counts: tokens and routes per expert, from which the plan follows.
Then each tells each other rank the rows and routes per chunk that concern the two, from which all
buffers follow; the first table is already that of a layer in one chunk without foreign experts.
Where a bound holds, each rank asks for the cut that its own sizes need, and the finest is taken.
Whatever decides reads only gathered tables and launch options: all ranks decide alike. Each table
is read by the host once, and nothing below this module reads a size from a tensor.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.assignment import DispatchPlan, native_experts, plan_dispatch
from flatpeak.workers.dispatch.counting import TOKENS_AT_ONCE, Columns, Counted, count, count_table
from flatpeak.workers.dispatch.cutting import Bounds, Cut, Extent, Footprint, first_cut
from flatpeak.workers.dispatch.footprint import MOST_FACTS
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.dispatch.peers import Peers, RanksOfGroup, Together
from flatpeak.workers.dispatch.routing import LABEL, Group, Routing, owners_of
from flatpeak.workers.errors import InputError

_NO_TERMS: Mapping[str, object] = MappingProxyType({})


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
    terms = {f"dispatch option {name}": value for name, value in asdict(options).items()}
    return agree(
        {rank: expert_ids}, RanksOfGroup(group), ranks, experts, bounds, terms | {**alike}
    )[rank]


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
    assert _FACTS + len(terms) <= MOST_FACTS, f"{_FACTS} + {len(terms)} facts outgrow {MOST_FACTS}"
    if bounds.footprint is not None:
        # Asked twice of the last cut: whether it holds, and what is planned.
        bounds = replace(bounds, footprint=cache(bounds.footprint))
    natives = [len(owned) for owned in native_experts(experts, ranks)]
    summaries = peers.gather(
        [_summary(ids, r, natives, terms, bounds.options) for r, ids in held.items()]
    )
    facts, table = np.split(summaries, [_FACTS + len(terms)], axis=1)
    _check_alike(alike, facts[:, _FACTS:], next(iter(held)))
    _check_ids(facts, experts)
    most = int(facts[:, 2].max())
    columns = Columns(natives)
    counts = table[:, columns.instances]
    plan = plan_dispatch(counts, bounds.options)
    _check_labels(plan, bounds.options)
    views = {r: Routing(r, plan, tuple(plan.splits(counts, r)), ()) for r in held}
    cut = first_cut(most, bounds.options)
    if cut.chunks == 1 and not plan.moves_weights:
        counted = [Counted.of(table, columns, r) for r in held]
    else:
        counted = count(held, views, peers, cut)
    while True:
        views = {
            r: replace(view, chunks=sizes.chunks(plan, cut, r))
            for (r, view), sizes in zip(views.items(), counted, strict=True)
        }
        if bounds.footprint is None and not bounds.exist:
            return views
        extents = {r: view.extent(len(held[r])) for r, view in views.items()}
        finer = _finer(held, extents, peers, cut, bounds, most) if bounds.exist else None
        if finer is None:
            break
        cut, counted = finer, count(held, views, peers, finer)
    if bounds.footprint is None:
        return views
    planned = {r: bounds.footprint(extent) for r, extent in extents.items()}
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
    tokens, device = len(expert_ids), expert_ids.device
    nothing = expert_ids.new_zeros(())
    extremes = expert_ids.aminmax() if expert_ids.numel() else (nothing, nothing)
    known = torch.tensor([tokens, *terms]).to(device, non_blocking=True)
    owners = owners_of(natives, device)
    one_chunk = first_cut(tokens, options).chunks == 1
    turns = (part.long().clamp(0, len(owners) - 1) for part in expert_ids.split(TOKENS_AT_ONCE))
    table = count_table(turns, owners, rank, len(natives), steps=1, with_rows=one_chunk)
    return torch.cat([torch.stack(extremes).long(), known, table.flatten()])


def _check_alike(alike: Mapping[str, object], terms: np.ndarray, rank: int) -> None:
    for (name, value), found in zip(alike.items(), terms.T, strict=True):
        others = np.flatnonzero(found != found[rank]).tolist()
        if others:
            raise InputError(
                f"{name} is {value} on rank {rank} of the expert group, but something else on "
                f"rank {', '.join(map(str, others))}; pass the same on all ranks"
            )


def _check_labels(plan: DispatchPlan, options: DispatchOptions) -> None:
    instances, most = plan.first_instance[-1], torch.iinfo(LABEL).max - plan.ranks
    if instances > most:
        raise InputError(
            f"{plan.experts} experts and {instances - plan.experts} foreign ones are more than the "
            f"{most} that {plan.ranks} ranks can number: lower max_foreign_experts, which is "
            f"{options.max_foreign_experts}"
        )


def _check_ids(facts: np.ndarray, experts: int) -> None:
    for rank, (smallest, largest) in enumerate(facts[:, :2].tolist()):
        if smallest < 0 or largest >= experts:
            raise InputError(
                f"rank {rank} of the expert group routes to expert ids {smallest} to {largest}, "
                f"but the layer has {experts} experts: ids must lie in [0, {experts - 1}]"
            )


def _finer(
    held: Mapping[int, torch.Tensor],
    extents: Mapping[int, Extent],
    peers: Peers,
    cut: Cut,
    bounds: Bounds,
    most: int,
) -> Cut | None:
    rows = []
    for r, ids in held.items():
        demand = bounds.demand(cut, extents[r], tokens=most)
        rows.append(torch.tensor(demand).to(ids.device, non_blocking=True))
    return bounds.settle(peers.gather(rows))
