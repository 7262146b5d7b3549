"""kill -9 of the process that updates an arena, at random moments: its successor goes on.

The worker's side writes bf16 and fp32 gradients and clips; each step is asked of the updating
process until it answers. It is killed in twenty of the steps, after a random part of the time that
a step takes: before the update, between buckets, within one, or after the last.
"""

import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range, Shard, cut_buckets
from flatpeak.workers.gradients import GradientStream, clipping_factor
from flatpeak.workers.optimizer import AdamW, OptimizerCore

STEPS, KILLS, SIZE, CLIP = 30, 20, 600_000, 1.0
SETTINGS = AdamW(betas=(0.9, 0.95), weight_decay=0.1)
ACTOR = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch
from flatpeak.workers.arena import Arena
from flatpeak.workers.optimizer import AdamW, OptimizerCore
torch.set_num_threads(1)
core = OptimizerCore([Arena.attach(sys.argv[1], run="r")], {SETTINGS!r})
print(core.step, flush=True)
for line in sys.stdin:
    step, lr, factor = line.split()
    core.update(int(step), lr=float(lr), clip_factor=None if factor == "None" else float(factor))
    print(core.step, flush=True)
"""


class Actor:
    """The updating process: it says which step it holds when it starts and after each update."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.step = self.answer()

    def ask(self, step: int, factor: float | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step} {rate(step)} {factor}\n")
        self._process.stdin.flush()

    def answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def rate(step: int) -> float:
    return 1e-3 / step


def gradient(step: int) -> Tensor:
    """Clipped in most steps; not finite in one of them, which is skipped."""
    make = torch.Generator().manual_seed(step)
    found = torch.randn(SIZE, generator=make) * (2e-3 if step % 3 else 1e-4)
    if step == 7:
        found[123_456] = math.inf
    return found


def make_arena(folder: Path, dtype: str) -> Arena:
    shards = [Shard(Range("p", 0, SIZE), 0, dtype, True)]
    buckets = cut_buckets(shards, bucket_parameters=15_000, arenas_of_rank=lambda rank: [0])
    arena = Arena.create(folder / "0.arena", run="r", buckets=buckets, spare_frames=2)
    core = OptimizerCore([arena], SETTINGS)
    core.load(Range("p", 0, SIZE), torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    core.commit_load(0)
    return arena


def write(stream: GradientStream, step: int) -> float | None:
    """The worker's part of a step; returns the clipping factor."""
    stream.begin_step(version=step - 1, timeout_s=10)
    stream.write("p", 0, gradient(step), accumulate=False, final=True)
    stream.finish()
    return clipping_factor(math.sqrt(stream.squared_norm().item()), CLIP)


def state(arena: Arena) -> list[Tensor]:
    return [part for bucket in arena.buckets for part in all_of(arena, bucket)]


def all_of(arena: Arena, bucket: Bucket) -> list[Tensor]:
    frame = arena.frame(bucket.index)
    return [*frame.state, frame.weights]


def undisturbed(folder: Path, dtype: str) -> list[Tensor]:
    folder.mkdir()
    with make_arena(folder, dtype) as arena:
        stream, core = GradientStream(arena.buckets, {0: arena}), OptimizerCore([arena], SETTINGS)
        for step in range(1, STEPS + 1):
            core.update(step, lr=rate(step), clip_factor=write(stream, step))
        assert core.counters.skipped_steps == 1
        return [part.clone() for part in state(arena)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_kills_at_random_moments_change_no_bit(dtype: str, tmp_path: Path):
    chance = random.Random(dtype)
    killed_in = set(chance.sample(range(1, STEPS + 1), KILLS))
    held, update_s = [], 0.0
    with make_arena(tmp_path, dtype) as arena:
        stream, actor = GradientStream(arena.buckets, {0: arena}), Actor(arena.path)
        for step in range(1, STEPS + 1):
            factor = write(stream, step)
            began = time.perf_counter()
            actor.ask(step, factor)
            if step in killed_in:
                time.sleep(chance.uniform(0, 1.2) * update_s)
                actor.kill()
                done = sum(arena.version(bucket.index) == step for bucket in arena.buckets)
                held.append(done / len(arena.buckets))
                actor = Actor(arena.path)
                if actor.step < step:  # else it was killed between the last bucket and its answer
                    actor.ask(step, factor)
                    assert actor.answer() == step
            else:
                assert actor.answer() == step
                update_s = time.perf_counter() - began
        actor.kill()
        wanted = undisturbed(tmp_path / "undisturbed", dtype)
        assert all(map(torch.equal, state(arena), wanted))
    assert len(held) == KILLS
    assert any(0 < part < 1 for part in held), f"no update was cut off half-way: {held}"
