"""kill -9 of the controller at random moments of a run: the next one goes on with the arenas, and
no bit changes. Workers do the updates here; `test_chaos.py` has those of the actors.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from driven_run import Driver, driving, load, tiny_job
from flatpeak.controller.spec import Spec
from local_run import holds_state_of, train_locally

KILLS = int(os.environ.get("FLATPEAK_KILLS", "2"))

pytestmark = pytest.mark.timeout(300 + 90 * KILLS)


def job_of(folder: Path, steps: int) -> Spec:
    return tiny_job(
        folder,
        train={"steps": steps, "schedule": {"decay": "linear", "decay_steps": 200}},
        cluster={"workers": 2, "optimizers": 2},
        parallel={"sequence": 2, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"bucket_parameters": 150, "update_on": "device"}},
        snapshots={"every_steps": 3},
    )


def kill(driver: Driver, chance: random.Random) -> float:
    """Kills the controller in the middle of a step; returns the seconds to the next one."""
    time.sleep(driver.wait_for(type="step")["step_seconds"] * chance.random())
    driver.kill_actor("controller")
    began = time.monotonic()
    driver.wait_for(kind="controller_replaced")
    driver.wait_for(type="step")
    return time.monotonic() - began


def test_no_bit_of_a_run_whose_controller_is_killed_at_random_moments_changes(tmp_path):
    chance = random.Random(11)
    with driving(job_of(tmp_path, 5000), tmp_path) as driver:
        driver.wait_for(kind="started")
        seconds = [kill(driver, chance) for _ in range(KILLS)]
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    print("seconds from kill to step:", " ".join(f"{s:.1f}" for s in seconds))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert max(seconds) < 60 * load()
    assert ended.kinds().count("controller_lost") == KILLS
    # What was told of twice was the step that was under way: it had changed nothing yet.
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert {line["step"] for line in ended.steps()} == {record.step for record in records}
    wanted = train_locally(job_of(tmp_path, len(records)), tmp_path)
    assert [record.loss for record in records] == wanted.losses
    assert [record.grad_norm for record in records] == wanted.norms
    told = {line["step"]: set() for line in ended.steps()}
    for line in ended.steps():
        told[line["step"]].add(line["loss"])
    assert [told[step] for step in sorted(told)] == [{loss} for loss in wanted.losses]
    assert holds_state_of(driver.run.snapshots / f"step-{len(records)}", wanted)
