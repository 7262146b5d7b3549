"""kill -9 of workers and controllers at random moments of a run whose workers do the updates: it
goes on, no bit changes, and what is told of the dead is all that is known of them. `test_chaos.py`
has the updates of actors, and their deaths.

The longer form, e.g. FLATPEAK_KILLS=20, kills more often in one run.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from driven_run import Driver, driving, load, tiny_job
from flatpeak.controller.spec import Spec
from local_run import holds_state_of, train_locally

KILLS = int(os.environ.get("FLATPEAK_KILLS", "3"))
WORKERS = ("worker-0", "worker-1")

pytestmark = pytest.mark.timeout(300 + 90 * KILLS)


def job_of(folder: Path, steps: int) -> Spec:
    return tiny_job(
        folder,
        train={"steps": steps, "schedule": {"decay": "linear", "decay_steps": 200}},
        cluster={"workers": 2, "optimizers": 2},
        parallel={"sequence": 2, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"bucket_parameters": 150, "update_on": "device"}},
        snapshots={"every_steps": 2},
    )


def kill(driver: Driver, chance: random.Random, *victims: str) -> float:
    """Kills them in the middle of a step; returns the seconds to the next one."""
    time.sleep(driver.wait_for(type="step")["step_seconds"] * chance.random())
    for victim in victims:
        driver.kill_actor(victim)
    began = time.monotonic()
    of_workers = "controller" not in victims
    driver.wait_for(kind="workers_replaced" if of_workers else "controller_replaced")
    driver.wait_for(type="step")
    return time.monotonic() - began


def test_no_bit_of_a_run_whose_processes_are_killed_at_random_moments_changes(tmp_path):
    chance = random.Random(7)
    with driving(job_of(tmp_path, 5000), tmp_path) as driver:
        driver.wait_for(kind="started")
        driver.kill_actor("worker-1")  # before the first step
        driver.wait_for(kind="workers_replaced")
        seconds = []
        for number in range(KILLS):
            worker = chance.choice(WORKERS)
            victims = [(worker,), ("controller",), (worker, "optimizer-1")][number % 3]
            seconds.append(kill(driver, chance, *victims))
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    print("seconds from kill to step:", " ".join(f"{s:.1f}" for s in seconds))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert max(seconds) < 60 * load()
    kinds = ended.kinds()
    assert kinds.count("controller_lost") == (KILLS + 1) // 3
    assert kinds.count("workers_replaced") == 1 + KILLS - (KILLS + 1) // 3
    assert kinds.count("optimizer_lost") == KILLS // 3
    # Of the one that died before its first step nothing is known.
    lost = [line["detail"] for line in ended.out if line.get("kind") == "worker_lost"]
    for detail in lost[1:]:
        assert f"{detail['actor']} died (it had finished step " in detail["reason"]
        known = (
            r"with peaks in bytes: total [\d,]+, .*dispatch [\d,]+.*; in use then: [\d,]+ of "
            r"device memory and [\d,]{10,} of host memory; pid \d+, ip .*worker process has died"
        )
        assert re.search(known, detail["reason"], re.DOTALL)
    # What was told of twice was the step that was under way: it had changed nothing yet.
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    wanted = train_locally(job_of(tmp_path, len(records)), tmp_path)
    assert [record.loss for record in records] == wanted.losses
    assert [record.grad_norm for record in records] == wanted.norms
    told = {line["step"]: set() for line in ended.steps()}
    for line in ended.steps():
        told[line["step"]].add(line["loss"])
    assert [told[step] for step in sorted(told)] == [{loss} for loss in wanted.losses]
    assert holds_state_of(driver.run.snapshots / f"step-{len(records)}", wanted)
