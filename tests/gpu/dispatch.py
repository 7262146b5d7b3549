"""The local part of expert dispatch on one device: allocator peaks and event times of each method.

One process without collectives (an expert-parallel degree of 1), so all methods compute the same
routes. Beside those of `flatpeak bench dispatch`, which says what the options mean, it runs dense
eager experts. Results are compared with dense ones in fp32.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flatpeak.controller.bench import load_bench
from frame import CHECKOUT, Check, Config, Ratios, Row, run_check, worst_ratios

bench = load_bench(CHECKOUT, "dispatch")
METHODS = (*bench.COMPARED, "dense")

# Of one rank without a budget.
NOT_HERE = ("ranks", "small", "budget_share")
DEFAULTS = {k: v for k, v in bench.DEFAULTS.items() if k not in NOT_HERE} | {
    "profile": ("balanced", "80/16"),
}
# The layer of Qwen3-30B-A3B.
ON_GPU = DEFAULTS | {
    "tokens": 65536,
    "chunk": 8192,
    "hidden": 2048,
    "intermediate": 768,
    "dtype": "bfloat16",
}
ON_CPU = DEFAULTS | {"tokens": 256, "chunk": 64, "hidden": 64, "experts": 32}


def refuse(config: Config) -> None:
    bench.check(bench.DEFAULTS | config)


def rows(config: Config, device: str) -> Iterator[Row]:
    for profile in config["profile"]:
        case = bench.make_case(config, 1, profile, config["tokens"])
        for row in measure(case, config["repeats"], device):
            yield row | {"exact": row["error"] <= bench.TOLERANCES[config["dtype"]]}


def measure(case: Any, repeats: int, device: str) -> list[Row]:
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


def ratios(rows: list[Row]) -> Ratios:
    return worst_ratios(rows, ours="ours", case=("profile",))


if __name__ == "__main__":
    check = Check(on_gpu=ON_GPU, on_cpu=ON_CPU, refuse=refuse, rows=rows, ratios=ratios)
    sys.exit(run_check(check, doc=__doc__))
