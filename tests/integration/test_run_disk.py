"""Runs on a file system of their own: one that is full for a while, and one that takes nothing."""

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from driven_run import driving, tiny_job
from flatpeak.controller.cli import run_command
from flatpeak.controller.spec_file import dump_spec
from flatpeak.workers.snapshot import find_latest, saved_steps
from saved_run import SavedRun

pytestmark = pytest.mark.timeout(400)


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "flatpeak-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        # Lazily: the mount goes at once, also when a failed test left a file on it open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Takes all that is left of the file system."""
    with path.open("wb", buffering=0) as file:
        for nbytes in (65536, 1):
            try:
                while file.write(bytes(nbytes)):
                    pass
            except OSError:
                continue


def failed_snapshots(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if 'kind="snapshot_failed"' in line)


def test_a_run_goes_on_while_the_disk_is_full_and_sigterm_leaves_a_snapshot(tmp_path):
    runs = tmp_path / "disk"
    with mounted(runs, 16 * 2**20):
        job = tiny_job(
            tmp_path,
            runs_dir=str(runs),
            train={"steps": 5000},
            snapshots={"every_steps": 2, "keep": 1},
        )
        with driving(job, tmp_path) as driver:
            address = driver.wait_for(kind="metrics")["detail"]["address"]
            driver.wait_for(kind="snapshot")
            assert failed_snapshots(address) == 0
            fill(runs / "filler")
            failure = driver.wait_for(kind="snapshot_failed")["detail"]
            assert failed_snapshots(address) >= 1
            # One write may be under way: all that is whole is what was saved before.
            (kept,) = saved_steps(driver.run.path)
            assert kept == failure["kept"]
            assert find_latest(driver.run.path, verify=True).folder is not None
            driver.wait_for(type="step")
            (runs / "filler").unlink()
            saved = driver.wait_for(kind="snapshot")["detail"]["step"]
            driver.signal(signal.SIGTERM)
            ended = driver.end()
            assert driver.left() == []
        assert ended.code == 130
        assert f"step-{failure['step']}/arena-0-" in failure["reason"]
        assert "No space left on device" in failure["reason"]
        last = driver.run.steps()[-1].step
        assert last > saved > failure["step"] > failure["kept"]
        assert [record.step for record in driver.run.steps()] == list(range(1, last + 1))
        snapshots = driver.run.snapshots
        assert [path.name for path in snapshots.iterdir()] == [f"step-{last}"]
        assert len(list((snapshots / f"step-{last}").iterdir())) == 2  # a part and the manifest
        assert find_latest(driver.run.path, verify=True).skipped == ()


def test_a_run_folder_that_cannot_be_written_is_refused_before_the_start(tmp_path, capsys):
    runs = tmp_path / "disk"
    with mounted(runs, 16 * 2**20):
        spec = tiny_job(tmp_path, runs_dir=str(runs), train={"steps": 10})
        SavedRun(spec).save()
        remount = ["mount", "-o", "remount,ro", str(runs)]
        subprocess.run(remount, check=True)
        for name, options in (("fresh", []), ("tiny", ["--resume"])):
            (tmp_path / "job.yaml").write_text(dump_spec(spec.model_copy(update={"run": name})))
            assert run_command(["train", str(tmp_path / "job.yaml"), *options]) == 2
            out, err = capsys.readouterr()
            assert out == "loading torch and Ray, checking the job\n"
            assert f"cannot write the run folder {runs / name}: Read-only file system" in err
