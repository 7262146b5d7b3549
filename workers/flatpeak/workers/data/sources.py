"""Which files a source names: the default corpus, one file, or those of a directory."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pyarrow as pa

from flatpeak.workers.errors import DataError

# Left out of the default corpus: tests, and what some distributions package separately, so that
# one Python version gives the same corpus wherever it is installed.
_NOT_IN_STDLIB_CORPUS = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip")
)


class Kind(Enum):
    PARQUET = "Parquet"
    JSONL = "JSONL"
    TEXT = "text"


_KIND_OF_SUFFIX = {
    ".parquet": Kind.PARQUET,
    ".pq": Kind.PARQUET,
    ".jsonl": Kind.JSONL,
    ".ndjson": Kind.JSONL,
}


@dataclass(frozen=True)
class Source:
    """The files of a corpus, of one kind, in the order in which they are read."""

    kind: Kind
    root: Path
    files: tuple[Path, ...]

    def listing(self) -> list[tuple[str, int, int]]:
        """Changes whenever the documents may have changed."""
        return listing(self.root, self.files)


def listing(root: Path, files: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """(path below `root`, bytes, mtime in ns) of every file."""
    entries = []
    for path in files:
        with reading(path):
            stat = path.stat()
        entries.append((_relative(path, root), stat.st_size, stat.st_mtime_ns))
    return entries


def find_source(source: str) -> Source:
    """Resolve `data.source`: "stdlib", a file, or a directory.

    A directory with Parquet (.parquet, .pq) or JSONL (.jsonl, .ndjson) files in it, at any depth,
    stands for those; any other one for all its files that look like text. Hidden files and
    directories and `__pycache__` are left out. Files are ordered by relative path.

    Raises DataError when nothing is there, or a directory holds both Parquet and JSONL.
    """
    if source == "stdlib":
        return _stdlib()
    # Links are kept: what a link to a blob without a suffix holds, only the link's name says.
    root = Path(os.path.abspath(os.path.expanduser(source)))
    with reading(root):
        is_file, is_directory = root.is_file(), root.is_dir()
    if is_file:
        suffix = root.suffix.lower()
        # In a directory .json is more likely part of a source tree.
        kind = Kind.JSONL if suffix == ".json" else _KIND_OF_SUFFIX.get(suffix, Kind.TEXT)
        return Source(kind, root.parent, (root,))
    if is_directory:
        return _directory(root)
    raise DataError(
        f"data.source: there is no file or directory {root}; give an existing path, or"
        " `stdlib` for the default corpus"
    )


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(path for path in _walk(root, _is_stdlib_corpus) if path.suffix == ".py")
    if not files:
        raise DataError(
            f"data.source is stdlib, but {root} holds no Python source files (a stripped or zipped"
            " Python); give a file or directory of documents"
        )
    return Source(Kind.TEXT, root, files)


def _is_stdlib_corpus(relative: Path) -> bool:
    parts = relative.with_suffix("").parts
    return parts[0] in sys.stdlib_module_names and _NOT_IN_STDLIB_CORPUS.isdisjoint(parts)


def _directory(root: Path) -> Source:
    files = _walk(root)
    by_kind = {kind: tuple(path for path in files if _kind(path) is kind) for kind in Kind}
    if by_kind[Kind.PARQUET] and by_kind[Kind.JSONL]:
        raise DataError(
            f"data.source: {root} holds both Parquet ({len(by_kind[Kind.PARQUET])} files) and JSONL"
            f" ({len(by_kind[Kind.JSONL])}); give a directory with one of them"
        )
    for kind in Kind:
        if by_kind[kind]:
            return Source(kind, root, by_kind[kind])
    raise DataError(
        f"data.source: {root} holds no files; give a directory with Parquet, JSONL or text files"
    )


def _kind(path: Path) -> Kind:
    return _KIND_OF_SUFFIX.get(path.suffix.lower(), Kind.TEXT)


def _walk(root: Path, keep: Callable[[Path], bool] = lambda relative: True) -> list[Path]:
    def is_kept(folder: str, name: str) -> bool:
        return (
            name[0] != "." and name != "__pycache__" and keep(Path(folder, name).relative_to(root))
        )

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out what it cannot read

    found = []
    with reading(root):
        for folder, folders, names in os.walk(root, onerror=refuse):
            folders[:] = [name for name in folders if is_kept(folder, name)]
            found += [Path(folder, name) for name in names if is_kept(folder, name)]
        found = [path for path in found if path.is_file()]
    return sorted(found, key=lambda path: _relative(path, root))


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system or Arrow says of a file into a DataError that names it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data.source: cannot read {path} ({error}); mend or remove the file, or give another"
        ) from error
