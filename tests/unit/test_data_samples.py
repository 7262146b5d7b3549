"""Samples against a reference that walks the corpus token by token."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.workers.data import NO_TARGET, Samples, open_samples
from flatpeak.workers.data.corpus import Corpus


def samples_of(lengths: list[int], sequence_length: int, seed: int = 0) -> Samples:
    """Documents of the given lengths whose tokens are their places in the corpus."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    corpus = Corpus(tokens=tokens, offsets=offsets, largest_id=int(offsets[-1]) - 1)
    return Samples(corpus, sequence_length=sequence_length, seed=seed)


def reference_window(lengths: list[int], start: int, length: int):
    """(inputs, targets, positions, boundaries) of the window that starts at a token."""
    places = [(document, place) for document, n in enumerate(lengths) for place in range(n)]
    targets, positions, boundaries = [], [], [0]
    for token in range(start, start + length):
        document, place = places[token]
        if place == 0 and token > start:
            boundaries.append(token - start)
        positions.append(token - start - boundaries[-1])
        targets.append(NO_TARGET if place == lengths[document] - 1 else token + 1)
    return list(range(start, start + length)), targets, positions, (*boundaries, length)


corpora = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@given(lengths=corpora, sequence_length=st.integers(1, 24), seed=st.integers(0, 99))
def test_packing_equals_the_reference(lengths, sequence_length, seed):
    sequence_length = min(sequence_length, sum(lengths))
    samples = samples_of(lengths, sequence_length, seed)
    for index in range(samples.samples_per_epoch):
        sample = samples.sample(index)
        start = int(sample.inputs[0])
        inputs, targets, positions, boundaries = reference_window(lengths, start, sequence_length)
        assert start % sequence_length == 0
        assert sample.index == index
        assert sample.inputs.tolist() == inputs
        assert sample.targets.tolist() == targets
        assert sample.positions.tolist() == positions
        assert sample.boundaries == boundaries


@given(lengths=corpora, sequence_length=st.integers(1, 24), epoch=st.integers(0, 3))
def test_an_epoch_has_every_target_once_but_for_first_tokens_and_the_tail(
    lengths, sequence_length, epoch
):
    sequence_length = min(sequence_length, sum(lengths))
    samples = samples_of(lengths, sequence_length)
    first = epoch * samples.samples_per_epoch
    epoch_samples = [samples.sample(first + i) for i in range(samples.samples_per_epoch)]
    targets = np.concatenate([sample.targets for sample in epoch_samples])
    used = sorted(targets[targets != NO_TARGET].tolist())
    starts = set(np.cumsum([0, *lengths]).tolist())
    windows_end = samples.samples_per_epoch * sequence_length
    reachable = range(1, min(windows_end + 1, sum(lengths)))
    assert used == [token for token in reachable if token not in starts]


@given(lengths=corpora, sequence_length=st.integers(1, 24))
def test_positions_targets_and_boundaries_agree(lengths, sequence_length):
    sequence_length = min(sequence_length, sum(lengths))
    sample = samples_of(lengths, sequence_length).sample(0)
    assert sample.boundaries[0] == 0
    assert sample.boundaries[-1] == sequence_length
    assert np.flatnonzero(sample.positions == 0).tolist() == list(sample.boundaries[:-1])
    for start, stop in zip(sample.boundaries, sample.boundaries[1:], strict=False):
        assert sample.targets[start : stop - 1].tolist() == sample.inputs[start + 1 : stop].tolist()
        if stop < sequence_length:
            assert sample.targets[stop - 1] == NO_TARGET


def test_arrays_are_writable_int64_of_the_sequence_length():
    sample = samples_of([7, 3, 20], 8).sample(2)
    for array in (sample.inputs, sample.targets, sample.positions):
        assert array.dtype == np.int64
        assert array.shape == (8,)
        assert type(array) is np.ndarray
        assert array.flags.writeable


def test_documents_of_seven_and_three_share_a_sequence_of_ten():
    sample = samples_of([7, 3], 10).sample(0)
    assert sample.boundaries == (0, 7, 10)
    assert sample.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert sample.targets.tolist() == [1, 2, 3, 4, 5, 6, -100, 8, 9, -100]


def test_five_documents_packed_into_one_sequence_stay_apart():
    sample = samples_of([3, 1, 4, 2, 6], 12).sample(0)
    assert sample.boundaries == (0, 3, 4, 8, 10, 12)
    assert sample.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0, 1]
    assert sample.targets.tolist() == [1, 2, -100, -100, 5, 6, 7, -100, 9, -100, 11, 12]


def test_a_document_that_goes_on_in_the_next_window_starts_anew_there():
    samples = samples_of([10], 5)
    windows = sorted((samples.sample(i) for i in range(2)), key=lambda each: each.inputs[0])
    assert [window.positions.tolist() for window in windows] == [[0, 1, 2, 3, 4]] * 2
    assert windows[0].targets.tolist() == [1, 2, 3, 4, 5]
    assert windows[1].targets.tolist() == [6, 7, 8, 9, NO_TARGET]


def test_epochs_hold_the_same_windows_in_different_order():
    samples = samples_of([13] * 40, 5)
    size = samples.samples_per_epoch
    epochs = [[int(samples.sample(e * size + i).inputs[0]) for i in range(size)] for e in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_corpus_of_exactly_one_sequence_repeats_it():
    samples = samples_of([4, 4], 8)
    assert samples.samples_per_epoch == 1
    assert samples.sample(0).inputs.tolist() == samples.sample(5).inputs.tolist()


def test_text_documents_end_with_an_end_token_that_predicts_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("xy")
    samples = open_samples(
        source=str(tmp_path), tokenizer="bytes", sequence_length=7, seed=0, cache_dir=str(tmp_path)
    )
    sample = samples.sample(0)
    assert sample.inputs.tolist() == [*b"abc", 256, *b"xy", 256]
    assert sample.targets.tolist() == [*b"bc", 256, NO_TARGET, *b"y", 256, NO_TARGET]
    assert (samples.tokens_total, samples.documents_total) == (7, 2)


@given(st.lists(st.lists(st.integers(0, 50), min_size=1), min_size=1, max_size=20))
def test_unigram_entropy_equals_numpy(documents):
    tokens = np.concatenate(documents).astype(np.uint16)
    offsets = np.cumsum([0, *map(len, documents)])
    corpus = Corpus(tokens=tokens, offsets=offsets, largest_id=int(tokens.max()))
    _, counts = np.unique(tokens, return_counts=True)
    share = counts / counts.sum()
    entropy = Samples(corpus, sequence_length=1, seed=0).unigram_entropy()
    assert entropy == pytest.approx(float(-(share * np.log(share)).sum()), abs=1e-12)


def test_the_default_corpus_is_there_and_has_the_entropy_of_source_code(tmp_path):
    samples = open_samples(
        source="stdlib",
        tokenizer="bytes",
        sequence_length=1024,
        seed=0,
        vocab_size=257,
        cache_dir=str(tmp_path),
    )
    assert samples.documents_total > 300
    assert samples.tokens_total > 5_000_000
    assert 2.5 < samples.unigram_entropy() < 4.0


_PRINT_SAMPLES = """
from flatpeak.workers.data import open_samples
samples = open_samples(
    source="stdlib", tokenizer="bytes", sequence_length=64, seed=3, cache_dir={cache!r}
)
print([samples.sample(i).inputs.tolist() for i in (0, 1, 10**6)])
"""


def test_processes_with_different_hash_seeds_and_no_shared_cache_read_the_same(tmp_path):
    outputs = []
    for hash_seed in ("1", "2"):
        code = _PRINT_SAMPLES.format(cache=str(tmp_path / hash_seed))
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] != ""


def test_opening_data_needs_no_torch():
    root = str(Path(__file__).parents[2] / "workers")
    code = "import sys, flatpeak.workers.data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": root}, check=True)
