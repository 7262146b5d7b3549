"""A run without Ray: the ranks of `run_ranks` train, rank 0 plays the controller and the optimizer.

The same trainer, arenas and optimizer core as in a real run, with the calls in the same order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Range, cut_buckets
from flatpeak.workers.optimizer import AdamW, OptimizerCore, clipping_factor
from flatpeak.workers.trainer import SlabRegion, StepResult, Trainer
from flatpeak.workers.weights import open_weights
from ranks import run_ranks


def tiny_spec(config: dict[str, Any], **sections: Any) -> Spec:
    """A job of three fp32 steps on the default corpus; keyword arguments replace whole keys."""
    base: dict[str, Any] = {
        "run": "tiny",
        "model": {"config": config},
        "train": {
            "steps": 5,
            "sequences_per_step": 4,
            "sequence_length": 32,
            "lr": 3e-3,
            "max_grad_norm": 0.5,
            "dtype": "float32",
        },
        "memory": {
            "dispatch": {"tokens_per_chunk": 24, "min_chunk": 1},
            "vocabulary": {"token_tile": 16},
            "optimizer": {"bucket_parameters": 3000},
        },
    }
    for name, section in sections.items():
        old = base.get(name)
        base[name] = old | section if isinstance(old, dict) else section
    return parse_spec(base)


@dataclass
class Outcome:
    results: list[StepResult] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """fp32 gradients of the first step, whole and flat, by canonical name."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """fp32 masters after the last step, whole and flat, by canonical name."""


def train_locally(spec: Spec, folder: Path, *, source: Any = None) -> Outcome:
    """Runs `spec` (degrees resolved) on as many processes as it has workers."""
    return run_ranks(spec.cluster.workers, _rank_main, spec, str(folder), source)[0]


def _rank_main(rank: int, spec: Spec, folder: str, source: Any) -> Outcome:
    trainer = Trainer(spec, rank=rank, device=torch.device("cpu"))
    if source is not None:
        trainer.open_samples = lambda: source
    shards: list[Any] = [None] * spec.cluster.workers
    dist.all_gather_object(shards, (trainer.build(), trainer.slab_bytes()))
    buckets = cut_buckets(
        [shard for own, _ in shards for shard in own],
        bucket_parameters=spec.memory.optimizer.bucket_parameters,
        actors_of_rank=lambda rank: [0],
    )
    slabs = [nbytes for _, nbytes in shards]
    path = str(Path(folder) / "local.arena")
    core = _make_core(spec, path, buckets, sum(slabs)) if rank == 0 else None
    dist.barrier()
    trainer.attach(buckets, {0: path}, SlabRegion(0, sum(slabs[:rank]), slabs[rank]))
    outcome = Outcome()
    for step in range(1, spec.train.steps + 1):
        outcome.results.append(trainer.step(step))
        dist.barrier()
        if core is not None:
            _update(core, spec, outcome)
        dist.barrier()
    if core is not None:
        outcome.parameters = _whole(core, "master")
        core.arena.unlink()
    return outcome


def _make_core(spec: Spec, path: str, buckets: Any, slab_bytes: int) -> OptimizerCore:
    arena = Arena.create(
        path,
        run=spec.run,
        buckets=buckets,
        spare_frames=spec.memory.optimizer.slots,
        slab_bytes=slab_bytes,
    )
    settings = AdamW(
        betas=spec.train.betas,
        eps=spec.train.eps,
        weight_decay=spec.train.weight_decay,
        lr_bias=spec.train.router_bias_update_rate,
    )
    core, weights = OptimizerCore(arena, settings), open_weights(spec)
    for bucket in buckets:
        for held in bucket.ranges:
            core.load(held, weights.read(held))
    core.commit_load(0)
    return core


def _update(core: OptimizerCore, spec: Spec, outcome: Outcome) -> None:
    result = outcome.results[-1]
    if result.step == 1:
        outcome.gradients = _whole(core, "gradient")
    factor = None
    if result.usable:
        factor = clipping_factor(result.grad_norm, spec.train.max_grad_norm)
    core.update(result.step, lr=lr(result.step, train=spec.train), clip_factor=factor)


def _whole(core: OptimizerCore, what: str) -> dict[str, Tensor]:
    """Every global parameter, put together from the ranges of all buckets."""
    pieces: dict[str, list[tuple[Range, Tensor]]] = {}
    for bucket in core.arena.buckets:
        values, offset = getattr(core.arena, what)(bucket.index), 0
        for held in bucket.ranges:
            pieces.setdefault(held.name, []).append((held, values[offset : offset + held.size]))
            offset += held.size
    return {
        name: torch.cat([v for _, v in sorted(held, key=lambda piece: piece[0].start)]).clone()
        for name, held in pieces.items()
    }
