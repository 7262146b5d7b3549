"""Text to token ids: the built-in byte tokenizer, or a Hugging Face tokenizer directory.

A tokenizer turns a batch of documents into one flat array of ids and the documents' lengths. Each
document ends with the end-of-document id, which its last token predicts.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flatpeak.workers.data.documents import Documents, document_bounds
from flatpeak.workers.data.sources import listing
from flatpeak.workers.errors import DataError


class Tokenizer(Protocol):
    def identity(self) -> object:
        """What the ids depend on, as JSON."""
        ...

    def encode(self, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
        """(ids, lengths): flat ids of all documents, and the number of ids of each."""
        ...


def open_tokenizer(name: str) -> Tokenizer:
    """Resolve `data.tokenizer`: "bytes", or a Hugging Face tokenizer directory."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 ends a document. Takes any bytes, valid UTF-8 or not."""

    END = 256

    def identity(self) -> object:
        return "bytes"

    def encode(self, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
        bounds = document_bounds(documents.values)
        values = np.frombuffer(documents.values.buffers()[2], np.uint8)
        lengths = np.diff(bounds) + 1
        ids = np.empty(int(lengths.sum()), np.uint16)
        is_byte = np.ones(len(ids), bool)
        is_byte[np.cumsum(lengths) - 1] = False
        ids[is_byte] = values[bounds[0] : bounds[-1]]
        ids[~is_byte] = self.END
        return ids, lengths


class HuggingFaceTokenizer:
    """A tokenizer directory as `transformers` saves it; its eos token ends a document.

    Special tokens written out in a text are recognised; none are added but the eos. Text that is
    not UTF-8 is refused, since replacing it would train on characters that nobody wrote.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(os.path.abspath(os.path.expanduser(directory)))
        if not self._path.is_dir():
            raise DataError(
                f"data.tokenizer: {self._path} is not a directory; give `bytes`, or a directory"
                " with a tokenizer.json"
            )
        # Loading takes seconds, and a cached corpus needs no tokenizer: left to the first use.
        self._loaded: tuple[Any, int, type[np.unsignedinteger]] | None = None

    def identity(self) -> object:
        files = sorted(path for path in self._path.iterdir() if path.is_file())
        return [str(self._path), listing(self._path, tuple(files))]

    def encode(self, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
        tokenizer, end, dtype = self._loaded = self._loaded or _load(self._path)
        encoded: Iterable[list[int]] = tokenizer(
            _as_strings(documents),
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        # A normaliser may leave nothing of a text; such a document is as empty as an empty one.
        pieces = [np.array([*ids, end], dtype) for ids in encoded if ids]
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        return np.concatenate(pieces or [np.empty(0, dtype)]), lengths


def _as_strings(documents: Documents) -> list[str]:
    texts = []
    for row, content in enumerate(documents.values.to_pylist()):
        try:
            texts.append(content.decode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{documents.origin(row)} is not UTF-8 ({error}); convert it, or set data.tokenizer"
                " to `bytes`, which takes any bytes"
            ) from error
    return texts


def _load(path: Path) -> tuple[Any, int, type[np.unsignedinteger]]:
    """(tokenizer, its eos id, the narrowest type that holds its ids)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises plain Exception on a broken file
        raise DataError(
            f"data.tokenizer: {path} is not a tokenizer directory ({_first_line(error)}); give one"
            " with a tokenizer.json, or `bytes`"
        ) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.tokenizer: {path} names no eos token, which separates documents; set eos_token"
            " in its tokenizer_config.json"
        )
    largest_id = max(tokenizer.get_vocab().values())
    return tokenizer, tokenizer.eos_token_id, np.uint16 if largest_id < 1 << 16 else np.uint32


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
