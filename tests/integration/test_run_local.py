"""Whole runs on a Ray of their own: what a run leaves on disk, what it leaves behind, its end."""

import json
import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from driven_run import Driver, driving, flatpeak, load, tiny_job
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec
from local_run import train_locally
from wandb_file import figures, records

pytestmark = pytest.mark.timeout(400)

TWO_WORKERS = {"workers": 2, "optimizers": 2}
DEGREES = {"sequence": 2, "expert": 2, "vocabulary": 2}
SLAB_FIGURES = ("offloaded_bytes", "slab_bytes", "slab_bytes_needed")


def status(job: Spec, folder: Path) -> dict:
    done = flatpeak("status", job.run, "--runs-dir", job.runs_dir, "--json", folder=folder)
    return json.loads(done.stdout)


def test_a_run_equals_training_without_ray_and_leaves_its_folder_and_nothing_else(tmp_path):
    cores = os.cpu_count() or 1
    job = tiny_job(
        tmp_path,
        train={"steps": 4},
        cluster=TWO_WORKERS | {"cpus_per_worker": cores},
        parallel=DEGREES,
        snapshots={"every_steps": 2, "keep": 2},
        logging={"tensorboard": True, "wandb": {"project": "moe", "mode": "offline"}},
    )
    with driving(job, tmp_path) as driver:
        planned = driver.wait_for(kind="started")["detail"]["planned_host_bytes"]
        arenas = [path.stat() for path in Path(job.cluster.shm_dir).iterdir()]
        assert len(arenas) == 2
        assert sum(file.st_size for file in arenas) == sum(planned.values())
        driver.wait_for(step=1)
        assert status(job, tmp_path)["state"] == "running"
        ended = driver.end()
        assert driver.left() == []
    assert (ended.code, ended.err) == (0, "")
    wanted = [result.loss for result in train_locally(job, tmp_path).results]
    assert [step["loss"] for step in ended.steps()] == pytest.approx(wanted, abs=1e-6)
    warning = next(line for line in ended.out if line.get("kind") == "warning")
    assert f"2 workers x {cores} and 2 optimizer actors x 1" in warning["detail"]["text"]
    assert f"ask for {2 * cores + 2} cores, this machine has {cores}" in warning["detail"]["text"]

    run = driver.run
    assert [record.loss for record in run.steps()] == [step["loss"] for step in ended.steps()]
    assert [record.lr for record in run.steps()] == [lr(n, train=job.train) for n in (1, 2, 3, 4)]
    assert [record.first_sample for record in run.steps()] == [0, 4, 8, 12]
    layer = 4 * 16 * 16 * 4  # bytes: sequences x half of their tokens x width, fp32
    boundaries = {"kept_bytes": 0, "count": 2, **dict.fromkeys(SLAB_FIGURES, 2 * layer)}
    assert all(record.boundaries == boundaries for record in run.steps())
    kinds = [event.kind for event in run.events()]
    assert kinds == ended.kinds()
    assert kinds.count("snapshot") == 2
    assert sorted(path.name for path in run.snapshots.iterdir()) == ["step-2", "step-4"]
    actors = {"worker-0", "worker-1", "optimizer-0", "optimizer-1", "controller"}
    assert {path.stem for path in run.logs.iterdir()} == actors
    assert "svg" in (run.path / "report.html").read_text()
    peaks = pq.read_table(run.path / "peaks.parquet").to_pylist()
    assert {row["step"] for row in peaks} == {1, 2, 3, 4}
    assert {"total", "dispatch", "vocabulary"} <= {row["component"] for row in peaks}
    for losses in (tensorboard_losses(run.path), wandb_losses(run.path)):
        assert losses == {step["step"]: pytest.approx(step["loss"]) for step in ended.steps()}
    after = status(job, tmp_path)
    assert (after["state"], after["step"], after["loss"]) == ("done", 4, ended.steps()[-1]["loss"])


def tensorboard_losses(folder: Path) -> dict[int, float]:
    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {point.step: point.value for point in read.Scalars("loss")}


def wandb_losses(folder: Path) -> dict[int, float]:
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = [figures(row) for kind, row in records(path) if kind == "history"]
    return {row["step"]: row["loss"] for row in rows}


def test_a_killed_driver_takes_its_ray_along_and_the_run_goes_on_from_its_snapshot(tmp_path):
    job = tiny_job(
        tmp_path,
        train={"steps": 1000, "schedule": {"decay_steps": 1000}},
        snapshots={"every_steps": 1},
    )
    with driving(job, tmp_path) as driver:
        driver.wait_for(kind="snapshot")
        driver.process.kill()
        driver.end()
        wait_until_gone(driver)
        assert [path.suffix for path in Path(job.cluster.shm_dir).iterdir()] == [".arena"]
    assert status(job, tmp_path)["state"] == "died"
    # The controller may have come a few steps further than its driver could write down.
    manifests = driver.run.snapshots.glob("step-*/manifest.json")
    saved = max(int(path.parent.name.removeprefix("step-")) for path in manifests)

    began = time.monotonic()
    more = ["--resume", "--set", f"train.steps={saved + 2}"]
    with driving(job, tmp_path, *more) as driver:
        driver.wait_for(kind="started")
        restarted = time.monotonic() - began
        ended = driver.end()
        assert driver.left() == []
    assert restarted < 60 * load()
    assert (ended.code, ended.err) == (0, "")
    assert [step["step"] for step in ended.steps()] == [saved + 1, saved + 2]
    records = driver.run.steps()
    assert [record.first_sample for record in records] == [4 * (r.step - 1) for r in records]


def test_an_interrupt_while_ray_starts_leaves_nothing(tmp_path):
    job = tiny_job(tmp_path)
    with driving(job, tmp_path) as driver:
        while not (driver.run.path / "run.json").exists():
            time.sleep(0.01)
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    assert (ended.code, ended.err, ended.steps()) == (130, "", [])
    assert status(job, tmp_path)["state"] == "interrupted"


def wait_until_gone(driver: Driver) -> None:
    """All but the agents of Ray, which first wait a minute for the rest of their Ray."""
    deadline = time.monotonic() + 20 * load()
    while left := [pid for pid in driver.marked() if not is_agent(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def is_agent(pid: int) -> bool:
    try:
        return b"Agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # it is gone
