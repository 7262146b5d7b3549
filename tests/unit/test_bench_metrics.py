"""The bench of metrics runs, and notices what its scrapers did not see."""

from pathlib import Path

import pytest

from flatpeak.controller.bench import load_bench, parse_options, run_bench
from flatpeak.workers.errors import InputError

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden=16", "--layers=1", "--sequence-length=32", "--rounds=2"]


def test_a_step_is_measured_alone_exported_and_metered():
    report = run_bench("metrics", SMALL, start=ROOT)
    assert report.exact
    assert [row["step"] for row in report.rows] == ["plain", "exported", "metered"]
    for row in report.rows:
        assert row["wall_s_max"] >= row["wall_s"] >= row["wall_s_min"] > 0
        assert row["cpu_s"] > 0
    assert report.rows[1]["scrapes"] >= 4
    assert report.rows[1]["scrape_bytes"] > 1000
    ratios = {"export_share", "exported_cpu", "exported_wall", "metered_cpu", "metered_wall"}
    assert report.ratios.keys() == ratios
    assert report.ratios["metered_cpu"] > 1


def test_scrapers_that_saw_another_loss_make_it_inexact(monkeypatch: pytest.MonkeyPatch):
    bench = load_bench(ROOT, "metrics")
    monkeypatch.setattr(bench, "total_of", lambda name, text: 0.0)
    config = bench.DEFAULTS | parse_options(SMALL, bench.DEFAULTS)
    exact, _, _ = bench.run(config)
    assert not exact


@pytest.mark.parametrize(
    ("option", "legal"),
    [
        ("rounds=1", "--rounds 1: should be 2 or more"),
        ("scrapers=0", "--scrapers 0: should be 1 or more"),
    ],
)
def test_an_option_out_of_range_is_refused(option: str, legal: str):
    with pytest.raises(InputError) as refused:
        run_bench("metrics", [*SMALL, f"--{option}"], start=ROOT)
    assert str(refused.value) == legal
