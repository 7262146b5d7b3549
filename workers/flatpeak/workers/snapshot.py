"""Snapshots of arenas on disk, addressed by the global flat index: any layout reads any other's.

A snapshot is a folder `snapshots/step-N` of a run: one Arrow IPC file an arena, and manifest.json.
A file has one record batch a bucket, one row a range; the columns of state are the frame's bytes,
written from the arena without a copy, and the batch carries a checksum. The manifest comes last,
by an atomic rename, and lists the files that count: a folder without one is no snapshot, and
writing a step again leaves the old one whole until the new manifest replaces it.
"""

import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, BucketIndex, Range
from flatpeak.workers.errors import CheckpointError, RunFailed
from flatpeak.workers.optimizer import OptimizerCore

_MANIFEST = "manifest.json"
_FORMAT = 1
_STATE = ("master", "exp_avg", "exp_avg_sq")
_SCHEMA = pa.schema(
    [("name", pa.utf8()), ("start", pa.int64()), ("stop", pa.int64())]
    + [(column, pa.large_binary()) for column in _STATE]
)
_log = logging.getLogger(__name__)
# Where nobody has set up logging (the driver's terminal), a skipped snapshot is no line on stderr;
# the controller's log has it.
_log.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class SnapshotPart:
    """Of one arena: a file of `nbytes` in the snapshot's folder, with all its state at version
    `step` after `updates` updates (None when the arena has no bucket)."""

    file: str
    nbytes: int
    step: int
    updates: int | None


def snapshot_folder(run_folder: str | Path, step: int) -> Path:
    return Path(run_folder) / "snapshots" / f"step-{step}"


def write_snapshot_part(folder: str | Path, arena: Arena, number: int, step: int) -> SnapshotPart:
    """Write the state of the arena of this number as of `step` into `folder`, and make it durable.

    May run beside gradients and weights of the next step, but not beside its update: raises
    `RunFailed` when a bucket is not, or does not stay, at version `step`. Takes no memory beyond
    the arena itself. The part counts once `commit_manifest` lists it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"arena-{number}-{secrets.token_hex(4)}.arrow"
    updates: set[int] = set()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for bucket in arena.buckets:
            _check_version(arena, bucket, step)
            updates.add(arena.updates(bucket.index))
            batch = _batch(arena, bucket)
            writer.write_batch(batch, custom_metadata={"crc32": str(_checksum(batch))})
            # Unchanged now means unchanged all along: the frame was this version's.
            _check_version(arena, bucket, step)
    assert len(updates) <= 1, f"buckets of {arena.path} have seen {sorted(updates)} updates"
    _sync(path)
    return SnapshotPart(path.name, path.stat().st_size, step, next(iter(updates), None))


def commit_manifest(
    folder: str | Path, *, step: int, parts: Sequence[SnapshotPart], meta: Mapping[str, Any]
) -> Path:
    """Turn the `parts` in `folder` into a snapshot, and drop what else lies there.

    `meta` is any JSON the run wants back. Raises `CheckpointError` for parts that are missing, of
    another size or of different steps, and then commits nothing.
    """
    folder = Path(folder)
    for part in parts:
        _check_file(folder / part.file, part.nbytes)
    states = {(part.step, part.updates) for part in parts if part.updates is not None}
    if len(states) > 1 or any(part.step != step for part in parts):
        raise CheckpointError(
            f"the parts of {folder} do not belong to step {step} alone: "
            f"(step, updates) {sorted(states)}"
        )
    content = {
        "format": _FORMAT,
        "step": step,
        "updates": next(iter(states), (step, step))[1],
        "parts": [asdict(part) for part in parts],
        "meta": dict(meta),
    }
    path, making = folder / _MANIFEST, folder / f"{_MANIFEST}.making"
    making.write_text(json.dumps({"crc32": _json_checksum(content), **content}, indent=1))
    for entry in (making, folder, folder.parent):
        _sync(entry)
    os.replace(making, path)
    _sync(folder)
    for other in set(folder.glob("*.arrow")) - {folder / part.file for part in parts}:
        other.unlink()
    return path


def find_latest(run_folder: str | Path, *, verify: bool = False) -> Path | None:
    """The folder of the newest snapshot of a run that is complete; None when there is none.

    Newer ones that are incomplete or damaged are skipped, with a warning that names them and the
    reason. Sizes and the structure of all files are checked; with `verify` every byte is.
    """
    for _, folder in sorted(_folders(run_folder), reverse=True):
        try:
            with SnapshotReader(folder) as reader:
                if verify:
                    reader.verify()
        except CheckpointError as error:
            _log.warning("skipping snapshot %s: %s", folder, error)
        else:
            return folder
    return None


def _is_whole(folder: Path) -> bool:
    try:
        SnapshotReader(folder).close()
    except CheckpointError:
        return False
    return True


def keep_last(run_folder: str | Path, n: int) -> list[Path]:
    """Remove all but the newest `n` (at least 1) complete snapshots; returns what was removed.

    Incomplete ones that are older than those go too; a newer one may be in the making and stays.
    """
    assert n >= 1, f"keep {n} snapshots"
    folders = sorted(_folders(run_folder), reverse=True)
    complete = [entry for entry in folders if _is_whole(entry[1])]
    if not complete:
        return []
    oldest = complete[:n][-1]
    removed = [folder for step, folder in folders if (step, folder) < oldest]
    for folder in removed:
        # The manifest first: what is left of a removal that is cut off is no snapshot.
        (folder / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return removed


def restore(core: OptimizerCore, reader: "SnapshotReader") -> None:
    """Load and commit all state of `core` from a snapshot, whatever layout wrote it."""
    for bucket in core.buckets:
        for held in bucket.ranges:
            core.load(held, *reader.read(held))
    core.commit_load(reader.step, updates=reader.updates)


class SnapshotReader:
    """Random access to a snapshot through memory maps; close it, or use it as a context.

    Raises `CheckpointError`, naming the file, for whatever is missing or damaged: structure at
    once, contents when they are first read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder / _MANIFEST)
        self.step: int = manifest["step"]
        self.updates: int = manifest["updates"]
        self.meta: dict[str, Any] = manifest["meta"]
        self._files: dict[int, tuple[Path, int]] = {}
        self._readers: dict[Path, Any] = {}
        self._checked: set[int] = set()
        buckets: list[Bucket] = []
        for part in manifest["parts"]:
            path = self.folder / part["file"]
            _check_file(path, part["nbytes"])
            for number, ranges in enumerate(self._open(path)):
                # Each batch is laid out as the bucket it came from, so a bucket index finds in it.
                self._files[len(buckets)] = (path, number)
                buckets.append(Bucket(len(buckets), 0, 0, ranges, "float32", True, "adamw"))
        self._buckets = buckets
        self._index = BucketIndex(buckets)

    def ranges(self) -> Iterable[Range]:
        """All ranges that the snapshot holds, as they were cut when it was written."""
        return [held for bucket in self._buckets for held in bucket.ranges]

    def read(self, held: Range) -> tuple[Tensor, Tensor, Tensor]:
        """Master, exp_avg and exp_avg_sq of elements `held`: each [held.size], fp32, a copy."""
        found = torch.empty(3, held.size)
        for piece in self._find(held):
            outer = slice(piece.start - held.start, piece.stop - held.start)
            size = piece.stop - piece.start
            batch = self._batch(piece.bucket.index)
            for row, column in zip(found.numpy(), _STATE, strict=True):
                values = np.frombuffer(_bytes(batch, column), np.float32)
                row[outer] = values[piece.offset : piece.offset + size]
        master, exp_avg, exp_avg_sq = found.unbind()
        return master, exp_avg, exp_avg_sq

    def verify(self) -> None:
        """Read everything once, and compare it with its checksums."""
        for number in self._files:
            self._batch(number)

    def close(self) -> None:
        self._readers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, held: Range) -> Any:
        try:
            return self._index.pieces(held.name, held.start, held.stop)
        except LookupError as error:
            raise CheckpointError(f"snapshot {self.folder} is not of this model: {error}") from None

    def _open(self, path: Path) -> list[tuple[Range, ...]]:
        """The ranges of each batch of a part."""
        try:
            reader = self._readers[path] = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, str(error)) from None
        if reader.schema != _SCHEMA:
            raise _damaged(path, f"its columns are {reader.schema.names}")
        return [_ranges(batch) for batch in batches]

    def _batch(self, number: int) -> pa.RecordBatch:
        path, place = self._files[number]
        batch, metadata = self._readers[path].get_batch_with_custom_metadata(place)
        if number not in self._checked:
            expected = metadata[b"crc32"].decode()
            if str(_checksum(batch)) != expected:
                raise _damaged(path, f"the checksum of its batch {place} is not {expected}")
            self._checked.add(number)
        return batch


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


def _bytes(batch: pa.RecordBatch, column: str) -> Any:
    return batch.column(column).buffers()[2]


def _checksum(batch: pa.RecordBatch) -> int:
    rows = [(held.name, held.start, held.stop) for held in _ranges(batch)]
    checksum = _json_checksum(rows)
    for column in _STATE:
        checksum = zlib.crc32(_bytes(batch, column), checksum)
    return checksum


def _json_checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check_version(arena: Arena, bucket: Bucket, step: int) -> None:
    held = arena.version(bucket.index)
    if held != step:
        raise RunFailed(
            f"the snapshot of step {step} found bucket {bucket.index} of {arena.path} at version "
            f"{held}: an update must wait until the snapshot is written"
        )


def _check_file(path: Path, nbytes: int) -> None:
    if not path.exists():
        raise _damaged(path, "it is missing")
    if path.stat().st_size != nbytes:
        raise _damaged(path, f"it has {path.stat().st_size} bytes instead of {nbytes}")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise _damaged(path, "it is missing, the snapshot was not finished") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(content, dict) or content.pop("crc32", None) != _json_checksum(content):
        raise _damaged(path, "its checksum is wrong")
    if content["format"] != _FORMAT:
        raise _damaged(path, f"it has format {content['format']}, this version reads {_FORMAT}")
    return content


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be used: {reason}; resume from an older snapshot")


def _folders(run_folder: str | Path) -> list[tuple[int, Path]]:
    found = Path(run_folder).glob("snapshots/step-*")
    return [
        (int(match[1]), folder)
        for folder in found
        if (match := re.fullmatch(r"step-(\d+)", folder.name)) and folder.is_dir()
    ]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
