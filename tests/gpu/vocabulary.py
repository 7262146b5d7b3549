"""One rank's strips of the vocabulary loss on one device: bytes, seconds, share of matmul rate.

A rank of P meets its tokens with V / P rows of the head weight at a time, so one process without
collectives runs just that; P = 1 is the whole loss of a single device. The fused strip and the
plain one are set beside dense logits, torch's chunked loss and Liger's, where they are there. Every
method is compared with fp64 first; ours are held to it.
"""

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product

import torch

from device_clock import seconds_of
from flatpeak.controller.bench import check_ranges
from flatpeak.workers.errors import InputError
from flatpeak.workers.partition import part
from frame import Check, Config, Ratios, Row, run_check, worst_ratios
from vocabulary_strips import Batch, Figures, expected, metered, methods_for

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of the loss, and of the gradients: bf16 residuals are off by 2^-9 each.
TOLERANCES = {"bfloat16": (1e-5, 1e-2), "float32": (1e-6, 1e-5)}
OURS = ("fused", "reference")
# Forward, and backward by hidden states and weight; what is computed again is the method's affair.
PRODUCTS = 3

ON_GPU = {
    "tokens": (16_384, 32_768),
    "ranks": (8, 1),
    "hidden": 7168,
    "vocab": 200_000,
    "dtype": "bfloat16",
    "repeats": 3,
}
ON_CPU = {
    "tokens": (64, 128),
    "ranks": (8, 1),
    "hidden": 64,
    "vocab": 1000,
    "dtype": "float32",
    "repeats": 2,
}


def refuse(config: Config) -> None:
    ranges = dict.fromkeys(("tokens", "ranks", "hidden"), (1, math.inf))
    check_ranges(config, ranges | {"vocab": (max(config["ranks"]), math.inf)})
    check_ranges(config, {"repeats": (0, math.inf)})
    if config["dtype"] not in DTYPES:
        raise InputError(f"--dtype {config['dtype']}: there are {', '.join(DTYPES)}")


def rows(config: Config, device: str) -> Iterator[Row]:
    rate = matmul_rate(config, device)
    for tokens, ranks in product(config["tokens"], config["ranks"]):
        batch = make_batch(config, tokens, ranks, device)
        flops = PRODUCTS * 2 * tokens * batch.weight.numel()
        for row in measure(batch, config):
            done = row["seconds"] and flops / row["seconds"]
            shares = {"matmul_share": done and done / rate, "matmul_flops_per_s": rate}
            yield {"tokens": tokens, "ranks": ranks, **row, **shares}


def make_batch(config: Config, tokens: int, ranks: int, device: str) -> Batch:
    make = torch.Generator(device).manual_seed(0)
    dtype, hidden = DTYPES[config["dtype"]], config["hidden"]
    start, stop = part(config["vocab"], ranks, 0)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, hidden, generator=make, device=device, dtype=dtype)

    targets = torch.randint(stop - start, (tokens,), generator=make, device=device)
    return Batch(normal(tokens), targets, normal(stop - start).mul_(hidden**-0.5))


def measure(batch: Batch, config: Config) -> list[Row]:
    methods, right = methods_for(batch.hidden), expected(batch)
    found = {name: metered(method, batch, right) for name, method in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(config["repeats"]):
        for name, taken in seconds.items():
            if found[name].fits:
                work = partial(methods[name], batch)
                taken.append(seconds_of(work, batch.hidden.device.type))
    return [row(name, found[name], seconds[name], config["dtype"]) for name in methods]


def row(name: str, figures: Figures, seconds: list[float], dtype: str) -> Row:
    loss_tolerance, tolerance = TOLERANCES[dtype]
    right = figures.fits and figures.loss_error <= loss_tolerance and figures.error <= tolerance
    return {
        "method": name,
        **asdict(figures),
        "exact": right if name in OURS else None,
        "seconds": statistics.median(seconds) if seconds else None,
        "seconds_min": min(seconds, default=None),
        "seconds_max": max(seconds, default=None),
    }


def matmul_rate(config: Config, device: str) -> float:
    """Operations a second of torch's product of two such matrices, in the same dtype and width."""
    hidden, dtype = config["hidden"], DTYPES[config["dtype"]]
    rows = 8192 if device == "cuda" else 512
    a, b = (torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b.t())
    taken = [seconds_of(lambda: torch.mm(a, b.t()), device) for _ in range(10)]
    return 2 * rows * rows * hidden / statistics.median(taken)


def ratios(rows: list[Row]) -> Ratios:
    mine = rows[0]["method"]
    shares = [row["matmul_share"] for row in rows if row["method"] == mine]
    return {
        "matmul_share_min": min(filter(None, shares), default=None),
        **worst_ratios(rows, ours=mine, case=("tokens", "ranks")),
    }


if __name__ == "__main__":
    check = Check(on_gpu=ON_GPU, on_cpu=ON_CPU, refuse=refuse, rows=rows, ratios=ratios)
    sys.exit(run_check(check, doc=__doc__))
