"""The host's part of one layer's dispatch: milliseconds to plan it and to agree on every size.

One rank's work is timed, in CPU time of one thread, so that neighbours on the machine do not count.
Planning is the plan and all that a rank derives from it; routing is planning and the counting of
rows and routes, without the exchange: what other ranks would send is made beforehand.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flatpeak.workers.dispatch import DispatchOptions, DispatchPlan, Routing
from flatpeak.workers.dispatch.assignment import plan_dispatch, plan_native
from flatpeak.workers.dispatch.cutting import Bounds
from flatpeak.workers.dispatch.routing import agree

Config = dict[str, int | float | str | bool]

DEFAULTS: Config = {
    "experts": 384,
    "ranks": 64,
    "top_k": 8,
    "tokens": "128,1024,16384",  # on each rank
    "chunks": "1,4,16",
    "max_foreign_experts": 2,
    "min_chunk": 1024,
    "repeats": 30,
}
PROFILES = ("balanced", "80/16", "zipf")
# Drawing ids takes longer than all that is measured: ranks share a few draws.
DRAWS = 4


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [
            measure(config, profile, tokens)
            for profile in PROFILES
            for tokens in numbers(config["tokens"])
        ]
    finally:
        torch.set_num_threads(threads)
    rows = [row for case in cases for row in case.rows]
    ratios: dict[str, float | None] = {
        "plan_ms_max": max(row["plan_ms"] for row in rows),
        "routing_ms_max": max(row["routing_ms"] for row in rows),
    }
    return all(case.exact for case in cases), rows, ratios


def numbers(text: str | float | bool) -> list[int]:
    return [int(word) for word in str(text).split(",")]


@dataclass(frozen=True)
class Case:
    exact: bool
    rows: list[dict]


def measure(config: dict, profile: str, tokens: int) -> Case:
    """One row for each number of chunks."""
    ranks, experts, repeats = (int(config[key]) for key in ("ranks", "experts", "repeats"))
    ids = draw_ids(config, profile, tokens)
    counts = torch.stack([torch.bincount(each.flatten(), minlength=experts) for each in ids])
    options = [make_options(config, math.ceil(tokens / n)) for n in numbers(config["chunks"])]
    rank = ranks - 1  # has the most to sum up over the ranks before it
    table = counts.numpy()
    plan = plan_dispatch(table, options[0])
    exact = is_valid(plan, counts, options[0]) and plan == plan_dispatch(table.tolist(), options[0])
    plan_ms = milliseconds(lambda: derive(plan_dispatch(table, options[0]), table, rank), repeats)
    mean = sum(plan.loads) / ranks
    rows = []
    for chosen in options:
        gathered, bounds = Gathered(rank), Bounds(chosen, None)
        routing = agree(dict(enumerate(ids)), gathered.from_all, rank, ranks, experts, bounds)
        own = {rank: ids[rank]}

        def route(gathered=gathered, bounds=bounds, own=own) -> Routing:
            return agree(own, gathered.from_one, rank, ranks, experts, bounds)

        exact = exact and route() == routing and counts_every_row(routing, ids)
        rows.append(
            {
                "experts": experts,
                "ranks": ranks,
                "profile": profile,
                "tokens": tokens,
                "chunks": len(routing.chunks),
                "plan_ms": plan_ms,
                "routing_ms": milliseconds(route, repeats),
                "rounds": len(gathered.stacks),
                "imbalance_native": max(plan_native(table).loads) / mean,
                "imbalance": max(plan.loads) / mean,
                "foreign_experts": sum(map(len, plan.foreign)),
            }
        )
    return Case(exact, rows)


def make_options(config: dict, tokens_per_chunk: int) -> DispatchOptions:
    return DispatchOptions(
        tokens_per_chunk=tokens_per_chunk,
        max_foreign_experts=int(config["max_foreign_experts"]),
        min_chunk=int(config["min_chunk"]),
    )


def draw_ids(config: dict, profile: str, tokens: int) -> list[torch.Tensor]:
    """Distinct experts for each token [tokens, k], one table a rank."""
    ranks, experts, top_k = (int(config[key]) for key in ("ranks", "experts", "top_k"))
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


class Gathered:
    """The tables of all ranks, round by round, in which one rank then finds its own again."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stacks: list[torch.Tensor] = []
        self._round = 0

    def from_all(self, tables: list[torch.Tensor]) -> torch.Tensor:
        self.stacks.append(torch.stack(tables))
        return self.stacks[-1]

    def from_one(self, tables: list[torch.Tensor]) -> torch.Tensor:
        stack = self.stacks[self._round % len(self.stacks)]
        self._round += 1
        stack[self.rank] = tables[0]
        return stack


def is_valid(plan: DispatchPlan, counts: torch.Tensor, options: DispatchOptions) -> bool:
    """Whether each route has one place, and no rank more experts, smaller pieces, or more load than
    the options allow."""
    native = plan_native(counts.numpy())
    limit = math.ceil(options.capacity_factor * sum(native.loads) / plan.ranks)
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
