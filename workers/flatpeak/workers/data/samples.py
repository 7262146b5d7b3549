"""Samples: windows of the tokenised corpus, addressed by a global index.

The documents of a corpus form one stream, each closed by its end-of-document id. Window w of
length T is stream[w T : (w + 1) T], so a long document goes on in the next window and short ones
share one. A token's target is the next token of its document, across the border of windows too;
the last token of a document has none. So in one epoch every token is a target exactly once, but
for the first tokens of documents and what is left of the stream after the last whole window.

Positions count from 0 at every document and at the start of every window: a document that goes on
in the next window starts there anew, since nothing of the window before can be attended to.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from flatpeak.workers.data.corpus import FORMAT, Corpus, open_corpus
from flatpeak.workers.data.documents import Documents, document_bounds, read_documents
from flatpeak.workers.data.order import permute
from flatpeak.workers.data.sources import Source, find_source
from flatpeak.workers.data.tokenizer import Tokenizer, open_tokenizer
from flatpeak.workers.errors import DataError

NO_TARGET = -100
_COUNT_TOKENS = 1 << 22
_LARGEST_ID = (1 << 32) - 1


@dataclass(frozen=True)
class Sample:
    """One sequence of T tokens; arrays are int64 [T].

    `targets` is -100 where the document ends. `boundaries` are the offsets at which documents
    start, from 0, and T at the end: attention stays within [boundaries[i], boundaries[i + 1]).
    """

    index: int
    inputs: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    boundaries: tuple[int, ...]


class Samples:
    """The samples of a corpus, for ever: index // samples_per_epoch is the epoch.

    Every epoch has an order of its own, a pure function of (seed, epoch).
    """

    def __init__(self, corpus: Corpus, *, sequence_length: int, seed: int) -> None:
        self._corpus = corpus
        self._length = sequence_length
        self._seed = seed
        self.tokens_total = len(corpus.tokens)
        self.documents_total = len(corpus.offsets) - 1
        self.samples_per_epoch = self.tokens_total // sequence_length

    def sample(self, index: int) -> Sample:
        """The sample with a global index of 0 or more."""
        assert index >= 0, f"sample {index}"
        epoch, position = divmod(index, self.samples_per_epoch)
        window = permute(position, self.samples_per_epoch, seed=self._seed, epoch=epoch)
        start, length = window * self._length, self._length
        stream = self._corpus.tokens[start : start + length + 1].astype(np.int64)
        ends = self._document_ends(start, start + length)
        targets = np.full(length, NO_TARGET, np.int64)
        targets[: len(stream) - 1] = stream[1:]
        targets[ends - 1] = NO_TARGET
        boundaries = (0, *ends[ends < length].tolist(), length)
        starts = np.array(boundaries[:-1])
        positions = np.arange(length) - np.repeat(starts, np.diff(boundaries))
        return Sample(index, stream[:length], targets, positions, boundaries)

    def unigram_entropy(self) -> float:
        """Nats a token of the corpus: the loss of a model that knows token frequencies alone."""
        counts = np.zeros(self._corpus.largest_id + 1, np.int64)
        for start in range(0, self.tokens_total, _COUNT_TOKENS):
            chunk = self._corpus.tokens[start : start + _COUNT_TOKENS]
            counts += np.bincount(chunk, minlength=len(counts))
        share = counts[counts > 0] / self.tokens_total
        return float(-(share * np.log(share)).sum())

    def _document_ends(self, start: int, stop: int) -> np.ndarray:
        """Ends of documents in (start, stop], counted from `start`."""
        offsets = self._corpus.offsets
        first, last = np.searchsorted(offsets, (start, stop), side="right")
        return offsets[first:last] - start


def open_samples(
    *,
    source: str,
    tokenizer: str,
    sequence_length: int,
    seed: int,
    text_column: str = "text",
    tokens_column: str | None = None,
    vocab_size: int | None = None,
    cache_dir: str | None = None,
) -> Samples:
    """Open a corpus, tokenising it unless the cache holds it already.

    `source` is "stdlib", a Parquet, JSONL or text file, or a directory (see `find_source`).
    `tokenizer` is "bytes" or a Hugging Face tokenizer directory. Ids of `tokens_column` are taken
    as they are: `tokenizer` is not read, nothing is appended, and the last token of a row has no
    target. `vocab_size`, when given, bounds the ids. `cache_dir` is `~/.cache/flatpeak` (or
    below $XDG_CACHE_HOME) unless given; one that cannot be written is done without.

    Raises DataError for whatever the user can mend. Ranks that see the same files get the same
    samples; a cache or its absence changes nothing but the time it takes.
    """
    assert sequence_length > 0, f"sequence length {sequence_length}"
    found = find_source(source)
    encoder = open_tokenizer(tokenizer) if tokens_column is None else None
    key = [FORMAT, found.kind.value, str(found.root), found.listing()]
    key += [encoder.identity(), text_column] if encoder else ["ids", tokens_column]
    corpus = open_corpus(
        sha256(json.dumps(key).encode()).hexdigest()[:32],
        lambda: _tokenise(found, encoder, text_column=text_column, tokens_column=tokens_column),
        cache_dir=_cache_dir(cache_dir),
    )
    _check(corpus, found, sequence_length=sequence_length, vocab_size=vocab_size)
    return Samples(corpus, sequence_length=sequence_length, seed=seed)


def _cache_dir(given: str | None) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # Not Path.expanduser, which raises where an account has no home directory.
    return Path(os.path.expanduser(given or f"{base}/flatpeak"))


def _tokenise(
    source: Source, tokenizer: Tokenizer | None, *, text_column: str, tokens_column: str | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    batches = read_documents(source, text_column=text_column, tokens_column=tokens_column)
    for documents in batches:
        if tokenizer:
            yield tokenizer.encode(documents)
        else:
            yield _ready_ids(documents), np.diff(document_bounds(documents.values))


def _ready_ids(documents: Documents) -> np.ndarray:
    path = documents.origin(0)
    values = documents.values.flatten()
    if values.null_count:
        raise DataError(f"{path} has a null among its token ids; write every id as an integer")
    ids = values.to_numpy()
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest > _LARGEST_ID:
        wrong = smallest if smallest < 0 else largest
        raise DataError(f"{path} has the token id {wrong}; ids go from 0 to {_LARGEST_ID}")
    return ids.astype(np.uint32)


def _check(corpus: Corpus, source: Source, *, sequence_length: int, vocab_size: int | None) -> None:
    where = source.files[0] if len(source.files) == 1 else source.root
    if not len(corpus.tokens):
        raise DataError(
            f"data.source: {where} ({len(source.files)} files) holds no documents, or empty ones"
            " only; give a corpus with text in it"
        )
    if vocab_size is not None and corpus.largest_id >= vocab_size:
        raise DataError(
            f"data.source: {where} has the token id {corpus.largest_id}, outside a vocabulary of"
            f" {vocab_size}; set model.config.vocab_size to {corpus.largest_id + 1} or more, or"
            " data.tokenizer to the one of the model"
        )
    if len(corpus.tokens) < sequence_length:
        raise DataError(
            f"data.source: {where} has {len(corpus.tokens)} tokens, fewer than one sequence of"
            f" {sequence_length}; set train.sequence_length to {len(corpus.tokens)} or less, or"
            " give a larger corpus"
        )
