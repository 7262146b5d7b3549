"""kill -9 of workers at random moments of a run: it goes on and no bit changes. They do the updates
themselves here; `test_chaos.py` has those of the actors.

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

KILLS = int(os.environ.get("FLATPEAK_KILLS", "2"))
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


def kill(driver: Driver, chance: random.Random, *, optimizer_too: bool) -> float:
    """Kills a worker in the middle of a step; returns the seconds to the next one."""
    time.sleep(driver.wait_for(type="step")["step_seconds"] * chance.random())
    driver.kill_actor(chance.choice(WORKERS))
    if optimizer_too:
        driver.kill_actor("optimizer-1")
    began = time.monotonic()
    driver.wait_for(kind="workers_replaced")
    driver.wait_for(type="step")
    return time.monotonic() - began


def test_no_bit_of_a_run_whose_workers_are_killed_at_random_moments_changes(tmp_path):
    chance = random.Random(7)
    with driving(job_of(tmp_path, 5000), tmp_path) as driver:
        driver.wait_for(kind="started")
        driver.kill_actor("worker-1")  # before the first step
        driver.wait_for(kind="workers_replaced")
        seconds = [kill(driver, chance, optimizer_too=n % 2 == 1) for n in range(KILLS)]
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    print("seconds from kill to step:", " ".join(f"{s:.1f}" for s in seconds))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert max(seconds) < 60 * load()
    assert ended.kinds().count("workers_replaced") == KILLS + 1
    assert ended.kinds().count("optimizer_lost") == KILLS // 2
    lost = [line["detail"] for line in ended.out if line.get("kind") == "worker_lost"]
    for detail in lost[-KILLS:]:
        assert f"{detail['actor']} died (it had finished step " in detail["reason"]
        known = (
            r"with peaks in bytes: total [\d,]+, .*dispatch [\d,]+.*; in use then: [\d,]+ of "
            r"device memory and [\d,]{10,} of host memory; pid \d+, ip .*worker process has died"
        )
        assert re.search(known, detail["reason"], re.DOTALL)
    steps = ended.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    wanted = train_locally(job_of(tmp_path, len(steps)), tmp_path)
    assert [step["loss"] for step in steps] == wanted.losses
    assert [step["grad_norm"] for step in steps] == wanted.norms
    assert holds_state_of(driver.run.snapshots / f"step-{len(steps)}", wanted)
