"""The frame around the device checks: their options, the device, and one report.

    python tests/gpu/NAME.py [--cpu] [--out FILE] [--key value ...]

A check measures on one GPU; with `--cpu` it runs small sizes on one thread of the processor. Each
row goes to standard error as it is measured, the report at the end to FILE or standard output: one
JSON object with config, device, versions, commit, ratios and rows. A wrong result has no speed, so
a report with one has no ratios. Exit codes: 0 done, 1 a wrong result, 2 bad input.

Checks run where there is torch and what comes with it, but no Ray, typer or pydantic.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatpeak.controller.bench import describe_options, parse_options, versions
from flatpeak.controller.strict_json import to_json
from flatpeak.workers.errors import InputError

CHECKOUT = Path(__file__).resolve().parents[2]
FRAME = {"cpu": False, "out": "-"}

Config = dict[str, Any]
Row = dict[str, Any]
Ratios = dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Check:
    on_gpu: Config
    """Options and their defaults; a tuple stands for an option with several values."""
    on_cpu: Config
    """The same options with small sizes."""
    refuse: Callable[[Config], None]
    """Raises InputError for a configuration that nothing can be measured with."""
    rows: Callable[[Config, str], Iterator[Row]]
    """Measures on the device, `cuda` or `cpu`, row by row. The key `exact` of a row is whether the
    result is right; None for one that is shown but held to nothing."""
    ratios: Callable[[list[Row]], Ratios]


def run_check(check: Check, *, doc: str | None) -> int:
    """Runs the check as the command line asks and returns the exit code. `doc` is its help."""
    script, *words = sys.argv
    assert check.on_gpu.keys() == check.on_cpu.keys(), f"options of {script} differ by device"
    if {"--help", "-h"} & set(words):
        print(describe_options(doc, FRAME | check.on_gpu))
        print(describe_options("", check.on_cpu, title="\nTheir defaults with --cpu"))
        return 0
    try:
        return _run(check, Path(script).stem, parse_options(words, FRAME | check.on_gpu))
    except InputError as error:
        return _complain(script, str(error), error.exit_code)


def worst_ratios(rows: list[Row], *, ours: str, case: tuple[str, ...]) -> Ratios:
    """The method `ours` over each other one in bytes and seconds: the largest of all cases, None
    where no case has both. Rows with equal values at the keys `case` are of one case."""
    cells = {(row["method"], *(row[key] for key in case)): row for row in rows}
    found: Ratios = {}
    for other in dict.fromkeys(row["method"] for row in rows if row["method"] != ours):
        for figure, column in (("increment", "increment_bytes"), ("time", "seconds")):
            pairs = [
                (mine[column], cells[(other, *where)][column])
                for (method, *where), mine in cells.items()
                if method == ours
            ]
            known = [a / b for a, b in pairs if a is not None and b]
            found[f"{figure}_vs_{other}_max"] = max(known, default=None)
    return found


def _run(check: Check, name: str, given: Config) -> int:
    chosen = FRAME | (check.on_cpu if given.get("cpu") else check.on_gpu) | given
    config = {key: chosen[key] for key in check.on_gpu}
    check.refuse(config)
    device, write = _device(chosen["cpu"]), _writer(chosen["out"])
    rows = []
    with redirect_stdout(sys.stderr):  # standard output carries the report alone
        for row in check.rows(config, device):
            rows.append(row)
            print(to_json(row), flush=True)
    wrong = [row for row in rows if row["exact"] is False]
    found = versions(CHECKOUT)
    report = {
        "check": name,
        "exact": not wrong,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "commit": found.pop("commit"),
        "config": config,
        "versions": found | {"cuda": torch.version.cuda},
        "ratios": {} if wrong else check.ratios(rows),
        "rows": rows,
    }
    write(to_json(report) + "\n")
    if wrong:
        text = f"{len(wrong)} of {len(rows)} results are wrong, first {to_json(wrong[0])}"
        return _complain(name, text, 1)
    return 0


def _device(cpu: bool) -> str:
    if cpu:
        torch.set_num_threads(1)  # small products on more threads wait for each other
        return "cpu"
    if not torch.cuda.is_available():
        raise InputError("torch sees no CUDA device; --cpu runs small sizes on the processor")
    return "cuda"


def _writer(out: str) -> Callable[[str], object]:
    if out == FRAME["out"]:
        return sys.stdout.write
    folder = Path(out).parent
    if not folder.is_dir():  # better known before than after the measurement
        raise InputError(f"--out {out}: there is no directory {folder}")
    return Path(out).write_text


def _complain(script: str, text: str, code: int) -> int:
    print(f"{Path(script).stem}: {text}", file=sys.stderr)
    return code
