"""The host's part of one layer's dispatch: milliseconds to plan it and to agree on every size.

One rank's work is timed, in CPU time of one thread, so that neighbours on the machine do not count.
Planning is the plan and all that a rank derives from it; routing is planning and the counting of
rows and routes, without the exchange: what other ranks would send is made beforehand. Sizing is
routing under a byte budget, which chooses the number of chunks instead.

Tokens are on each rank. A budget share is of what the rank takes with the layer at once, in bf16 on
a GPU, but no less than what holds for any routing; hidden and intermediate width are for that.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf

import torch

from dispatch_peers import Recorder, Replay
from flatpeak.controller.bench import check_ranges
from flatpeak.workers.dispatch import DispatchOptions, DispatchPlan, Routing
from flatpeak.workers.dispatch.agreement import agree
from flatpeak.workers.dispatch.assignment import plan_dispatch, plan_native
from flatpeak.workers.dispatch.cutting import Bounds
from flatpeak.workers.dispatch.experts import read_layout
from flatpeak.workers.dispatch.footprint import (
    LayerSizes,
    dispatch_bytes,
    layer_sizes,
    smallest_budget,
)
from moe_families import PlainExperts

DEFAULTS = {
    "experts": 384,
    "ranks": 64,
    "top_k": 8,
    "tokens": (128, 1024, 16384),
    "chunks": (1, 4, 16),
    "budget_share": (0.5, 0.2),
    "hidden": 7168,
    "intermediate": 2048,
    "max_foreign_experts": 2,
    "min_chunk": 1024,
    "repeats": 30,
}
PROFILES = ("balanced", "80/16", "zipf")
# Drawing ids takes longer than all that is measured: ranks share a few draws.
DRAWS = 4


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    check(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [
            measure(config, profile, tokens) for profile in PROFILES for tokens in config["tokens"]
        ]
    finally:
        torch.set_num_threads(threads)
    rows = [row for case in cases for row in case.rows]
    ratios: dict[str, float | None] = {
        f"{figure}_max": max(row[figure] for row in rows if row[figure] is not None)
        for figure in ("plan_ms", "routing_ms", "sized_ms")
    }
    return all(case.exact for case in cases), rows, ratios


def check(config: dict) -> None:
    """Raise InputError for what no case can be made of."""
    least = dict.fromkeys(config, (1, inf)) | {"max_foreign_experts": (0, inf)}
    check_ranges(config, least | {"budget_share": (0, 1), "top_k": (1, config["experts"])})


@dataclass(frozen=True)
class Case:
    exact: bool
    rows: list[dict]


def measure(config: dict, profile: str, tokens: int) -> Case:
    """One row for each number of chunks, and one for each budget."""
    ranks, experts, repeats = (config[key] for key in ("ranks", "experts", "repeats"))
    ids = draw_ids(config, profile, tokens)
    counts = torch.stack([torch.bincount(each.flatten(), minlength=experts) for each in ids])
    options = DispatchOptions(
        max_foreign_experts=config["max_foreign_experts"], min_chunk=config["min_chunk"]
    )
    rank = ranks - 1  # has the most to sum up over the ranks before it
    table = counts.numpy()
    plan = plan_dispatch(table, options)
    exact = is_valid(plan, counts, options) and plan == plan_dispatch(table.tolist(), options)
    mean = sum(plan.loads) / ranks
    about = {
        "experts": experts,
        "ranks": ranks,
        "profile": profile,
        "tokens": tokens,
        "plan_ms": milliseconds(
            lambda: derive(plan_dispatch(table, options), table, rank), repeats
        ),
        "imbalance_native": max(plan_native(table).loads) / mean,
        "imbalance": max(plan.loads) / mean,
        "foreign_experts": sum(map(len, plan.foreign)),
    }
    rows = []
    for bounds in all_bounds(config, options, ids):
        agreed = agree_alone(ids, experts, bounds, repeats)
        routing, budget = agreed.routing, bounds.options.budget_bytes
        exact = exact and agreed.repeatable and counts_every_row(routing, ids)
        if bounds.footprint is not None and budget is not None:
            exact = exact and bounds.footprint(routing.extent(tokens)) <= budget
        figure, other = ("routing_ms", "sized_ms")[:: 1 if budget is None else -1]
        sized = {"budget_bytes": budget, figure: agreed.milliseconds, other: None}
        rows.append(about | {"chunks": len(routing.chunks), "rounds": agreed.rounds} | sized)
    return Case(exact, rows)


def all_bounds(config: dict, options: DispatchOptions, ids: list[torch.Tensor]) -> list[Bounds]:
    """What each row's layer is held to."""
    tokens, sizes = len(ids[0]), gpu_sizes(config)
    at_once = agree_alone(ids, config["experts"], Bounds(options, None), 0).routing
    least = smallest_budget(
        sizes,
        experts=config["experts"],
        ranks=len(ids),
        tokens=tokens,
        max_foreign=options.max_foreign_experts,
    )
    whole = dispatch_bytes(sizes, at_once.extent(tokens))
    budgets = dict.fromkeys(max(least, int(share * whole)) for share in config["budget_share"])
    return [
        *(
            Bounds(replace(options, tokens_per_chunk=ceil(tokens / number)), None)
            for number in config["chunks"]
        ),
        *(
            Bounds(replace(options, budget_bytes=budget), partial(dispatch_bytes, sizes))
            for budget in budgets
        ),
    ]


def gpu_sizes(config: dict) -> LayerSizes:
    """Of experts in bf16, as they are on a GPU."""
    with torch.device("meta"):
        experts = PlainExperts(1, hidden=config["hidden"], intermediate=config["intermediate"])
        experts = experts.to(torch.bfloat16)
        hidden = torch.empty(1, config["hidden"], dtype=torch.bfloat16)
        weights = torch.empty(1, config["top_k"], dtype=torch.bfloat16)
    parameters, device = list(experts.parameters()), torch.device("cuda")
    return layer_sizes(read_layout(experts), parameters, hidden, weights, device=device)


@dataclass(frozen=True)
class Agreed:
    routing: Routing
    repeatable: bool
    """Whether one rank comes to what all ranks together came to."""
    rounds: int
    milliseconds: float | None


def agree_alone(ids: list[torch.Tensor], experts: int, bounds: Bounds, repeats: int) -> Agreed:
    """What the last of all ranks agrees on, and the time that its own part takes."""
    ranks, rank = len(ids), len(ids) - 1
    recorder, own = Recorder(), {rank: ids[rank]}
    together = agree(dict(enumerate(ids)), recorder, ranks, experts, bounds)[rank]
    replay = Replay(rank, recorder.made)

    def alone() -> Routing:
        return agree(own, replay, ranks, experts, bounds)[rank]

    return Agreed(
        routing=together,
        repeatable=alone() == together,
        rounds=len(recorder.made),
        milliseconds=milliseconds(alone, repeats) if repeats else None,
    )


def draw_ids(config: dict, profile: str, tokens: int) -> list[torch.Tensor]:
    """Distinct experts for each token [tokens, k], one table a rank."""
    ranks, experts, top_k = (config[key] for key in ("ranks", "experts", "top_k"))
    make = torch.Generator().manual_seed(0)
    odds = torch.ones(experts)
    if profile == "80/16":  # four of five routes to 16 experts
        odds[:16] *= 4 * max(1, experts - 16) / 16
    elif profile == "zipf":
        odds /= 1 + torch.randperm(experts, generator=make)
    drawn = [
        torch.multinomial(odds.expand(tokens, experts), top_k, generator=make) for _ in range(DRAWS)
    ]
    return [drawn[rank % DRAWS] for rank in range(ranks)]


def derive(plan: DispatchPlan, counts, rank: int) -> tuple:
    """All that a rank reads from a plan before the first row travels."""
    routing = Routing(rank, plan, tuple(plan.splits(counts, rank)), ())
    return plan.loads, plan.foreign, plan.first_instance, routing.owners(torch.device("cpu"))


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        begin = time.thread_time()
        work()
        return 1e3 * (time.thread_time() - begin)

    once()
    return statistics.median(once() for _ in range(repeats))


def is_valid(plan: DispatchPlan, counts: torch.Tensor, options: DispatchOptions) -> bool:
    """Whether each route has one place, and no rank more experts, smaller pieces, or more load than
    the options allow."""
    native = plan_native(counts.numpy())
    limit = ceil(options.capacity_factor * sum(native.loads) / plan.ranks)
    least = max(1, min(options.min_chunk, limit // 8))
    pieces = [(e, rank, routes) for e, held in enumerate(plan.segments) for rank, routes in held]
    placed = [sum(routes for _, routes in held) for held in plan.segments]
    moved = [routes for e, rank, routes in pieces if e not in plan.natives[rank]]
    split = torch.zeros(plan.first_instance[-1], dtype=torch.long)
    for source in range(plan.ranks):
        for instance, routes in plan.splits(counts.numpy(), source):
            split[instance] += routes
    return (
        placed == counts.sum(0).tolist()
        and all(split[plan.instance(e, rank)] == routes for e, rank, routes in pieces)
        and int(split.sum()) == sum(placed)
        and max(map(len, plan.foreign)) <= options.max_foreign_experts
        and min(moved, default=least) >= least
        and max(plan.loads) <= max(*native.loads, limit)
    )


def counts_every_row(routing: Routing, ids: list[torch.Tensor]) -> bool:
    """Whether one rank sends each of its tokens once to each rank, and computes its whole load."""
    owners = routing.owners(torch.device("cpu"))[routing.label(ids[routing.rank]).long()]
    token = torch.arange(len(owners))[:, None].expand_as(owners)
    visits = torch.stack([token, owners]).flatten(1).unique(dim=1)[1]
    expected = torch.bincount(visits, minlength=routing.plan.ranks)
    expected[routing.rank] = 0
    sent = torch.tensor([chunk.send for chunk in routing.chunks]).sum(0)
    computed = sum(sum(chunk.own_routes) + sum(chunk.landed_routes) for chunk in routing.chunks)
    return torch.equal(sent, expected) and computed == routing.plan.loads[routing.rank]
