"""What a resumed run goes on from, and whether it may: the same model, samples and order."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec, TrainSpec
from flatpeak.workers.buckets import Range
from flatpeak.workers.errors import CheckpointError, SpecError
from flatpeak.workers.snapshot import SnapshotReader, find_latest

# Samples are addressed by step x sequences_per_step in an order that these settings define.
_SAME = {
    "train": ("sequences_per_step", "sequence_length", "seed"),
    "data": ("source", "tokenizer", "text_column", "tokens_column"),
}


class Resume(NamedTuple):
    """What a run goes on from, and what its user should know of that."""

    snapshot: Path
    warnings: tuple[str, ...]


def snapshot_meta(spec: Spec, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a snapshot says of its run; `sizes` are the elements of every parameter."""
    data = {name: getattr(spec.data, name) for name in _SAME["data"]}
    train = spec.train.model_dump(mode="json")
    return {"run": spec.run, "parameters": dict(sizes), "train": train, "data": data}


def snapshot_to_resume(spec: Spec, folder: Path) -> Resume | None:
    """The newest whole snapshot in the run folder, all of whose bytes are as they were written;
    None when a resumed run starts afresh.

    Raises CheckpointError when there are only damaged ones or one of another version, SpecError
    when the job would read other samples than the run it goes on with, or has no step left to do.
    """
    if not spec.resume:
        return None
    snapshot, skipped = find_latest(folder, verify=True)
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
        return Resume(snapshot, (*skipped, *_other_rates(spec.train, reader)))


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


def _other_rates(train: TrainSpec, reader: SnapshotReader) -> Iterator[str]:
    """Says so where the learning rate does not go on as it would have."""
    try:
        before = TrainSpec.model_validate(reader.meta["train"])
    except (KeyError, ValidationError):  # another version's settings
        return
    if _course(before) == _course(train):
        return
    coming = range(reader.step + 1, train.steps + 1)
    first = next((n for n in coming if lr(n, train=before) != lr(n, train=train)), None)
    if first is not None:
        yield (
            f"the learning rate of step {first} is {lr(first, train=train):.4g}, where the run "
            f"that wrote {reader.folder.name} had {lr(first, train=before):.4g}: train.lr or "
            "train.schedule is another, or train.steps, which is where the decay ends by itself; "
            f"--set train.schedule.decay_steps={_decay_end(before)} keeps the end of before"
        )


def _course(train: TrainSpec) -> tuple[Any, ...]:
    """What the learning rate follows from."""
    schedule = train.schedule
    end = None if schedule.decay == "constant" else _decay_end(train)
    return train.lr, schedule.warmup_steps, schedule.decay, schedule.min_lr_ratio, end


def _decay_end(train: TrainSpec) -> int:
    return train.schedule.decay_steps or train.steps
