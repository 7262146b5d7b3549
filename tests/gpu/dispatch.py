"""The local part of expert dispatch on one device: allocator peaks and event times of each method.

    python tests/gpu/dispatch.py [--profile r/h ...] [--tokens N] [--chunk c] ... [--json]

One process without collectives (an expert-parallel degree of 1), so all methods compute the same
routes. Beside those of `flatpeak bench dispatch`, which says what the options mean, it runs dense
eager experts. The report has the shape of that bench's. Without a GPU it runs a small case on the
CPU under `PeakMeter`. It imports nothing beyond torch and what comes with it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flatpeak.controller.bench import (
    BenchReport,
    describe_options,
    load_bench,
    parse_options,
    versions,
)
from flatpeak.workers.errors import InputError

CHECKOUT = Path(__file__).resolve().parents[2]
bench = load_bench(CHECKOUT, "dispatch")
METHODS = (*bench.COMPARED, "dense")

# The layer of Qwen3-30B-A3B.
ON_GPU = {
    "profile": ("balanced", "80/16"),
    "tokens": 65536,
    "chunk": 8192,
    "hidden": 2048,
    "intermediate": 768,
    "dtype": "bfloat16",
}
ON_CPU = {"profile": ("balanced", "80/16"), "tokens": 256, "chunk": 64, "hidden": 64, "experts": 32}
# Of one rank without a budget.
NOT_HERE = ("ranks", "small", "budget_share")


def defaults(device: str) -> dict:
    chosen = bench.DEFAULTS | (ON_GPU if device == "cuda" else ON_CPU)
    return {key: value for key, value in chosen.items() if key not in NOT_HERE}


def run(config: dict, device: str) -> tuple[bool, list[dict], dict[str, float | None]]:
    rows = []
    for profile in config["profile"]:
        case = bench.make_case(config, 1, profile, config["tokens"])
        found = measure(case, config["repeats"], device)
        rows += found
        print("\n".join(map(bench.progress, found)), file=sys.stderr, flush=True)
    exact = all(row["error"] <= bench.TOLERANCES[config["dtype"]] for row in rows)
    return exact, rows, ratios(rows)


def measure(case: Any, repeats: int, device: str) -> list[dict]:
    work = bench.make_work(case, 0, group=None, device=device)
    wanted, scales = bench.dense_results(work)
    figures = {}
    for name in METHODS:
        taken, results = bench.metered_method(name, work, 0)
        figures[name] = replace(taken, error=bench.error(results, wanted, scales))
        del results
    del wanted
    with bench.freed_memory_kept():
        turns = bench.take_turns(METHODS, work, repeats)
    return [bench.row(case, name, [figures[name]], [turns[name]]) for name in METHODS]


def ratios(rows: list[dict]) -> dict[str, float | None]:
    cells = {(row["method"], row["profile"]): row for row in rows}
    return {
        f"{figure}_vs_{other}_max": max(
            row[column] / cells[(other, profile)][column]
            for (method, profile), row in cells.items()
            if method == "ours"
        )
        for other in METHODS
        if other != "ours"
        for figure, column in (("increment", "increment_bytes"), ("time", "seconds"))
    }


def main(words: Sequence[str]) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if {"--help", "-h"} & set(words):
        print(describe_options(__doc__, defaults(device)))
        return 0
    if device == "cpu":
        torch.set_num_threads(1)  # small products on more threads wait for each other
    try:
        return check(words, device)
    except InputError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_code


def check(words: Sequence[str], device: str) -> int:
    config = defaults(device)
    config |= parse_options([word for word in words if word != "--json"], config)
    bench.check(bench.DEFAULTS | config)
    exact, rows, found = run(config, device)
    report = BenchReport(
        bench="gpu/dispatch",
        exact=exact,
        ratios=found if exact else {},
        rows=rows,
        config=config,
        versions=versions(CHECKOUT) | {"device": device_name(device)},
    )
    if "--json" in words:
        print(json.dumps(asdict(report)))
    else:
        for name, value in report.ratios.items():
            print(f"{name} {value:.3f}")
    return 0 if exact else 4


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
