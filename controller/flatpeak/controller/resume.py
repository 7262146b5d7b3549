"""What a resumed run goes on from, and whether it may: the same model, samples and order."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flatpeak.controller.spec import Spec
from flatpeak.workers.buckets import Range
from flatpeak.workers.errors import CheckpointError, SpecError
from flatpeak.workers.snapshot import SnapshotReader, find_latest

# Samples are addressed by step x sequences_per_step in an order that these settings define.
_SAME = {
    "train": ("sequences_per_step", "sequence_length", "seed"),
    "data": ("source", "tokenizer", "text_column", "tokens_column"),
}


def snapshot_meta(spec: Spec, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a snapshot says of its run; `sizes` are the elements of every parameter."""
    meta: dict[str, Any] = {"run": spec.run, "parameters": dict(sizes)}
    for section, names in _SAME.items():
        values = getattr(spec, section)
        meta[section] = {name: getattr(values, name) for name in names}
    return meta


def snapshot_to_resume(spec: Spec, folder: Path) -> Path | None:
    """The newest whole snapshot in the run folder; None when a resumed run starts afresh.

    Raises CheckpointError when there are only damaged ones, SpecError when the job would read other
    samples than the run it goes on with, or has no step left to do.
    """
    if not spec.resume:
        return None
    snapshot = find_latest(folder, verify=True)
    if snapshot is None:
        damaged = sorted(path.parent.name for path in folder.glob("snapshots/*/manifest.json"))
        if damaged:
            raise CheckpointError(
                f"every snapshot in {folder / 'snapshots'} is damaged ({', '.join(damaged)}); "
                "restore one from a copy, or start afresh under another run name"
            )
        return None
    with SnapshotReader(snapshot) as reader:
        _check_samples(spec, reader)
        if reader.step >= spec.train.steps:
            raise SpecError(
                f"run {spec.run} has done {reader.step} steps and train.steps = "
                f"{spec.train.steps}: nothing is left to do; set train.steps above {reader.step}, "
                f"like --set train.steps={2 * reader.step}"
            )
    return snapshot


def check_parameters(reader: SnapshotReader, sizes: Mapping[str, int]) -> None:
    """Raises CheckpointError when the snapshot is of a model with other parameters."""
    held = parameter_sizes(reader.ranges())
    names = held.keys() | sizes.keys()
    if differing := sorted(name for name in names if held.get(name) != sizes.get(name)):
        first = differing[0]
        raise CheckpointError(
            f"{reader.folder} is a snapshot of another model: {len(differing)} parameters differ, "
            f"like {first} with {held.get(first, 0)} elements there and {sizes.get(first, 0)} "
            "here; give the run its old model, or start afresh under another run name"
        )


def parameter_sizes(ranges: Iterable[Range]) -> dict[str, int]:
    """Elements of every parameter that `ranges` make up."""
    sizes: dict[str, int] = {}
    for held in ranges:
        sizes[held.name] = sizes.get(held.name, 0) + held.size
    return sizes


def _check_samples(spec: Spec, reader: SnapshotReader) -> None:
    for section, names in _SAME.items():
        before, now = reader.meta.get(section, {}), getattr(spec, section)
        for name in names:
            value = getattr(now, name)
            if name in before and before[name] != value:
                raise SpecError(
                    f"{section}.{name} = {value}, but the run was at {before[name]} when it wrote "
                    f"{reader.folder.name}: samples would be repeated or left out; set it back to "
                    f"{before[name]}, or start afresh under another run name"
                )
