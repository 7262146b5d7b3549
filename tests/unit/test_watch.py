import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flatpeak.controller.cli import run_command
from flatpeak.controller.observed import FolderRun
from flatpeak.controller.runs import RunEvent, RunFolder, StepRecord
from flatpeak.controller.watch import Seen, picture
from flatpeak.workers.errors import InputError
from local_run import tiny_spec
from sample_run import STEP
from tiny_models import tiny_content

AGES = {"controller": 1.0, "optimizer-0": 700.0, "worker-0": 0.2}
EVENT = RunEvent(kind="snapshot", time=0.0, detail={"step": 2, "folder": "x"})


def new_folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(
        tiny_spec(tiny_content("qwen3_moe"), run="first", runs_dir=str(tmp_path))
    )


def shown(folder: RunFolder, records: list[StepRecord | RunEvent], width: int = 80) -> list[str]:
    seen = Seen()
    for record in records:
        seen(record)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True)
    console.print(picture(FolderRun(folder).status(), seen, AGES))
    return out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()


def test_the_picture_has_peaks_against_bounds_in_80_columns_without_colour(tmp_path: Path):
    with new_folder(tmp_path) as folder:
        spike = replace(STEP, step=2, peak_bytes=STEP.peak_bytes | {"dispatch": 4 * 2**20})
        lines = shown(folder, [STEP, spike, replace(STEP, step=3, skipped=True), EVENT])
        text = "\n".join(lines)
    assert lines[0].strip() == "first: running"
    assert "step 3 of 5  loss 2.5000" in text
    assert "320 tokens/s  2.00 s a step  0:00:04 left  1 skipped" in text
    total, dispatch = (next(x for x in lines if x.startswith(n)) for n in ("total", "dispatch "))
    assert total.split()[2:] == ["5.0", "MiB", "5.0", "MiB", "10.0", "MiB"]
    assert dispatch.split()[2:] == ["3.0", "MiB", "4.0", "MiB"]
    # Bars are to scale: the highest fills one.
    assert [line.count("━") for line in (total, dispatch)] == [26, 20]
    assert "2.0 MiB (50.0%) of its budget above inputs and results" in text
    assert "optimizer-0 12 min ago" in text
    assert "snapshot of step 2" in text
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_a_run_before_its_first_step_is_shown(tmp_path: Path):
    with new_folder(tmp_path) as folder:
        lines = shown(folder, [])
    assert lines[0].strip() == "first: running"
    assert any("controller 1 s ago" in line for line in lines)


def test_figures_that_are_not_measured_are_left_out(tmp_path: Path):
    bare = replace(STEP, peak_bytes={}, dispatch={}, optimizer={})
    with new_folder(tmp_path) as folder:
        text = "\n".join(shown(folder, [bare]))
    assert "peak" not in text
    assert "dispatch" not in text


def test_following_gives_each_record_once_and_ends_with_the_run(tmp_path: Path):
    got: list[object] = []
    with new_folder(tmp_path) as folder:
        folder.record(STEP)
        reader = threading.Thread(target=lambda: got.extend(FolderRun(folder).follow()))
        reader.start()
        for step in (2, 3):
            time.sleep(0.2)
            folder.record(replace(STEP, step=step))
        folder.record(EVENT)
    reader.join(30)
    assert not reader.is_alive()
    records = [record for record in got if record is not None]
    assert [r.step for r in records if isinstance(r, StepRecord)] == [1, 2, 3]
    assert [r.kind for r in records if isinstance(r, RunEvent)] == ["snapshot"]


def test_a_record_in_the_making_is_read_when_it_is_whole(tmp_path: Path):
    with new_folder(tmp_path) as folder:
        folder.record(STEP)
        new = folder.follow()
        assert new() == [STEP]
        line = (folder.path / "steps.jsonl").read_text()
        with (folder.path / "steps.jsonl").open("a") as file:
            file.write(line[:20])
            file.flush()
            assert new() == []
            file.write(line[20:])
        assert new() == [STEP]
        with (folder.path / "steps.jsonl").open("a") as file:
            file.write("nonsense\n")
        with pytest.raises(InputError, match="line 3"):
            new()


def test_output_that_is_no_terminal_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with new_folder(tmp_path) as folder:
        folder.record(STEP)
        folder.record(EVENT)
    assert run_command(["watch", "first", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "snapshot of step 2"
    assert out[1].startswith("step 1/5  loss 2.5000")
    assert out[2] == "first: done"
    assert run_command(["watch", "first", "--runs-dir", str(tmp_path), "--json"]) == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["type"] for line in out] == ["event", "step"]


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_command(["watch", "nobody", "--runs-dir", str(tmp_path)]) == 2
    assert "nobody" in capsys.readouterr().err
