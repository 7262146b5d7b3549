"""Arenas: named files in shared memory that hold buckets and the slab of boundaries.

A bucket owns a gradient region and points at one frame (master, two moments, working weights).
There are more frames than buckets. A new version is written to a free frame and becomes visible
by one aligned 8-byte store of (version, frame), so that a half-written bucket never exists,
whatever dies when. Frame and pointer live in the file and outlive every process.

File: header (magic, format, checksum, run, layout as JSON), a word a bucket, a word a frame (the
updates that made it), frames, gradient regions, slab. Frames have the size of the largest bucket
among those they serve; buckets of less than half of that size have smaller frames of their own.

One process at a time updates a bucket, and attaches anew to take over: the arena's owner, see
`own`, or the worker whose device does it. Each has frames of its own, spare ones too, so that no
two processes ever ask for the same frame. Any number read weights and write gradients. The flip is
ordered after the frame's contents by x86-64's total store order; a CPU with weaker order, on which
it would need a fence that Python does not have, gets no arena.
"""

import errno
import fcntl
import json
import mmap
import os
import platform
import secrets
import struct
import time
import weakref
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from flatpeak.workers.buckets import Bucket, from_json, to_json
from flatpeak.workers.errors import ClusterError, DoesNotFit, InputError, WaitTimeout
from flatpeak.workers.host_memory import Room, room
from flatpeak.workers.registration import Registration

SUFFIX = ".arena"
_MAKING = ".making"
_MAGIC = b"FLATPEAK"
_FORMAT = 2
_RUN_BYTES = 128
_PREFIX = struct.Struct(f"<8sIIQ{_RUN_BYTES}s")
_LINE = 64
_PAGE = 4096
_FRAME_BITS = 24
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The longest is what a forward pass may lose where it waits, and costs a core a few per cent.
_POLL_S = (20e-6, 1e-3)
# Fewer elements than torch splits over threads: a sum over a block does not depend on them.
_SUM_BLOCK = 16384
# struct flock, for the open file rather than the process.
_LOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True)
class Frame:
    """Views of one version of a bucket, each [size]. With fp32 weights, `weights` is `master`."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weights: Tensor

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq


@dataclass(frozen=True)
class _SizeClass:
    """Buckets of one updater that share equal frames, numbered from `first_frame`."""

    buckets: tuple[Bucket, ...]
    first_frame: int
    frames: int
    offset: int

    @property
    def _elements(self) -> int:
        return max(bucket.size for bucket in self.buckets)

    @property
    def state_bytes(self) -> int:
        """Bytes from one fp32 array of a frame to the next."""
        return _align(4 * self._elements, _LINE)

    @property
    def frame_bytes(self) -> int:
        low = any(bucket.dtype == "bfloat16" for bucket in self.buckets)
        return 3 * self.state_bytes + low * _align(2 * self._elements, _LINE)


class _Layout:
    """Where everything lies, in bytes; a pure function of its arguments."""

    def __init__(self, buckets: Sequence[Bucket], spare_frames: int, slab_bytes: int) -> None:
        if spare_frames < 1:
            raise InputError(
                f"an arena needs a spare frame to update into, not {spare_frames}; "
                "set memory.optimizer.slots to 1 or more, e.g. 2"
            )
        described = {
            "buckets": to_json(buckets),
            "spare_frames": spare_frames,
            "slab_bytes": slab_bytes,
        }
        self.body = json.dumps(described).encode()
        groups = _sharing_frames(buckets)
        frames = [len(group) + min(spare_frames, len(group)) for group in groups]
        self.words = _align(_PREFIX.size + len(self.body), _LINE)
        self.word_count = len(buckets) + sum(frames)
        at = self.header_bytes = _align(self.words + 8 * self.word_count, _PAGE)

        self.class_of: dict[int, _SizeClass] = {}
        first = 0
        for group, count in zip(groups, frames, strict=True):
            size_class = _SizeClass(group, first, count, at)
            self.class_of.update({bucket.index: size_class for bucket in group})
            first += count
            at += count * size_class.frame_bytes
        self.gradients: dict[int, int] = {}
        for bucket in buckets:
            self.gradients[bucket.index] = at
            at += _align(4 * bucket.size, _LINE)
        self.slab = _align(at, _PAGE)
        self.slab_bytes = slab_bytes
        self.nbytes = _align(self.slab + slab_bytes, _PAGE)

    def first_frames(self) -> dict[int, int]:
        return {
            bucket.index: size_class.first_frame + place
            for size_class in set(self.class_of.values())
            for place, bucket in enumerate(size_class.buckets)
        }


def arena_bytes(buckets: Sequence[Bucket], spare_frames: int, slab_bytes: int = 0) -> int:
    """The exact size of the arena of these `buckets`."""
    return _Layout(buckets, spare_frames, slab_bytes).nbytes


class Arena:
    """One mapped arena; make it with `create` or `attach`, and `close` it.

    Buckets are named by `Bucket.index`. Views of a frame are good until the bucket's next version:
    its frame is then free for any other. Readers in other processes use `read_places`.
    """

    def __init__(self, path: Path, run: str, file: BinaryIO, layout: _Layout) -> None:
        self.path, self.run, self.nbytes = path, run, layout.nbytes
        self._file, self._layout = file, layout
        self.buckets = tuple(from_json(json.loads(layout.body)["buckets"]))
        self._bucket = {bucket.index: bucket for bucket in self.buckets}
        self._place = {bucket.index: place for place, bucket in enumerate(self.buckets)}
        self._header = mmap.mmap(file.fileno(), layout.header_bytes)
        view = memoryview(self._header)
        self._words = view[layout.words : layout.words + 8 * layout.word_count].cast("Q")
        self._bytes = torch.from_file(str(path), shared=True, size=self.nbytes, dtype=torch.uint8)
        self._pending: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._registration: Registration | None = None
        self._failure: BaseException | None = None
        # Closed with the arena even if nobody calls close(): the lock must go with the mapping.
        weakref.finalize(self, file.close)

    # Making, finding and leaving an arena

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        run: str,
        buckets: Sequence[Bucket],
        spare_frames: int,
        slab_bytes: int = 0,
    ) -> Self:
        """Make the arena of these `buckets`, all zeros and not loaded (version -1).

        Its memory is allocated now, so that a write can not fail later. Raises `DoesNotFit` when
        the folder has no room and `ClusterError` when `path` exists, and leaves nothing behind.
        """
        _check_cpu()
        path = Path(path)
        assert path.suffix == SUFFIX, f"{path} would escape the sweep: it must end in {SUFFIX}"
        layout = _Layout(buckets, spare_frames, slab_bytes)
        header = _pack_header(run, layout)
        _check_room(path, run, layout.nbytes)
        # The file gets its name when it is whole: whoever finds an arena finds a valid header.
        making = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_MAKING}")
        with open(making, "x+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH)
                _allocate(file, path, run, layout.nbytes)
                file.write(header)
                file.flush()
                os.link(making, path)
                return cls.attach(path, run=run)
            except FileExistsError:
                raise ClusterError(
                    f"{path} exists already; attach to it, or sweep it if its run is dead"
                ) from None
            finally:
                making.unlink()

    @classmethod
    def attach(cls, path: str | Path, *, run: str) -> Self:
        """Map an existing arena of `run`. Raises `ClusterError` and changes nothing when there is
        none, or it is of another run or format, or damaged; `InputError` on a CPU that cannot."""
        _check_cpu()
        path = Path(path)
        try:
            file = open(path, "r+b")  # noqa: SIM115 - it stays open: its lock says that we live
        except FileNotFoundError:
            raise ClusterError(f"there is no arena {path} for run {run}") from None
        try:
            # Held until the process ends, in whatever way: `sweep_stale` spares locked arenas.
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file.fileno()).st_nlink == 0:
                raise ClusterError(f"{path} was swept while run {run} attached to it; start again")
            layout = _read_layout(file, path, run)
            return cls(path, run, file, layout)
        except BaseException:
            file.close()
            raise

    def own(self, *, rank: int | None = None, timeout_s: float = 0.0) -> None:
        """Be the arena's owner, or its worker `rank`, until it is disowned or closed, or the
        process ends.

        A predecessor that was given up may still be in the middle of an update, or of a gradient:
        waits until the kernel says that it has let go. Raises `WaitTimeout`.
        """
        # A byte of the file for each who may write: the owner, then the ranks.
        seat = 0 if rank is None else 1 + rank
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, seat, 1, 0)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"another process still writes to {self.path} after {timeout_s:g} s, as "
                        f"{'its actor' if rank is None else f'worker {rank}'} does; end it"
                    ) from None
            time.sleep(_POLL_S[1])

    def disown(self) -> None:
        """Let another process be its owner. It stays mapped here, to be read at most."""
        nobody = _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, nobody)

    def register(self, *, cudart: Any = None) -> None:
        """Make the mapping known to CUDA until it is closed; raises as `Registration` does."""
        assert self._registration is None, f"{self.path} is registered already"
        self._registration = Registration(self._bytes, name=str(self.path), cudart=cudart)
        # A process that ends gives all back, maybe after CUDA has gone.
        weakref.finalize(self, self._registration.close).atexit = False

    def close(self) -> None:
        """Give up the mapping. Views that are still held keep their memory mapped."""
        if self._registration is not None:
            self._registration.close()
        if not self._file.closed:
            self._words.release()
            self._header.close()
            self._file.close()
            del self._bytes

    def unlink(self) -> None:
        """Remove the file's name; its memory goes when the last process has let go of it."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Views

    def bucket(self, i: int) -> Bucket:
        return self._bucket[i]

    def master(self, i: int) -> Tensor:
        return self.frame(i).master

    def exp_avg(self, i: int) -> Tensor:
        return self.frame(i).exp_avg

    def exp_avg_sq(self, i: int) -> Tensor:
        return self.frame(i).exp_avg_sq

    def weights(self, i: int) -> Tensor:
        """The current version's weights [size] in the bucket's working dtype."""
        return self.frame(i).weights

    def gradient(self, i: int) -> Tensor:
        """The gradient region [size], fp32; it belongs to no version and survives a flip."""
        return self._view(self._layout.gradients[i], self._bucket[i].size, torch.float32)

    def write_gradient(self, i: int, offset: int, values: Tensor, *, accumulate: bool) -> None:
        """Store `values` [n, any float dtype and device] at [offset, offset + n) of the region, or
        add them there in fp32."""
        target = self.gradient(i)[offset : offset + values.numel()]
        if accumulate:
            target.add_(values.to(target.device))
        else:
            target.copy_(values)

    def zero_gradient(self, i: int, start: int, stop: int) -> None:
        self.gradient(i)[start:stop].zero_()

    def square_gradient(self, i: int, start: int, stop: int) -> Tensor:
        """Sum of squares [] (fp64) of elements [start, stop) of the region."""
        blocks = self.gradient(i)[start:stop].split(_SUM_BLOCK)
        return torch.stack([block.double().square_().sum() for block in blocks]).sum()

    def settle(self) -> None:
        """Gradients are in place when their calls return; those to a `RemoteArena` are not."""

    def slab(self) -> Tensor:
        """The boundaries' region [slab_bytes], uint8, page-aligned."""
        return self._view(self._layout.slab, self._layout.slab_bytes, torch.uint8)

    def frame(self, i: int) -> Frame:
        """Views of the bucket's current frame."""
        return self._frame(i, self._current(i)[1])

    def _frame(self, i: int, number: int) -> Frame:
        bucket, size_class = self._bucket[i], self._layout.class_of[i]
        at = size_class.offset + (number - size_class.first_frame) * size_class.frame_bytes
        master, exp_avg, exp_avg_sq = (
            self._view(at + part * size_class.state_bytes, bucket.size, torch.float32)
            for part in range(3)
        )
        weights = master
        if bucket.dtype != "float32":
            place = at + 3 * size_class.state_bytes
            weights = self._view(place, bucket.size, _DTYPES[bucket.dtype])
        return Frame(master, exp_avg, exp_avg_sq, weights)

    def _view(self, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[offset : offset + elements * dtype.itemsize].view(dtype)

    # Versions

    def version(self, i: int) -> int:
        """The step whose update the bucket holds; -1 until it is loaded."""
        return self._current(i)[0]

    def count_before(self, version: int, *, rank: int) -> int:
        """How many buckets of worker `rank` are not yet at `version`."""
        own = (bucket.index for bucket in self.buckets if bucket.rank == rank)
        return sum(self.version(i) < version for i in own)

    def updates(self, i: int) -> int:
        """How many updates made the bucket's current state: its version less skipped steps."""
        return self._words[len(self.buckets) + self._current(i)[1]]

    def begin_update(self, i: int) -> Frame:
        """Views of a free frame for the bucket's next version; its contents are arbitrary."""
        if i not in self._pending:
            free = self._free_frames(self._layout.class_of[i])
            assert free, f"no free frame for bucket {i}: commit an update first"
            self._pending[i] = free.pop()
        return self._frame(i, self._pending[i])

    def commit_update(self, i: int, version: int) -> None:
        """Make the frame of `begin_update` the bucket's current one, in one store."""
        number, left = self._pending.pop(i), self._current(i)[1]
        self._words[len(self.buckets) + number] = self.updates(i) + 1
        self._publish(i, version, number)
        self._free_frames(self._layout.class_of[i]).append(left)

    def advance(self, i: int, version: int, *, updates: int | None = None) -> None:
        """Move the bucket to `version` with its state as it is: it was loaded, or the step skipped.

        `updates` sets the count of updates behind the state; without it the count stays.
        """
        number = self._current(i)[1]
        if updates is not None:
            self._words[len(self.buckets) + number] = updates
        self._publish(i, version, number)

    def wait_version(self, i: int, version: int, *, timeout_s: float) -> None:
        """Return when the bucket holds `version` or a later one. Raises `WaitTimeout`."""
        deadline = time.monotonic() + timeout_s
        pause, longest = _POLL_S
        while (held := self.version(i)) < version:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"bucket {i} of arena {self._bucket[i].arena} did not reach version "
                    f"{version} within {timeout_s:g} s, it holds {held} ({self.path}); "
                    f"if {self._updater(i)} or cluster.step_timeout_s"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def fail(self, error: BaseException) -> None:
        """Let all that wait for versions in this process end with `error`: nobody updates on."""
        self._failure = error

    def _updater(self, i: int) -> str:
        if self._bucket[i].updater is None:
            return "its optimizer actor lives it is too slow: raise cluster.cpus_per_optimizer"
        return (
            f"worker {self._bucket[i].rank}, which updates it, lives it is too slow: raise "
            "memory.optimizer.slots"
        )

    def read_places(self, i: int, version: int, places: Sequence[tuple[int, Tensor]]) -> None:
        """Copy elements [offset, offset + n) of the weights of `version` to each (offset, out [n]).

        Any dtype and device of `out`; to a CUDA device the copies may still run at the end. Raises
        as `check_version` does. Who calls that again when they are done knows that the bucket did
        not leave its frame meanwhile.
        """
        self.check_version(i, version)
        weights = self.weights(i)
        outs = [out for _, out in places]
        sources = [weights[offset : offset + out.numel()] for offset, out in places]
        # One call: each would let go of the interpreter, and get it back when others let it.
        torch._foreach_copy_(outs, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]

    def check_version(self, i: int, version: int) -> None:
        """Raises `ClusterError` when the bucket does not hold `version`."""
        held = self.version(i)
        if held != version:
            raise ClusterError(
                f"weights of version {version} were asked of bucket {i} in {self.path}, "
                f"which holds version {held}: the worker is out of step"
            )

    def _free_frames(self, size_class: _SizeClass) -> list[int]:
        # Found once and then kept: only the updater of these buckets moves their pointers.
        if size_class.first_frame not in self._free:
            frames = range(size_class.first_frame, size_class.first_frame + size_class.frames)
            taken = {self._current(bucket.index)[1] for bucket in size_class.buckets}
            self._free[size_class.first_frame] = [n for n in frames if n not in taken]
        return self._free[size_class.first_frame]

    def _current(self, i: int) -> tuple[int, int]:
        word = self._words[self._place[i]]
        return (word >> _FRAME_BITS) - 1, word & ((1 << _FRAME_BITS) - 1)

    def _publish(self, i: int, version: int, number: int) -> None:
        held = self.version(i)
        assert version >= held, f"bucket {i} holds version {held}, not to be followed by {version}"
        # A cast memoryview stores an aligned 8-byte item at once: readers see old or new.
        self._words[self._place[i]] = _word(version, number)


def sweep_stale(folder: str | Path, *, keep_runs: Iterable[str] = ()) -> list[Path]:
    """Remove the arenas in `folder` that no living process holds; returns what was removed.

    Every process that maps an arena holds a shared `flock` on it, which the kernel drops when the
    process ends in whatever way. Unlike a process id with its start time, a lock also means
    something between containers that share /dev/shm, and to those who attached later than the
    maker. An arena is stale when an exclusive lock can be had. A run that restarts on a node where
    all its processes have died names itself in `keep_runs`.
    """
    folder = Path(folder)
    found = chain(folder.glob(f"*{SUFFIX}"), folder.glob(f"*{SUFFIX}.*{_MAKING}"))
    return [path for path in sorted(found) if remove_stale(path, keep_runs=keep_runs)]


def remove_stale(path: Path, *, keep_runs: Iterable[str] = ()) -> bool:
    """Remove the arena at `path` if no living process holds it; see `sweep_stale`."""
    try:
        with open(path, "rb") as file:
            if not _is_ours(path, file.read(_PREFIX.size), {_pack_run(run) for run in keep_runs}):
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError, PermissionError, IsADirectoryError):
        return False  # it is in use, already gone, another user's, or no file at all
    return True


def _is_ours(path: Path, prefix: bytes, kept: set[bytes]) -> bool:
    if path.name.endswith(_MAKING):
        return True  # its maker died before the header was written
    return prefix[:8] == _MAGIC and prefix[-_RUN_BYTES:] not in kept


def _sharing_frames(buckets: Sequence[Bucket]) -> list[tuple[Bucket, ...]]:
    """Groups of buckets, in each of one updater and of like sizes."""
    of_updater: dict[int | None, list[Bucket]] = {}
    for bucket in buckets:
        of_updater.setdefault(bucket.updater, []).append(bucket)
    return [group for own in of_updater.values() for group in _by_size(own)]


def _by_size(buckets: Sequence[Bucket]) -> list[tuple[Bucket, ...]]:
    """Groups of buckets, largest first, of which none is smaller than half of its largest."""
    groups: list[list[Bucket]] = []
    for bucket in sorted(buckets, key=lambda bucket: (-bucket.size, bucket.index)):
        if not groups or 2 * bucket.size < groups[-1][0].size:
            groups.append([])
        groups[-1].append(bucket)
    return [tuple(group) for group in groups]


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _word(version: int, number: int) -> int:
    return (version + 1) << _FRAME_BITS | number


def _pack_run(run: str) -> bytes:
    name = run.encode()
    if len(name) > _RUN_BYTES:
        raise InputError(f"the run's name takes {len(name)} bytes of at most {_RUN_BYTES}: {run}")
    return name.ljust(_RUN_BYTES, b"\0")


def _pack_header(run: str, layout: _Layout) -> bytes:
    name = _pack_run(run)
    checksum = zlib.crc32(name + layout.body)
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, checksum, len(layout.body), name)
    first = layout.first_frames()
    described = from_json(json.loads(layout.body)["buckets"])
    words = b"".join(struct.pack("<Q", _word(-1, first[bucket.index])) for bucket in described)
    return (prefix + layout.body).ljust(layout.words, b"\0") + words


def _read_layout(file: BinaryIO, path: Path, run: str) -> _Layout:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or prefix[:8] != _MAGIC:
        raise ClusterError(f"{path} is no Flatpeak arena")
    _, version, checksum, body_bytes, name = _PREFIX.unpack(prefix)
    if version != _FORMAT:
        raise ClusterError(f"{path} has arena format {version}, this version reads {_FORMAT}")
    body = file.read(min(body_bytes, os.fstat(file.fileno()).st_size))
    if len(body) != body_bytes or zlib.crc32(name + body) != checksum:
        raise ClusterError(f"the header of {path} is damaged; restore from the last snapshot")
    if name != _pack_run(run):
        owner = name.rstrip(b"\0").decode()
        raise ClusterError(f"{path} belongs to run {owner}, not to run {run}")
    fields = json.loads(body)
    layout = _Layout(from_json(fields["buckets"]), fields["spare_frames"], fields["slab_bytes"])
    size = os.fstat(file.fileno()).st_size
    if size != layout.nbytes:
        raise ClusterError(f"{path} has {size} bytes, its header says {layout.nbytes}")
    _check_words(file, path, layout)
    return layout


def _check_words(file: BinaryIO, path: Path, layout: _Layout) -> None:
    file.seek(layout.words)
    words = struct.unpack(f"<{len(layout.gradients)}Q", file.read(8 * len(layout.gradients)))
    seen = set()
    for index, word in zip(layout.gradients, words, strict=True):
        number = word & ((1 << _FRAME_BITS) - 1)
        first = layout.class_of[index].first_frame
        if not first <= number < first + layout.class_of[index].frames or number in seen:
            raise ClusterError(
                f"bucket {index} in {path} points at frame {number}, which is not its to use; "
                "restore from the last snapshot"
            )
        seen.add(number)


def _check_cpu() -> None:
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        raise InputError(
            f"arenas need the store order of x86-64, and {platform.node()} is {machine}: another "
            "process could see a bucket's new version before its contents; use x86-64 nodes"
        )


def _check_room(path: Path, run: str, nbytes: int) -> None:
    left = room(path.parent)
    if nbytes > left.nbytes:
        raise _no_room(path, run, nbytes, left)


def _allocate(file: BinaryIO, path: Path, run: str, nbytes: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(path, run, nbytes, room(path.parent)) from None


def _no_room(path: Path, run: str, nbytes: int, left: Room) -> DoesNotFit:
    return DoesNotFit(
        f"the arena {path.name} of run {run} takes {nbytes:,} bytes and {left.where} has "
        f"{left.nbytes:,} free; set cluster.shm_dir to a folder with that much, raise the limit, "
        "or use more nodes for the optimizer"
    )
