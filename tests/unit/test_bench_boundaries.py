"""The boundary bench: what it reports, and that it says nothing of gradients that differ."""

from pathlib import Path

import pytest
import torch

from flatpeak.controller.bench import load_bench, run_bench
from flatpeak.workers.errors import InputError

ROOT = Path(__file__).parents[2]
SMALL = ["--tokens=64", "--hidden=16", "--layers=4,8"]
BOUNDARY = 64 * 16 * 4


def test_every_method_and_depth_is_measured_and_equal():
    report = run_bench("boundaries", [*SMALL, "--repeats=2"], start=ROOT)
    assert report.exact
    assert report.ratios.pop("bytes_vs_bound") == 1
    assert report.ratios.pop("slab_overhead") == 1
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in report.ratios.values())
    held = [
        (row["method"], row["budget"], row["layers"], row["device_bytes"], row["host_bytes"])
        for row in report.rows
    ]
    assert held == [
        (*case, device * BOUNDARY, host * BOUNDARY)
        for layers in (4, 8)
        for case, device, host in (
            (("plain", None, layers), layers, 0),
            (("save_on_cpu", None, layers), 1, layers),
            (("ours", 1.0, layers), 2, layers),
            (("ours", 0.5, layers), layers - layers // 2, layers // 2),
            (("ours", 0.25, layers), layers - layers // 4, layers // 4),
            (("ours", 0.0, layers), layers, 0),
        )
    ]
    for row in report.rows:
        assert row["seconds_max"] >= row["seconds"] >= row["seconds_min"] > 0
        assert row["cpu_seconds"] > 0


def test_boundaries_that_fill_no_cache_lines_take_a_slab_of_hardly_more():
    words = ["--tokens=321", "--hidden=13", "--layers=4", "--dtype=bfloat16", "--repeats=0"]
    report = run_bench("boundaries", words, start=ROOT)
    overhead = report.ratios["slab_overhead"]
    assert overhead is not None
    assert 1 < overhead <= 1.01
    assert report.ratios["time_vs_plain_checkpointing"] is None


def test_gradients_that_differ_are_seen_and_not_timed():
    bench = load_bench(ROOT, "boundaries")

    class Rounding(bench.Plain):
        def checkpoint(self, layer, x):
            return super().checkpoint(layer, x.bfloat16().float())

    case = bench.Case(64, 16, 4, torch.float32)
    plain, rounded = bench.measure(case, [bench.Plain(), Rounding()], repeats=2)
    assert plain.equal
    assert not rounded.equal
    assert plain.times == rounded.times == []


@pytest.mark.parametrize(
    ("option", "legal"),
    [
        ("tokens=0", "--tokens 0: should be 1 or more"),
        ("hidden=0", "--hidden 0: should be 1 or more"),
        ("layers=4,0", "--layers 0: should be 1 or more"),
        ("budgets=0.5,1.5", "--budgets 1.5: should be from 0 to 1"),
        ("repeats=-1", "--repeats -1: should be 0 or more"),
        ("dtype=int8", "--dtype int8: there are float32, bfloat16"),
    ],
)
def test_an_option_out_of_range_is_refused(option: str, legal: str):
    with pytest.raises(InputError) as refused:
        run_bench("boundaries", [*SMALL, f"--{option}"], start=ROOT)
    assert str(refused.value) == legal
