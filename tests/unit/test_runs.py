"""The run folder: claiming a name, appending records, reading a driver's life, stopping it."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flatpeak.controller.observed import FolderRun
from flatpeak.controller.runs import (
    RunEvent,
    RunFolder,
    RunState,
    StepRecord,
    list_runs,
    process_start,
    stop_run,
)
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.controller.spec_file import load_spec
from flatpeak.workers.errors import InputError, SpecError, WaitTimeout


def job(folder: Path, **changes) -> Spec:
    plain = {"run": "small", "runs_dir": str(folder), "model": {"path": "/models/x"}}
    return parse_spec(plain | changes)


def record(step: int, **changes) -> StepRecord:
    values = {
        "step": step,
        "loss": 5.0 - step / 10,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens": 2048,
        "tokens_per_s": 4096.0,
        "step_seconds": 0.5,
        "peak_bytes": {"total": 2**30, "dispatch": 2**20},
        "device_budget_bytes": 2**31,
        "first_sample": 8 * (step - 1),
        "last_sample": 8 * step - 1,
    }
    return StepRecord(**values | changes)


@pytest.fixture
def driver():
    """A process that pretends to drive a run; ends on SIGTERM as any Python process does."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def stubborn_driver():
    """A driver that takes no notice of SIGTERM."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def hand_to(folder: RunFolder, **changes) -> None:
    """Make run.json name another driver than this process."""
    path = folder.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def driven_by(folder: RunFolder, process: subprocess.Popen) -> None:
    hand_to(folder, pid=process.pid, process_start=process_start(process.pid))


def test_a_new_folder_holds_the_spec_and_the_driver(tmp_path):
    spec = job(tmp_path / "runs" / "deep")
    folder = RunFolder.create(spec)
    assert sorted(path.name for path in folder.path.iterdir()) == [
        *("events.jsonl", "lock", "logs", "run.json", "snapshots", "spec.yaml", "steps.jsonl")
    ]
    assert load_spec(folder.path / "spec.yaml") == spec
    info = folder.info
    assert (info.pid, info.host, info.steps) == (os.getpid(), socket.gethostname(), 100)
    assert info.alive
    assert info.seen_state is RunState.RUNNING


def test_the_cluster_is_noted_beside_the_driver(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    before = folder.info
    folder.set_cluster(address="127.0.0.1:6379", namespace="flatpeak-small")
    after = folder.info
    assert (after.address, after.namespace) == ("127.0.0.1:6379", "flatpeak-small")
    assert (after.pid, after.started, after.state) == (before.pid, before.started, before.state)


def test_records_come_back_as_they_were_written(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    steps = [record(1), record(2, skipped=True, peak_bytes={}, device_budget_bytes=None)]
    event = RunEvent(kind="snapshot", time=1.5, detail={"step": 2, "path": "snapshots/step-2"})
    for item in (steps[0], event, steps[1]):
        folder.record(item)
    assert folder.steps() == steps
    assert folder.events() == [event]


def test_each_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    folder.record(record(1))
    assert (folder.path / "steps.jsonl").read_text().endswith("}\n")


def test_numbers_that_are_not_finite_are_null_on_disk_and_nan_in_memory(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    folder.record(record(1, loss=math.inf, grad_norm=math.nan, skipped=True))
    line = json.loads((folder.path / "steps.jsonl").read_text())
    assert line["loss"] is None
    assert line["grad_norm"] is None
    [read] = folder.steps()
    assert math.isnan(read.loss)
    assert math.isnan(read.grad_norm)


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    folder.record(record(1))
    with (folder.path / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [read.step for read in folder.steps()] == [1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"step": 2, "lo', "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b"7", "should be an object"),
        (b'{"step": 2}', "loss: Field required"),
        (b'{"step": "2", "loss": 1.0}', "step: Input should be a valid integer"),
    ],
    ids=["torn", "empty", "binary", "number", "fields missing", "step as text"],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, problem):
    folder = RunFolder.create(job(tmp_path))
    folder.record(record(1))
    path = folder.path / "steps.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(InputError, match=rf"steps.jsonl, line 2, is no record: .*{problem}"):
        folder.steps()


def test_an_event_that_is_no_record_is_named(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    (folder.path / "events.jsonl").write_text('{"kind": "start", "time": 1.0, "color": 1}\n')
    with pytest.raises(InputError, match=r"events.jsonl, line 1, is no record: color: "):
        folder.events()


def test_a_damaged_line_costs_a_run_only_the_earlier_peaks(tmp_path):
    from flatpeak.controller.launch import _Follower

    folder = RunFolder.create(job(tmp_path))
    (folder.path / "steps.jsonl").write_text("7\n")
    seen = []
    follower = _Follower(folder, seen.append, [])
    follower(record(2))
    follower.write_peaks()
    assert pq.read_table(folder.path / "peaks.parquet").column("step").to_pylist() == [2, 2]
    assert [event.kind for event in seen[1:]] == ["warning"]
    assert "steps.jsonl, line 1, is no record" in seen[1].detail["text"]


def test_a_resumed_run_cuts_the_torn_line_and_its_steps_replace_the_earlier_ones(tmp_path):
    with RunFolder.create(job(tmp_path)) as folder:
        for step in range(1, 7):
            folder.record(record(step))
        with (folder.path / "steps.jsonl").open("a") as file:
            file.write('{"step": 7, "lo')
    resumed = RunFolder.create(job(tmp_path, resume=True))
    resumed.record(record(4, loss=1.0))
    resumed.record(record(5, loss=1.0))
    assert [(read.step, read.loss == 1.0) for read in resumed.steps()] == [
        *((1, False), (2, False), (3, False), (4, True), (5, True))
    ]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, RunState.DONE, None),
        (KeyboardInterrupt(), RunState.INTERRUPTED, None),
        (SystemExit(15), RunState.INTERRUPTED, None),
        (RuntimeError("rank 3 is gone"), RunState.FAILED, "rank 3 is gone"),
        (RuntimeError(), RunState.FAILED, "RuntimeError"),
    ],
    ids=["done", "Ctrl-C", "SIGTERM under Ray", "failure", "failure without words"],
)
def test_leaving_the_folder_writes_how_the_run_ended(tmp_path, error, state, reason):
    def drive() -> None:
        with RunFolder.create(job(tmp_path)):
            if error is not None:
                raise error

    if error is None:
        drive()
    else:
        with pytest.raises(type(error)):
            drive()
    info = RunFolder.open(tmp_path, "small").info
    assert (info.seen_state, info.reason) == (state, reason)
    assert not info.alive
    assert info.ended is not None


def test_the_name_of_a_live_run_is_refused_with_its_pid_even_for_resume(tmp_path):
    RunFolder.create(job(tmp_path))
    for resume in (False, True):
        with pytest.raises(SpecError) as caught:
            RunFolder.create(job(tmp_path, resume=resume))
        assert str(caught.value) == (
            f"the run small is going on in process {os.getpid()}; end it with "
            "`flatpeak stop small`, or choose a free name, like --set run=small-2"
        )


def test_of_two_that_resume_at_once_only_one_gets_the_folder(tmp_path):
    with RunFolder.create(job(tmp_path)):
        pass
    record = (tmp_path / "small" / "run.json").read_text()
    with RunFolder.create(job(tmp_path, resume=True)) as folder:
        winner = folder.info
        # What the other one would see that looked before the winner wrote.
        (folder.path / "run.json").write_text(record)
        with pytest.raises(SpecError, match="the run small is going on in process"):
            RunFolder.create(job(tmp_path, resume=True))
        folder._write_info(winner)
    with RunFolder.create(job(tmp_path, resume=True)):
        pass


def test_a_refused_start_keeps_no_lock(tmp_path):
    with RunFolder.create(job(tmp_path)):
        pass
    with pytest.raises(SpecError, match="exists"):
        RunFolder.create(job(tmp_path))
    assert RunFolder.create(job(tmp_path, resume=True)).info.alive


def test_the_lock_goes_with_a_driver_that_is_killed(tmp_path):
    code = (
        "import sys, time; from flatpeak.controller.runs import RunFolder; "
        "from flatpeak.controller.spec import parse_spec; "
        "folder = RunFolder.create(parse_spec({'run': 'small', 'runs_dir': sys.argv[1], "
        "'model': {'path': '/models/x'}})); print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            with pytest.raises(SpecError, match=f"going on in process {process.pid}"):
                RunFolder.create(job(tmp_path, resume=True))
        finally:
            process.kill()
    assert RunFolder.create(job(tmp_path, resume=True)).info.alive


def test_the_name_of_a_finished_run_is_refused_without_resume(tmp_path):
    with RunFolder.create(job(tmp_path)):
        pass
    (tmp_path / "small-2").mkdir()
    with pytest.raises(SpecError) as caught:
        RunFolder.create(job(tmp_path))
    assert str(caught.value) == (
        "the run small exists (done); go on with it by --resume, or choose a free name, like "
        "--set run=small-3"
    )


def test_the_name_of_a_run_whose_driver_died_can_be_resumed(tmp_path, driver):
    with RunFolder.create(job(tmp_path)) as folder:
        pass
    driven_by(folder, driver)
    hand_to(folder, state="running")
    with pytest.raises(SpecError, match=f"going on in process {driver.pid}"):
        RunFolder.create(job(tmp_path, resume=True))
    driver.kill()
    driver.wait()
    assert folder.info.seen_state is RunState.DIED
    assert "--resume goes on" in (FolderRun(folder).status().reason or "")
    assert RunFolder.create(job(tmp_path, resume=True)).info.pid == os.getpid()


def test_a_pid_that_was_given_to_another_process_is_no_life_sign(tmp_path):
    folder = RunFolder.create(job(tmp_path))
    hand_to(folder, process_start="another boot/12345")
    assert folder.info.seen_state is RunState.DIED


def test_a_driver_that_nobody_has_reaped_is_gone(driver):
    driver.kill()
    deadline = time.monotonic() + 10
    while process_start(driver.pid) is not None:
        assert time.monotonic() < deadline, "a zombie counts as alive"
        time.sleep(0.01)


def test_a_run_on_another_host_is_alive_by_its_own_word(tmp_path):
    with RunFolder.create(job(tmp_path)) as folder:
        pass
    hand_to(folder, host="elsewhere", pid=1, state="running")
    assert folder.info.alive
    with pytest.raises(SpecError, match=r'process 1 on elsewhere; .* set "state": "failed" in'):
        RunFolder.create(job(tmp_path, resume=True))
    with pytest.raises(InputError, match="driven from elsewhere; stop it there"):
        stop_run(folder, timeout_s=1)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.tex").write_text("years of work")
    with pytest.raises(SpecError, match=r"small exists and is no run folder; .*run=small-2"):
        RunFolder.create(job(tmp_path, resume=True))
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["thesis.tex"]


def test_a_runs_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SpecError, match=r"cannot write the run folder .*file/small: .*; set runs_dir to"
    ):
        RunFolder.create(job(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_runs_dir_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SpecError, match="Permission denied"):
            RunFolder.create(job(tmp_path))
    finally:
        tmp_path.chmod(0o700)


def test_an_unknown_run_is_refused_with_the_names_that_exist(tmp_path):
    with pytest.raises(InputError, match=r"no run 'x' in .*; it holds no run at all"):
        RunFolder.open(tmp_path, "x")
    RunFolder.create(job(tmp_path))
    RunFolder.create(job(tmp_path, run="other"))
    with pytest.raises(InputError, match=r"no run 'x' in .*; there are other, small"):
        RunFolder.open(tmp_path, "x")
    assert [folder.path.name for folder in list_runs(tmp_path)] == ["other", "small"]


def test_a_path_is_no_name_of_a_run(tmp_path):
    RunFolder.create(job(tmp_path / "runs"))
    (tmp_path / "empty").mkdir()
    for name in ("../runs/small", ".", "", str(tmp_path / "runs" / "small")):
        with pytest.raises(InputError, match=r"no run .* it holds no run at all"):
            RunFolder.open(tmp_path / "empty", name)


def test_a_runs_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is no directory"):
        list_runs(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff\xfe\x00", b'{"state": "running"}', b'{"state": "flying"}'],
)
def test_a_broken_run_json_is_named(tmp_path, content):
    folder = RunFolder.create(job(tmp_path))
    (folder.path / "run.json").write_bytes(content)
    with pytest.raises(InputError, match=r"run.json is not the record of a run"):
        _ = folder.info


def test_stopping_ends_the_driver_and_reports_what_it_left(tmp_path, driver):
    folder = RunFolder.create(job(tmp_path))
    driven_by(folder, driver)
    assert stop_run(folder, timeout_s=10) is RunState.DIED  # this one writes no state
    assert driver.wait() == -15


def test_stopping_a_run_that_has_ended_leaves_its_pid_alone(tmp_path, driver):
    with RunFolder.create(job(tmp_path)) as folder:
        driven_by(folder, driver)
    assert stop_run(folder, timeout_s=1) is RunState.DONE
    assert driver.poll() is None


def test_stopping_spares_a_process_that_only_has_the_pid(tmp_path, driver):
    folder = RunFolder.create(job(tmp_path))
    hand_to(folder, pid=driver.pid, process_start="another boot/12345")
    assert stop_run(folder, timeout_s=1) is RunState.DIED
    assert driver.poll() is None


def test_a_driver_that_does_not_go_in_time_is_named(tmp_path, stubborn_driver):
    folder = RunFolder.create(job(tmp_path))
    driven_by(folder, stubborn_driver)
    with pytest.raises(WaitTimeout, match=f"process {stubborn_driver.pid} .* 0.2 s after SIGTERM"):
        stop_run(folder, timeout_s=0.2)
    assert stubborn_driver.poll() is None
