"""The optimizer bench: what it reports, and that a wrong update has no speed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from flatpeak.controller.bench import load_bench, run_bench
from flatpeak.kernels.adamw import LEAST_COMPILED, host
from flatpeak.workers.errors import InputError
from optimizer_overlap import Overlap

CHECKOUT = Path(__file__).parents[2]
SIZES = {"parameters": 2 * LEAST_COMPILED + 11, "bucket": LEAST_COMPILED + 6, "threads": 2}
WORDS = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]


def test_it_is_exact_and_compares_with_the_stream_and_the_others():
    report = run_bench("optimizer", [*WORDS, "--repeats=2", "--update-s=0"], start=CHECKOUT)
    assert report.exact
    rows = {row["side"]: row for row in report.rows}
    assert rows["update_bucket"]["bytes_per_parameter"] == 30
    assert rows["one pass, bf16"]["bytes_per_parameter"] == 28
    for name in ("update_bucket", "one pass, bf16"):
        assert rows[name]["error"] < 1e-6
    assert all(row["error"] < 1e-3 for row in report.rows if row["error"] is not None)
    streams = [row for name, row in rows.items() if name.startswith("stream")]
    assert len(streams) == (4 if host.compiled() else 2)
    best = max(row["gb_per_s"] for row in streams)
    ours = rows["update_bucket"]
    assert report.ratios["bandwidth_fraction"] == ours["gb_per_s"] / best
    fused = report.ratios["time_vs_torch_fused"]
    assert fused == ours["seconds"] / rows["torch fused"]["seconds"]
    narrow, cast = rows["one pass, bf16"], rows["torch fused, bf16"]
    both_casts = report.ratios["time_vs_torch_fused_bf16_gradient"]
    assert both_casts == narrow["seconds"] / cast["seconds"]
    assert (report.ratios["time_vs_deepspeed"] is None) == (find_spec("deepspeed") is None)
    for row in report.rows:
        assert row["seconds_max"] >= row["seconds"] >= row["seconds_min"] > 0


@pytest.mark.parametrize("same_losses", [True, False])
def test_the_simulation_of_the_overlap_is_reported_beside_them(monkeypatch, same_losses):
    bench, asked = load_bench(CHECKOUT, "optimizer"), []

    def simulate(*, update_s):
        asked.append(update_s)
        return Overlap(8, 6, [0.3, 0.1, 0.2], [0.05, 0.04, 0.09], [2.0, 4.0, 3.0], same_losses)

    monkeypatch.setattr(bench, "simulate", simulate)
    exact, rows, ratios = bench.run(bench.DEFAULTS | SIZES | {"repeats": 1, "update_s": 1.5})
    assert asked == [1.5]
    assert exact == same_losses
    assert ratios["overlapped_bucket_fraction"] == 6 / 8
    assert ratios["exposed_vs_serial_simulated"] == 0.2 / 3.0
    spread = ("seconds", "seconds_min", "seconds_max")
    assert [[row["side"], *(row[name] for name in spread)] for row in rows[-3:]] == [
        ["serial, simulated", 3.0, 2.0, 4.0],
        ["overlapped, simulated", 0.2, 0.1, 0.3],
        ["of that, the first weights", 0.05, 0.04, 0.09],
    ]


def test_an_update_that_is_off_by_a_bit_gets_no_ratio(monkeypatch):
    bench = load_bench(CHECKOUT, "optimizer")

    def almost(*arguments):
        bench.reference.adamw(*arguments)
        arguments[5][3] *= 1 + 2**-23

    monkeypatch.setattr(bench, "adamw", almost)
    exact, rows, ratios = bench.run(bench.DEFAULTS | SIZES | {"repeats": 1})
    assert not exact
    assert ratios == {}
    assert {row["seconds"] for row in rows} == {None}


def test_nothing_to_measure_is_refused():
    with pytest.raises(InputError, match=r"--parameters 0: should be 16 or more"):
        run_bench("optimizer", ["--parameters=0"], start=CHECKOUT)
