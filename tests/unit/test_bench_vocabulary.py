"""The vocabulary bench: what it reports, what grows with what, and what it refuses."""

from pathlib import Path

import pytest

from flatpeak.controller.bench import run_bench
from flatpeak.workers.errors import InputError

CHECKOUT = Path(__file__).parents[2]
SMALL = ("--hidden=64", "--vocab=259", "--token-tile=16")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_exact_and_gives_every_ratio(ranks: int):
    words = [*SMALL, f"--ranks={ranks}", "--tokens=200", "--repeats=2"]
    report = run_bench("vocabulary", words, start=CHECKOUT)
    assert report.exact
    compared = {1: ["ring", "dense", "torch chunked"], 2: ["ring", "vocabulary parallel"]}
    # torch's own is there since 2.13.
    own = [name for name in compared[1] if name in {row["method"] for row in report.rows}]
    expected = [(name, 1) for name in own]
    expected += [(name, 2) for name in compared[2]] if ranks == 2 else []
    assert [(row["method"], row["ranks"]) for row in report.rows] == expected
    for row in report.rows:
        assert row["peak_bytes"] - row["resident_bytes"] == row["increment_bytes"] > 0
        assert row["seconds_max"] >= row["seconds"] >= row["seconds_min"] > 0
    ratios = dict(report.ratios)
    if "torch chunked" not in own:
        assert ratios.pop("increment_vs_torch_chunked_p1") is None
        assert ratios.pop("time_vs_torch_chunked_p1") is None
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in ratios.values())
    assert ("increment_vs_vocabulary_parallel" in ratios) is (ranks == 2)
    assert ratios["increment_vs_dense"] < 0.2


@pytest.mark.parametrize("schedule", ["weights", "activations", "auto"])
def test_only_scalars_grow_with_the_tokens_and_nothing_with_the_vocabulary(schedule: str):
    # Under `auto` twice the vocabulary would let the other tensor move.
    words = [*SMALL, "--ranks=2", "--tokens=150", "--repeats=0", f"--schedule={schedule}"]
    report = run_bench("vocabulary", words, start=CHECKOUT)
    assert report.ratios["time_vs_torch_chunked_p1"] is None
    by_tokens = report.ratios["increment_growth_on_doubling_n"]
    by_rows = report.ratios["increment_growth_on_doubling_v"]
    assert by_tokens is not None
    assert by_rows is not None
    assert 1 <= by_tokens < 1.5
    assert by_rows == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("option", "legal"),
    [
        ("tokens=0", "--tokens 0: should be 1 or more"),
        ("hidden=-1", "--hidden -1: should be 1 or more"),
        ("vocab=0", "--vocab 0: should be 1 or more"),
        ("ranks=0", "--ranks 0: should be 1 or more"),
        ("token-tile=-1", "--token-tile -1: should be 0 or more"),
        ("repeats=-1", "--repeats -1: should be 0 or more"),
        ("vocab=7", "--vocab 7: should be 8 or more, a row a rank"),
        ("schedule=sideways", "--schedule sideways: there are auto, weights, activations"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(option: str, legal: str):
    with pytest.raises(InputError) as refused:
        run_bench("vocabulary", [f"--{option}"], start=CHECKOUT)
    assert str(refused.value) == legal
