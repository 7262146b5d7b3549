"""What leaves the device and comes back: boundaries, optimizer state, and the link between.

Boundaries of a stack of checkpointed layers kept on the device or in host memory; the update of
bf16 weights with fp32 state in an arena, on the device through slots, on the host, and by torch's
AdamW on the CPU; copies of memory that is registered, pinned by torch, or neither; and what the
update adds to a forward pass that waits for each bucket's weights.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from device_clock import seconds_of
from flatpeak.controller.bench import check_ranges
from flatpeak.kernels.adamw import Coefficients
from flatpeak.kernels.adamw.reference import adamw
from flatpeak.workers.arena import Arena, arena_bytes
from flatpeak.workers.boundaries import CheckpointOffload, slab_bytes
from flatpeak.workers.errors import InputError
from flatpeak.workers.memory import PeakMeter
from flatpeak.workers.update_rates import measure_device_rates
from flatpeak.workers.update_split import Stages
from frame import Check, Config, Ratios, Row, run_check
from offload_rig import CLIP, LR, SETTINGS, Rig, cut, fill

# fp32 state from a kernel that fuses products and sums; bf16 weights may round the other way.
TOLERANCES = (1e-6, 1e-6, 1e-6, 2**-7)

# The boundaries are those of a step on 47 layers, the parameters of one rank's share.
ON_GPU = {
    "layers": 47,
    "tokens": 11_838,
    "hidden": 2880,
    "parameters": 2_600_000_000,
    "bucket": 100_000_000,
    "slots": (1, 2, 3),
    "copied_bytes": 1 << 30,
    "torch_parameters": 200_000_000,
    "forward": 1.25,
    "folder": "/dev/shm",
    "repeats": 3,
}
ON_CPU = ON_GPU | {
    "layers": 3,
    "tokens": 64,
    "hidden": 32,
    "parameters": 50_000,
    "bucket": 7000,
    "copied_bytes": 1 << 20,
    "torch_parameters": 50_000,
    "repeats": 2,
}


def refuse(config: Config) -> None:
    sizes = ("layers", "tokens", "hidden", "parameters", "bucket", "slots", "copied_bytes")
    check_ranges(config, dict.fromkeys((*sizes, "torch_parameters", "repeats"), (1, 2**40)))
    check_ranges(config, {"forward": (0.01, 100)})
    if not Path(config["folder"]).is_dir():
        raise InputError(f"--folder {config['folder']}: there is no such directory for the arena")
    needed, free = arena_size(config), shutil.disk_usage(config["folder"]).free
    if needed > free:
        raise InputError(
            f"--folder {config['folder']} has {free:,} bytes free and the arena takes {needed:,}; "
            f"use another one, or --parameters {config['parameters'] * free // needed // 2}"
        )


def arena_size(config: Config) -> int:
    buckets = cut(config["parameters"], config["bucket"])
    return arena_bytes(buckets, max(config["slots"]), config["copied_bytes"])


def rows(config: Config, device: str) -> Iterator[Row]:
    yield from boundaries(config, device)
    yield from updates(config, torch.device(device))


# Boundaries


def boundaries(config: Config, device: str) -> Iterator[Row]:
    tokens, hidden, layers = config["tokens"], config["hidden"], config["layers"]
    make = torch.Generator(device).manual_seed(0)
    options = {"generator": make, "device": device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **options)
    weights = [torch.randn(hidden, hidden, **options).mul_(hidden**-0.5) for _ in range(layers)]
    nbytes = slab_bytes(tokens, hidden, torch.bfloat16, layers)
    slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    wanted: list[Tensor] = []
    for where, budget in (("device", 0), ("host", None)):
        offload = CheckpointOffload(slab, host_budget=budget)
        step = partial(forward_backward, offload, x, weights)
        with PeakMeter(device=device) as meter:
            meter.reset_peaks()
            found = step()
            peaks = meter.peaks()
        wanted = wanted or found
        yield {
            "part": "boundaries",
            "method": where,
            "exact": all(map(torch.equal, found, wanted)),
            "peak_bytes": peaks["total"],
            "boundary_bytes": peaks.get("boundaries", 0),
            "pinned_bytes": offload.stats().slab_bytes,
            "needed_bytes": layers * x.nbytes,
            **timed(lambda step=step: seconds_of(step, device), config["repeats"]),
        }


def forward_backward(offload: CheckpointOffload, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradients of a stack of layers, the first and the last."""
    inner = [w.detach().requires_grad_() for w in weights]
    with offload:
        h = x.detach().requires_grad_()
        for w in inner:
            h = offload.checkpoint(layer, h, w)
        h.float().square().mean().backward()
    return [g for g in (inner[0].grad, inner[-1].grad) if g is not None]


def layer(h: Tensor, w: Tensor) -> Tensor:
    return h + torch.tanh(h @ w)


# Updates


def updates(config: Config, device: torch.device) -> Iterator[Row]:
    repeats = config["repeats"]
    began = time.perf_counter()
    rig = Rig(
        config["folder"],
        parameters=config["parameters"],
        bucket=config["bucket"],
        spare_frames=max(config["slots"]),
        slab_bytes=config["copied_bytes"],
        device=device,
    )
    made = time.perf_counter()
    if device.type == "cuda":
        rig.arena.register()
    registered = time.perf_counter()
    figures = {"arena_bytes": rig.arena.nbytes, "made_s": made - began}
    figures |= {"register_s": registered - made}
    yield {"part": "arena", "method": "registered", "exact": None, **figures}
    yield from copies(config, rig.arena, device)
    exact = is_exact(rig, config)
    rates = measure_device_rates(device, elements=min(config["bucket"], 1 << 24))
    stages = Stages.of(rig.buckets[0], rates)
    for slots in config["slots"]:
        where = rig.on_device(slots)
        taken = timed(lambda where=where: wall(lambda: rig.update(where), device), repeats)
        yield update_row(f"device, {slots} slots", exact, rig.parameters, taken) | {
            "expected_s": stages.period(slots) * (len(rig.buckets) - 1) + stages.through
        }
    taken = timed(lambda: wall(lambda: rig.update(None), device), repeats)
    yield update_row("host", exact, rig.parameters, taken)
    yield torch_row(config)
    yield exposed(config, rig, device)
    rig.close()


def is_exact(rig: Rig, config: Config) -> bool:
    """Whether an update on the device is that of fp32 torch, in the first and the last bucket."""
    ends = (rig.buckets[0].index, rig.buckets[-1].index)
    before = {i: [*rig.state(i), rig.arena.gradient(i).clone()] for i in ends}
    rig.update(rig.on_device(max(config["slots"])))
    coefficients = Coefficients.of(
        updates=1,
        lr=LR,
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
        decay=SETTINGS.weight_decay,
        clip_factor=CLIP,
    )
    right = []
    for i, (p, m, v, weights, g) in before.items():
        adamw(p, m, v, g, p, m, v, weights, coefficients)
        for wanted, found, allowed in zip(
            (p, m, v, weights), rig.state(i), TOLERANCES, strict=True
        ):
            worst = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
            right.append(float(worst) <= allowed)
    start = sum(b.size for b in rig.buckets[:-1])
    in_model = rig.weights[start:].cpu()
    return all(right) and torch.equal(in_model, rig.arena.weights(ends[1]))


def torch_row(config: Config) -> Row:
    """torch's fused AdamW on the CPU, and the cast of its parameters to bf16."""
    p = torch.nn.Parameter(torch.zeros(config["torch_parameters"]))
    fill(p.data, torch.linspace(-1, 1, 1_000_003))
    p.grad = torch.full_like(p, 1e-3)
    weights = torch.empty(p.shape, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([p], lr=LR, fused=True)

    def step() -> None:
        optimizer.step()
        weights.copy_(p.data)

    step()
    taken = timed(lambda: wall(step, torch.device("cpu")), config["repeats"])
    return update_row("torch", None, p.numel(), taken)


def update_row(method: str, exact: bool | None, parameters: int, taken: Row) -> Row:
    rate = {"parameters": parameters, "parameters_per_s": parameters / taken["seconds"]}
    return {"part": "update", "method": method, "exact": exact, **rate, **taken}


def exposed(config: Config, rig: Rig, device: torch.device) -> Row:
    """The time that an update adds to a forward pass of `forward` times its length."""
    where = rig.on_device(max(config["slots"]))
    repeats = config["repeats"]
    alone = timed(lambda: wall(lambda: rig.update(where), device), repeats)["seconds"]
    square = torch.randn(8192 if device.type == "cuda" else 64, 1, device=device).bfloat16()
    square = square.expand(-1, len(square)).contiguous()
    once = timed(lambda: wall(lambda: square @ square, device), 10)["seconds"]
    times = max(1, round(config["forward"] * alone / len(rig.buckets) / once))

    def work() -> None:
        for _ in range(times):
            square @ square

    def forward() -> None:
        for _ in rig.buckets:
            work()

    passes = timed(lambda: wall(forward, device), repeats)["seconds"]
    both = timed(lambda: wall(lambda: rig.update_under(where, work), device), repeats)
    added = both["seconds"] - passes
    return {
        "part": "exposed",
        "method": f"device, {max(config['slots'])} slots",
        "exact": None,
        "update_s": alone,
        "forward_s": passes,
        "exposed_s": added,
        "share_of_serial": added / (passes + alone),
        **both,
    }


# Copies


def copies(config: Config, arena: Arena, device: torch.device) -> Iterator[Row]:
    nbytes = config["copied_bytes"]
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    ways = {"registered": arena.slab(), "pinned by torch": pinned}
    ways["neither"] = torch.zeros(nbytes, dtype=torch.uint8)
    for name, host in ways.items():
        for way, target, source in (("in", there, host), ("out", host, there)):
            copy = partial(target.copy_, source, non_blocking=True)
            source.fill_(7)
            target.zero_()
            copy()
            taken = timed(lambda copy=copy: seconds_of(copy, device.type), config["repeats"])
            rate = {"bytes_per_s": nbytes / taken["seconds"]}
            right = bool((target == 7).all())
            yield {"part": "copies", "method": f"{name}, {way}", "exact": right, **rate, **taken}


def wall(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has nothing left to do."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timed(seconds: Callable[[], float], repeats: int) -> Row:
    taken = [seconds() for _ in range(repeats)]
    return {
        "seconds": statistics.median(taken),
        "seconds_min": min(taken),
        "seconds_max": max(taken),
    }


def ratios(rows: list[Row]) -> Ratios:
    found = {(row["part"], row["method"]): row for row in rows}

    def ratio(column: str, part: str, one: str, other: str) -> float:
        return found[part, one][column] / found[part, other][column]

    best = min(
        (row for row in rows if row["method"].startswith("device") and row["part"] == "update"),
        key=lambda row: row["seconds"],
    )["method"]
    with_update = next(row for row in rows if row["part"] == "exposed")
    serial = with_update["forward_s"] + with_update["update_s"]
    return {
        "boundary_time_host_vs_device": ratio("seconds", "boundaries", "host", "device"),
        "boundary_peak_host_vs_device": ratio("peak_bytes", "boundaries", "host", "device"),
        "update_rate_device_vs_host": ratio("parameters_per_s", "update", best, "host"),
        "update_rate_device_vs_torch": ratio("parameters_per_s", "update", best, "torch"),
        "registered_vs_pinned_in": ratio(
            "bytes_per_s", "copies", "registered, in", "pinned by torch, in"
        ),
        "forward_with_update_vs_alone": with_update["seconds"] / with_update["forward_s"],
        "forward_with_update_vs_serial": with_update["seconds"] / serial,
    }


if __name__ == "__main__":
    check = Check(on_gpu=ON_GPU, on_cpu=ON_CPU, refuse=refuse, rows=rows, ratios=ratios)
    sys.exit(run_check(check, doc=__doc__))
