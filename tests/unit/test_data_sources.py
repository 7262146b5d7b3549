"""Every format, and everything a user can get wrong about one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from flatpeak.workers.data import Samples, documents, open_samples, sources
from flatpeak.workers.data.documents import Documents
from flatpeak.workers.data.tokenizer import ByteTokenizer
from flatpeak.workers.errors import DataError

TEXTS = ["first document", "", "zweites Dökument\n", None, "x" * 40, "三"]
IDS = [[1, 2, 3], [], [70_000], None, [5, 6]]


def open_bytes(source: Path, **options: Any) -> Samples:
    return open_samples(
        source=str(source),
        seed=0,
        cache_dir=str(source.parent / "cache"),
        **{"tokenizer": "bytes", "sequence_length": 4, **options},
    )


def documents_of(samples: Samples) -> list[list[int]]:
    corpus = samples._corpus
    return [piece.tolist() for piece in np.split(corpus.tokens, corpus.offsets[1:-1])]


def as_bytes(texts: Sequence[str | None]) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts if text]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_parquet_text_of_any_string_type(tmp_path, kind):
    column = pa.array(TEXTS, pa.string()).cast(kind)
    path = write_parquet(tmp_path / "a.parquet", id=list(range(len(TEXTS))), text=column)
    assert documents_of(open_bytes(path)) == as_bytes(TEXTS)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())],
    ids=str,
)
def test_parquet_token_ids_are_taken_as_they_are(tmp_path, kind):
    ids = [[1, 2, 3], [], [60_000 if kind.value_type == pa.uint16() else 70_000], None, [5, 6]]
    path = write_parquet(tmp_path / "a.parquet", ids=pa.array(ids, kind))
    samples = open_bytes(path, tokens_column="ids")
    assert documents_of(samples) == [each for each in ids if each]


def test_parquet_token_ids_of_fixed_length(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", ids=pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    )
    assert documents_of(open_bytes(path, tokens_column="ids")) == [[1, 2], [3, 4]]


def test_a_link_is_read_by_its_own_name_and_not_by_that_of_its_target(tmp_path):
    write_parquet(tmp_path / "blob", text=["linked"])
    (tmp_path / "a.parquet").symlink_to(tmp_path / "blob")
    assert documents_of(open_bytes(tmp_path / "a.parquet")) == as_bytes(["linked"])


def test_shards_without_a_single_document_are_passed_over(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    write_parquet(root / "0.parquet", text=pa.array([], pa.string()))
    write_parquet(root / "1.parquet", text=pa.array([None, None], pa.string()))
    write_parquet(root / "2.parquet", text=["a document"])
    assert documents_of(open_bytes(root)) == as_bytes(["a document"])


def test_a_jsonl_file_may_start_with_nothing_but_nulls(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_JSONL_BYTES", 8)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in (None, "", "a document")])
    assert documents_of(open_bytes(path)) == as_bytes(["a document"])


def test_jsonl_text_with_other_keys_blank_lines_and_missing_values(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"meta": {"n": n}, "text": text}) for n, text in enumerate(TEXTS)]
    path.write_text("\n\n".join([*lines, '{"meta": "no text"}', '{"text": "last"}']))
    assert documents_of(open_bytes(path)) == as_bytes([*TEXTS, "last"])


def test_jsonl_token_ids(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"ids": ids} for ids in IDS])
    assert documents_of(open_bytes(path, tokens_column="ids")) == [each for each in IDS if each]


def test_jsonl_longer_than_a_piece_and_with_lines_longer_than_one(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_JSONL_BYTES", 64)
    texts = ["a" * n for n in (3, 200, 1, 64, 63, 1000, 2)]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    assert documents_of(open_bytes(path)) == as_bytes(texts)


def test_a_text_file_is_one_document_of_raw_bytes(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9\n")
    assert documents_of(open_bytes(path)) == [[*b"caf\xe9\n", 256]]


def test_a_source_tree_is_read_in_path_order_without_hidden_and_binary_files(tmp_path):
    root = tmp_path / "tree"
    for name, content in {
        "b.py": b"b",
        "a/z.py": b"az",
        "a/b/c.c": b"abc",
        "a.py": b"a",
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "__pycache__/b.pyc": b"cached",
        "image.png": b"\x89PNG\0\0",
        "empty.py": b"",
        "package.json": b"{}",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    expected = as_bytes(["a", "abc", "az", "b", "{}"])
    assert documents_of(open_bytes(root)) == expected


@pytest.mark.parametrize("batch_bytes", [1, 4, 100])
def test_text_files_are_the_same_documents_however_they_are_batched(
    tmp_path, monkeypatch, batch_bytes
):
    monkeypatch.setattr(documents, "_TEXT_BYTES", batch_bytes)
    root = tmp_path / "tree"
    root.mkdir()
    texts = ["abc", "", "d", "efghi", "jk"]
    for number, text in enumerate(texts):
        (root / f"{number}.txt").write_text(text)
    assert documents_of(open_bytes(root)) == as_bytes(texts)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_directory_of_shards_is_read_in_path_order_and_its_readme_is_not(tmp_path, suffix):
    root = tmp_path / "shards"
    (root / "b").mkdir(parents=True)
    for name, text in {"2": "two", "b/0": "zero", "10": "ten"}.items():
        path = root / f"{name}.{suffix}"
        if suffix == "parquet":
            write_parquet(path, text=[text])
        else:
            write_jsonl(path, [{"text": text}])
    (root / "README.md").write_text("not a document")
    assert documents_of(open_bytes(root)) == as_bytes(["ten", "two", "zero"])


def test_the_default_corpus_leaves_out_tests_and_installed_packages():
    names = [path.as_posix() for path in sources.find_source("stdlib").files]
    assert any(name.endswith("/json/decoder.py") for name in names)
    for part in ("/site-packages/", "/dist-packages/", "/test/", "/idlelib/", "_sysconfigdata"):
        assert not [name for name in names if part in name]


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9))
def test_the_byte_tokenizer_equals_a_loop(documents):
    array = pa.array([b"cut off", *documents], pa.large_binary())[1:]
    ids, lengths = ByteTokenizer().encode(Documents(array, (Path("origin"),)))
    assert ids.tolist() == [token for document in documents for token in [*document, 256]]
    assert lengths.tolist() == [len(document) + 1 for document in documents]


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return path


def test_a_hugging_face_tokenizer_gives_its_ids_and_its_eos(tmp_path, tokenizer_directory):
    from tokenizers import Tokenizer

    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    samples = open_bytes(path, tokenizer=str(tokenizer_directory))
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<eos>")
    assert documents_of(samples) == [[*tokenizer.encode(text).ids, end] for text in TEXTS if text]
    assert samples._corpus.tokens.dtype == np.uint16


def test_text_that_is_not_utf8_is_refused_by_a_hugging_face_tokenizer(
    tmp_path, tokenizer_directory
):
    root = tmp_path / "tree"
    root.mkdir()
    (root / "empty.txt").touch()
    (root / "fine.txt").write_text("café")
    (root / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8.*`bytes`"):
        open_bytes(root, tokenizer=str(tokenizer_directory))


def missing_path(folder: Path) -> dict[str, Any]:
    return {"source": folder / "nowhere"}


def empty_directory(folder: Path) -> dict[str, Any]:
    (folder / "empty").mkdir()
    return {"source": folder / "empty"}


def only_empty_documents(folder: Path) -> dict[str, Any]:
    return {"source": write_jsonl(folder / "a.jsonl", [{"text": ""}, {"text": ""}])}


def only_binary_files(folder: Path) -> dict[str, Any]:
    (folder / "tree").mkdir()
    for name in "ab":
        (folder / "tree" / name).write_bytes(b"\0")
    return {"source": folder / "tree"}


def compressed_file(folder: Path) -> dict[str, Any]:
    (folder / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0\0\0")
    return {"source": folder / "a.jsonl.gz"}


def both_kinds(folder: Path) -> dict[str, Any]:
    (folder / "mixed").mkdir()
    write_jsonl(folder / "mixed" / "a.jsonl", [{"text": "a"}])
    write_parquet(folder / "mixed" / "a.parquet", text=["a"])
    return {"source": folder / "mixed"}


def shorter_than_a_sequence(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("abc")
    return {"source": folder / "a.txt", "sequence_length": 5}


def parquet_without_column(folder: Path) -> dict[str, Any]:
    return {"source": write_parquet(folder / "a.parquet", texts=["a"], url=["b"])}


def jsonl_without_column(folder: Path) -> dict[str, Any]:
    return {"source": write_jsonl(folder / "a.jsonl", [{"content": "a", "url": "b"}])}


def parquet_text_of_integers(folder: Path) -> dict[str, Any]:
    return {"source": write_parquet(folder / "a.parquet", text=[1, 2])}


def parquet_tokens_of_text(folder: Path) -> dict[str, Any]:
    return {"source": write_parquet(folder / "a.parquet", ids=["a"]), "tokens_column": "ids"}


def parquet_tokens_of_floats(folder: Path) -> dict[str, Any]:
    return {"source": write_parquet(folder / "a.parquet", ids=[[1.5]]), "tokens_column": "ids"}


def jsonl_text_of_integers(folder: Path) -> dict[str, Any]:
    return {"source": write_jsonl(folder / "a.jsonl", [{"text": "a"}, {"text": 3}])}


def jsonl_tokens_of_floats(folder: Path) -> dict[str, Any]:
    return {"source": write_jsonl(folder / "a.jsonl", [{"ids": [1.5]}]), "tokens_column": "ids"}


def null_token(folder: Path) -> dict[str, Any]:
    return {"source": write_jsonl(folder / "a.jsonl", [{"ids": [1, None]}]), "tokens_column": "ids"}


def negative_token(folder: Path) -> dict[str, Any]:
    return {"source": write_jsonl(folder / "a.jsonl", [{"ids": [1, -7]}]), "tokens_column": "ids"}


def tokens_of_text_files(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("abc")
    return {"source": folder / "a.txt", "tokens_column": "ids"}


def invalid_json(folder: Path) -> dict[str, Any]:
    (folder / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n')
    return {"source": folder / "a.jsonl"}


def json_array(folder: Path) -> dict[str, Any]:
    (folder / "a.json").write_text('[{"text": "a"}]\n')
    return {"source": folder / "a.json"}


def broken_parquet(folder: Path) -> dict[str, Any]:
    (folder / "a.parquet").write_bytes(b"PAR1 but no more")
    return {"source": folder / "a.parquet"}


def id_outside_vocabulary(folder: Path) -> dict[str, Any]:
    path = write_jsonl(folder / "a.jsonl", [{"ids": [1, 300, 2, 3]}])
    return {"source": path, "tokens_column": "ids", "vocab_size": 300}


def bytes_outside_vocabulary(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("abc")
    return {"source": folder / "a.txt", "vocab_size": 256}


def no_tokenizer_directory(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("abc")
    return {"source": folder / "a.txt", "tokenizer": str(folder / "Qwen")}


def directory_without_tokenizer(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("abc")
    (folder / "Qwen").mkdir()
    return {"source": folder / "a.txt", "tokenizer": str(folder / "Qwen")}


def broken_tokenizer(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("abc")
    (folder / "Qwen").mkdir()
    (folder / "Qwen" / "tokenizer.json").write_text("{}")
    return {"source": folder / "a.txt", "tokenizer": str(folder / "Qwen")}


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (missing_path, ["data.source", "nowhere", "stdlib"]),
        (empty_directory, ["data.source", "holds no files"]),
        (only_empty_documents, ["a.jsonl", "no documents"]),
        (only_binary_files, ["2 files", "no documents"]),
        (compressed_file, ["a.jsonl.gz", "not text", "uncompressed"]),
        (both_kinds, ["both Parquet (1 files) and JSONL (1)"]),
        (shorter_than_a_sequence, ["4 tokens", "sequence of 5", "train.sequence_length to 4"]),
        (parquet_without_column, ["no column 'text'", "texts, url", "data.text_column to 'texts'"]),
        (jsonl_without_column, ["a.jsonl", "no column 'text'", "content, url"]),
        (parquet_text_of_integers, ["data.text_column", "int64", "not text"]),
        (parquet_tokens_of_text, ["data.tokens_column", "string", "data.text_column"]),
        (parquet_tokens_of_floats, ["data.tokens_column", "double", "lists of integers"]),
        (jsonl_text_of_integers, ["a.jsonl", "data.text_column", "must hold a string"]),
        (jsonl_tokens_of_floats, ["a.jsonl", "data.tokens_column", "a list of integers"]),
        (null_token, ["a.jsonl", "null"]),
        (negative_token, ["a.jsonl", "token id -7"]),
        (tokens_of_text_files, ["data.tokens_column", "text files"]),
        (invalid_json, ["a.jsonl, line 3", "not valid JSON"]),
        (json_array, ["a.json, line 1", "not a JSON object"]),
        (broken_parquet, ["a.parquet", "cannot read"]),
        (id_outside_vocabulary, ["token id 300", "of 300", "model.config.vocab_size to 301"]),
        (bytes_outside_vocabulary, ["token id 256", "model.config.vocab_size to 257"]),
        (no_tokenizer_directory, ["data.tokenizer", "Qwen is not a directory", "`bytes`"]),
        (directory_without_tokenizer, ["data.tokenizer", "tokenizer.json"]),
        (broken_tokenizer, ["data.tokenizer", "Qwen is not a tokenizer directory"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_bad_input_is_refused_with_what_is_wrong_and_what_mends_it(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]], fragments: list[str]
):
    with pytest.raises(DataError) as caught:
        open_bytes(**make(tmp_path))
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    assert caught.value.exit_code == 2
    assert "\n" not in message


def test_the_vocabulary_is_checked_with_a_warm_cache_too(tmp_path):
    options = id_outside_vocabulary(tmp_path)
    open_bytes(**{**options, "vocab_size": 301})
    with pytest.raises(DataError, match="token id 300"):
        open_bytes(**options)


def test_a_tokenizer_without_eos_is_refused(tmp_path, tokenizer_directory):
    directory = tmp_path / "no-eos"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes(
        (tokenizer_directory / "tokenizer.json").read_bytes()
    )
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match="names no eos token"):
        open_bytes(tmp_path / "a.txt", tokenizer=str(directory))
