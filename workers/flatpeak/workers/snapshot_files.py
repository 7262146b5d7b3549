"""What a snapshot consists of on disk: files in blocks, and the manifest that vouches for them.

A block is the bytes from the end of the one before it to its own end, and has a checksum. The
blocks of a file leave no byte out, and they are listed in the manifest, which has a checksum too.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flatpeak.workers.errors import CheckpointError, UnknownFormat

MANIFEST = "manifest.json"
FORMAT = 2
SYNC_BYTES = 64 * 2**20
"""So much of a file may be in memory before the writer waits for the disk and gives it back."""

Block = tuple[int, int]
"""Where a block ends in its file, and the CRC-32 of its bytes."""


class BlockFile:
    """A new file for Arrow to write to: durable where the context ends well, else gone.

    Raises OSError as a file does. What was written does not stay in the page cache, where it would
    push other things out of a node's memory that is full of arenas.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Block] = []
        self.nbytes = 0
        self._sum = self._synced = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        self._sum = zlib.crc32(left, self._sum)
        while left:
            left = left[os.write(self._file, left) :]
        self.nbytes += size
        return size

    def end_block(self) -> None:
        self.blocks.append((self.nbytes, self._sum))
        self._sum = 0
        if self.nbytes - self._synced >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, self._synced, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self.nbytes

    # What Arrow asks of a file beside that; it is closed here alone.

    closed = False

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        whole = False
        try:
            if error is None:
                self._sync()
                whole = True
        finally:
            os.close(self._file)
            if not whole:
                self.path.unlink(missing_ok=True)


def check_blocks(path: Path, content: memoryview, blocks: Sequence[Block], which: range) -> None:
    """Raises CheckpointError when one of the blocks `which` of the file is not what was written."""
    for number in which:
        start = blocks[number - 1][0] if number else 0
        stop, expected = blocks[number]
        if zlib.crc32(content[start:stop]) != expected:
            raise damaged(path, f"its bytes {start:,} to {stop:,} do not have their checksum")


def check_size(path: Path, nbytes: int) -> None:
    if not path.exists():
        raise damaged(path, "it is missing")
    if path.stat().st_size != nbytes:
        raise damaged(path, f"it has {path.stat().st_size} bytes instead of {nbytes}")


def write_manifest(folder: Path, content: dict[str, Any]) -> Path:
    """Replace the manifest at once, when it and what lies beside it are durable."""
    path, making = folder / MANIFEST, folder / f"{MANIFEST}.making"
    try:
        making.write_bytes(_dumped(content))
        for entry in (making, folder, folder.parent):
            _sync(entry)
        os.replace(making, path)
    except OSError:
        making.unlink(missing_ok=True)
        raise
    _sync(folder)
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError where it is missing or not to the byte what was written, UnknownFormat
    where another version wrote it."""
    path = folder / MANIFEST
    try:
        written = path.read_bytes()
        content = json.loads(written)
    except FileNotFoundError:
        raise damaged(path, "it is missing, the snapshot was not finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    checksum = content.pop("crc32", None) if isinstance(content, dict) else None
    if checksum != _checksum(content):
        raise damaged(path, "its checksum is wrong")
    if (found := content["format"]) != FORMAT:
        raise UnknownFormat(
            f"{path} has format {found}, and this version of Flatpeak reads {FORMAT}: go on with "
            "the version that wrote it, or start afresh under another run name"
        )
    if written != _dumped(content):  # spaces, say, which mean nothing
        raise damaged(path, "it is not as it was written")
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named and int(named[1]) != content["step"]:  # as the newest it would outlive all others
        raise damaged(path, f"it is of step {content['step']}, and its folder is {folder.name}")
    return content


def damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be used: {reason}; use an older snapshot")


def _dumped(content: dict[str, Any]) -> bytes:
    return json.dumps({"crc32": _checksum(content), **content}).encode() + b"\n"


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
