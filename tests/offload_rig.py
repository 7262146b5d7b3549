"""An arena and the updates of its buckets, for measuring: one rank, one actor, one process."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range, Shard, cut_buckets
from flatpeak.workers.device_update import DeviceUpdate, Slots, Target
from flatpeak.workers.optimizer import AdamW, update_bucket
from flatpeak.workers.streams import streams_of
from flatpeak.workers.update_split import assign_updates

SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
LR, CLIP = 1e-3, 0.5
# Filling billions of elements with random numbers of their own would take most of the time.
_PATTERN = 1_000_003


class Rig:
    """`parameters` bf16 weights on the device, their state in an arena, loaded as version 0."""

    def __init__(
        self,
        folder: str,
        *,
        parameters: int,
        bucket: int,
        spare_frames: int,
        slab_bytes: int,
        device: torch.device,
    ) -> None:
        self.buckets = cut(parameters, bucket)
        path = Path(folder) / f"flatpeak-check-{time.monotonic_ns()}.arena"
        self.arena = Arena.create(
            path,
            run="check",
            buckets=self.buckets,
            spare_frames=spare_frames,
            slab_bytes=slab_bytes,
        )
        self.arena.unlink()  # mapped, it needs no name, and nothing can be left behind
        self.device, self.version = device, 0
        self.weights = torch.zeros(parameters, dtype=torch.bfloat16, device=device)
        values = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
        for b in self.buckets:
            fill(self.arena.master(b.index), values)
            fill(self.arena.gradient(b.index), values.flip(0) * 1e-2)
            self.arena.advance(b.index, 0, updates=0)

    @property
    def parameters(self) -> int:
        return self.weights.numel()

    def on_device(self, slots: int) -> DeviceUpdate:
        return DeviceUpdate(
            self.buckets,
            {0: self.arena},
            SETTINGS,
            slots=Slots(slots, self.buckets, self.device),
            streams=streams_of(self.device),
            targets={"p": Target(0, self.weights)},
        )

    def update(self, where: DeviceUpdate | None) -> None:
        """One step on the device, or with None on the host."""
        self.version += 1
        if where is not None:
            where.update(self.version, lr=LR, clip_factor=CLIP)
            return
        for b in self.buckets:
            update_bucket(
                self.arena, b.index, step=self.version, lr=LR, clip_factor=CLIP, settings=SETTINGS
            )

    def update_under(self, where: DeviceUpdate, work: Callable[[], object]) -> None:
        """One step on the device beside a forward pass: `work` a bucket, once its weights are
        there."""
        self.version += 1
        where.start(self.version, lr=LR, clip_factor=CLIP)
        for b in self.buckets:
            self.arena.wait_version(b.index, self.version, timeout_s=60)
            work()
        where.join()

    def state(self, i: int) -> list[Tensor]:
        frame = self.arena.frame(i)
        return [part.clone() for part in (*frame.state, frame.weights)]

    def close(self) -> None:
        self.arena.close()


def cut(parameters: int, bucket: int) -> tuple[Bucket, ...]:
    """One parameter of bf16 weights, in buckets that are updated on the device."""
    shard = Shard(Range("p", 0, parameters), 0, "bfloat16", True)
    buckets = cut_buckets([shard], bucket_parameters=bucket, arenas_of_rank=lambda rank: [0])
    return assign_updates(buckets, range(len(buckets)))


def fill(target: Tensor, values: Tensor) -> None:
    for part in target.split(len(values)):
        part.copy_(values[: len(part)])
