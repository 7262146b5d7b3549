"""Processes of a run that stop without dying: it finds them, names them and goes on."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from driven_run import FAULTS, SOURCE_ROOTS, WHEN_IMPORTED, driving, tiny_job
from flatpeak.controller.cluster import connected
from flatpeak.controller.placement import actor_class
from flatpeak.controller.runs import process_start
from flatpeak.controller.spec import Spec
from flatpeak.workers.actors import TrainWorker
from flatpeak.workers.progress import Beat
from local_run import holds_state_of, train_locally

pytestmark = pytest.mark.timeout(500)


SLOW_ON_RANK_1_AND_STUCK_IN_STEP_3 = """
import os
import threading
import time

MODULE = "flatpeak.workers.attention"


class AttentionFault(Fault):
    def change(self, module):
        from flatpeak.workers.progress import beat

        attend = module.packed_attention

        def attend_late_or_never(*arguments, **how):
            if module.dist.get_rank() == 1:
                time.sleep(0.25)
                flag = os.path.join(os.path.dirname(__file__), "stuck")
                if beat().step == 3 and not os.path.exists(flag):
                    open(flag, "w").close()
                    threading.Event().wait()
            return attend(*arguments, **how)

        module.packed_attention = attend_late_or_never


sys.meta_path.insert(0, AttentionFault())
"""


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
        ("worker_lost", "worker 1", r"(in \w+, )?(idle after|[\w ]+ of) step \d+"),
        ("optimizer_lost", "optimizer 1", r"(idle after|\w+ of) step \d+"),
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


def recorder() -> type:
    """A worker that notes the calls that it gets; local, so that it travels to Ray by value."""

    class Recorder(TrainWorker):
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def step(self, step: int) -> Any:
            self.calls.append((step, threading.get_ident()))
            time.sleep(0.5 if step == 0 else 0.0)

        def noted(self) -> list[tuple[int, int]]:
            return self.calls

    return Recorder


def test_calls_stay_in_order_on_one_thread_while_heartbeats_are_answered(tmp_path):
    with connected(tiny_job(tmp_path)):
        where = {"env_vars": {"PYTHONPATH": SOURCE_ROOTS}}
        actor = actor_class(recorder()).options(runtime_env=where).remote()
        refs = [actor.step.remote(step) for step in range(100)]
        assert isinstance(ray.get(actor.heartbeat.remote(), timeout=60), Beat)
        assert ray.wait(refs[:1], timeout=0)[0] == []
        for _ in range(20):
            ray.get(actor.heartbeat.remote(), timeout=60)
        calls = ray.get(actor.noted.remote(), timeout=60)
    assert [step for step, _ in calls] == [*range(100)]
    assert len({thread for _, thread in calls}) == 1


def test_a_rank_that_is_stuck_in_a_step_is_told_from_those_that_wait_for_it(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WHEN_IMPORTED + SLOW_ON_RANK_1_AND_STUCK_IN_STEP_3)
    job = tiny_job(
        tmp_path,
        train={"steps": 4},
        cluster={"workers": 2, "step_timeout_s": 25.0},
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
    )
    with monkeypatch.context() as faulty:
        faulty.setenv(FAULTS, str(tmp_path))
        with driving(job, tmp_path) as driver:
            ended = driver.end()
            assert driver.left() == []
    assert ended.code == 0, ended.err
    (lost,) = [line["detail"] for line in ended.out if line.get("kind") == "worker_lost"]
    assert lost["actor"] == "worker 1"
    told = r"step 3: worker 1 hangs: worker 1 was in attention, forward of step 3, for (.*) s "
    told += r"\(attention.py:\d+ in attention_forward\), \d\.\d s ago"
    found = re.fullmatch(told, lost["reason"])
    assert found, lost["reason"]
    assert 12.5 <= float(found[1]) <= 25.0
    wanted = train_locally(job, tmp_path)
    steps = ended.steps()
    assert [step["loss"] for step in steps] == wanted.losses
    print("seconds of lag:", [step["lag_s"] for step in steps])
    # Two layers, which are done again in the backward pass.
    assert all(step["straggler"] == 1 and step["lag_s"] > 0.5 for step in steps[1:])
