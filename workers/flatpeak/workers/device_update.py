"""AdamW on the worker's device, over state that lies in the arenas.

Buckets pass through `s` slots of device memory in the order in which the next forward needs them:
master, moments and gradient come in, one pass updates them and refreshes the working weights where
the model has them, and state and weights go out to a free frame, so that any process can take over.

How order is kept. Each of the three stages is a stream of its own. The update of a bucket waits for
its way in and its way out for the update, by events. A slot takes its next bucket, and the pointer
of the last one flips, when the process has seen that one's way out end. So the gradient has been
read when the flip lets the next step overwrite it, and the frame is whole when it counts.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatpeak.kernels.adamw_device import Coefficients, adamw_
from flatpeak.workers.arena import Arena, Frame
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.errors import RunFailed
from flatpeak.workers.streams import Streams

if TYPE_CHECKING:
    from flatpeak.workers.optimizer import AdamW

log = logging.getLogger("flatpeak")


class Slots:
    """Device memory for `count` of these buckets at once, each as large as the largest.

    A slot has 16 bytes an element, and 2 more where any weights are bf16.
    """

    def __init__(self, count: int, buckets: Sequence[Bucket], device: torch.device) -> None:
        assert count >= 1, f"{count} slots"
        # All arrays start at multiples of 64 bytes: loads are wide where the kernel finds them so.
        elements = -(-max(bucket.size for bucket in buckets) // 32) * 32
        low = any(bucket.dtype != "float32" for bucket in buckets)
        self.state = torch.empty(count, 4, elements, device=device)
        self.weights = torch.empty(count, low * elements, dtype=torch.bfloat16, device=device)
        self.free = list(range(count))

    def frame(self, number: int, bucket: Bucket) -> Frame:
        master, exp_avg, exp_avg_sq = (part[: bucket.size] for part in self.state[number, :3])
        low = bucket.dtype != "float32"
        weights = self.weights[number, : bucket.size] if low else master
        return Frame(master, exp_avg, exp_avg_sq, weights)

    def gradient(self, number: int, like: Tensor) -> Tensor:
        return self.state[number, 3].view(like.dtype)[: like.numel()]


@dataclass(frozen=True)
class Target:
    """Where the model has its working weights of a parameter's elements from `start` on: [n]."""

    start: int
    weights: Tensor


@dataclass(frozen=True)
class _Flight:
    bucket: Bucket
    slot: int
    landed: Any


class DeviceUpdate:
    """Updates a rank's buckets that are to be updated on the device; it alone may do so.

    `arenas` are by number. `targets` says what is refreshed in place, by
    canonical name; other parameters are left to whoever fetches them. It may be set anew between
    updates. `slots` may be shared by several, of which one works at a time. Copies run beside the
    rest where the arenas are registered.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        arenas: Mapping[int, Arena],
        settings: "AdamW",
        *,
        slots: Slots,
        streams: Streams,
        targets: Mapping[str, Target] | None = None,
    ) -> None:
        assert all(b.update_on == "device" and b.rule == "adamw" for b in buckets), "not ours"
        self.settings = settings
        self.buckets = sorted(buckets, key=lambda bucket: bucket.index)
        self._arena = {bucket.index: arenas[bucket.arena] for bucket in buckets}
        self.targets = targets or {}
        self._slots, self._streams = slots, streams
        self._flying: deque[_Flight] = deque()
        self._in_place: dict[int, int] = {}
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @torch.no_grad()
    def update(
        self, step: int, *, lr: float, clip_factor: float | None, after: Sequence[Any] = ()
    ) -> None:
        """Bring all buckets to version `step`; returns when they have it.

        Without a finite `clip_factor` the step is skipped, as in `OptimizerCore.update`. Weights
        are refreshed after the marks `after`. Buckets that hold `step` already are left alone.
        Raises `RunFailed` for a step that is not the next.
        """
        factor = clip_factor if clip_factor is not None and math.isfinite(clip_factor) else None
        for bucket in self.buckets:
            arena = self._arena[bucket.index]
            held = arena.version(bucket.index)
            if held == step:
                continue
            if held != step - 1:
                raise RunFailed(
                    f"step {step} was asked of bucket {bucket.index} in {arena.path}, which holds "
                    f"version {held}: a step is applied once and none is left out"
                )
            if factor is None:
                if self.in_place(bucket.index, held):
                    self._in_place[bucket.index] = step
                arena.advance(bucket.index, step)
                continue
            if not self._slots.free:
                self._land(step)
            self._launch(bucket, lr, factor, after)
        while self._flying:
            self._land(step)

    def in_place(self, bucket: int, version: int) -> bool:
        """Whether the model holds all weights of `version` of the bucket with this index, because
        this object put them there. To be asked when the bucket has that version."""
        return self._in_place.get(bucket) == version

    def start(self, step: int, *, lr: float, clip_factor: float | None) -> None:
        """`update` in a thread beside the caller, after what the current stream has to do so far.

        When it fails, whoever waits in this process for a version of these arenas gets the error.
        """
        self.join()
        after = (self._streams.now(),)
        self._thread = Thread(
            target=self._run, args=(step, lr, clip_factor, after), name="update", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for what `start` began, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, step: int, lr: float, clip_factor: float | None, after: tuple[Any, ...]) -> None:
        try:
            self.update(step, lr=lr, clip_factor=clip_factor, after=after)
        except BaseException as error:
            log.exception("the update of step %d failed", step)
            self._error = error
            for arena in set(self._arena.values()):
                arena.fail(error)

    def _launch(self, bucket: Bucket, lr: float, clip_factor: float, after: Sequence[Any]) -> None:
        arena, slot = self._arena[bucket.index], self._slots.free.pop(0)
        old, new = arena.frame(bucket.index), arena.begin_update(bucket.index)
        held, gradient = self._slots.frame(slot, bucket), arena.gradient(bucket.index)
        staged = self._slots.gradient(slot, gradient)
        coefficients = self._coefficients(bucket, arena, lr, clip_factor)
        rounded = None if held.weights is held.master else held.weights

        def arrive() -> None:
            _copy((*held.state, staged), (*old.state, gradient))

        def update() -> None:
            adamw_(*held.state, staged, rounded, coefficients)
            self._refresh(bucket, held.weights)

        def leave() -> None:
            _copy(new.state, held.state)
            if rounded is not None:
                _copy((new.weights,), (rounded,))

        arrived = self._streams.issue("in", arrive)
        updated = self._streams.issue("update", update, after=(*after, arrived))
        landed = self._streams.issue("out", leave, after=(updated,))
        self._flying.append(_Flight(bucket, slot, landed))

    def _land(self, step: int) -> None:
        flight = self._flying.popleft()
        self._streams.finish(flight.landed)
        # Before the version moves on: who waits for it asks then.
        if all(held.name in self.targets for held in flight.bucket.ranges):
            self._in_place[flight.bucket.index] = step
        self._arena[flight.bucket.index].commit_update(flight.bucket.index, step)
        self._slots.free.append(flight.slot)

    def _refresh(self, bucket: Bucket, weights: Tensor) -> None:
        offset = 0
        for held in bucket.ranges:
            target = self.targets.get(held.name)
            if target is not None:
                place = slice(held.start - target.start, held.stop - target.start)
                target.weights[place].copy_(weights[offset : offset + held.size])
            offset += held.size

    def _coefficients(
        self, bucket: Bucket, arena: Arena, lr: float, clip_factor: float
    ) -> Coefficients:
        settings = self.settings
        return Coefficients.of(
            updates=arena.updates(bucket.index) + 1,
            lr=lr,
            betas=settings.betas,
            eps=settings.eps,
            decay=settings.weight_decay if bucket.decay else 0.0,
            clip_factor=clip_factor,
        )


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
