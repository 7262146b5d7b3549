"""The cache of tokenised corpora: reuse, atomicity, and doing without."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flatpeak.workers.data import corpus as corpus_module
from flatpeak.workers.data import open_samples
from flatpeak.workers.data.corpus import Corpus, open_corpus
from flatpeak.workers.errors import DataError, WaitTimeout
from ranks import run_ranks

DOCUMENTS = ([1, 2, 3], [4], [70_000, 6])


def batches():
    for document in DOCUMENTS:
        yield np.array(document, np.uint32), np.array([len(document)])


def no_batches():
    raise AssertionError("the corpus was tokenised again")


def contents(corpus: Corpus) -> tuple[list[int], list[int], int]:
    return corpus.tokens.tolist(), corpus.offsets.tolist(), corpus.largest_id


EXPECTED = ([1, 2, 3, 4, 70_000, 6], [0, 3, 4, 6], 70_000)


def test_a_second_opening_reads_the_cache(tmp_path):
    first = open_corpus("name", batches, cache_dir=tmp_path / "new" / "folder")
    second = open_corpus("name", no_batches, cache_dir=tmp_path / "new" / "folder")
    assert contents(first) == contents(second) == EXPECTED


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("tokens", range(1, 6))
def test_any_number_of_tokens_of_either_width_survives_the_file(tmp_path, dtype, tokens):
    ids = np.arange(tokens, dtype=dtype)
    open_corpus("name", lambda: [(ids, np.array([tokens]))], cache_dir=tmp_path)
    corpus = open_corpus("name", no_batches, cache_dir=tmp_path)
    assert contents(corpus) == (list(range(tokens)), [0, tokens], tokens - 1)
    assert corpus.tokens.itemsize == np.dtype(dtype).itemsize


@pytest.mark.parametrize("kept", [0, 10, 47, 48, 60, -1], ids=lambda n: f"{n}-bytes")
def test_a_cut_off_cache_file_is_made_again(tmp_path, kept):
    open_corpus("name", batches, cache_dir=tmp_path)
    path = tmp_path / ".name.tokens"
    path.write_bytes(path.read_bytes()[:kept])
    assert contents(open_corpus("name", batches, cache_dir=tmp_path)) == EXPECTED
    assert contents(open_corpus("name", no_batches, cache_dir=tmp_path)) == EXPECTED


def test_a_cache_that_cannot_be_written_is_done_without_and_said(tmp_path, caplog):
    (tmp_path / ".name.lock").mkdir()  # in the way, and in that of root too
    with caplog.at_level(logging.WARNING):
        corpus = open_corpus("name", batches, cache_dir=tmp_path)
    assert contents(corpus) == EXPECTED
    assert "held in memory" in caplog.text


@pytest.mark.parametrize("below", ["", "below/it"], ids=["file", "below a file"])
def test_a_cache_that_is_no_directory_is_refused(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.cache_dir = .*/file.* is no directory"):
        open_corpus("name", batches, cache_dir=tmp_path / "file" / below)


def test_a_failed_tokenisation_leaves_neither_a_cache_file_nor_a_temporary_one(tmp_path):
    def failing():
        yield np.array([1], np.uint32), np.array([1])
        raise ValueError("bad document")

    with pytest.raises(ValueError, match="bad document"):
        open_corpus("name", failing, cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".name.lock"]
    assert contents(open_corpus("name", batches, cache_dir=tmp_path)) == EXPECTED


_KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from flatpeak.workers.data.corpus import open_corpus

def batches():
    yield np.arange(10**6, dtype=np.uint32), np.array([10**6])
    os.kill(os.getpid(), signal.SIGKILL)

open_corpus("name", batches, cache_dir=Path(sys.argv[1]))
"""


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _KILLED_WHILE_WRITING, str(tmp_path)]
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".name.*.tmp"))) == 1
    assert contents(open_corpus("name", batches, cache_dir=tmp_path)) == EXPECTED
    assert sorted(path.name for path in tmp_path.iterdir()) == [".name.lock", ".name.tokens"]


def test_processes_that_start_at_once_tokenise_once_and_agree(tmp_path):
    def open_together(rank: int, folder: Path):
        import torch.distributed as dist

        def slow_batches():
            (folder / f"tokenised-by-{rank}").touch()
            for ids, lengths in batches():
                time.sleep(0.1)
                yield ids, lengths

        dist.barrier()
        return contents(open_corpus("name", slow_batches, cache_dir=folder))

    assert run_ranks(3, open_together, tmp_path) == [EXPECTED] * 3
    assert len(list(tmp_path.glob("tokenised-by-*"))) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_waiting_for_another_process_ends_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_WAIT_S", 0.1)
    with (tmp_path / ".name.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4321")
        lock.flush()
        with pytest.raises(WaitTimeout, match=r"process 4321 .*data\.cache_dir"):
            open_corpus("name", batches, cache_dir=tmp_path)
    assert contents(open_corpus("name", batches, cache_dir=tmp_path)) == EXPECTED


def test_a_cache_inside_the_directory_of_documents_is_not_part_of_the_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    for _ in range(3):
        assert open_text(tmp_path, tmp_path).documents_total == 1
    assert len(list(tmp_path.glob("*.tokens"))) == 1


def open_text(folder: Path, cache: Path, **options):
    return open_samples(
        source=str(folder),
        sequence_length=2,
        seed=0,
        cache_dir=str(cache),
        **{"tokenizer": "bytes", **options},
    )


def test_an_unchanged_corpus_is_not_read_again_and_a_changed_one_is(tmp_path):
    folder, cache = tmp_path / "corpus", tmp_path / "cache"
    folder.mkdir()
    file = folder / "a.txt"
    file.write_text("abcd")
    stat = file.stat()
    open_text(folder, cache)
    # Other bytes under the same size and time: only a cache can still answer with the old ones.
    file.write_text("wxyz")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_text(folder, cache).unigram_entropy() == pytest.approx(np.log(5))
    assert len(list(cache.glob("*.tokens"))) == 1

    file.write_text("aaaaaaa")
    assert open_text(folder, cache).tokens_total == 8
    (folder / "b.txt").write_text("b")
    assert open_text(folder, cache).tokens_total == 10
    assert len(list(cache.glob("*.tokens"))) == 3


def test_columns_of_one_file_have_caches_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abcd", "title": "xy"}\n')
    assert open_text(tmp_path, tmp_path).tokens_total == 5
    assert open_text(tmp_path, tmp_path, text_column="title").tokens_total == 3


def test_the_cache_lies_where_the_user_keeps_caches_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "a.txt").write_text("abcd")
    source = str(tmp_path / "a.txt")
    for cache_dir in (None, "~/mine"):
        open_samples(
            source=source, tokenizer="bytes", sequence_length=2, seed=0, cache_dir=cache_dir
        )
    assert len(list((tmp_path / "xdg" / "flatpeak").glob("*.tokens"))) == 1
    assert len(list((tmp_path / "home" / "mine").glob("*.tokens"))) == 1
