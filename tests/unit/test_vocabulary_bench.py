"""The vocabulary bench: what it reports, and that its baselines are what they say."""

from pathlib import Path

import pytest

from flatpeak.controller.bench import run_bench
from flatpeak.workers.errors import InputError

CHECKOUT = Path(__file__).parents[2]
SMALL = ["--tokens=96", "--hidden=16", "--vocab=501", "--token-tile=16"]


def test_a_run_on_several_ranks_is_exact_and_gives_every_ratio():
    report = run_bench("vocabulary", [*SMALL, "--ranks=3", "--repeats=2"], start=CHECKOUT)
    assert report.exact
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in report.ratios.values())
    assert [(row["method"], row["ranks"]) for row in report.rows] == [
        ("ring", 1),
        ("dense", 1),
        ("torch chunked", 1),
        ("ring", 3),
        ("vocabulary parallel", 3),
    ]
    for row in report.rows:
        assert row["error"] < 1e-6
        assert row["seconds_max"] >= row["seconds"] >= row["seconds_min"] > 0
        assert row["peak_bytes"] - row["resident_bytes"] == row["increment_bytes"] > 0
    logits = 4 * 96 * 501
    for row in report.rows:
        # Probabilities of own tokens and all words, or of all tokens and own words.
        whole = row["method"] in ("dense", "vocabulary parallel")
        assert (row["increment_bytes"] >= logits) is whole
    assert report.ratios["flops_vs_dense"] == pytest.approx(4 / 3, rel=1e-3)
    assert report.ratios["increment_growth_on_doubling_n"] < 1.6  # scalars beside tiny tiles


def test_one_rank_and_no_repeats_measure_bytes_alone():
    report = run_bench("vocabulary", [*SMALL, "--ranks=1", "--repeats=0"], start=CHECKOUT)
    assert report.exact
    assert report.ratios["time_vs_torch_chunked_p1"] is None
    assert {row["method"] for row in report.rows} == {"ring", "dense", "torch chunked"}


def test_nothing_to_measure_is_refused():
    with pytest.raises(InputError, match=r"--tokens 0: should be 1 or more"):
        run_bench("vocabulary", ["--tokens=0"], start=CHECKOUT)
