"""A run on two Ray nodes that share no arena folder: one has the workers, the other an actor."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from driven_run import SOURCE_ROOTS, driving, tiny_job
from flatpeak.controller.spec import Spec
from local_run import train_locally

pytestmark = pytest.mark.timeout(600)

FOLDER = "FLATPEAK_TEST_SHM"  # each node has its own


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[tuple[str, list[Path]]]:
    """The address of a Ray of two nodes, the first with cores for three, and their folders."""
    folders = [tmp_path_factory.mktemp(name) for name in ("workers", "other")]
    changed = {"PYTHONPATH": SOURCE_ROOTS, "OMP_NUM_THREADS": "1", FOLDER: str(folders[0])}
    before = {name: os.environ.get(name) for name in (*changed, "RAY_AUTH_MODE")}
    os.environ.update(changed)
    shared: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster()
    try:
        for folder, cores in zip(folders, (3, 1), strict=True):
            os.environ[FOLDER] = str(folder)
            cluster.add_node(num_cpus=cores, **shared)
        os.environ[FOLDER] = str(folders[0])
        yield cluster.address, folders
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


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
            "shm_dir": f"${FOLDER}",
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
    address, folders = nodes
    with driving(job(tmp_path, address, optimizers=optimizers), tmp_path) as driver:
        parameters = driver.wait_for(kind="started")["detail"]["parameters"]
        driver.wait_for(step=1)
        arenas = [len(list(folder.iterdir())) for folder in folders]
        controller = Path(f"/proc/{driver.pids()['controller']}/environ").read_bytes()
        ended = driver.end()
        assert driver.left() == []
    assert (ended.code, ended.err) == (0, "")
    assert arenas == [optimizers - 1, 1]
    assert f"{FOLDER}={folders[0]}".encode() in controller.split(b"\0")  # the driver's node
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    assert [step["loss"] for step in ended.steps()] == wanted
    figures = [step["optimizer"] for step in ended.steps()]
    print(f"{parameters} parameters, {figures[-1]}")
    # Two microbatches of fp32 gradients there, bf16 weights back, of one parameter in `optimizers`.
    for step in figures:
        assert 1 < step["sent_bytes"] / (2 * 4 * parameters / optimizers) < 1.5
        assert 1 < step["received_bytes"] / (2 * parameters / optimizers) < 1.5
    assert all(step["boundaries"]["offloaded_bytes"] > 0 for step in ended.steps())


@pytest.mark.parametrize("victim", ["optimizer-0", "worker-1"])
def test_a_run_goes_on_without_an_actor_or_a_worker_that_is_killed(tmp_path, nodes, victim):
    address, folders = nodes
    with driving(job(tmp_path, address, steps=5000), tmp_path) as driver:
        driver.wait_for(step=2)
        driver.kill_actor(victim)
        driver.wait_for(kind="workers_replaced")
        driver.wait_for(type="step")
        driver.wait_for(type="step")
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
    assert ended.code == 130
    assert "Traceback" not in ended.err
    # A worker of an actor that died has lost what it had sent, and all workers begin anew.
    assert ended.kinds().count("worker_lost") == 1
    assert ended.kinds().count("optimizer_replaced") == (victim == "optimizer-0")
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    losses = [step["loss"] for step in ended.steps()]
    assert losses == train_locally(job(tmp_path, "local", steps=len(losses)), tmp_path).losses
