"""State that is moved from arenas of one cut into arenas of another, in memory.

A `StateSource` holds the old arenas of one node; whoever fills new ones reads through a
`StateReader`, which takes each element where it lies: mapped on the own node, asked for on others.
Elements are addressed by the global flat index, so the two cuts need not have anything in common.
The old arenas stay as they are until the new ones are whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, BucketIndex, Range
from flatpeak.workers.errors import RunFailed
from flatpeak.workers.host_memory import node_path
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.snapshot import SnapshotPart, write_snapshot_part

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Held:
    """What a source has: the ranges of each bucket, all at version `step` after `updates`
    updates."""

    ranges: tuple[tuple[Range, ...], ...]
    step: int
    updates: int


class StateSource:
    """The arenas at `paths`, of `run`. With `timeout_s` it waits until whoever wrote to them is
    gone, and owns them; without, it only reads them."""

    def __init__(
        self, run: str, paths: Sequence[str | Path], settings: AdamW, *, timeout_s: float | None
    ) -> None:
        self._arenas = [Arena.attach(node_path(str(path)), run=run) for path in paths]
        if timeout_s is not None:
            for arena in self._arenas:
                for rank in {None, *(bucket.updater for bucket in arena.buckets)}:
                    arena.own(rank=rank, timeout_s=timeout_s)
        # What the workers' devices update as well: they are gone.
        self._core = OptimizerCore(self._arenas, settings, alone=True)

    def versions(self) -> list[int]:
        return sorted(set(map(self._core.version, self._core.buckets)))

    def finish(self, step: int, lr: float, clip_factor: float | None) -> Held:
        """Brings all buckets to `step`, which was asked of their owners, whatever they did of
        it."""
        self._core.finish(step, lr=lr, clip_factor=clip_factor)
        ranges = tuple(bucket.ranges for bucket in self._core.buckets)
        return Held(ranges, self._core.step, self._core.updates)

    def read(self, held: Range) -> Arrays:
        """Master and both moments of elements `held`, fp32, each [held.size]: a copy."""
        master, exp_avg, exp_avg_sq = (values.numpy() for values in self._core.read(held))
        return master, exp_avg, exp_avg_sq

    def snapshot(self, folder: str, step: int) -> list[SnapshotPart]:
        """Writes each arena, all of whose buckets are at `step`; raises SnapshotFailed."""
        return [
            write_snapshot_part(folder, arena, number, step)
            for number, arena in enumerate(self._arenas)
        ]

    def remove(self, mirrors: Sequence[str | Path] = ()) -> None:
        """Their memory goes with the last process that maps them. Those of `mirrors`, too, that are
        on this node: they are like other arenas, and nobody reads them."""
        for arena in self._arenas:
            arena.unlink()
        for path in mirrors:
            node_path(str(path)).unlink(missing_ok=True)

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


class StateReader:
    """All of the state, as `snapshot.restore` wants it: `fetch` reads from the source of a
    number."""

    def __init__(self, sources: Sequence[Held], fetch: Callable[[int, Range], Arrays]) -> None:
        states = {(held.step, held.updates) for held in sources if held.ranges}
        if len(states) != 1:
            raise RunFailed(f"the arenas are at different (step, updates): {sorted(states)}")
        self.step, self.updates = states.pop()
        self._fetch = fetch
        self._index = BucketIndex(
            Bucket(number, 0, number, ranges, "float32", True, "adamw")
            for number, held in enumerate(sources)
            for ranges in held.ranges
        )

    def read(self, held: Range) -> tuple[Tensor, Tensor, Tensor]:
        """Master, exp_avg and exp_avg_sq of elements `held`: each [held.size], fp32."""
        whole = np.empty((3, held.size), np.float32)
        for piece in self._index.pieces(held.name, held.start, held.stop):
            part = Range(held.name, piece.start, piece.stop)
            place = slice(part.start - held.start, part.stop - held.start)
            for out, values in zip(whole, self._fetch(piece.bucket.arena, part), strict=True):
                out[place] = values
        master, exp_avg, exp_avg_sq = torch.from_numpy(whole)
        return master, exp_avg, exp_avg_sq
