"""The bench frame: finding a bench, its options, its report, and no ratio without exactness."""

import json
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from flatpeak.controller.bench import (
    check_ranges,
    describe_options,
    find_checkout,
    list_benches,
    parse_options,
    run_bench,
)
from flatpeak.controller.cli import run_command
from flatpeak.workers.errors import InputError

DEFAULTS = {"world": 2, "scale": 1.5, "label": "plain", "bias": False, "tokens_per_chunk": 8}

BENCH = '''
"""A bench that measures nothing.

And says so.
"""
import math
import bench_harness

DEFAULTS = {"world": 2, "scale": 1.5, "label": "plain", "bias": False, "wrong": False}


def run(config):
    print("chatter of a library")
    rows = [{"side": "ours", "bytes": 10}, {"side": "theirs", "bytes": 20, "note": "[red]"}]
    ratios = {"memory": bench_harness.HALF, "time": None, "undefined": math.nan}
    return not config["wrong"], rows, ratios
'''


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    benches = tmp_path / "tests" / "benchmarks"
    benches.mkdir(parents=True)
    (tmp_path / "controller" / "flatpeak").mkdir(parents=True)
    (benches / "nothing.py").write_text(BENCH)
    for name in ("_shared", "test_nothing", "conftest"):
        (benches / f"{name}.py").write_text("")
    (tmp_path / "tests" / "bench_harness.py").write_text("HALF = 0.5\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(benches)
    return tmp_path


def test_the_checkout_around_the_working_directory_is_found(checkout):
    assert find_checkout(Path.cwd()) == checkout
    assert list_benches(checkout) == ["nothing"]


def test_a_report_says_what_was_measured_with_what(checkout, capfd):
    report = run_bench("nothing", ["--world", "4", "--bias=true"])
    assert report.bench == "nothing"
    assert report.exact
    assert report.config == {
        "world": 4,
        "scale": 1.5,
        "label": "plain",
        "bias": True,
        "wrong": False,
    }
    assert report.ratios["memory"] == 0.5
    assert [row["side"] for row in report.rows] == ["ours", "theirs"]
    assert {"flatpeak", "python", "torch", "ray", "transformers", "commit", "platform", "cpus"} <= (
        set(report.versions)
    )
    out, err = capfd.readouterr()
    assert (out, err) == ("", "chatter of a library\n")


def test_the_commit_is_that_of_the_checkout_and_says_when_it_has_changes(checkout):
    assert run_bench("nothing", []).versions["commit"] is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(checkout), *command], check=True)
    commit = run_bench("nothing", []).versions["commit"]
    assert isinstance(commit, str)
    assert len(commit) == 40
    (checkout / "tests" / "bench_harness.py").write_text("HALF = 0.25\n")
    assert run_bench("nothing", []).versions["commit"] == f"{commit}-dirty"


def test_json_is_one_strict_object(checkout, capfd):
    assert run_command(["bench", "nothing", "--json", "--world", "3"]) == 0
    out = capfd.readouterr().out
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(report) == ["bench", "exact", "ratios", "rows", "config", "versions"]
    assert report["ratios"] == {"memory": 0.5, "time": None, "undefined": None}
    assert report["config"]["world"] == 3


def test_a_table_shows_every_column_and_the_ratios(checkout, capfd):
    assert run_command(["bench", "nothing"]) == 0
    words = capfd.readouterr().out.split()
    assert words == [
        *("side", "bytes", "note", "ours", "10", "-", "theirs", "20", "[red]"),
        *("ratio", "value", "memory", "0.5", "time", "-", "undefined", "nan"),
    ]


def test_a_bench_that_is_not_exact_gives_rows_but_no_ratios(checkout, capfd):
    assert run_command(["bench", "nothing", "--json", "--wrong", "true"]) == 4
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert report["exact"] is False
    assert report["ratios"] == {}
    assert len(report["rows"]) == 2
    assert "bench nothing: the results are not exact, so it gives no ratios" in err


def test_an_unknown_bench_is_refused_with_those_that_exist(checkout, capfd):
    assert run_command(["bench", "nothign"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("flatpeak: no bench 'nothign' in ")
    assert err.endswith("; there are: nothing\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_benches(checkout, capfd, flag):
    (checkout / "tests" / "benchmarks" / "silent.py").write_text("raise ImportError")
    assert run_command(["bench", flag]) == 0
    out = capfd.readouterr().out
    assert "Usage: flatpeak bench" in out
    assert out.endswith("Benches:\n  nothing  A bench that measures nothing.\n  silent\n")


def test_help_outside_a_checkout_says_that_there_is_none(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatpeak.controller.bench.BENCHES", Path("absent"))
    assert run_command(["bench", "--help"]) == 0
    assert "no source checkout with absent around" in capfd.readouterr().out


def test_help_of_a_bench_lists_its_options_with_defaults(checkout, capfd):
    assert run_command(["bench", "nothing", "--help", "--world", "4"]) == 0
    assert capfd.readouterr() == (
        "A bench that measures nothing.\n\nAnd says so.\n\n"
        "Options and their defaults:\n"
        "  --world  2\n  --scale  1.5\n  --label  plain\n  --bias   false\n  --wrong  false\n",
        "",
    )


def test_help_marks_an_option_with_several_values():
    assert describe_options(None, {"token_tile": (1, 2), "seed": 0}).splitlines() == [
        "Options and their defaults; ... takes several values, with commas or by repetition:",
        "  --token-tile ...  1,2",
        "  --seed            0",
    ]


def test_a_bench_must_be_named(checkout, capfd):
    assert run_command(["bench"]) == 2
    assert capfd.readouterr().err == (
        "flatpeak: name a bench of tests/benchmarks; flatpeak bench --help lists them\n"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ranks": (2, 0)}, "--ranks 0: should be 1 or more"),
        ({"top_k": 9}, "--top-k 9: should be from 1 to 8"),
        ({"share": float("nan")}, "--share nan: should be from 0 to 1"),
        ({"share": 1.5}, "--share 1.5: should be from 0 to 1"),
    ],
    ids=["one of several", "above", "not a number", "a share"],
)
def test_a_value_out_of_range_is_refused_with_the_legal_range(config, message):
    ranges = {"ranks": (1, inf), "top_k": (1, 8), "share": (0, 1)}
    check_ranges({"ranks": (2, 4), "top_k": 8, "share": 0}, ranges)
    with pytest.raises(InputError) as refused:
        check_ranges({"ranks": (2, 4), "top_k": 8, "share": 0} | config, ranges)
    assert str(refused.value) == message


def test_options_take_the_type_of_their_default():
    words = ["--world", "4", "--scale=2", "--label", "-x", "--bias", "true"]
    values = parse_options([*words, "--tokens-per-chunk", "16"], DEFAULTS)
    assert values == {"world": 4, "scale": 2.0, "label": "-x", "bias": True, "tokens_per_chunk": 16}
    assert isinstance(values["scale"], float)


def test_an_option_with_several_values_takes_commas_and_repetition():
    defaults = {"ranks": (2, 4), "profile": ("balanced",)}
    words = ["--ranks", "2,4", "--profile", "80/16", "--ranks=8", "--profile", "balanced"]
    assert parse_options(words, defaults) == {
        "ranks": (2, 4, 8),
        "profile": ("80/16", "balanced"),
    }
    with pytest.raises(InputError, match=r"--ranks x: should be a whole number, like 2"):
        parse_options(["--ranks", "2,x"], defaults)
    with pytest.raises(InputError, match=r"--ranks needs a value, like --ranks 2"):
        parse_options(["--ranks"], defaults)


def test_a_switch_needs_no_value():
    assert parse_options(["--bias"], DEFAULTS) == {"bias": True}
    assert parse_options(["--bias", "--world", "4"], DEFAULTS) == {"bias": True, "world": 4}
    assert parse_options(["--bias", "false"], DEFAULTS) == {"bias": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wrold", "4"], r"no option --wrold; did you mean --world\? There are --world, --scale"),
        (["--world"], r"--world needs a value, like --world 2"),
        (["--world", "4.5"], r"--world 4.5: should be a whole number, like 2"),
        (["--scale", "big"], r"--scale big: should be a number, like 1.5"),
        (["--bias", "yes"], r"--bias yes: should be true or false"),
        (["world"], r"'world' is no option; options are --world"),
    ],
    ids=["unknown", "no value", "not whole", "not a number", "not a bool", "not an option"],
)
def test_an_option_that_does_not_fit_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        parse_options(options, DEFAULTS)


def test_a_bench_without_options_refuses_all():
    with pytest.raises(InputError, match=r"no option --world; there are none"):
        parse_options(["--world", "4"], {})
