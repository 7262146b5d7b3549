"""Where documents come from: which files a source names, and the documents in them.

Documents travel as Arrow arrays of either raw text (large_binary) or token ids
(large_list<int64>), without nulls and empty entries, so that no document becomes a Python object
on its way to the byte tokenizer.
"""

import difflib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pyarrow as pa
from flatpeak.workers.errors import DataError
from pyarrow import json as arrow_json
from pyarrow import parquet, types

_SNIFF_BYTES = 8192
_JSONL_BYTES = 32 << 20
_PARQUET_ROWS = 256
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
        """(path, bytes, mtime in ns) of every file: changes whenever the corpus may have."""
        return listing(self.root, self.files)


def listing(root: Path, files: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    entries = []
    for path in files:
        with _reading(path):
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
    root = Path(source).expanduser().resolve()
    with _reading(root):
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


def read_documents(
    source: Source, *, text_column: str, tokens_column: str | None
) -> Iterator[tuple[Path, pa.Array]]:
    """Yield (file, documents): large_list<int64> if `tokens_column` is given, else large_binary.

    Text and token lists come from the named column (Parquet) or key (JSONL); a text file is one
    document. Null and empty documents are left out. Raises DataError that names the file.
    """
    column = tokens_column or text_column
    is_text = tokens_column is None
    if source.kind is Kind.TEXT and not is_text:
        raise DataError(
            f"data.tokens_column is {tokens_column!r}, but {source.root} holds text files, which"
            " have no columns; set data.tokens_column to null, or give Parquet or JSONL"
        )
    for path in source.files:
        with _reading(path):
            if source.kind is Kind.TEXT:
                batches = _read_text(path, skip_binary=len(source.files) > 1)
            elif source.kind is Kind.JSONL:
                batches = _read_jsonl(path, column, is_text)
            else:
                batches = _read_parquet(path, column, is_text)
            for batch in batches:
                documents = _nonempty(batch, is_text)
                if len(documents):
                    yield path, documents


def document_bounds(documents: pa.Array) -> np.ndarray:
    """Offsets [documents + 1] of a large_binary or large_list array into its values."""
    offsets = np.frombuffer(documents.buffers()[1], np.int64)
    return offsets[documents.offset :][: len(documents) + 1]


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
    with _reading(root):
        for folder, folders, names in os.walk(root, onerror=refuse):
            folders[:] = [name for name in folders if is_kept(folder, name)]
            found += [Path(folder, name) for name in names if is_kept(folder, name)]
        found = [path for path in found if path.is_file()]
    return sorted(found, key=lambda path: _relative(path, root))


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _read_text(path: Path, *, skip_binary: bool) -> Iterator[pa.Array]:
    content = path.read_bytes()
    if b"\0" not in content[:_SNIFF_BYTES]:
        bounds = pa.py_buffer(np.array([0, len(content)], np.int64))
        # Not pa.array, which copies what may be a large file.
        yield pa.Array.from_buffers(pa.large_binary(), 1, [None, bounds, pa.py_buffer(content)])
    elif not skip_binary:
        raise DataError(
            f"data.source: {path} is not text (a zero byte in its first {_SNIFF_BYTES} bytes);"
            " give UTF-8 text, a .parquet or a .jsonl file, uncompressed"
        )


def _read_jsonl(path: Path, column: str, is_text: bool) -> Iterator[pa.Array]:
    kind = pa.large_string() if is_text else pa.list_(pa.int64())
    options = arrow_json.ParseOptions(
        explicit_schema=pa.schema([(column, kind)]), unexpected_field_behavior="ignore"
    )
    lines_before = 0
    seen = False
    with path.open("rb") as file:
        # Pieces that end with a line: Arrow's own blocks refuse a line longer than a block.
        while piece := file.read(_JSONL_BYTES) + file.readline():
            if not piece.isspace():
                values = _parse_json(path, piece, options, lines_before)
                seen = seen or values.null_count < len(values)
                if not seen:
                    _require_column(path, _first_keys(piece), column, is_text)
                yield values
            lines_before += piece.count(b"\n")


def _parse_json(
    path: Path, piece: bytes, options: arrow_json.ParseOptions, lines_before: int
) -> pa.Array:
    blocks = arrow_json.ReadOptions(block_size=len(piece) + 1)
    try:
        table = arrow_json.read_json(pa.BufferReader(piece), blocks, options)
    except pa.ArrowInvalid as error:
        raise DataError(_explain_json(path, piece, options, lines_before, error)) from error
    return table.column(0).combine_chunks()


def _explain_json(
    path: Path, piece: bytes, options: arrow_json.ParseOptions, lines_before: int, error: Exception
) -> str:
    """Name the line at fault; Arrow counts rows of a block only."""
    field = options.explicit_schema.field(0)
    for number, line in enumerate(piece.split(b"\n"), lines_before + 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as reason:
                return f"{path}, line {number} is not valid JSON ({reason}); mend or remove it"
            if not isinstance(record, dict):
                return (
                    f"{path}, line {number} is not a JSON object; write one object a line,"
                    f' such as {{"{field.name}": ...}}'
                )
    expected = "a list of integers" if types.is_list(field.type) else "a string"
    setting = "data.tokens_column" if types.is_list(field.type) else "data.text_column"
    return (
        f"{path}: {setting} is {field.name!r}, which must hold {expected} in every record"
        f" ({error}); name another column"
    )


def _first_keys(piece: bytes) -> list[str]:
    # Decoded as leniently as Arrow does, which has accepted this text.
    text = piece.decode("utf-8-sig", "replace").lstrip()
    return list(json.JSONDecoder().raw_decode(text)[0])


def _read_parquet(path: Path, column: str, is_text: bool) -> Iterator[pa.Array]:
    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        _require_column(path, schema.names, column, is_text)
        _require_type(path, schema.field(column), is_text)
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
            yield batch.column(0)


def _require_column(path: Path, names: list[str], column: str, is_text: bool) -> None:
    if column in names:
        return
    setting = "data.text_column" if is_text else "data.tokens_column"
    near = difflib.get_close_matches(column, names, n=1)
    hint = f"; set {setting} to {near[0]!r}?" if near else f"; set {setting} to one of them"
    raise DataError(f"{path} has no column {column!r}; it has {', '.join(names) or 'none'}{hint}")


def _require_type(path: Path, field: pa.Field, is_text: bool) -> None:
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    if is_text:
        fits = any(
            check(kind)
            for check in (
                types.is_string,
                types.is_large_string,
                types.is_string_view,
                types.is_binary,
                types.is_large_binary,
            )
        )
    else:
        is_list = any(
            check(kind) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list)
        )
        fits = is_list and types.is_integer(kind.value_type)
    if not fits:
        setting, wanted, other = (
            ("data.text_column", "text", "data.tokens_column for token ids")
            if is_text
            else ("data.tokens_column", "lists of integers", "data.text_column for text")
        )
        raise DataError(
            f"{path}: {setting} is {field.name!r}, which holds {field.type}, not {wanted};"
            f" name another column, or use {other}"
        )


def _nonempty(batch: pa.Array, is_text: bool) -> pa.Array:
    if types.is_dictionary(batch.type):
        batch = batch.dictionary_decode()
    # Cast first: Arrow cannot filter every type of string.
    documents = batch.cast(pa.large_binary() if is_text else pa.large_list(pa.int64())).drop_null()
    is_filled = np.diff(document_bounds(documents)) > 0
    return documents if is_filled.all() else documents.filter(pa.array(is_filled))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data.source: cannot read {path} ({error}); mend or remove the file, or give another"
        ) from error
