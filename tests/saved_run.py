"""A run folder with snapshots that no cluster wrote: a tiny model, moved by random gradients."""

from pathlib import Path
from typing import Any

import torch

from flatpeak.controller.resume import snapshot_meta
from flatpeak.controller.runs import RunFolder
from flatpeak.controller.spec import Spec
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.checkpoint import build_meta_model, load_config
from flatpeak.workers.model import decays
from flatpeak.workers.optimizer import OptimizerCore
from flatpeak.workers.settings import adamw_of
from flatpeak.workers.snapshot import commit_manifest, snapshot_folder, write_snapshot_part
from flatpeak.workers.support import ROUTER_BIAS, trained_sizes
from flatpeak.workers.weights import open_weights

LR = 1e-2


def meta_model(spec: Spec) -> Any:
    return build_meta_model(load_config(path=spec.model.path, config=spec.model.config))


def gradient(step: int, name: str, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 1_000_003 + sum(name.encode()))
    return torch.randn(size, generator=generator)


class SavedRun:
    """The job's run folder as its driver makes it, and the state of one rank with one actor."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.model = spec, meta_model(spec)
        with RunFolder.create(spec) as self.folder:
            pass
        self.sizes = trained_sizes(self.model)
        dims = {name: tensor.dim() for name, tensor in self.model.state_dict().items()}
        shards = [
            Shard(
                Range(name, 0, size),
                0,
                "float32",
                decays(name, dims[name]),
                "bias" if name.endswith(ROUTER_BIAS) else "adamw",
            )
            for name, size in self.sizes.items()
        ]
        buckets = cut_buckets(shards, bucket_parameters=3000, arenas_of_rank=lambda rank: [0])
        path = self.folder.path / "saved.arena"
        self.arena = Arena.create(path, run=spec.run, buckets=buckets, spare_frames=1)
        self.arena.unlink()
        self.core = OptimizerCore([self.arena], adamw_of(spec))
        weights = open_weights(spec, self.model)
        for bucket in buckets:
            for held in bucket.ranges:
                self.core.load(held, weights.read(held))
        self.core.commit_load(0)

    def update(self) -> None:
        step = self.core.step + 1
        for bucket in self.arena.buckets:
            values = [
                gradient(step, r.name, self.sizes[r.name])[r.start : r.stop] for r in bucket.ranges
            ]
            self.arena.gradient(bucket.index).copy_(torch.cat(values))
        self.core.update(step, lr=LR, clip_factor=1.0)

    def save(self) -> Path:
        step = self.core.step
        folder = snapshot_folder(self.folder.path, step)
        part = write_snapshot_part(folder, self.arena, 0, step)
        meta = snapshot_meta(self.spec, self.sizes)
        commit_manifest(folder, step=step, parts=[part], meta=meta)
        return folder

    def state(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master and moments of a parameter, flat."""
        return self.core.read(Range(name, 0, self.sizes[name]))
