"""The tokenised corpus: one flat array of ids and the documents' offsets, mapped from a cache file.

The file is tokens | padding to 8 bytes | offsets (int64) | footer. The footer comes last, and the
file gets its name only when it is whole and on disk, so that a file with that name and a fitting
footer is complete. Processes that start at once take turns: the first one tokenises, the others
find its file. The files may be deleted at any time. Their names start with a dot, so that a cache
directory inside a directory of documents does not become part of the corpus.
"""

import fcntl
import io
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flatpeak.workers.errors import DataError, WaitTimeout

logger = logging.getLogger(__name__)

FORMAT = 1
_MAGIC = b"flatpeak"
_FOOTER = struct.Struct("<8s5Q")  # magic, format, bytes a token, tokens, documents, largest id
_WAIT_S = 3600.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Corpus:
    """`tokens` [S] (uint16 or uint32); `offsets` [documents + 1] int64, from 0 to S, increasing."""

    tokens: np.ndarray
    offsets: np.ndarray
    largest_id: int


Batches = Iterable[tuple[np.ndarray, np.ndarray]]  # (ids, lengths of the documents)


def open_corpus(name: str, batches: Callable[[], Batches], *, cache_dir: Path) -> Corpus:
    """Map the corpus `name` from the cache; on a miss, make it from `batches()`.

    A cache directory that cannot be written costs a warning, and the corpus is held in memory; one
    that is no directory raises DataError.
    """
    path = cache_dir / f".{name}.tokens"
    corpus = _map(path)
    if corpus is not None:
        return corpus
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _turn(cache_dir / f".{name}.lock"):
            return _map(path) or _make(path, batches())
    except WaitTimeout:  # an OSError too, but no reason for every process to tokenise on its own
        raise
    except (FileExistsError, NotADirectoryError):
        raise DataError(
            f"data.cache_dir = {cache_dir} is no directory, nor can it be made one; use a directory"
            " that may be absent, like ~/.cache/flatpeak"
        ) from None
    except OSError as error:
        logger.warning("data.cache_dir: %s; the tokenised corpus is held in memory", error)
    sink = io.BytesIO()
    _write(sink, batches())
    corpus = _parse(np.frombuffer(sink.getbuffer(), np.uint8))
    assert corpus is not None, "a corpus just written has a fitting footer"
    return corpus


def _make(path: Path, batches: Batches) -> Corpus:
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as sink:
            _write(sink, batches)
            sink.flush()
            os.fsync(sink.fileno())
        # Mapped before it gets its name: nobody can delete it in between.
        corpus = _map(Path(temporary))
        assert corpus is not None, "a corpus just written has a fitting footer"
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return corpus


def _write(sink: BinaryIO, batches: Batches) -> None:
    """The width of a token is that of the batches, which all have the same type."""
    tokens, width, largest = 0, 1, 0
    lengths = [np.zeros(1, np.int64)]
    for ids, batch_lengths in batches:
        if len(ids):
            sink.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).data)
            tokens, width, largest = tokens + len(ids), ids.itemsize, max(largest, int(ids.max()))
            lengths.append(batch_lengths)
    offsets = np.cumsum(np.concatenate(lengths), dtype="<i8")
    sink.write(bytes(-tokens * width % 8))
    sink.write(offsets.data)
    sink.write(_FOOTER.pack(_MAGIC, FORMAT, width, tokens, len(offsets) - 1, largest))


def _map(path: Path) -> Corpus | None:
    """The corpus in a file, or None where there is none that is whole."""
    try:
        if path.stat().st_size < _FOOTER.size:
            return None
        return _parse(np.asarray(np.memmap(path, np.uint8, "r")))
    except OSError:  # absent or unreadable: the caller makes it, and meets the reason there
        return None


def _parse(content: np.ndarray) -> Corpus | None:
    footer = _FOOTER.unpack(content[-_FOOTER.size :].tobytes())
    magic, version, width, tokens, documents, largest = footer
    start = tokens * width + -tokens * width % 8
    stop = start + 8 * (documents + 1)
    if (magic, version, stop + _FOOTER.size) != (_MAGIC, FORMAT, len(content)):
        return None
    return Corpus(
        tokens=content[: tokens * width].view(f"<u{width}"),
        offsets=content[start:stop].view("<i8"),
        largest_id=largest,
    )


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel frees it when its holder ends, however it ends."""
    with path.open("a+") as file:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise WaitTimeout(
                        f"process {file.read()} has held {path} for {_WAIT_S:.0f} s while it"
                        " tokenises the corpus; end it, or set data.cache_dir to another directory"
                    ) from None
                time.sleep(_POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
