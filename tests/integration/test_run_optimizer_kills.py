"""kill -9 of optimizer actors at random moments of a run: the run goes on and no bit changes.

The longer form, e.g. FLATPEAK_KILLS=20, kills more often in one run.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from driven_run import Driver, driving, tiny_job
from flatpeak.controller.spec import Spec
from local_run import holds_state_of, train_locally

KILLS = int(os.environ.get("FLATPEAK_KILLS", "4"))
ACTORS = ("optimizer-0", "optimizer-1")

pytestmark = pytest.mark.timeout(300 + 60 * KILLS)


def job_of(folder: Path, steps: int) -> Spec:
    """Small buckets, so that an update takes a good part of a step; several arenas an actor."""
    return tiny_job(
        folder,
        train={"steps": steps, "schedule": {"decay": "linear", "decay_steps": 200}},
        cluster={"optimizers": 2, "max_optimizers": 5},
        parallel={"sequence": 1, "expert": 1, "vocabulary": 1},
        memory={"optimizer": {"bucket_parameters": 150}},
        snapshots={"every_steps": 2},
    )


def kill_one(driver: Driver, chance: random.Random) -> float:
    """Kills an actor in the middle of a step; returns the seconds to the next one it helped in."""
    seconds = driver.wait_for(type="step")["step_seconds"]
    # Squared, because an update is asked for at the start of a step.
    time.sleep(seconds * chance.random() ** 2)
    driver.kill_actor(chance.choice(ACTORS))
    began = time.monotonic()
    driver.wait_for(kind="optimizer_replaced")
    driver.wait_for(type="step")
    return time.monotonic() - began


def test_no_bit_of_a_run_whose_optimizer_actors_are_killed_at_random_moments_changes(tmp_path):
    chance = random.Random(5)
    with driving(job_of(tmp_path, steps=5000), tmp_path) as driver:
        seconds = [kill_one(driver, chance) for _ in range(KILLS)]
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert ended.kinds().count("optimizer_lost") == KILLS
    assert ended.kinds().count("optimizer_replaced") == KILLS
    steps = ended.steps()
    wanted = train_locally(job_of(tmp_path, steps=len(steps)), tmp_path)
    assert [step["loss"] for step in steps] == wanted.losses
    assert [step["grad_norm"] for step in steps] == wanted.norms
    assert holds_state_of(driver.run.snapshots / f"step-{len(steps)}", wanted)
    logs = "".join((driver.run.logs / f"{actor}.log").read_text() for actor in ACTORS)
    print("seconds from kill to step:", " ".join(f"{s:.1f}" for s in seconds))
    print("found:", *re.findall(r"buckets by step: (.*)", logs), sep="\n")
