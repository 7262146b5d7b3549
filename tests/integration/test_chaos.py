"""The story of a run that is killed again and again, and does not notice.

Two workers, a controller and one to three optimizer actors train. At random moments, in a step, an
update, a snapshot, a resize or a start, one or two of them get kill -9. Afterwards every loss is
that of a run that was left alone. FLATPEAK_CHAOS=50 makes it a long story; FLATPEAK_CHAOS_RESULTS
is a file for the seconds that each kind of death cost.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from driven_run import Driver, driving, environment, load, tiny_job
from faults import slow_down
from flatpeak.controller.runs import RunEvent, StepRecord, process_start
from flatpeak.controller.spec import Spec
from local_run import holds_state_of, train_locally

KILLS = int(os.environ.get("FLATPEAK_CHAOS", "5"))
RESULTS = os.environ.get("FLATPEAK_CHAOS_RESULTS")
SEED = 2026
MOMENTS = ("step", "update", "snapshot", "resize", "start")
ROLES = ("worker", "optimizer", "controller")
EVERY_STEPS = 2

UPDATE_S, SNAPSHOT_S = 0.005, 0.3
"""A bucket and an arena take this much longer, so that there is an update to be killed in."""
SLOW = {
    ("flatpeak.workers.optimizer", "update_bucket"): UPDATE_S,
    ("flatpeak.workers.actors", "write_snapshot_part"): SNAPSHOT_S,
}

pytestmark = pytest.mark.timeout(400 + 60 * KILLS)


def job_of(folder: Path, steps: int) -> Spec:
    return tiny_job(
        folder,
        train={"steps": steps, "schedule": {"decay": "linear", "decay_steps": 200}},
        cluster={"workers": 2, "optimizers": 2, "max_optimizers": 3},
        parallel={"sequence": 2, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"bucket_parameters": 300}},
        snapshots={"every_steps": EVERY_STEPS},
    )


@dataclass
class Kill:
    moment: str
    victims: list[str]
    time: float


@dataclass
class Chaos:
    driver: Driver
    chance: random.Random
    kills: list[Kill] = field(default_factory=list)
    requests: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def act(self, moment: str) -> None:
        """One or two deaths in the middle of `moment`, and the run has gone on."""
        getattr(self, f"wait_in_a_{moment}")()
        roles = self.chance.sample(ROLES, k=self.chance.choice((1, 1, 2)))
        last = self.strike(moment, roles)
        # One more step may have been done when it struck.
        while self.driver.wait_for(type="step")["step"] < last + 2:
            pass

    def strike(self, moment: str, roles: Sequence[str]) -> int:
        """Kills one of each role that has one alive; returns the last step that was recorded."""
        pids = self.driver.pids()
        alive = [name for name, pid in pids.items() if process_start(pid) is not None]
        victims = []
        for role in roles:
            if of_role := sorted(name for name in alive if name.startswith(role)):
                victims.append(self.chance.choice(of_role))
        self.kills.append(Kill(moment, victims, time.time()))
        for name in victims:
            os.kill(pids[name], signal.SIGKILL)
        return self.driver.run.steps()[-1].step

    def wait_in_a_step(self) -> None:
        time.sleep(self.driver.wait_for(type="step")["step_seconds"] * self.chance.random())

    def wait_in_a_update(self) -> None:
        self.driver.wait_for(type="step")
        time.sleep(UPDATE_S * 60 * self.chance.random())

    def wait_in_a_snapshot(self) -> None:
        while self.driver.wait_for(type="step")["step"] % EVERY_STEPS:
            pass
        time.sleep(UPDATE_S * 60 + SNAPSHOT_S * self.chance.random())

    def wait_in_a_resize(self) -> None:
        command = [sys.executable, "-m", "flatpeak.controller", "scale", self.driver.spec.run]
        command += ["--runs-dir", self.driver.spec.runs_dir, "--timeout", "60"]
        command += ["--optimizers", str(self.chance.randint(1, 3))]
        self.requests.append(
            subprocess.Popen(
                command,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        time.sleep(8 * self.chance.random() * load())

    def wait_in_a_start(self) -> None:
        self.driver.wait_for(type="step")
        self.strike("step", [self.chance.choice(("controller", "worker"))])
        time.sleep(8 * self.chance.random() * load())


def test_a_run_that_is_killed_again_and_again_does_not_notice(tmp_path, monkeypatch):
    slow_down(monkeypatch, tmp_path, SLOW)
    with driving(job_of(tmp_path, 50_000), tmp_path) as driver:
        driver.wait_for(kind="started")
        chaos = Chaos(driver, random.Random(SEED))
        moments = [*MOMENTS, *chaos.chance.choices(MOMENTS, k=max(0, KILLS - len(MOMENTS)))]
        for moment in moments[:KILLS]:
            chaos.act(moment)
        for request in chaos.requests:
            request.wait(100)
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    assert ended.code == 130
    assert "Traceback" not in ended.err

    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert {line["step"] for line in ended.steps()} == {record.step for record in records}
    report(chaos.kills, driver.run.events(), records)
    monkeypatch.undo()
    wanted = train_locally(job_of(tmp_path, len(records)), tmp_path)
    assert [record.loss for record in records] == wanted.losses
    assert [record.grad_norm for record in records] == wanted.norms
    assert holds_state_of(driver.run.snapshots / f"step-{len(records)}", wanted)


def report(
    kills: Sequence[Kill], events: Sequence[RunEvent], records: Sequence[StepRecord]
) -> None:
    """The seconds from a death to the next step, by role, of deaths that came alone."""
    seconds: dict[str, list[dict[str, float]]] = defaultdict(list)
    ends = [kill.time for kill in kills[1:]] + [float("inf")]
    for kill, end in zip(kills, ends, strict=True):
        if len(kill.victims) != 1:
            continue
        role = kill.victims[0].partition("-")[0]
        of_workers = role == "worker"
        happened = {e.kind: e for e in reversed(events) if kill.time < e.time < end}
        lost = happened.get(f"{role}_lost")
        replaced = happened.get("workers_replaced" if of_workers else f"{role}_replaced")
        if lost is None or replaced is None:
            continue  # the next death came first, or it was on its way out
        first = next(r.time for r in records if r.time is not None and r.time > replaced.time)
        detail = replaced.detail
        rehydrate = detail.get("build_s", 0.0) + detail["attach_s"]
        seconds[role].append(
            {
                "detect_s": lost.time - kill.time,
                "place_s": replaced.time - lost.time - rehydrate,
                "rehydrate_s": rehydrate,
                "step_s": first - replaced.time,
            }
        )
    medians = {
        role: {part: round(median(each[part] for each in found), 3) for part in found[0]}
        | {"kills": len(found)}
        for role, found in sorted(seconds.items())
    }
    by_moment = {moment: sum(kill.moment == moment for kill in kills) for moment in MOMENTS}
    result = {
        "deaths": sum(len(kill.victims) for kill in kills),
        "kills": len(kills),
        "by_moment": by_moment,
        "two_at_once": sum(len(kill.victims) == 2 for kill in kills),
        "steps": len(records),
        "load": load(),
        "median_seconds": medians,
    }
    print(json.dumps(result, indent=2))
    if RESULTS:
        Path(RESULTS).write_text(json.dumps(result, indent=2) + "\n")
