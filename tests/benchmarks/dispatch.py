"""Expert dispatch beside LLEP and plain expert parallelism: bytes, seconds, balance, error.

The methods, all with expert-matmul checkpointing and fp32 weight gradients added in place:

ours: bounded dispatch, under a budget.
llep: LLEP at once with a backward pass by hand, leaner than published.
llep_autograd: LLEP at once by ordinary autograd.
plain_ep: plain all-to-all, no expert moves; by hand as llep.

Ratios are ours over the method in their name. All methods get the same tokens, routes and weights,
in the same processes. Memory and error come from a pass of their own; for the clock the methods
then take turns. Every output and gradient is compared with dense ones.

Tokens are on each rank; a profile r/h sends the first r percent of them to h hot experts. Our
method gets a share of LLEP's increment as its budget, at least what holds for any routing, 0 for
none, and keeps that budget for the layers of `small` tokens. It has `chunk` tokens of a rank on
their way at once and receives `receive-rows` rows, where 0 sets no bound. No repeats measure bytes
alone.

Of a row, `resident` are inputs, weights, outputs and gradients, `increment` is the peak above them;
`foreign` is what foreign experts take of it and `bounded` the rest; `growth` is the factor that the
profile of twice the tokens, with as many in a chunk, puts on `bounded`; `send_ratio` is the largest
of what a rank sends over the mean; `error` is relative to the largest entry of the dense result.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf
from typing import Any

import torch
import torch.distributed as dist

from dispatch_measures import clock, dense_results, error, freed_memory_kept, meter
from dispatch_methods import BALANCED, METHODS, Case, Work, least_loaded, make_work
from flatpeak.controller.bench import check_ranges
from flatpeak.workers.dispatch import DispatchOptions, DispatchPlan
from flatpeak.workers.dispatch.assignment import plan_native
from flatpeak.workers.dispatch.experts import read_layout
from flatpeak.workers.dispatch.footprint import layer_sizes, smallest_budget
from flatpeak.workers.errors import InputError
from ranks import run_ranks

DEFAULTS = {
    "profile": (BALANCED, "30/16", "50/16", "80/16", "95/16", "30/4", "50/4"),
    "tokens": 2048,
    "small": (128,),
    "ranks": (2,),
    "budget_share": 0.1,
    "chunk": 0,
    "receive_rows": 0,
    "max_foreign": 4,
    "backward": True,
    "hidden": 448,
    "intermediate": 128,
    "experts": 128,
    "top_k": 8,
    "dtype": "float32",
    "repeats": 3,
}
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}
TIMEOUT_S = 1800.0  # large layers on few cores
COMPARED = ("ours", "llep", "llep_autograd", "plain_ep")


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    check(config)
    rows = []
    for ranks, profile in product(config["ranks"], config["profile"]):
        case = make_case(config, ranks, profile, config["tokens"])
        case = with_budget(case, config["budget_share"])
        found = measure(case, config["repeats"])
        found[0]["growth"] = growth(case, found[0])
        for tokens in config["small"]:
            found += measure(replace(case, tokens=tokens), config["repeats"])
        rows += found
        print("\n".join(map(progress, found)), flush=True)
    exact = all(row["error"] <= TOLERANCES[config["dtype"]] for row in rows)
    return exact, rows, ratios(rows, config["tokens"], config["small"])


def check(config: dict) -> None:
    """Raise InputError for what no case can be made of."""
    positive = ("tokens", "small", "ranks", "hidden", "intermediate", "experts")
    counts = ("chunk", "receive_rows", "max_foreign", "repeats")
    ranges = dict.fromkeys(positive, (1, inf)) | dict.fromkeys(counts, (0, inf))
    check_ranges(config, ranges | {"budget_share": (0, 1), "top_k": (1, config["experts"])})
    if config["dtype"] not in TOLERANCES:
        raise InputError(f"--dtype {config['dtype']}: there are {', '.join(TOLERANCES)}")
    for profile in config["profile"]:
        check_profile(profile, config["experts"])


def make_case(config: dict, ranks: int, profile: str, tokens: int) -> Case:
    return Case(
        ranks=ranks,
        profile=profile,
        tokens=tokens,
        dtype=getattr(torch, config["dtype"]),
        options=dispatch_options(config),
        **{k: config[k] for k in ("hidden", "intermediate", "experts", "top_k", "backward")},
    )


def check_profile(profile: str, experts: int) -> None:
    percent, _, hot = profile.partition("/")
    if profile == BALANCED or (
        percent.isdecimal() and hot.isdecimal() and int(percent) <= 100 and 0 < int(hot) < experts
    ):
        return
    raise InputError(
        f"--profile {profile}: should be {BALANCED}, or r/h, r percent of the tokens to h of the "
        f"{experts} experts, like 80/16"
    )


def dispatch_options(config: dict) -> DispatchOptions:
    return DispatchOptions(
        tokens_per_chunk=config["chunk"] or None,
        receive_rows=config["receive_rows"] or None,
        max_foreign_experts=config["max_foreign"],
    )


def with_budget(case: Case, share: float) -> Case:
    """The case with a budget for our method, in its options: a share of LLEP's increment."""
    if not share:
        return case
    llep = run_ranks(case.ranks, metered_alone, case, "llep", timeout_s=TIMEOUT_S)
    wanted = int(share * max(figures.increment_bytes for figures in llep))
    budget = max(wanted, least_budget(case))
    if budget > wanted:
        print(
            f"{case.profile}: a share of {share} is {wanted:,} bytes, raised to {budget:,}, which "
            "hold for any routing",
            flush=True,
        )
    return replace(case, options=replace(case.options, budget_bytes=budget))


def least_budget(case: Case) -> int:
    """What holds for any routing: foreign experts alone may take more than a share of little."""
    work = make_work(case, 0, group=None)
    parameters = list(work.parameters.values())
    sizes = layer_sizes(read_layout(work.experts), parameters, work.hidden, work.weights)
    return smallest_budget(
        sizes,
        experts=case.experts,
        ranks=case.ranks,
        tokens=case.tokens,
        max_foreign=case.options.max_foreign_experts,
    )


def measure(case: Case, repeats: int) -> list[dict]:
    """One row a method."""
    metered = run_ranks(case.ranks, metered_rank, case, timeout_s=TIMEOUT_S)
    if repeats:
        timed = run_ranks(case.ranks, timed_rank, case, repeats, timeout_s=TIMEOUT_S)
    else:
        timed = [{name: [] for name in COMPARED}] * case.ranks
    return [
        row(case, name, [rank[name] for rank in metered], [rank[name] for rank in timed])
        for name in COMPARED
    ]


def growth(case: Case, ours: dict) -> float:
    """The factor that twice the tokens put on our increment, foreign experts apart.

    A chunk may have as many tokens as it has in the row of `ours`.
    """
    options = replace(
        case.options,
        budget_bytes=None,
        tokens_per_chunk=ceil(case.tokens / ours["chunks"]),
        max_chunks=2 * case.tokens,
    )
    doubled = replace(case, tokens=2 * case.tokens, options=options)
    twice = run_ranks(case.ranks, metered_alone, doubled, "ours", timeout_s=TIMEOUT_S)
    return max(map(bounded, twice)) / ours["bounded_bytes"]


@dataclass(frozen=True)
class Figures:
    """What one method took on one rank."""

    resident_bytes: int
    peak_bytes: int
    foreign_bytes: int
    sent_bytes: int
    routes_before: tuple[int, ...]
    routes_after: tuple[int, ...]
    chunks: int
    error: float

    @property
    def increment_bytes(self) -> int:
        return self.peak_bytes - self.resident_bytes


def bounded(figures: Figures) -> int:
    """What the chunk bounds: the increment less the foreign experts, which the plan bounds."""
    return figures.increment_bytes - figures.foreign_bytes


def metered_rank(rank: int, case: Case) -> dict[str, Figures]:
    work = make_work(case, rank, group=_group(case))
    wanted, scales = dense_results(work)
    found = {}
    for name in COMPARED:
        figures, results = metered_method(name, work, rank)
        found[name] = replace(figures, error=error(results, wanted, scales))
    return found


def metered_alone(rank: int, case: Case, name: str) -> Figures:
    return metered_method(name, make_work(case, rank, group=_group(case)), rank)[0]


def metered_method(name: str, work: Work, rank: int) -> tuple[Figures, dict[str, torch.Tensor]]:
    metered = meter(METHODS[name], work)
    native, plan, chunks = plans(name, work)
    figures = Figures(
        resident_bytes=metered.resident_bytes,
        peak_bytes=metered.peak_bytes,
        foreign_bytes=len(plan.foreign[rank]) * expert_bytes(work.case),
        sent_bytes=metered.sent_bytes,
        routes_before=native.loads,
        routes_after=plan.loads,
        chunks=chunks,
        error=torch.nan,
    )
    return figures, metered.results


def plans(name: str, work: Work) -> tuple[DispatchPlan, DispatchPlan, int]:
    """The native plan, the method's own, and its number of chunks."""
    case = work.case
    # Every rank has the same ids.
    counts = [torch.bincount(work.ids.flatten(), minlength=case.experts).tolist()] * case.ranks
    native = plan_native(counts)
    if name == "ours":
        return native, work.routings[-1].plan, len(work.routings[-1].chunks)
    return native, native if name == "plain_ep" else least_loaded(case)(counts), 1


def expert_bytes(case: Case) -> int:
    """Of one foreign expert: its weights and, in backward, their fp32 gradients."""
    wide = torch.promote_types(case.dtype, torch.float32).itemsize
    return (
        3 * case.hidden * case.intermediate * (case.dtype.itemsize + (wide if case.backward else 0))
    )


def timed_rank(rank: int, case: Case, repeats: int) -> dict[str, list[tuple[float, float]]]:
    work = make_work(case, rank, group=_group(case))
    with freed_memory_kept():
        return take_turns(COMPARED, work, repeats)


def take_turns(
    names: Sequence[str], work: Work, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each repeat of each method, after one turn to warm up."""
    turns = [{name: clock(METHODS[name], work) for name in names} for _ in range(1 + repeats)]
    return {name: [turn[name] for turn in turns[1:]] for name in names}


def _group(case: Case) -> dist.ProcessGroup | None:
    return dist.group.WORLD if case.ranks > 1 else None


def row(
    case: Case, name: str, ranks: list[Figures], timed: list[list[tuple[float, float]]]
) -> dict[str, Any]:
    # A pass takes as long as its slowest rank.
    walls = [max(wall for wall, _ in turn) for turn in zip(*timed, strict=True)]
    busiest = max(statistics.median(cpu for _, cpu in turns) for turns in timed) if walls else None
    fullest = max(ranks, key=lambda figures: figures.increment_bytes)
    sent = [figures.sent_bytes for figures in ranks]
    return {
        "method": name,
        "ranks": case.ranks,
        "profile": case.profile,
        "tokens": case.tokens,
        "budget_bytes": case.options.budget_bytes if name == "ours" else None,
        "resident_bytes": max(figures.resident_bytes for figures in ranks),
        "peak_bytes": max(figures.peak_bytes for figures in ranks),
        "increment_bytes": fullest.increment_bytes,
        "foreign_bytes": fullest.foreign_bytes,
        "bounded_bytes": max(map(bounded, ranks)),
        "growth": None,
        "seconds": statistics.median(walls) if walls else None,
        "seconds_min": min(walls, default=None),
        "seconds_max": max(walls, default=None),
        "cpu_seconds": busiest,
        "send_ratio": max(sent) * len(sent) / sum(sent) if sum(sent) else None,
        "chunks": ranks[0].chunks,
        "error": max(figures.error for figures in ranks),
        "routes_before": ranks[0].routes_before,
        "routes_after": ranks[0].routes_after,
    }


def ratios(rows: list[dict], tokens: int, small: Sequence[int]) -> dict[str, float | None]:
    """The largest over the cases; None where no case was run."""
    cells = {(r["method"], r["ranks"], r["profile"], r["tokens"]): r for r in rows}

    def largest(figure: str, other: str, tokens: int, **where: Any) -> float | None:
        found = [
            mine[figure] / cells[(other, *case)][figure]
            for (method, *case), mine in cells.items()
            if method == "ours"
            and mine[figure] is not None
            and mine["tokens"] == tokens
            and all(accepts(mine[key]) for key, accepts in where.items())
        ]
        return max(found, default=None)

    def skewed(profile: str) -> bool:
        return profile != BALANCED

    def eight(ranks: int) -> bool:
        return ranks == 8

    found = [largest("seconds", "llep", size) for size in small]
    growths = [r["growth"] for r in rows if r["growth"] is not None and r["tokens"] == tokens]
    return {
        "increment_vs_llep_max": largest("increment_bytes", "llep", tokens),
        "increment_vs_llep_autograd_max": largest("increment_bytes", "llep_autograd", tokens),
        "peak_vs_llep_ep8_max": largest("peak_bytes", "llep", tokens, ranks=eight),
        "peak_vs_llep_autograd_ep8_max": largest(
            "peak_bytes", "llep_autograd", tokens, ranks=eight
        ),
        "increment_growth_on_doubling_n": max(growths, default=None),
        "time_vs_llep_skewed_max": largest("seconds", "llep", tokens, profile=skewed),
        "time_vs_plain_ep_skewed_max": largest("seconds", "plain_ep", tokens, profile=skewed),
        "time_vs_llep_small": max(filter(None, found), default=None),
    }


def progress(row: dict) -> str:
    return (
        f"{row['ranks']} ranks, {row['tokens']} tokens, {row['profile']}: {row['method']} took "
        f"{row['increment_bytes'] / 2**20:.1f} MiB above {row['resident_bytes'] / 2**20:.1f}, "
        f"{row['seconds'] or 0:.3f} s, error {row['error']:.1g}"
    )
