"""A snapshot of a run as a Hugging Face model, and its optimizer state for those who leave.

Masters are read tensor by tensor through the snapshot's memory maps: a run may go on meanwhile.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from flatpeak.controller.resume import check_parameters
from flatpeak.controller.runs import RunFolder
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec, TrainSpec
from flatpeak.controller.spec_file import load_spec
from flatpeak.workers import checkpoint
from flatpeak.workers.buckets import Range
from flatpeak.workers.errors import CheckpointError, InputError
from flatpeak.workers.model import decays
from flatpeak.workers.snapshot import SnapshotReader, find_latest, saved_steps, snapshot_folder
from flatpeak.workers.support import ROUTER_BIAS, trained_sizes

_STATE = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Exported:
    run: str
    step: int
    folder: str
    dtype: str
    parameters: int
    skipped: tuple[str, ...]
    """Why newer snapshots were left out."""


def export_run(
    folder: RunFolder,
    target: Path,
    *,
    step: int | None = None,
    dtype: str = "train",
    optimizer_state: bool = False,
) -> Exported:
    """Write the run's snapshot of `step` (its newest whole one) to `target`, which appears whole
    or not at all.

    The weights are masters rounded to `dtype`, "train" being what the run trains in; what the
    family keeps in fp32 stays so. With `optimizer_state` fp32 masters and moments are beside them
    in `optimizer*.safetensors`, and what an AdamW goes on with in `optimizer.json`.

    Raises CheckpointError when there is no such snapshot, or it is damaged or not of the model that
    the run's spec names; InputError when `target` holds something or cannot be written.
    """
    snapshots = (folder.path / "snapshots").resolve()
    if snapshots in (target.resolve(), *target.resolve().parents):
        raise InputError(f"{target} is among the run's snapshots, which it removes; choose another")
    spec = load_spec(folder.path / "spec.yaml")
    snapshot, skipped = _snapshot(folder, step)
    model = checkpoint.build_meta_model(
        checkpoint.load_config(path=spec.model.path, config=spec.model.config)
    )
    chosen: torch.dtype = getattr(torch, spec.train.dtype if dtype == "train" else dtype)
    with SnapshotReader(snapshot, verify=step is not None) as reader:  # else it was verified
        sizes = trained_sizes(model)
        check_parameters(reader, sizes)

        def write_state(partial: Path) -> None:
            if optimizer_state:
                checkpoint.write_safetensors(partial, "optimizer", _state(reader, model))
                text = json.dumps(_settings(spec, reader, model), indent=2)
                (partial / "optimizer.json").write_text(text + "\n")

        try:
            checkpoint.export_checkpoint(
                target,
                model.config,
                _weights(reader, model, chosen),
                tokenizer_dir=None if spec.data.tokenizer == "bytes" else spec.data.tokenizer,
                beside=write_state,
            )
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write {target}: {error}; nothing of it is left") from None
        return Exported(
            run=spec.run,
            step=reader.step,
            folder=str(target),
            dtype=str(chosen).removeprefix("torch."),
            parameters=sum(sizes.values()),
            skipped=skipped,
        )


def _snapshot(folder: RunFolder, step: int | None) -> tuple[Path, tuple[str, ...]]:
    if step is None:
        latest, skipped = find_latest(folder.path, verify=True)
        if latest is None:
            reasons = "; ".join(skipped) or "it has written none yet"
            raise CheckpointError(f"{folder.path} has no whole snapshot: {reasons}")
        return latest, skipped
    found = snapshot_folder(folder.path, step)
    if not found.is_dir():
        steps = ", ".join(map(str, saved_steps(folder.path))) or "none"
        raise CheckpointError(f"{folder.path} has no snapshot of step {step}; it has: {steps}")
    return found, ()


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Of all that is trained, by canonical name."""
    tensors = model.state_dict()
    return {name: tensors[name].shape for name in trained_sizes(model)}


def _whole(reader: SnapshotReader, column: str, name: str, shape: torch.Size) -> Tensor:
    return reader.read_one(column, Range(name, 0, shape.numel())).view(shape)


def _weights(
    reader: SnapshotReader, model: PreTrainedModel, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    precise = checkpoint.kept_in_fp32(model, dtype)
    for name, shape in _shapes(model).items():
        kept = torch.float32 if name in precise else dtype
        yield name, _whole(reader, "master", name, shape).to(kept)


def _state(reader: SnapshotReader, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, shape in _shapes(model).items():
        for column in _STATE:
            yield f"{name}.{column}", _whole(reader, column, name, shape)


def _settings(spec: Spec, reader: SnapshotReader, model: PreTrainedModel) -> Mapping[str, Any]:
    """What AdamW needs beside the tensors; of the settings, those that wrote the snapshot."""
    train = TrainSpec.model_validate(reader.meta["train"])
    shapes = _shapes(model)
    return {
        "run": spec.run,
        "step": reader.step,
        "updates": reader.updates,  # enters the bias correction: steps less skipped ones
        "optimizer": "AdamW",
        "lr": lr(max(reader.step, 1), train=train),
        "betas": train.betas,
        "eps": train.eps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "schedule": {"lr": train.lr, "steps": train.steps} | train.schedule.model_dump(),
        "decayed": [name for name, shape in shapes.items() if decays(name, len(shape))],
        # Moved by router_bias_update_rate, not by AdamW: their moments are zero.
        "router_biases": [name for name in shapes if name.endswith(ROUTER_BIAS)],
        "router_bias_update_rate": train.router_bias_update_rate,
    }
