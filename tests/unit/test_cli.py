"""The command line: exit codes, messages, what it imports, and what a run shows."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from flatpeak.controller.cli import run_command
from flatpeak.controller.display import LiveDisplay, display_for, event_line, memory, step_line
from flatpeak.controller.runs import RunEvent, RunFolder, StepRecord, Summary
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.controller.spec_file import load_spec
from flatpeak.workers.errors import DoesNotFit, RunFailed

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = os.pathsep.join(str(ROOT / root) for root in ("controller", "workers", "kernels"))

STEP = StepRecord(
    step=3,
    loss=5.43219,
    grad_norm=1.2345,
    lr=3e-4,
    tokens=2048,
    tokens_per_s=12345.6,
    step_seconds=0.517,
    peak_bytes={"total": 3 * 2**29, "dispatch": 2**20},
    device_budget_bytes=2**31,
    first_sample=16,
    last_sample=23,
)
SNAPSHOT = RunEvent(
    kind="snapshot", time=1.5, detail={"step": 3, "folder": "runs/my-run/snapshots/step-3"}
)
WARNING = RunEvent(kind="warning", time=1.0, detail={"text": "the name [2] is no markup"})
SUMMARY = Summary(
    run="my-run",
    folder="runs/my-run",
    steps=20,
    loss=4.25,
    seconds=12.34,
    peak_bytes={"total": 2**30},
    device_budget_bytes=2**32,
)
BEFORE = "loading torch and Ray, checking the job"
STEP_LINE = (
    "step  3/20  loss 5.4322  grad 1.234  lr 3.00e-04  peak 1.500 GiB (75.0%)  "
    "12,346 tokens/s  0.52 s"
)


def flatpeak(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flatpeak.controller", *arguments],
        env=os.environ | {"PYTHONPATH": SOURCE_ROOTS, "COLUMNS": "100"},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


class Launch(ModuleType):
    """Stands in for `flatpeak.controller.launch`: two events, then a summary or an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__("flatpeak.controller.launch")
        self.error = error
        self.jobs: list[Spec] = []

    def train(self, spec: Spec, *, on_event) -> Summary:
        self.jobs.append(spec)
        on_event(STEP)
        on_event(SNAPSHOT)
        if self.error is not None:
            raise self.error
        return SUMMARY


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job_file(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command(["init"]) == 0
    capsys.readouterr()
    return "job.yaml"


def launched_by(monkeypatch: pytest.MonkeyPatch, launch: Launch) -> Launch:
    import flatpeak.controller

    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    monkeypatch.setattr(flatpeak.controller, "launch", launch, raising=False)
    return launch


def test_no_command_imports_torch_ray_or_triton_before_it_needs_them():
    modules = ("cli", "spec_file", "schedule", "runs", "display", "bench", "__main__")
    imports = "; ".join(f"import flatpeak.controller.{module}" for module in modules)
    code = f"import sys; {imports}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": SOURCE_ROOTS},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "ray", "triton", "transformers", "numpy", "pyarrow"}


def test_help_answers_at_once(tmp_path):
    # Processor time, because a busy machine says nothing about the command.
    before = os.times()
    done = flatpeak("--help", cwd=tmp_path)
    after = os.times()
    seconds = sum(after[2:4]) - sum(before[2:4])
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("init", "train", "status", "logs", "stop", "bench"))
    assert seconds < 1.0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "absent.yaml"], 2, "flatpeak: cannot read the job spec absent.yaml: No such"),
        (["logs", "absent"], 2, "flatpeak: no run 'absent' in runs; it holds no run at all"),
        (["stop", "absent"], 2, "flatpeak: no run 'absent' in runs"),
        (["status", "absent"], 2, "flatpeak: no run 'absent' in runs"),
        (["bench", "absent"], 2, "flatpeak: no "),
        (["init", "no/such/folder.yaml"], 2, "flatpeak: cannot write no/such/folder.yaml: No such"),
        (["status", "--jsn"], 2, "No such option: --jsn"),
        (["trian"], 2, "No such command 'trian'"),
        (["train"], 2, "Missing argument 'SPEC'"),
        (["status"], 0, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_exits_2_with_one_message_and_no_traceback(tmp_path, arguments, code, message):
    done = flatpeak(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_exits_2_and_names_section_and_nearest_key(tmp_path):
    assert flatpeak("init", cwd=tmp_path).returncode == 0
    done = flatpeak("train", "job.yaml", "--set", "gradient_checkpoint=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "the top level has no key `gradient_checkpoint`; the nearest is `" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_with_json_an_error_is_one_object_on_standard_output(tmp_path):
    done = flatpeak("train", "absent.yaml", "--json", cwd=tmp_path)
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("SpecError", done.returncode) == ("SpecError", 2)
    assert done.stderr == f"flatpeak: {error['message']}\n"


def test_init_writes_a_job_that_validates(in_folder, capsys):
    assert run_command(["init", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "wrote mine.yaml; start it with: flatpeak train mine.yaml\n"
    assert load_spec("mine.yaml").run == "my-run"


def test_init_replaces_a_file_only_by_force(in_folder, capsys):
    (in_folder / "job.yaml").write_text("precious")
    assert run_command(["init"]) == 2
    assert capsys.readouterr().err == "flatpeak: job.yaml exists; --force replaces it\n"
    assert (in_folder / "job.yaml").read_text() == "precious"
    assert run_command(["init", "--force"]) == 0
    assert load_spec("job.yaml").run == "my-run"


def test_train_hands_the_job_with_its_overrides_to_the_launch(job_file, monkeypatch, capsys):
    launch = launched_by(monkeypatch, Launch())
    command = ["train", job_file, "--set", "train.steps=20", "--set", "run=b", "--resume"]
    assert run_command(command) == 0
    [job] = launch.jobs
    assert (job.train.steps, job.run, job.resume) == (20, "b", True)
    assert capsys.readouterr().out.splitlines() == [
        BEFORE,
        STEP_LINE,
        "snapshot of step 3",
        "my-run: 20 steps in 12.3 s, loss 4.2500, peak 1.000 GiB (25.0%), in runs/my-run",
    ]


def test_train_with_json_prints_one_object_an_event(job_file, monkeypatch, capsys):
    launched_by(monkeypatch, Launch())
    assert run_command(["train", job_file, "--json"]) == 0
    step, event, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert (step["type"], step["step"], step["peak_bytes"]["total"]) == ("step", 3, 3 * 2**29)
    assert (event["type"], event["kind"], event["detail"]["step"]) == ("event", "snapshot", 3)
    assert (summary["type"], summary["loss"]) == ("summary", 4.25)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DoesNotFit("needs 9 GiB of 8 GiB"), 3, "flatpeak: needs 9 GiB of 8 GiB\n"),
        (RunFailed("rank 3 is gone"), 4, "flatpeak: rank 3 is gone\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("a bug"), 4, "ZeroDivisionError: a bug\n"),
    ],
    ids=["does not fit", "failed", "Ctrl-C", "bug"],
)
def test_how_a_run_ends_is_its_exit_code(job_file, monkeypatch, capsys, error, code, message):
    launched_by(monkeypatch, Launch(error))
    assert run_command(["train", job_file]) == code
    out, err = capsys.readouterr()
    assert out.startswith(f"{BEFORE}\n{STEP_LINE}")
    assert err.endswith(message)
    assert ("Traceback" in err) == isinstance(error, ZeroDivisionError)


def test_with_json_a_bug_is_an_error_object_too(job_file, monkeypatch, capsys):
    launched_by(monkeypatch, Launch(ZeroDivisionError("a bug")))
    assert run_command(["train", job_file, "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {
        "error": {"kind": "ZeroDivisionError", "message": "a bug", "exit_code": 4}
    }
    assert "Traceback" in err


def test_sigterm_unwinds_a_run_like_an_interrupt(job_file, monkeypatch):
    unwound = []

    class Terminated(Launch):
        def train(self, spec: Spec, *, on_event) -> Summary:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
                raise AssertionError("SIGTERM did nothing")
            finally:
                unwound.append(spec.run)

    before = signal.getsignal(signal.SIGTERM)
    launched_by(monkeypatch, Terminated())
    assert run_command(["train", job_file]) == 130
    assert unwound == ["my-run"]
    assert signal.getsignal(signal.SIGTERM) is before


def a_run(folder: Path, name: str) -> RunFolder:
    plain = {"run": name, "runs_dir": str(folder), "model": {"path": "/models/x"}}
    return RunFolder.create(parse_spec(plain))


def test_status_tells_the_state_and_progress_of_each_run(in_folder, capsys):
    a_run(in_folder / "runs", "live").record(STEP)
    with pytest.raises(RuntimeError), a_run(in_folder / "runs", "lost"):
        raise RuntimeError("rank 3 is gone\nand more")
    assert run_command(["status", "--json"]) == 0
    live, lost = map(json.loads, capsys.readouterr().out.splitlines())
    assert (live["run"], live["state"], live["step"], live["steps"]) == ("live", "running", 3, 100)
    assert live["pid"] == os.getpid()
    assert (lost["run"], lost["state"], lost["step"]) == ("lost", "failed", 0)
    assert run_command(["status"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "step", "steps"]
    assert rows[0].split()[:5] == ["live", "running", "3", "100", "5.432"]
    assert rows[1].rstrip().endswith("rank 3 is gone")


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl"])
@pytest.mark.parametrize("content", [b"", b"[]\n", b"\xff\xfe\x00\n", b'{"color": 1}\n'])
def test_status_lists_the_others_beside_a_damaged_run(in_folder, capsys, name, content):
    a_run(in_folder / "runs", "good").record(STEP)
    damaged = a_run(in_folder / "runs", "damaged")
    (damaged.path / name).write_bytes(content)
    readable = name == "steps.jsonl" and not content
    assert run_command(["status", "--json"]) == 0
    bad, good = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["run"], good["state"], good["step"]) == ("good", "running", 3)
    assert (bad["run"], bad["state"]) == ("damaged", "running" if readable else "unreadable")
    assert bad.keys() == good.keys()
    assert run_command(["status", "damaged"]) == (0 if readable else 2)
    assert readable or name in capsys.readouterr().err


def test_a_runs_dir_that_is_a_file_exits_2(in_folder, capsys):
    (in_folder / "runs").write_text("")
    assert run_command(["status"]) == 2
    assert capsys.readouterr().err.startswith("flatpeak: runs is no directory")


def test_status_of_one_run_is_one_object(in_folder, capsys):
    a_run(in_folder / "elsewhere", "a")
    a_run(in_folder / "elsewhere", "b")
    assert run_command(["status", "b", "--runs-dir", "elsewhere", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "b"


def test_logs_show_the_tail_of_each_actor_or_of_one(in_folder, capsys):
    folder = a_run(in_folder / "runs", "a")
    assert run_command(["logs", "a"]) == 0
    assert capsys.readouterr().err == "no logs in runs/a/logs\n"
    for actor in ("worker-0", "worker-1"):
        lines = [f"{actor} line {number}\n" for number in range(30)]
        (folder.logs / f"{actor}.log").write_text("".join(lines))
    (folder.logs / "old.log").mkdir()
    assert run_command(["logs", "a", "--tail", "1"]) == 0
    assert capsys.readouterr().out == (
        "== worker-0\nworker-0 line 29\n== worker-1\nworker-1 line 29\n"
    )
    assert run_command(["logs", "a", "--actor", "worker-1", "--tail", "2"]) == 0
    assert capsys.readouterr().out == "worker-1 line 28\nworker-1 line 29\n"
    assert run_command(["logs", "a", "--tail", "1", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"actor": f"worker-{rank}", "line": f"worker-{rank} line 29"} for rank in (0, 1)
    ]
    assert run_command(["logs", "a", "--actor", "worker-7"]) == 2
    assert "there are: worker-0, worker-1" in capsys.readouterr().err


def test_stop_of_a_run_that_has_ended_says_how_it_ended(in_folder, capsys):
    with a_run(in_folder / "runs", "a"):
        pass
    assert run_command(["stop", "a"]) == 0
    assert capsys.readouterr().out == "a: done\n"
    assert run_command(["stop", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "a", "state": "done"}


def test_stop_ends_a_training_process_which_exits_130(tmp_path):
    # A whole driver: the real command with a launch that records one step and then waits.
    assert flatpeak("init", cwd=tmp_path).returncode == 0
    code = """
import sys, time, types
import flatpeak.controller
from flatpeak.controller.cli import main
from flatpeak.controller.runs import RunFolder
launch = types.ModuleType("flatpeak.controller.launch")
def train(spec, *, on_event):
    with RunFolder.create(spec):
        print("up", file=sys.__stdout__, flush=True)
        time.sleep(60)
launch.train = train
sys.modules[launch.__name__] = flatpeak.controller.launch = launch
sys.argv = ["flatpeak", "train", "job.yaml"]
main()
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": SOURCE_ROOTS},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().decode() == f"{BEFORE}\n"
        assert driver.stdout.readline() == b"up\n"
        done = flatpeak("stop", "my-run", "--timeout", "20", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "my-run: interrupted\n")
        assert done.stderr == "my-run: stopping, which may take 20 s\n"
        assert driver.wait(timeout=20) == 130
    finally:
        driver.kill()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()


def test_the_likelihood_is_shown_where_the_loss_is_something_else():
    def line(nll: float | None) -> str:
        return step_line(StepRecord(**{**vars(STEP), "nll": nll}), steps=20)

    assert line(STEP.loss) == line(None) == STEP_LINE
    assert line(4.0) == STEP_LINE.replace("loss 5.4322", "loss 5.4322  nll 4.0000")


def test_a_skipped_step_and_an_unknown_peak_say_so():
    changed = StepRecord(
        **{**vars(STEP), "loss": float("nan"), "skipped": True, "peak_bytes": {}, "step": 20}
    )
    assert step_line(changed, steps=20) == (
        "step 20/20  loss nan  grad 1.234  lr 3.00e-04  peak -  12,346 tokens/s  0.52 s  "
        "skipped: the gradient is not finite"
    )


@pytest.mark.parametrize(
    ("peak", "budget", "text"),
    [
        (2**30, None, "1.000 GiB"),
        (2**30 - 2**20, 2**31, "1023.0 MiB (50.0%)"),
        (5_400_000, None, "5.1 MiB"),
        (None, 2**30, "-"),
    ],
)
def test_a_peak_is_shown_in_a_unit_that_suits_it(peak, budget, text):
    assert memory(peak, budget) == text


@pytest.mark.parametrize(
    ("kind", "detail", "line"),
    [
        ("starting", {"what": "building the model"}, "building the model"),
        (
            "workers_placed",
            {"device": "cpu", "workers": 1, "nodes": ["7f"]},
            "1 worker (cpu) on 1 node",
        ),
        (
            "workers_placed",
            {"device": "cuda", "workers": 16, "nodes": ["7f", "80"]},
            "16 workers (cuda) on 2 nodes",
        ),
        (
            "started",
            {
                "parameters": 17680,
                "buckets": 8,
                "planned_host_bytes": {"7f": 2**20, "80": 3 * 2**19},
                "step": 0,
            },
            "started with 17,680 parameters in 8 buckets, 1.5 MiB of host memory a node",
        ),
        (
            "optimizer_lost",
            {"actor": "optimizer 1", "step": 7, "reason": "step 8: optimizer 1 died"},
            "lost optimizer 1 at step 7; another takes its place",
        ),
        (
            "optimizer_replaced",
            {"actor": "optimizer 1", "step": 7, "seconds": 8.93},
            "optimizer 1 replaced in 8.9 s",
        ),
        (
            "worker_lost",
            {"actor": "worker 1", "step": 7, "reason": "step 7: worker 1 died"},
            "lost worker 1 in step 7; all workers start anew",
        ),
        (
            "workers_replaced",
            {"generation": 2, "step": 7, "seconds": 8.93, "place_s": 5.0},
            "workers replaced in 8.9 s",
        ),
        (
            "optimizers_scaled",
            {
                "before": 3,
                "after": 1,
                "step": 7,
                "arenas": 2,
                "arena_bytes": 3 * 2**20,
                "seconds": 0.0123,
                "copied_bytes": 0,
                "reason": "asked for",
            },
            "3 to 1 optimizer actor after step 7: 2 arenas of 3.0 MiB handed over in 0.012 s, "
            "0 bytes copied: asked for",
        ),
        ("scaling_refused", {"request": "a", "reason": "3 are free"}, "not scaled: 3 are free"),
        (
            "resumed",
            {"step": 4, "snapshot": "runs/a/snapshots/step-4"},
            "resumes after step 4, from runs/a/snapshots/step-4",
        ),
        ("snapshot", {"step": 4, "folder": "runs/a/snapshots/step-4"}, "snapshot of step 4"),
        ("warning", {"text": "few cores"}, "warning: few cores"),
        ("interrupted", {"step": 4}, "interrupted after step 4"),
        ("finished", {"step": 5}, None),
        ("largest_tensors", {"shapes": {"dispatch": (3, 4)}}, None),
        ("renamed", {"old": "a", "new": "b"}, "renamed  old=a  new=b"),
    ],
)
def test_an_event_is_a_line_that_a_reader_needs(kind, detail, line):
    assert event_line(RunEvent(kind=kind, time=0.0, detail=detail)) == line


def test_an_event_without_a_line_leaves_no_empty_one():
    out = io.StringIO()
    with display_for(steps=20, json=False, out=out) as display:
        display(RunEvent(kind="finished", time=0.0, detail={"step": 20}))
        display(SNAPSHOT)
    assert out.getvalue() == "snapshot of step 3\n"


def test_a_terminal_gets_the_same_lines_above_a_bar():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system=None)
    with LiveDisplay(steps=20, console=console) as display:
        display(STEP)
        display(WARNING)
    display.summary(SUMMARY)
    text = out.getvalue()
    assert STEP_LINE in text
    assert "the name [2] is no markup" in text
    assert "3/20" in text
    assert "loss 5.4322" in text
    assert text.rstrip().endswith("in runs/my-run")


@pytest.mark.parametrize(
    ("tty", "json_lines", "kind"),
    [
        (True, False, "LiveDisplay"),
        (False, False, "PlainDisplay"),
        (True, True, "JsonDisplay"),
        (False, True, "JsonDisplay"),
    ],
)
def test_the_display_suits_the_stream(tty, json_lines, kind):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    assert type(display_for(steps=1, json=json_lines, out=Stream())).__name__ == kind
