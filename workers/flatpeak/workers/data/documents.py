"""The documents in the files of a source.

They travel in batches, as Arrow arrays of either raw text or token ids: columns are never turned
into Python objects on their way to the byte tokenizer, and other tokenizers have many documents to
work on in parallel.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import json as arrow_json
from pyarrow import parquet, types

from flatpeak.workers.data.sources import Kind, Source, reading
from flatpeak.workers.errors import DataError

_SNIFF_BYTES = 8192
_TEXT_BYTES = 8 << 20
_JSONL_BYTES = 32 << 20
_PARQUET_ROWS = 256
_TEXT_TYPES = (
    types.is_string,
    types.is_large_string,
    types.is_string_view,
    types.is_binary,
    types.is_large_binary,
)
_LIST_TYPES = (types.is_list, types.is_large_list, types.is_fixed_size_list)


@dataclass(frozen=True)
class Documents:
    """A batch: large_binary or large_list<int64>, without nulls and empty entries.

    `files` has one path for all documents, or one for each.
    """

    values: pa.Array
    files: tuple[Path, ...]

    def origin(self, row: int) -> Path:
        return self.files[row if len(self.files) > 1 else 0]


def read_documents(
    source: Source, *, text_column: str, tokens_column: str | None
) -> Iterator[Documents]:
    """Yield documents: large_list<int64> if `tokens_column` is given, else large_binary.

    Text and token lists come from the named column (Parquet) or key (JSONL); a text file is one
    document. Null and empty documents are left out. Raises DataError that names the file.
    """
    column = tokens_column or text_column
    is_text = tokens_column is None
    if source.kind is Kind.TEXT:
        if not is_text:
            raise DataError(
                f"data.tokens_column is {tokens_column!r}, but {source.root} holds text files,"
                " which have no columns; set data.tokens_column to null, or give Parquet or JSONL"
            )
        yield from _read_texts(source.files)
        return
    read = _read_jsonl if source.kind is Kind.JSONL else _read_parquet
    for path in source.files:
        with reading(path):
            for batch in read(path, column, is_text):
                values = _nonempty(batch, is_text)
                if len(values):
                    yield Documents(values, (path,))


def document_bounds(documents: pa.Array) -> np.ndarray:
    """Offsets [documents + 1] of a large_binary or large_list array into its values."""
    offsets = np.frombuffer(documents.buffers()[1], np.int64)
    return offsets[documents.offset :][: len(documents) + 1]


def _read_texts(files: tuple[Path, ...]) -> Iterator[Documents]:
    batch: list[tuple[Path, bytes]] = []
    size = 0
    for path in files:
        with reading(path):
            content = path.read_bytes()
        if b"\0" in content[:_SNIFF_BYTES]:
            if len(files) > 1:
                continue  # not a document of this directory
            raise DataError(
                f"data.source: {path} is not text (a zero byte in its first {_SNIFF_BYTES} bytes);"
                " give UTF-8 text, a .parquet or a .jsonl file, uncompressed"
            )
        if content:
            batch.append((path, content))
            size += len(content)
        if size >= _TEXT_BYTES:
            yield _join_texts(batch)
            batch, size = [], 0
    if batch:
        yield _join_texts(batch)


def _join_texts(batch: list[tuple[Path, bytes]]) -> Documents:
    bounds = np.cumsum([0, *(len(content) for _, content in batch)], dtype=np.int64)
    joined = b"".join(content for _, content in batch)
    # From buffers, which does not copy what may be one large file.
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(joined)]
    values = pa.Array.from_buffers(pa.large_binary(), len(batch), buffers)
    return Documents(values, tuple(path for path, _ in batch))


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
        fits = any(is_kind(kind) for is_kind in _TEXT_TYPES)
    else:
        fits = any(is_kind(kind) for is_kind in _LIST_TYPES) and types.is_integer(kind.value_type)
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
    return documents.filter(pa.array(np.diff(document_bounds(documents)) > 0))
