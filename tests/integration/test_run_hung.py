"""Processes of a run that stop without dying: it finds them, names them and goes on."""

import os
import re
import signal
from pathlib import Path

import pytest

from driven_run import driving, tiny_job
from flatpeak.controller.runs import process_start
from flatpeak.controller.spec import Spec
from local_run import holds_state_of, train_locally

pytestmark = pytest.mark.timeout(300)


def job_of(folder: Path, steps: int = 5000) -> Spec:
    return tiny_job(
        folder,
        train={"steps": steps, "schedule": {"decay": "linear", "decay_steps": 200}},
        cluster={"workers": 2, "optimizers": 2, "heartbeat_timeout_s": 5.0},
        parallel={"sequence": 2, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"bucket_parameters": 150}},
    )


def test_stopped_processes_are_replaced_and_no_bit_changes(tmp_path):
    with driving(job_of(tmp_path), tmp_path) as driver:
        driver.wait_for(type="step")
        workers = [driver.pids()[name] for name in ("worker-0", "worker-1")]
        os.kill(workers[1], signal.SIGSTOP)
        driver.wait_for(kind="workers_replaced")
        # A stopped process hears nothing, and its peer was in a collective with it.
        assert [pid for pid in workers if process_start(pid) is not None] == []
        driver.wait_for(type="step")
        os.kill(driver.pids()["optimizer-1"], signal.SIGSTOP)
        driver.wait_for(kind="optimizer_replaced")
        driver.wait_for(type="step")
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    assert ended.code == 130
    assert "Traceback" not in ended.err
    details = {line["kind"]: line["detail"] for line in ended.out if line.get("type") == "event"}
    for kind, who, doing in (
        ("worker_lost", "worker 1", r"(in \w+, )?[\w ]+ of step \d+"),
        ("optimizer_lost", "optimizer 1", r"(idle|\w+ of step \d+)"),
    ):
        assert details[kind]["actor"] == who
        told = rf"step \d+: {who} hangs: it has not answered for \d+\.\d s, longer than "
        told += rf"cluster.heartbeat_timeout_s = 5; {who} was {doing}"
        assert re.search(told, details[kind]["reason"]), details[kind]["reason"]
    steps = ended.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    wanted = train_locally(job_of(tmp_path, len(steps)), tmp_path)
    assert [step["loss"] for step in steps] == wanted.losses
    assert [step["grad_norm"] for step in steps] == wanted.norms
    assert holds_state_of(driver.run.snapshots / f"step-{len(steps)}", wanted)
