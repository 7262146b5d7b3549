"""A run whose workers change while it trains: 2, 4, 1, 3, and what cannot be is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from driven_run import Driver, driving, flatpeak, tiny_job
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec
from local_run import train_locally
from ray_nodes import SHM, ray_nodes

pytestmark = pytest.mark.timeout(600)


def job(folder: Path, *, steps: int, address: str = "local", **sections: Any) -> Spec:
    return tiny_job(
        folder,
        **sections,
        train={
            "steps": steps,
            "sequences_per_step": 12,
            "schedule": {"decay": "linear", "decay_steps": 200},
        },
        cluster={
            "workers": 2,
            "max_optimizers": 2,
            "cpus_per_worker": 2,  # so that a node has room for two of them
            "address": address,
            "shm_dir": f"${SHM}",
        },
        memory={"optimizer": {"bucket_parameters": 150}},
        snapshots={"every_steps": 50, "at_end": False},
    )


def scale(driver: Driver, *arguments: str) -> Any:
    done = flatpeak(
        *("scale", "tiny", "--runs-dir", driver.spec.runs_dir, "--json", *arguments),
        folder=driver.folder,
    )
    if done.returncode:
        assert done.returncode == 2
        return done.stderr
    return json.loads(done.stdout)


def test_losses_samples_and_rates_are_those_of_a_run_of_fixed_size(tmp_path):
    with (
        ray_nodes(tmp_path, cores=(5, 5)) as nodes,
        driving(job(tmp_path, steps=5000, address=nodes.address), tmp_path) as driver,
    ):
        driver.wait_for(step=2)
        refused = [
            scale(driver, *arguments.split())
            for arguments in (
                "--workers 0",
                "--workers 12",
                "--workers 5",
                "--workers 4 --expert 3",
            )
        ]
        changes = [scale(driver, "--workers", "4", "--expert", "2", "--vocabulary", "1")]
        driver.wait_for(type="step")
        driver.kill_actor("controller")  # the arenas of now, not those of before, are taken over
        driver.wait_for(kind="controller_replaced")
        driver.wait_for(type="step")
        changes += [scale(driver, "--workers", "1"), scale(driver, "--workers", "3")]
        last = changes[-1]["step"]
        driver.wait_for(step=last + 2)
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
        assert [list(folder.iterdir()) for folder in nodes.folders] == [[], []]
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err  # Ray itself may say there that the controller died
    for text, reason in zip(
        refused,
        (
            "cluster.workers = 0",
            "12 workers instead of 2 need 15 CPUs more than there are; free in the cluster: 5 CPUs",
            "no multiple of 5",
            "parallel.expert = 3 does not divide cluster.workers = 4",
        ),
        strict=True,
    ):
        assert reason in text
    assert [(change["before"], change["after"]) for change in changes] == [(2, 4), (4, 1), (1, 3)]
    assert [change["expert"] for change in changes] == [2, 1, 3]
    assert [change["vocabulary"] for change in changes] == [1, 1, 3]
    print("seconds without a step:", *(f"{change['seconds']:.1f}" for change in changes))
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    degrees = {"sequence": 1, "expert": 2, "vocabulary": 2}
    wanted = train_locally(job(tmp_path, steps=len(records), parallel=degrees), tmp_path)
    assert [r.loss for r in records] == pytest.approx([r.loss for r in wanted.results], abs=1e-5)
    # The order of samples and the rate know of no workers.
    assert [(r.first_sample, r.last_sample) for r in records] == [
        (12 * step, 12 * step + 11) for step in range(len(records))
    ]
    train = driver.spec.train
    assert [r.lr for r in records] == [lr(step, train=train) for step in range(1, len(records) + 1)]
