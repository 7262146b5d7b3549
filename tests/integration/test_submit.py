"""Runs submitted to the head of a cluster with a token, from a folder that knows nothing of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driven_run import PATIENCE_S, SOURCE_ROOTS, tiny_job
from flatpeak.controller.runs import RunFolder
from flatpeak.controller.spec import Spec
from flatpeak.controller.spec_file import dump_spec
from flatpeak.workers.host_memory import node_path
from ray_head import TOKEN, Head, ray_head

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A cluster whose nodes have an old copy of every part installed, which no run may take."""
    old = tmp_path_factory.mktemp("old")
    for part in ("controller", "workers", "kernels"):
        (old / "flatpeak" / part).mkdir(parents=True)
        (old / "flatpeak" / part / "__init__.py").write_text("raise ImportError('an old copy')\n")
    with ray_head(cores=4, PYTHONPATH=str(old), OMP_NUM_THREADS="1") as head:
        yield head


class Elsewhere:
    """A shell on another machine: a folder of its own, the address, the token and the job file."""

    def __init__(self, head: Head, job: Spec, folder: Path, *, token: str = TOKEN) -> None:
        self.folder = folder / "elsewhere"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "job.yaml").write_text(dump_spec(job))
        inherited = {n: value for n, value in os.environ.items() if not n.startswith("RAY_")}
        self._environment = inherited | {
            "HOME": str(self.folder),
            "PYTHONPATH": SOURCE_ROOTS,
            "RAY_AUTH_TOKEN": token,
            "RAY_API_SERVER_ADDRESS": head.address,
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flatpeak.controller", *arguments],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def objects(self, *arguments: str) -> list[dict[str, Any]]:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done
        return [json.loads(line) for line in done.stdout.splitlines()]

    def submit(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("submit", "job.yaml", "--python", sys.executable, "--json", *arguments)


def check_nothing_left(head: Head, job: Spec) -> None:
    assert head.alive("actors") == []
    assert head.alive("placement_groups") == []
    assert [*node_path(job.cluster.shm_dir).iterdir()] == []


def next_of(process: subprocess.Popen[str], kind: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if (content := json.loads(line))["type"] == kind:
            return content
    raise AssertionError(process.communicate())


def test_a_submitted_run_is_watched_stopped_and_resumed_by_its_address(tmp_path: Path, head: Head):
    began = time.monotonic()
    train = {"steps": 5000, "schedule": {"decay": "constant"}}
    job = tiny_job(tmp_path, train=train, cluster={"workers": 2})
    shell, folder = Elsewhere(head, job, tmp_path), RunFolder(tmp_path / "runs" / "tiny")

    following = shell.submit("--follow")
    assert next_of(following, "submitted")["job"] == "flatpeak-tiny-1"
    assert next_of(following, "step")["step"] == 1
    again = shell.run("submit", "job.yaml", "--resume")
    [seen] = shell.objects("status", "tiny")
    [stopped] = shell.objects("stop", "tiny", "--timeout", str(PATIENCE_S))
    check_nothing_left(head, job)
    _, errors = following.communicate(timeout=PATIENCE_S)
    assert again.returncode == 2
    assert "the run tiny is going on at http://127.0.0.1:" in again.stderr
    assert (seen["state"], seen["steps"], seen["folder"]) == ("running", 5000, str(folder.path))
    assert seen["step"] >= 1
    assert seen["pid"] == folder.info.pid
    assert stopped == {"run": "tiny", "state": "interrupted"}
    assert (following.returncode, errors) == (130, "")
    last = folder.steps()[-1].step
    assert [path.name for path in folder.snapshots.iterdir()] == [f"step-{last}"]

    refused = shell.run("submit", "job.yaml")
    assert refused.returncode == 2
    assert "the run tiny exists at http://127.0.0.1:" in refused.stderr
    assert "go on with it by --resume" in refused.stderr

    waiting = shell.submit("--resume", "--set", f"train.steps={last + 3}", "--wait")
    assert next_of(waiting, "submitted")["job"] == "flatpeak-tiny-2"
    watched = shell.objects("watch", "tiny")
    assert next_of(waiting, "summary")["steps"] == 3
    waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 0
    check_nothing_left(head, job)
    assert [each["step"] for each in watched if each["type"] == "step"] == [
        *range(last + 1, last + 4)
    ]
    assert [each["kind"] for each in watched if each["type"] == "event"][-1] == "finished"
    [done] = shell.objects("status")
    assert (done["run"], done["state"], done["step"]) == ("tiny", "done", last + 3)
    assert done["loss"] == folder.steps()[-1].loss
    assert "finished" not in shell.run("logs", "tiny").stdout
    print(f"in {time.monotonic() - began:.0f} s")


def test_a_run_that_its_driver_refuses_ends_the_waiting_with_its_message_and_code(
    tmp_path: Path, head: Head
):
    job = tiny_job(tmp_path, run="refused", data={"source": str(tmp_path / "absent.txt")})
    shell = Elsewhere(head, job, tmp_path)
    waiting = shell.submit("--wait")
    out, err = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 2
    assert "absent.txt" in err
    assert err.count("\n") == 1
    assert json.loads(out.splitlines()[-1])["error"]["exit_code"] == 2


def test_a_cluster_refuses_another_token(tmp_path: Path, head: Head):
    shell = Elsewhere(head, tiny_job(tmp_path), tmp_path, token="not-the-token-of-the-cluster")
    done = shell.run("status")
    assert done.returncode == 2
    assert "refuses this client: Authentication failed" in done.stderr
    assert done.stderr.count("\n") == 1
