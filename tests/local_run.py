"""A run without Ray: the ranks of `run_ranks` train, rank 0 plays the controller and the optimizer.

The same trainer, arenas and optimizer core as in a real run, with the calls in the same order; and
beside it the yardsticks, each in one plain process.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flatpeak.controller.resume import parameter_sizes, snapshot_meta
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.workers.arena import Arena
from flatpeak.workers.batches import SampleSource
from flatpeak.workers.buckets import Range, cut_buckets
from flatpeak.workers.data import NO_TARGET, Sample
from flatpeak.workers.optimizer import OptimizerCore, clipping_factor
from flatpeak.workers.plain import PlainTrainer, plain_model
from flatpeak.workers.settings import adamw_of, samples_of
from flatpeak.workers.snapshot import (
    SnapshotReader,
    commit_manifest,
    restore,
    snapshot_folder,
    write_snapshot_part,
)
from flatpeak.workers.trainer import SlabRegion, StepResult, Trainer
from flatpeak.workers.update_split import assign_updates
from flatpeak.workers.weights import open_weights
from ranks import TIMEOUT_S, run_ranks
from tiny_models import tiny_content

VOCABULARY = 257
_STEP_TIMEOUT_S = 5.0


def tiny_spec(config: dict[str, Any], **sections: Any) -> Spec:
    """A job of five fp32 steps on the default corpus; keyword arguments replace whole keys."""
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


def job(
    family: str,
    layout: tuple[int, ...] = (1, 1, 1, 1),
    *,
    model: dict[str, Any] | None = None,
    **sections: Any,
) -> Spec:
    """The tiny model of a family on W ranks with the degrees D, E_p and P; `model` changes it."""
    W, D, E_p, P = layout
    changes: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    if family == "deepseek_v3":
        changes["num_key_value_heads"] = 4
    else:
        changes["output_router_logits"] = True  # asks for the auxiliary loss
    if family in ("qwen3_moe", "mixtral"):
        changes["head_dim"] = 8
    return tiny_spec(
        tiny_content(family, **(changes | (model or {}))),
        cluster={"workers": W},
        parallel={"sequence": D, "expert": E_p, "vocabulary": P},
        **sections,
    )


def make_sample(
    index: int, documents: list[int], *, vocab: int = VOCABULARY, ignored: bool = False
) -> Sample:
    """A row of documents of these lengths with random tokens, a function of `index`."""
    inputs = np.random.default_rng(index).integers(0, vocab, sum(documents))
    boundaries = tuple(int(x) for x in np.cumsum([0, *documents]))
    targets = np.append(inputs[1:], NO_TARGET)
    targets[np.array(boundaries[1:]) - 1] = NO_TARGET
    if ignored:
        targets[:] = NO_TARGET
    positions = np.concatenate([np.arange(n) for n in documents])
    return Sample(index, inputs, targets, positions, boundaries)


def packed(rows: list[Sample]) -> Sample:
    """The documents of several rows in one."""
    inputs, targets, positions = (
        np.concatenate([getattr(row, name) for row in rows])
        for name in ("inputs", "targets", "positions")
    )
    lengths = [int(n) for row in rows for n in np.diff(row.boundaries)]
    boundaries = tuple(int(x) for x in np.cumsum([0, *lengths]))
    return Sample(0, inputs, targets, positions, boundaries)


@dataclass(frozen=True)
class Rows:
    """A source written by hand; after its last row it starts again."""

    rows: list[Sample]

    def sample(self, index: int) -> Sample:
        return self.rows[index % len(self.rows)]


@dataclass
class Outcome:
    results: list[StepResult] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """fp32 gradients of the first step, whole and flat, by canonical name."""
    last_gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """fp32 masters after the last step, whole and flat, by canonical name."""
    moments: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    skipped_steps: int = 0

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def norms(self) -> list[float]:
        return [result.grad_norm for result in self.results]


def train_locally(
    spec: Spec,
    folder: Path,
    *,
    source: SampleSource | None = None,
    after: Outcome | Path | None = None,
) -> Outcome:
    """Runs `spec` (degrees resolved) on as many processes as it has workers.

    `after` is an earlier part of the run, or a snapshot of it, which this one continues to the last
    step.
    """
    ranks = spec.cluster.workers
    timeout_s = max(TIMEOUT_S, _STEP_TIMEOUT_S * spec.train.steps)
    args = (spec, str(folder), source, after)
    return run_ranks(ranks, _rank_main, *args, timeout_s=timeout_s)[0]


def _rank_main(
    rank: int, spec: Spec, folder: str, source: SampleSource | None, after: Outcome | Path | None
) -> Outcome:
    return LocalRun(rank, spec, folder, source=source, after=after).train()


class LocalRun:
    """One rank of a run. Rank 0 is its controller and its optimizer too."""

    def __init__(
        self,
        rank: int,
        spec: Spec,
        folder: str,
        *,
        source: SampleSource | None = None,
        after: Outcome | Path | None = None,
    ) -> None:
        # The trainer is to give FSDP2 no reason for it.
        warnings.filterwarnings("error", message="FSDP2-wrapped")
        self.spec, self.outcome = spec, Outcome()
        self.step = step_after(after)
        self.trainer = Trainer(spec, rank=rank, device=torch.device("cpu"))
        if source is not None:
            self.trainer.open_samples = lambda: source
        shards: list[Any] = [None] * spec.cluster.workers
        dist.all_gather_object(shards, (self.trainer.build(), self.trainer.slab_bytes()))
        buckets = cut_buckets(
            [shard for own, _ in shards for shard in own],
            bucket_parameters=spec.memory.optimizer.bucket_parameters,
            arenas_of_rank=lambda rank: [0],
        )
        if spec.memory.optimizer.update_on == "device":
            buckets = assign_updates(buckets, range(len(buckets)))
        slabs = [nbytes for _, nbytes in shards]
        path = str(Path(folder) / "local.arena")
        self.core = _make_core(spec, path, buckets, sum(slabs), after) if rank == 0 else None
        dist.barrier()
        self.trainer.attach(buckets, {0: path}, SlabRegion(0, sum(slabs[:rank]), slabs[rank]))

    def train(self) -> Outcome:
        """To the last step. Rank 0 returns what the optimizer holds; the others losses alone."""
        while self.step < self.spec.train.steps:
            self.train_step()
        return self.close()

    def train_step(self) -> StepResult:
        result = self.forward_and_backward()
        dist.barrier()
        self.apply()
        dist.barrier()
        return result

    def forward_and_backward(self) -> StepResult:
        self.step += 1
        result = self.trainer.step(self.step)
        self.outcome.results.append(result)
        return result

    def apply(self) -> None:
        """Updates the weights with the last step's gradients: on rank 0, and where ranks do so."""
        result, train, factor = self.outcome.results[-1], self.spec.train, None
        if result.usable:
            factor = clipping_factor(result.grad_norm, train.max_grad_norm)
        rate = lr(result.step, train=train)
        self.trainer.update(result.step, lr=rate, clip_factor=factor)
        if self.core is not None:
            _keep_gradients(self.core, self.outcome)
            self.core.update(result.step, lr=rate, clip_factor=factor)
            self.core.wait_for_workers(result.step, timeout_s=60)

    def save(self, run_folder: Path) -> None:
        """Writes a snapshot, on the rank that holds the state."""
        if self.core is None:
            return
        folder = snapshot_folder(run_folder, self.step)
        part = write_snapshot_part(folder, self.core.arenas[0], 0, self.step)
        held = (held for bucket in self.core.buckets for held in bucket.ranges)
        meta = snapshot_meta(self.spec, parameter_sizes(held))
        commit_manifest(folder, step=self.step, parts=[part], meta=meta)

    def close(self) -> Outcome:
        if self.core is not None:
            self.outcome.parameters = _whole(self.core, "master")
            self.outcome.moments = _whole(self.core, "exp_avg"), _whole(self.core, "exp_avg_sq")
            self.outcome.skipped_steps = self.core.counters.skipped_steps
            self.core.arenas[0].unlink()
        return self.outcome


def _make_core(
    spec: Spec, path: str, buckets: Any, slab_bytes: int, after: Outcome | Path | None
) -> OptimizerCore:
    arena = Arena.create(
        path,
        run=spec.run,
        buckets=buckets,
        spare_frames=spec.memory.optimizer.slots,
        slab_bytes=slab_bytes,
    )
    core = OptimizerCore([arena], adamw_of(spec))
    if isinstance(after, Path):
        with SnapshotReader(after) as reader:
            restore(core, reader)
        return core
    weights = open_weights(spec)
    for held in (held for bucket in buckets for held in bucket.ranges):
        if after is None:
            core.load(held, weights.read(held))
        else:
            part = slice(held.start, held.stop)
            state = (after.parameters, *after.moments)
            core.load(held, *(values[held.name][part] for values in state))
    core.commit_load(step_after(after))
    return core


def step_after(part: Outcome | Path | None) -> int:
    """The last step of an earlier part of a run."""
    if isinstance(part, Path):
        with SnapshotReader(part) as reader:
            return reader.step
    return part.results[-1].step if part else 0


def _keep_gradients(core: OptimizerCore, outcome: Outcome) -> None:
    outcome.last_gradients = _whole(core, "gradient")
    outcome.gradients = outcome.gradients or outcome.last_gradients


def _whole(core: OptimizerCore, what: str) -> dict[str, Tensor]:
    """Every global parameter, put together from the ranges of all buckets."""
    pieces: dict[str, list[tuple[Range, Tensor]]] = {}
    for bucket in core.arenas[0].buckets:
        values, offset = getattr(core.arenas[0], what)(bucket.index), 0
        for held in bucket.ranges:
            pieces.setdefault(held.name, []).append((held, values[offset : offset + held.size]))
            offset += held.size
    return {
        name: torch.cat([v for _, v in sorted(held, key=lambda piece: piece[0].start)]).clone()
        for name, held in pieces.items()
    }


def holds_state_of(snapshot: Path, outcome: Outcome) -> bool:
    """Whether masters and moments of the snapshot are those after the last step, to the bit."""
    with SnapshotReader(snapshot) as reader:
        return all(
            torch.equal(found, wanted)
            for name, master in outcome.parameters.items()
            for found, wanted in zip(
                reader.read(Range(name, 0, master.numel())),
                (master, *(moment[name] for moment in outcome.moments)),
                strict=True,
            )
        )


@dataclass
class Reference:
    """What one plain process finds; tensors are flat, by canonical name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train_plainly(
    spec: Spec,
    *,
    source: SampleSource | None = None,
    prepare: Callable[[PlainTrainer], None] = lambda plain: None,
    after_backward: Callable[[PlainTrainer], None] = lambda plain: None,
) -> Reference:
    """The plain trainer on the same job, seen at its start and before each update."""
    train = spec.train
    plain = PlainTrainer(spec, source if source is not None else samples_of(spec))
    prepare(plain)
    found, backward = Reference(), plain.backward

    def observed(step: int) -> float:
        loss = backward(step)
        found.gradients = found.gradients or flat_gradients(plain.model)
        after_backward(plain)
        return loss

    plain.backward = observed
    for step in range(1, train.steps + 1):
        loss, norm = plain.step(step, lr(step, train=train))
        found.losses.append(loss)
        found.norms.append(norm)
    found.parameters = {n: p.detach().flatten() for n, p in plain.model.named_parameters()}
    return found


def documents_alone(spec: Spec, samples: list[Sample]) -> Reference:
    """Loss and gradients with each document in a forward pass of its own: nothing can leak."""
    model: Any = plain_model(spec)
    targets = sum(int((sample.targets != NO_TARGET).sum()) for sample in samples)
    total = torch.zeros(())
    for sample in samples:
        for start, stop in zip(sample.boundaries, sample.boundaries[1:], strict=False):
            logits = model(
                torch.from_numpy(sample.inputs[None, start:stop]), use_cache=False
            ).logits
            wanted = torch.from_numpy(sample.targets[start:stop])
            loss = F.cross_entropy(
                logits[0],
                wanted,
                ignore_index=NO_TARGET,
                reduction="sum",
                label_smoothing=spec.train.label_smoothing,
            )
            squares = logits[0].logsumexp(1)[wanted != NO_TARGET].square()
            total = total + (loss + spec.train.z_loss * squares.sum()) / targets
    total.backward()
    return Reference(losses=[total.item()], gradients=flat_gradients(model))


def flat_gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone()
        for name, p in model.named_parameters()
    }


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by parameter."""
    return {
        name: ((found[name] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for name, value in wanted.items()
    }


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(relative(found, wanted).values())
