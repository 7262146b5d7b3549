"""The host's update of AdamW buckets beside the memory's bandwidth, torch and DeepSpeed.

All sides update the same bf16 weights with fp32 masters and moments and take turns bucket by
bucket, so that a busy machine is busy for all; the serial side takes its whole state at once. Ours
is `update_bucket` on an arena with fp32 gradients, and the same pass with bf16 ones. The others
cast bf16 gradients to fp32 before their update and the weights to bf16 after it. Nobody clips.

A bandwidth counts what an update has to move, once a byte: 12 bytes of state read and 12 written,
2 of weights written, and 4 or 2 of gradient read. The stream is the best of copy and triad, by
torch and by a loop with streaming stores, over as many bytes as an update; use many times the last
cache.

The simulated sides are of a small model in training, see `optimizer_overlap`: its update and its
forward pass sleep for `update-s` seconds each, 0 leaves both sides out. Their seconds are those by
which an update delays the next forward pass, which waits for all of it, or layer by layer.
"""

import math
import os
import secrets
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatpeak.controller.bench import check_ranges
from flatpeak.kernels.adamw import Coefficients, adamw, reference
from flatpeak.kernels.adamw.build import CannotBuild, load_library
from flatpeak.kernels.adamw.host import same_bits
from flatpeak.workers.arena import SUFFIX, Arena
from flatpeak.workers.buckets import Bucket, Range, Shard, cut_buckets
from flatpeak.workers.optimizer import AdamW, OptimizerCore, update_bucket
from optimizer_overlap import simulate

DEFAULTS = {
    "parameters": 67_108_864,
    "bucket": 4_194_304,
    "threads": 0,  # 0 takes every CPU that this process may use
    "repeats": 15,
    "update_s": 1.0,
}
LR = 1e-3
SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
CHECKED_UPDATES = 2
# Of the masters' moves: baselines round elsewhere than we do.
TOLERANCE = 1e-3
STREAM = Path(__file__).with_name("stream.cpp")
Update = Callable[[], object]
State = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Side:
    """`pieces` together are one update of all parameters, or one pass of a stream.

    `state` gives bucket i's master, moments and weights; a stream has none. `ours` is held to the
    bits of the reference.
    """

    name: str
    gradient: str | None
    nbytes: int
    pieces: list[Update]
    state: Callable[[int], State] | None = None
    ours: bool = False


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    least = {"parameters": 16, "bucket": 16, "threads": 0, "repeats": 1, "update_s": 0}
    check_ranges(config, {name: (value, math.inf) for name, value in least.items()})
    count = config["threads"] or len(os.sched_getaffinity(0))
    with threads(count), make_arena(config) as arena, torch.no_grad():
        exact, rows, ratios = compare(arena, config)
    if not (exact and config["update_s"]):
        return exact, rows, ratios
    overlap = simulate(update_s=config["update_s"])
    rows += [
        measured("serial, simulated", overlap.serial_s),
        measured("overlapped, simulated", overlap.exposed_s),
        measured("of that, the first weights", overlap.first_s),
    ]
    return overlap.same_losses, rows, ratios | overlap.ratios()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(arena: Arena, config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    updates = [*arena_sides(arena), *torch_sides(arena.buckets)]
    errors = {side.name: error(side, arena) for side in updates}
    exact = all(errors[side.name] <= (0.0 if side.ours else TOLERANCE) for side in updates)
    sides = [*updates, *stream_sides(config["parameters"], len(arena.buckets))]
    seconds = take_turns(sides, config["repeats"]) if exact else {}
    rows = [
        row_of(side, config["parameters"], errors.get(side.name), seconds.get(side.name))
        for side in sides
    ]
    return exact, rows, ratios(rows) if exact else {}


def ratios(rows: list[dict]) -> dict[str, float | None]:
    """Of `update_bucket`, but for those that say bf16."""
    found = {row["side"]: row for row in rows}
    stream = max(row["gb_per_s"] for row in rows if row["side"].startswith("stream"))
    ours, narrow = found["update_bucket"], found["one pass, bf16"]

    def time_against(side: str, row: dict) -> float | None:
        return row["seconds"] / found[side]["seconds"] if side in found else None

    return {
        "bandwidth_fraction": ours["gb_per_s"] / stream,
        "bandwidth_fraction_bf16_gradient": narrow["gb_per_s"] / stream,
        "time_vs_torch_fused": time_against("torch fused", ours),
        "time_vs_torch_fused_bf16_gradient": time_against("torch fused, bf16", narrow),
        "time_vs_deepspeed": time_against("DeepSpeedCPUAdam", ours),
        "time_vs_deepspeed_bf16_gradient": time_against("DeepSpeedCPUAdam, bf16", narrow),
        "time_vs_serial_offload": time_against("serial offload", ours),
    }


# Sides


def make_arena(config: dict) -> Arena:
    shards = [Shard(Range("p", 0, config["parameters"]), 0, "bfloat16", True)]
    buckets = cut_buckets(
        shards, bucket_parameters=config["bucket"], arenas_of_rank=lambda rank: [0]
    )
    shared = Path("/dev/shm")
    folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"flatpeak-bench-{secrets.token_hex(4)}{SUFFIX}"
    arena = Arena.create(path, run="bench", buckets=buckets, spare_frames=2)
    arena.unlink()  # mapped, it needs no name
    return arena


def initial(bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Masters, and gradients in bf16, each [size]."""
    make = torch.Generator().manual_seed(bucket.index)
    gradient = 1e-3 * torch.randn(bucket.size, generator=make)
    return 0.02 * torch.randn(bucket.size, generator=make), gradient.bfloat16()


def coefficients(updates: int) -> Coefficients:
    return Coefficients.of(
        updates=updates,
        lr=LR,
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
        decay=SETTINGS.weight_decay,
    )


def arena_sides(arena: Arena) -> list[Side]:
    """They share the arena, which is loaded anew when each is checked."""
    buckets, n = arena.buckets, sum(bucket.size for bucket in arena.buckets)
    narrow = [initial(bucket)[1] for bucket in buckets]
    for bucket, gradient in zip(buckets, narrow, strict=True):
        arena.gradient(bucket.index).copy_(gradient)

    def whole(i: int) -> None:
        step = arena.version(i) + 1
        update_bucket(arena, i, step=step, lr=LR, clip_factor=1.0, settings=SETTINGS)

    def one_pass(i: int) -> None:
        old, new = arena.frame(i), arena.begin_update(i)
        c = coefficients(arena.updates(i) + 1)
        adamw(*old.state, narrow[i], *new.state, new.weights, c)
        arena.commit_update(i, arena.version(i) + 1)

    def state(i: int) -> State:
        frame = arena.frame(i)
        return *frame.state, frame.weights

    by_bucket = range(len(buckets))
    wide, low = ([partial(update, i) for i in by_bucket] for update in (whole, one_pass))
    return [
        Side("update_bucket", "fp32", 30 * n, wide, state, ours=True),
        Side("one pass, bf16", "bf16", 28 * n, low, state, ours=True),
    ]


def torch_sides(buckets: Sequence[Bucket]) -> list[Side]:
    options = {"lr": LR, "betas": SETTINGS.betas, "eps": SETTINGS.eps}
    options |= {"weight_decay": SETTINGS.weight_decay}
    alone = [[bucket] for bucket in buckets]
    makers = {"torch fused": partial(torch.optim.AdamW, fused=True, **options)}
    if find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

        makers["DeepSpeedCPUAdam"] = partial(DeepSpeedCPUAdam, adamw_mode=True, **options)
    serial = optimizer_side("serial offload", partial(torch.optim.AdamW, **options), [buckets])
    return [
        serial,
        *(optimizer_side(name, make, alone) for name, make in makers.items()),
        *(optimizer_side(f"{name}, bf16", make, alone, cast=True) for name, make in makers.items()),
    ]


def optimizer_side(
    name: str,
    make: Callable[..., Any],
    groups: Sequence[Sequence[Bucket]],
    *,
    cast: bool = False,
) -> Side:
    """One fp32 parameter and optimizer for each group of buckets, and its weights in bf16.

    With `cast` the gradients come in bf16.
    """
    pieces: list[Update] = []
    states: dict[int, Callable[[], State]] = {}
    for group in groups:
        masters, gradients = zip(*map(initial, group), strict=True)
        p, gradient = torch.nn.Parameter(torch.cat(masters)), torch.cat(gradients)
        p.grad = gradient.float()
        optimizer, weights = make([p]), torch.empty_like(p, dtype=torch.bfloat16)
        pieces.append(partial(step_and_cast, optimizer, p, gradient if cast else None, weights))
        start = 0
        for bucket in group:
            part = slice(start, start + bucket.size)
            states[bucket.index] = partial(state_of, optimizer, p, weights, part)
            start += bucket.size
    n = sum(bucket.size for group in groups for bucket in group)
    kind, nbytes = ("bf16", 28 * n) if cast else ("fp32", 30 * n)
    return Side(name, kind, nbytes, pieces, lambda i: states[i]())


def step_and_cast(optimizer: Any, p: Tensor, gradient: Tensor | None, weights: Tensor) -> None:
    if gradient is not None:
        assert p.grad is not None
        p.grad.copy_(gradient)
    optimizer.step()
    weights.copy_(p)


def state_of(optimizer: Any, p: Tensor, weights: Tensor, part: slice) -> State:
    held = optimizer.state[p]
    return p[part], held["exp_avg"][part], held["exp_avg_sq"][part], weights[part]


def stream_sides(parameters: int, count: int) -> list[Side]:
    # As many bytes as an update, since a busy machine takes its time to start a piece.
    floats = max(96, 30 * parameters // count // 4 // 96 * 96)
    pool = torch.ones(count, floats)
    nbytes, pieces = pool.nbytes, [Streams(each) for each in pool]
    sides = [
        Side("stream copy, torch", None, nbytes, [each.copy for each in pieces]),
        Side("stream triad, torch", None, nbytes, [each.triad for each in pieces]),
    ]
    try:
        library = load_library(STREAM)
    except CannotBuild as error:
        print(f"no streaming stores in the measured bandwidth: {error}")
        return sides
    copies = [partial(each.streaming_copy, library) for each in pieces]
    triads = [partial(each.streaming_triad, library) for each in pieces]
    return [
        *sides,
        Side("stream copy, streaming", None, nbytes, copies),
        Side("stream triad, streaming", None, nbytes, triads),
    ]


class Streams:
    """Passes over the halves or thirds of one array; each reads or writes all of it once."""

    def __init__(self, memory: Tensor) -> None:
        self.halves, self.thirds = memory.chunk(2), memory.chunk(3)

    def copy(self) -> None:
        to, a = self.halves
        to.copy_(a)

    def triad(self) -> None:
        to, a, b = self.thirds
        torch.add(a, b, alpha=3.0, out=to)

    def streaming_copy(self, library: Any) -> None:
        self._stream(library.stream_copy, self.halves)

    def streaming_triad(self, library: Any) -> None:
        self._stream(library.stream_triad, self.thirds)

    @staticmethod
    def _stream(function: Any, arrays: Sequence[Tensor]) -> None:
        addresses = [c_void_p(array.data_ptr()) for array in arrays]
        function(c_int64(len(arrays[0])), c_int(torch.get_num_threads()), *addresses)


# Measuring


def error(side: Side, arena: Arena) -> float:
    """The largest error of a master, in moves of the learning rate, after a few updates.

    For a side of ours NaN unless every bit of state and weights is the reference's.
    """
    assert side.state is not None, f"{side.name} updates nothing"
    if side.ours:
        core = OptimizerCore([arena], SETTINGS)
        for bucket in arena.buckets:
            for moment in arena.frame(bucket.index).state[1:]:
                moment.zero_()
        masters = torch.cat([initial(bucket)[0] for bucket in arena.buckets])
        core.load(Range("p", 0, len(masters)), masters)
        core.commit_load(core.step + 1, updates=0)
    for _ in range(CHECKED_UPDATES):
        for piece in side.pieces:
            piece()
    worst = 0.0
    for bucket in arena.buckets:
        with threads(1):  # the reference is many small operations, which a busy machine holds up
            expected = expected_state(bucket)
        found = side.state(bucket.index)
        if side.ours and not all(map(same_bits, found, expected)):
            return math.nan
        worst = max(worst, ((found[0] - expected[0]).abs().max() / LR).item())
        if not torch.equal(found[3], found[0].bfloat16()):
            return math.nan
    return worst


def expected_state(bucket: Bucket) -> State:
    master, gradient = initial(bucket)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    weights = torch.empty_like(gradient)
    state = master, exp_avg, exp_avg_sq
    for updates in range(1, CHECKED_UPDATES + 1):
        reference.adamw(*state, gradient, *state, weights, coefficients(updates))
    return *state, weights


def take_turns(sides: list[Side], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side's passes: piece by piece, the sides in another order each time."""
    seconds = {side.name: [0.0] * repeats for side in sides}
    turns = max(len(side.pieces) for side in sides)
    order = deque(enumerate(sides))
    for repeat in range(repeats):
        for turn in range(turns):
            for place, side in order:
                count = len(side.pieces)
                if turn < count:
                    # Sides that share memory are at different pieces: caches would help one.
                    piece = side.pieces[(turn + place * count // len(sides)) % count]
                    begin = time.perf_counter()
                    piece()
                    seconds[side.name][repeat] += time.perf_counter() - begin
            order.rotate()
    return seconds


def row_of(
    side: Side, parameters: int, error: float | None, seconds: list[float] | None
) -> dict[str, Any]:
    row = measured(side.name, seconds)
    return row | {
        "gradient": side.gradient,
        "bytes_per_parameter": side.nbytes / parameters,
        "gb_per_s": side.nbytes / row["seconds"] / 1e9 if row["seconds"] else None,
        "error": error,
    }


def measured(side: str, seconds: list[float] | None) -> dict[str, Any]:
    return {
        "side": side,
        "gradient": None,
        "bytes_per_parameter": None,
        "seconds": statistics.median(seconds) if seconds else None,
        "seconds_min": min(seconds) if seconds else None,
        "seconds_max": max(seconds) if seconds else None,
        "gb_per_s": None,
        "error": None,
    }
