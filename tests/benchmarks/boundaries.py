"""Boundary offload beside plain checkpointing and save_on_cpu: bytes on either side, seconds.

A stack of equal layers (norm, wide product, dropout, residual) goes forward and backward with every
layer checkpointed. All methods get the same input, weights and random numbers in one process:

plain: torch's non-reentrant checkpoint; all boundaries stay on the device.
save_on_cpu: the same inside `torch.autograd.graph.save_on_cpu`, a host buffer for each boundary.
ours: `CheckpointOffload` with a slab for a share of the layers, once for each of `budgets`.

Gradients of all weights and of the input must be those of plain to the last bit; where any is not,
nothing is timed and no ratio given.

It runs on the CPU, where the device and the host are one memory, so bytes are told apart by what
they are for. `device_bytes` is the peak of what is charged to boundaries: the inputs of the layers,
and what comes back of them. `host_bytes` is what is allocated to hold them, which never counts as
device memory. There `save_on_cpu` would copy nothing, as its tensors are on the CPU, so hooks make
the copies that it makes for a device. One stream does all the work: seconds show no overlap.

`logical_bytes` are layers x tokens x hidden x bytes of a number, `bound_bytes` those of two layers.
Ratios are the largest over the depths, of ours with a slab for all layers: `bytes_vs_bound` has the
device bytes, `slab_overhead` the host bytes over the logical ones. No repeats measure bytes alone.
"""

import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from flatpeak.controller.bench import check_ranges
from flatpeak.workers.boundaries import BOUNDARIES, CheckpointOffload, slab_bytes
from flatpeak.workers.errors import InputError
from flatpeak.workers.memory import HOST, PeakMeter, attribute, scope

DEFAULTS = {
    "tokens": 512,
    "hidden": 256,
    "layers": (4, 16, 64),
    "budgets": (1.0, 0.5, 0.25, 0.0),
    "dtype": "float32",
    "repeats": 3,
}
DTYPES = ("float32", "bfloat16")
SEED = 7


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    layers: int
    dtype: torch.dtype

    @property
    def boundary_bytes(self) -> int:
        return self.tokens * self.hidden * self.dtype.itemsize

    @property
    def logical_bytes(self) -> int:
        return self.layers * self.boundary_bytes


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        # Dropout, so that a recomputation with other random numbers would show.
        inner = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(inner), 0.1)


class Stack(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.ModuleList(Layer(case.hidden) for _ in range(case.layers))
        self.input = nn.Parameter(torch.randn(case.tokens, case.hidden))
        self.to(case.dtype)

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.parameters() if p.grad is not None]


class Plain:
    budget: float | None = None
    name = "plain"
    host_bytes = 0

    def whole_pass(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def checkpoint(self, layer: nn.Module, x: Tensor) -> Any:
        attribute(x, BOUNDARIES)
        return checkpoint(layer, x, use_reentrant=False)


class SaveOnCpu(Plain):
    name = "save_on_cpu"

    def checkpoint(self, layer: nn.Module, x: Tensor) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            return super().checkpoint(layer, x)

    def whole_pass(self) -> AbstractContextManager[Any]:
        self.host_bytes = 0
        return nullcontext()

    def _pack(self, tensor: Tensor) -> Tensor:
        with scope(HOST):
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.host_bytes += host.untyped_storage().nbytes()
        return host.copy_(tensor)

    def _unpack(self, host: Tensor) -> Tensor:
        with scope(BOUNDARIES):
            return host.clone()


class Ours(Plain):
    name = "ours"

    def __init__(self, case: Case, budget: float) -> None:
        self.budget = budget
        taken = math.floor(budget * case.layers)
        with scope(HOST):
            nbytes = slab_bytes(case.tokens, case.hidden, case.dtype, taken)
            slab = torch.empty(nbytes, dtype=torch.uint8)
        self.host_bytes = slab.untyped_storage().nbytes()
        self._offload = CheckpointOffload(slab, host_budget=None)

    def whole_pass(self) -> AbstractContextManager[Any]:
        return self._offload

    def checkpoint(self, layer: nn.Module, x: Tensor) -> Any:
        return self._offload.checkpoint(layer, x)


@dataclass(frozen=True)
class Metered:
    device_bytes: int
    host_bytes: int
    equal: bool
    times: list[tuple[float, float]] = field(default_factory=list)
    """Wall and CPU seconds of each repeat."""


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    check(config)
    rows = []
    for layers in config["layers"]:
        case = Case(config["tokens"], config["hidden"], layers, getattr(torch, config["dtype"]))
        methods = [Plain(), SaveOnCpu(), *(Ours(case, budget) for budget in config["budgets"])]
        found = measure(case, methods, config["repeats"])
        rows += [row(case, *each) for each in zip(methods, found, strict=True)]
        print("\n".join(map(progress, rows[-len(methods) :])), flush=True)
    return all(row["equal"] for row in rows), rows, ratios(rows)


def check(config: dict) -> None:
    ranges = dict.fromkeys(("tokens", "hidden", "layers"), (1, math.inf))
    check_ranges(config, ranges | {"budgets": (0, 1), "repeats": (0, math.inf)})
    if config["dtype"] not in DTYPES:
        raise InputError(f"--dtype {config['dtype']}: there are {', '.join(DTYPES)}")


def measure(case: Case, methods: list[Plain], repeats: int) -> list[Metered]:
    """Each method once under the meter, which warms it up, then all in turn for the clock."""
    stack = Stack(case)
    found = [meter(stack, methods[0])]
    wanted = stack.gradients()
    for method in methods[1:]:
        found.append(meter(stack, method, wanted))
    if all(metered.equal for metered in found):
        for _ in range(repeats):
            for method, metered in zip(methods, found, strict=True):
                metered.times.append(clock(stack, method))
    return found


def meter(stack: Stack, method: Plain, wanted: list[Tensor] | None = None) -> Metered:
    with PeakMeter() as memory:
        one_pass(stack, method)
        peak = memory.peaks()[BOUNDARIES]
    gradients = stack.gradients()
    assert len(gradients) == len(list(stack.parameters())), "a parameter got no gradient"
    equal = all(map(torch.equal, gradients, wanted or gradients))
    return Metered(peak, method.host_bytes, equal)


def clock(stack: Stack, method: Plain) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    one_pass(stack, method)
    return time.perf_counter() - wall, time.process_time() - cpu


def one_pass(stack: Stack, method: Plain) -> None:
    stack.zero_grad()
    torch.manual_seed(SEED)
    with method.whole_pass():
        x = stack.input * 1  # an activation, as what an embedding gives is
        for layer in stack.layers:
            x = method.checkpoint(layer, x)
        x.square().mean().backward()


def row(case: Case, method: Plain, metered: Metered) -> dict[str, Any]:
    walls = [wall for wall, _ in metered.times]
    return {
        "method": method.name,
        "budget": method.budget,
        "layers": case.layers,
        "logical_bytes": case.logical_bytes,
        "bound_bytes": 2 * case.boundary_bytes,
        "device_bytes": metered.device_bytes,
        "host_bytes": metered.host_bytes,
        "equal": metered.equal,
        "seconds": statistics.median(walls) if walls else None,
        "seconds_min": min(walls, default=None),
        "seconds_max": max(walls, default=None),
        "cpu_seconds": statistics.median(cpu for _, cpu in metered.times) if walls else None,
    }


def ratios(rows: list[dict]) -> dict[str, float | None]:
    """The largest over the depths; None where nothing was measured."""
    whole = [r for r in rows if r["method"] == "ours" and r["budget"] == 1]
    cells = {(r["method"], r["layers"]): r for r in rows}

    def slowest(figure: str, other: str) -> float | None:
        pairs = [(r[figure], cells[other, r["layers"]][figure]) for r in whole]
        return max((ours / theirs for ours, theirs in pairs if theirs), default=None)

    return {
        "bytes_vs_bound": max((r["device_bytes"] / r["bound_bytes"] for r in whole), default=None),
        "slab_overhead": max((r["host_bytes"] / r["logical_bytes"] for r in whole), default=None),
        "time_vs_plain_checkpointing": slowest("seconds", "plain"),
        "cpu_time_vs_plain_checkpointing": slowest("cpu_seconds", "plain"),
        "time_vs_save_on_cpu": slowest("seconds", "save_on_cpu"),
    }


def progress(row: dict) -> str:
    budget = "" if row["budget"] is None else f" with a budget of {row['budget']:g}"
    device, host, logical = (row[f"{n}_bytes"] / 2**20 for n in ("device", "host", "logical"))
    return (
        f"{row['layers']} layers: {row['method']}{budget} held {device:.2f} of {logical:.2f} MiB "
        f"on the device, {host:.2f} off it, {row['seconds'] or 0:.3f} s"
    )
