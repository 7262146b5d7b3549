"""Snapshots of arenas on disk, addressed by the global flat index: any layout reads any other's.

A snapshot is a folder `snapshots/step-N` of a run: one Arrow IPC file an arena, and manifest.json.
A file has one record batch a bucket, one row a range; the columns of state are the frame's bytes,
written from the arena without a copy. The manifest comes last, by an atomic rename, and lists the
files that count with the checksums of all their bytes: a folder without one is no snapshot, and
writing a step again leaves the old one whole until the new manifest replaces it.

Every snapshot has all of the state: AdamW changes every moment in every step, also those of experts
without a gradient, so no bucket could be a link to that of an older snapshot.
"""

import mmap
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, BucketIndex, Range
from flatpeak.workers.errors import CheckpointError, RunFailed, SnapshotFailed, UnknownFormat
from flatpeak.workers.optimizer import OptimizerCore
from flatpeak.workers.snapshot_files import (
    FORMAT,
    MANIFEST,
    Block,
    BlockFile,
    check_blocks,
    check_size,
    damaged,
    read_manifest,
    write_manifest,
)

_STATE = ("master", "exp_avg", "exp_avg_sq")
_SCHEMA = pa.schema(
    [("name", pa.utf8()), ("start", pa.int64()), ("stop", pa.int64())]
    + [(column, pa.large_binary()) for column in _STATE]
)
# Files that are verified at once: more than one, since a checksum is the work of one core.
_VERIFIERS = 8


@dataclass(frozen=True)
class SnapshotPart:
    """Of one arena: a file of `nbytes` in the snapshot's folder, with all its state at version
    `step` after `updates` updates (None when the arena has no bucket). Block n of the file has
    record batch n; the last one has Arrow's footer."""

    file: str
    nbytes: int
    step: int
    updates: int | None
    blocks: tuple[Block, ...]


def snapshot_folder(run_folder: str | Path, step: int) -> Path:
    return Path(run_folder) / "snapshots" / f"step-{step}"


def write_snapshot_part(folder: str | Path, arena: Arena, number: int, step: int) -> SnapshotPart:
    """Write the state of the arena of this number as of `step` into `folder`, and make it durable.

    May run beside gradients and weights of the next step, but not beside its update: raises
    `RunFailed` when a bucket is not, or does not stay, at version `step`. Takes no memory beyond
    the arena itself, and of the page cache SYNC_BYTES and a bucket. The part counts once
    `commit_manifest` lists it. Raises `SnapshotFailed` when the disk does not take it.
    """
    path = Path(folder) / f"arena-{number}-{secrets.token_hex(4)}.arrow"
    updates: set[int] = set()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with BlockFile(path) as file:
            with pa.ipc.new_file(file, _SCHEMA) as writer:
                for bucket in arena.buckets:
                    _check_version(arena, bucket, step)
                    updates.add(arena.updates(bucket.index))
                    writer.write_batch(_batch(arena, bucket))
                    # Unchanged now means unchanged all along: the frame was this version's.
                    _check_version(arena, bucket, step)
                    file.end_block()
            file.end_block()
    except OSError as error:
        raise SnapshotFailed(f"{path} could not be written: {error.strerror or error}") from None
    assert len(updates) <= 1, f"buckets of {arena.path} have seen {sorted(updates)} updates"
    return SnapshotPart(path.name, file.nbytes, step, next(iter(updates), None), tuple(file.blocks))


def commit_manifest(
    folder: str | Path, *, step: int, parts: Sequence[SnapshotPart], meta: Mapping[str, Any]
) -> Path:
    """Turn the `parts` in `folder` into a snapshot, and drop what else lies there.

    `meta` is any JSON the run wants back. Raises `CheckpointError` for parts that are missing, of
    another size or of different steps, `SnapshotFailed` when the disk does not take the manifest,
    and then commits nothing.
    """
    folder = Path(folder)
    for part in parts:
        check_size(folder / part.file, part.nbytes)
    states = {(part.step, part.updates) for part in parts if part.updates is not None}
    if len(states) > 1 or any(part.step != step for part in parts):
        raise CheckpointError(
            f"the parts of {folder} do not belong to step {step} alone: "
            f"(step, updates) {sorted(states)}"
        )
    content = {
        "format": FORMAT,
        "step": step,
        "updates": next(iter(states), (step, step))[1],
        "parts": [asdict(part) for part in parts],
        "meta": dict(meta),
    }
    try:
        path = write_manifest(folder, content)
    except OSError as error:
        raise SnapshotFailed(f"{folder} could not be completed: {error.strerror}") from None
    for other in set(folder.glob("*.arrow")) - {folder / part.file for part in parts}:
        other.unlink()
    return path


def discard_parts(folder: str | Path, parts: Sequence[SnapshotPart]) -> None:
    """Remove `parts` that will not be committed, and the folder if nothing else is in it.

    As far as the disk lets: without a manifest that lists them they count for nothing.
    """
    folder = Path(folder)
    with suppress(OSError):
        for part in parts:
            (folder / part.file).unlink(missing_ok=True)
        folder.rmdir()  # an error where something is in it


class Latest(NamedTuple):
    folder: Path | None
    skipped: tuple[str, ...]
    """Of each newer snapshot that cannot be used, which one and why."""


def find_latest(run_folder: str | Path, *, verify: bool = False) -> Latest:
    """The newest snapshot of a run that is complete, if there is one.

    Newer ones that are incomplete or damaged are skipped. Sizes and the structure of all files are
    checked; with `verify` every byte is. Raises UnknownFormat for one of another version.
    """
    skipped = []
    for _, folder in sorted(_folders(run_folder), reverse=True):
        try:
            SnapshotReader(folder, verify=verify).close()
        except UnknownFormat:
            raise
        except CheckpointError as error:
            skipped.append(f"{folder.name} is left out: {error}")
        else:
            return Latest(folder, tuple(skipped))
    return Latest(None, tuple(skipped))


def saved_steps(run_folder: str | Path) -> list[int]:
    """Of the snapshots that are complete, as far as their sizes tell."""
    return sorted(step for step, folder in _folders(run_folder) if _is_whole(folder))


def _is_whole(folder: Path) -> bool:
    try:
        for part in read_manifest(folder)["parts"]:
            check_size(folder / part["file"], part["nbytes"])
    except UnknownFormat:
        return True  # not for this version to remove
    except CheckpointError:
        return False
    return True


def keep_last(run_folder: str | Path, n: int, *, every: int = 0) -> list[Path]:
    """Remove all but the newest `n` (at least 1) complete snapshots; returns what was removed.

    Of the others, those of steps that `every` divides stay. Incomplete ones that are older than
    the newest `n` go too; a newer one may be in the making and stays.
    """
    assert n >= 1, f"keep {n} snapshots"
    whole = saved_steps(run_folder)
    if not whole:
        return []
    oldest = whole[-n:][0]
    kept = {step for step in whole if every and step % every == 0}
    removed = [
        folder
        for step, folder in sorted(_folders(run_folder), reverse=True)
        if step < oldest and step not in kept
    ]
    for folder in removed:
        # The manifest first: what is left of a removal that is cut off is no snapshot.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return removed


class Reader(Protocol):
    """Where state comes from: a snapshot, or arenas of another cut."""

    step: int
    updates: int

    def read(self, held: Range, /) -> tuple[Tensor, Tensor, Tensor]: ...


def restore(core: OptimizerCore, reader: Reader) -> None:
    """Load and commit all state of `core`, whatever layout wrote it."""
    for bucket in core.buckets:
        for held in bucket.ranges:
            core.load(held, *reader.read(held))
    core.commit_load(reader.step, updates=reader.updates)


class _PartReader:
    """A mapped file of a snapshot; its bytes are checked before anything is made of them."""

    def __init__(self, path: Path, part: Mapping[str, Any]) -> None:
        check_size(path, part["nbytes"])
        self.path, self._blocks = path, part["blocks"]
        try:
            with open(path, "rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise damaged(path, str(error)) from None
        self._checked: set[int] = set()

    def verify(self) -> None:
        check_blocks(self.path, memoryview(self._content), self._blocks, range(len(self._blocks)))
        self._checked.update(range(len(self._blocks)))

    def open(self) -> list[tuple[Range, ...]]:
        """The ranges of each batch."""
        try:
            self._reader = pa.ipc.open_file(pa.py_buffer(self._content))
            if self._reader.schema != _SCHEMA:
                raise damaged(self.path, f"its columns are {self._reader.schema.names}")
            batches = [self._reader.get_batch(n) for n in range(self._reader.num_record_batches)]
            for batch in batches:
                batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.path, str(error)) from None
        return [_ranges(batch) for batch in batches]

    def state(self, number: int, column: str) -> np.ndarray:
        """fp32 elements of a batch, not a copy."""
        if number not in self._checked:
            which = range(number, number + 1)
            check_blocks(self.path, memoryview(self._content), self._blocks, which)
            self._checked.add(number)
        return np.frombuffer(self._reader.get_batch(number).column(column).buffers()[2], np.float32)


class SnapshotReader:
    """Random access to a snapshot through memory maps; close it, or use it as a context.

    Raises `CheckpointError`, naming the file, for whatever is missing or damaged: structure at
    once, contents when they are first read, or all of them at once with `verify`.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        self.step: int = manifest["step"]
        self.updates: int = manifest["updates"]
        self.meta: dict[str, Any] = manifest["meta"]
        parts = [_PartReader(self.folder / part["file"], part) for part in manifest["parts"]]
        if verify:
            with ThreadPoolExecutor(_VERIFIERS) as pool:
                list(pool.map(_PartReader.verify, parts))
        self._batches: list[tuple[_PartReader, int]] = []
        buckets: list[Bucket] = []
        for part in parts:
            for number, ranges in enumerate(part.open()):
                # Each batch is laid out as the bucket it came from, so a bucket index finds in it.
                buckets.append(Bucket(len(buckets), 0, 0, ranges, "float32", True, "adamw"))
                self._batches.append((part, number))
        self._buckets = buckets
        self._index = BucketIndex(buckets)

    def ranges(self) -> Iterable[Range]:
        """All ranges that the snapshot holds, as they were cut when it was written."""
        return [held for bucket in self._buckets for held in bucket.ranges]

    def read(self, held: Range) -> tuple[Tensor, Tensor, Tensor]:
        """Master, exp_avg and exp_avg_sq of elements `held`: each [held.size], fp32, a copy."""
        master, exp_avg, exp_avg_sq = (self.read_one(column, held) for column in _STATE)
        return master, exp_avg, exp_avg_sq

    def read_one(self, column: str, held: Range) -> Tensor:
        """Of "master", "exp_avg" or "exp_avg_sq", elements `held`: [held.size], fp32, a copy."""
        found = np.empty(held.size, np.float32)
        for piece in self._find(held):
            part, number = self._batches[piece.bucket.index]
            size = piece.stop - piece.start
            values = part.state(number, column)[piece.offset : piece.offset + size]
            found[piece.start - held.start : piece.stop - held.start] = values
        return torch.from_numpy(found)

    def close(self) -> None:
        self._batches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, held: Range) -> Any:
        try:
            return self._index.pieces(held.name, held.start, held.stop)
        except LookupError as error:
            raise CheckpointError(f"snapshot {self.folder} is not of this model: {error}") from None


def _batch(arena: Arena, bucket: Bucket) -> pa.RecordBatch:
    """The bucket's current frame as a record batch over the arena's own memory."""
    ends = np.cumsum([0] + [4 * held.size for held in bucket.ranges])
    columns = [
        pa.array([held.name for held in bucket.ranges], pa.utf8()),
        pa.array([held.start for held in bucket.ranges], pa.int64()),
        pa.array([held.stop for held in bucket.ranges], pa.int64()),
    ]
    for values in arena.frame(bucket.index).state:
        buffers = [None, pa.py_buffer(ends.astype(np.int64)), pa.py_buffer(values.numpy())]
        columns.append(pa.Array.from_buffers(pa.large_binary(), len(bucket.ranges), buffers))
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _ranges(batch: pa.RecordBatch) -> tuple[Range, ...]:
    rows = zip(*(batch.column(column).to_pylist() for column in range(3)), strict=True)
    return tuple(Range(*row) for row in rows)


def _check_version(arena: Arena, bucket: Bucket, step: int) -> None:
    held = arena.version(bucket.index)
    if held != step:
        raise RunFailed(
            f"the snapshot of step {step} found bucket {bucket.index} of {arena.path} at version "
            f"{held}: an update must wait until the snapshot is written"
        )


def _folders(run_folder: str | Path) -> list[tuple[int, Path]]:
    found = Path(run_folder).glob("snapshots/step-*")
    return [
        (int(match[1]), folder)
        for folder in found
        if (match := re.fullmatch(r"step-(\d+)", folder.name)) and folder.is_dir()
    ]
