"""The checks of a GPU: that they run in small on the CPU, what they report, and how they fail."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatpeak.controller.bench import check_ranges

CHECKOUT = Path(__file__).parents[2]
FOLDER = CHECKOUT / "tests" / "gpu"
CHECKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "frame")

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("ray", "typer", "pydantic")))
"""


def run_all(
    folder: Path, out: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    given = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "OUT")} | environment
    return subprocess.run(
        ["sh", str(folder / "run.sh"), *([str(out)] if "OUT" not in given else []), *words],
        env=given,
        capture_output=True,
        text=True,
    )


def test_all_run_on_the_cpu_with_torch_alone(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    here = {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = run_all(FOLDER, tmp_path / "out", "--cpu", **here)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == CHECKS
    for name in CHECKS:
        report = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert report["check"] == name
        assert report["exact"] is True
        assert report["device"] == "cpu"
        assert report["versions"]["torch"] == torch.__version__
        assert {"commit", "config"} <= report.keys()
        assert len(report["rows"]) > 1
        assert all(ratio > 0 for ratio in report["ratios"].values())


CHECK = """
import sys
from pathlib import Path

name, *words = sys.argv
out = Path(words[words.index("--out") + 1])
if name.endswith("a_fails.py"):
    sys.exit(1)
if name.endswith("b_hangs.py"):
    import time
    time.sleep(60)
out.write_text(" ".join([*words, *sys.orig_argv[:1]]))
"""


@pytest.mark.parametrize("given", ["argument", "OUT"])
def test_one_that_fails_or_hangs_leaves_no_report_and_the_others_run(tmp_path: Path, given: str):
    folder, out = tmp_path / "tests" / "gpu", tmp_path / "out"
    folder.mkdir(parents=True)
    shutil.copy(FOLDER / "run.sh", folder)
    (folder / "frame.py").write_text("raise SystemExit(5)")
    for name in ("a_fails", "b_hangs", "c_passes"):
        (folder / f"{name}.py").write_text(CHECK)
    out.mkdir()
    (out / "a_fails.json").write_text("of an earlier run")
    here = {"LIMIT_S": "5"} | ({"OUT": str(out)} if given == "OUT" else {})
    python = tmp_path / ".venv" / "bin" / "python"
    if given == "OUT":
        here["PYTHON"] = sys.executable
    else:
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    done = run_all(folder, out, "--cpu", **here)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "a_fails failed with exit code 1",
        "b_hangs did not end within 5 s",
    ]
    assert [path.name for path in out.iterdir()] == ["c_passes.json"]
    said = (out / "c_passes.json").read_text()
    assert said == f"--out {out / 'c_passes.json'} --cpu {here.get('PYTHON', python)}"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The exit code of a check that measures nothing, given its words and the right and wrong."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    import frame

    def rows(config, device):
        print("chatter of a library")
        for tokens, exact in zip(config["tokens"], config["exact"], strict=True):
            yield {"method": "ours", "tokens": tokens, "exact": exact, "seconds": float("nan")}

    def run(*words: str, exact: tuple = (True, None)) -> int:
        check = frame.Check(
            on_gpu={"tokens": (4096, 8192), "exact": exact},
            on_cpu={"tokens": (4, 8), "exact": exact},
            refuse=lambda config: check_ranges(config, {"tokens": (1, 9999)}),
            rows=rows,
            ratios=lambda rows: {"rows": len(rows)},
        )
        monkeypatch.setattr(sys, "argv", ["some/where/nothing.py", *words])
        return frame.run_check(check, doc="It measures nothing.")

    return run


def test_the_report_is_one_object_on_standard_output_or_in_a_file(run, capsys, tmp_path: Path):
    assert run("--cpu") == 0
    out, err = capsys.readouterr()
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(report) == [
        *("check", "exact", "device", "commit", "config", "versions", "ratios", "rows")
    ]
    assert (report["check"], report["exact"], report["device"]) == ("nothing", True, "cpu")
    assert report["config"] == {"tokens": [4, 8], "exact": [True, None]}
    assert report["ratios"] == {"rows": 2}
    assert err.splitlines() == ["chatter of a library", *map(json.dumps, report["rows"])]

    assert run("--cpu", "--tokens=5,6", "--out", str(tmp_path / "report.json")) == 0
    assert capsys.readouterr().out == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["tokens"] for row in report["rows"]] == [5, 6]


def test_a_wrong_result_has_no_speed(run, capsys):
    assert run("--cpu", exact=(None, False)) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["exact"], report["ratios"], len(report["rows"])) == (False, {}, 2)
    assert err.splitlines()[-1].startswith('nothing: 1 of 2 results are wrong, first {"method": "o')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu", "--tokens=0,1"], "nothing: --tokens 0: should be from 1 to 9999\n"),
        (["--cpu", "--token=1"], "nothing: no option --token; did you mean --tokens? There are"),
        (["--cpu", "--out", "/no/where/x"], "nothing: --out /no/where/x: there is no directory"),
        ([], "nothing: torch sees no CUDA device; --cpu runs small sizes on the processor\n"),
    ],
    ids=["out of range", "unknown", "no folder", "no device"],
)
def test_bad_input_is_refused_in_one_line(run, capsys, words: list[str], message: str):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_help_has_the_options_with_their_defaults_on_either_device(run, capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert out.startswith("It measures nothing.\n\nOptions and their defaults;")
    assert "--tokens ...  4096,8192\n" in out
    assert "  --out         -\n" in out
    assert (
        out.partition("\n\nTheir defaults with --cpu")[2].splitlines()[1] == "  --tokens ...  4,8"
    )
