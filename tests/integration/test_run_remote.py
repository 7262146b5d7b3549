"""A run on two Ray nodes that share no arena folder: one has the workers, the other an actor.

A third node has no cores: only actors that take none could be there.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driven_run import Driver, driving, flatpeak, tiny_job
from flatpeak.controller.spec import Spec
from local_run import train_locally
from ray_nodes import SHM, Nodes, ray_nodes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    with ray_nodes(tmp_path_factory.mktemp("nodes"), cores=(3, 1, 0)) as nodes:
        yield nodes


def job(folder: Path, address: str, *, steps: int = 4, **cluster: Any) -> Spec:
    return tiny_job(
        folder,
        train={
            "steps": steps,
            "schedule": {"decay": "linear", "decay_steps": 200},
            "microbatches": 2,
            "dtype": "bfloat16",
        },
        cluster={
            "workers": 2,
            "address": address,
            "optimizer_placement": "anywhere",
            "shm_dir": f"${SHM}",
            **cluster,
        },
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
    )


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> list[float]:
    """The losses of the same job with one actor beside the workers."""
    folder = tmp_path_factory.mktemp("shared")
    return train_locally(job(folder, "local"), folder).losses


@pytest.mark.parametrize("optimizers", [1, 2], ids=["all elsewhere", "one of two elsewhere"])
def test_losses_are_those_of_a_run_in_shared_memory(tmp_path, nodes, wanted, optimizers):
    with driving(job(tmp_path, nodes.address, optimizers=optimizers), tmp_path) as driver:
        parameters = driver.wait_for(kind="started")["detail"]["parameters"]
        driver.wait_for(step=1)
        arenas = [len(list(folder.iterdir())) for folder in nodes.folders]
        homes = {name: nodes.of(pid) for name, pid in driver.pids().items()}
        ended = driver.end()
        assert driver.left() == []
    assert (ended.code, ended.err) == (0, "")
    assert arenas == [optimizers - 1, 1, 0]
    assert nodes.left() == []
    # An actor keeps its node from being given back, also one that takes no core.
    assert set(homes.values()) == {0, 1}
    assert homes["controller"] == homes["worker-0"] == 0
    assert [step["loss"] for step in ended.steps()] == wanted
    figures = [step["optimizer"] for step in ended.steps()]
    print(f"{parameters} parameters, {figures[-1]}")
    # Two microbatches of fp32 gradients there, bf16 weights back, of one parameter in `optimizers`.
    for step in figures:
        assert 1 < step["sent_bytes"] / (2 * 4 * parameters / optimizers) < 1.5
        assert 1 < step["received_bytes"] / (2 * parameters / optimizers) < 1.5
    assert all(step["boundaries"]["offloaded_bytes"] > 0 for step in ended.steps())


def test_a_run_goes_on_without_those_that_are_killed_and_with_other_actors(tmp_path, nodes):
    with driving(job(tmp_path, nodes.address, steps=5000), tmp_path) as driver:
        parameters = driver.wait_for(kind="started")["detail"]["parameters"]
        for victim in ("optimizer-0", "worker-1"):
            driver.wait_for(type="step")
            driver.wait_for(type="step")
            driver.kill_actor(victim)
            driver.wait_for(kind="workers_replaced")
        driver.wait_for(type="step")
        answers = [scale(driver, optimizers) for optimizers in (0, 3, 2)]
        # By then the old arenas are gone.
        driver.wait_for(step=json.loads(answers[-1][1])["step"] + 1)
        arenas = [len(list(folder.iterdir())) for folder in nodes.folders]
        answers.append(scale(driver, 1))
        driver.wait_for(step=json.loads(answers[-1][1])["step"] + 1)
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    assert ended.code == 130
    assert "Traceback" not in ended.err
    # A worker of an actor that died has lost what it had sent, and all workers begin anew.
    assert ended.kinds().count("worker_lost") == 2
    assert ended.kinds().count("optimizer_replaced") == 1
    # Between nodes the state is copied.
    assert [code for code, _ in answers] == [2, 2, 0, 0]
    assert "cluster.optimizers = 0" in answers[0][1]
    assert "3 optimizer actors instead of 1 need 1 CPUs more than there are" in answers[1][1]
    moved = [json.loads(text) for _, text in answers[2:]]
    assert [(m["before"], m["after"], m["copied_bytes"]) for m in moved] == [
        (1, 2, 12 * parameters),
        (2, 1, 12 * parameters),
    ]
    assert arenas == [1, 1, 0]
    assert nodes.left() == []
    losses = [step["loss"] for step in ended.steps()]
    assert losses == train_locally(job(tmp_path, "local", steps=len(losses)), tmp_path).losses


def scale(driver: Driver, optimizers: int) -> tuple[int, str]:
    """Exit code and what was printed."""
    arguments = ("--optimizers", str(optimizers), "--runs-dir", driver.spec.runs_dir, "--json")
    done = flatpeak("scale", "tiny", *arguments, folder=driver.folder)
    return done.returncode, done.stdout or done.stderr
