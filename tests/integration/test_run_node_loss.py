"""A node is killed with its raylet, and with the optimizer state in its memory."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from driven_run import driving, tiny_job
from flatpeak.controller.spec import ParallelSpec, Spec
from local_run import train_locally
from ray_nodes import SHM, ray_nodes

pytestmark = pytest.mark.timeout(600)


def job(
    folder: Path,
    *,
    steps: int,
    address: str = "local",
    every_steps: int = 3,
    mirrors: int = 0,
    **cluster: Any,
) -> Spec:
    return tiny_job(
        folder,
        train={"steps": steps, "schedule": {"decay": "linear", "decay_steps": 200}},
        cluster={
            "workers": 2,
            "optimizers": 2,
            "cpus_per_worker": 2,  # so that a node has no room for both workers
            "address": address,
            "shm_dir": f"${SHM}",
            **cluster,
        },
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"mirrors": mirrors, "bucket_parameters": 3000}},
        snapshots={"every_steps": every_steps},
    )


def shrinking(job: Spec) -> Spec:
    """The job without snapshots but at its end, and with one worker if there is room for no two."""
    autoscale = job.cluster.autoscale.model_copy(update={"workers": (1, 2)})
    cluster = job.cluster.model_copy(update={"autoscale": autoscale})
    snapshots = job.snapshots.model_copy(update={"every_steps": 0})
    changed = {"cluster": cluster, "snapshots": snapshots, "parallel": ParallelSpec()}
    return job.model_copy(update=changed)


def drain(address: str, node: str) -> None:
    """The notice that a cloud gives of a node that it takes back."""
    client = GcsClient(address=address)
    soon = int(1000 * (time.time() + 600))
    accepted, reason = client.drain_node(
        node, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "taken back", soon
    )
    assert accepted, reason


def test_a_run_with_notice_of_a_lost_node_does_hardly_anything_again_with_fewer_workers(tmp_path):
    with (
        ray_nodes(tmp_path, cores=(3, 3)) as nodes,
        driving(shrinking(job(tmp_path, steps=5000, address=nodes.address)), tmp_path) as driver,
    ):
        places = driver.wait_for(kind="started")["detail"]["worker_nodes"]
        driver.wait_for(step=2)
        pids = driver.pids()
        rank = max(range(2), key=lambda rank: nodes.of(pids[f"worker-{rank}"]))
        drain(nodes.address, places[rank])
        noticed = driver.wait_for(kind="node_draining")["detail"]
        driver.wait_for(kind="snapshot")
        driver.wait_for(type="step")
        nodes.kill(nodes.of(pids[f"worker-{rank}"]))
        lost = driver.wait_for(kind="state_lost")["detail"]
        driver.wait_for(step=lost["step"] + 1)
        driver.signal(signal.SIGINT)
        ended = driver.end()
    assert ended.code == 130
    assert noticed["nodes"] == [places[rank]]
    assert lost["redone_steps"] <= 2
    assert lost["workers"] == 1  # there is no room for a second one any more
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    wanted = train_locally(job(tmp_path, steps=len(records)), tmp_path)
    assert [record.loss for record in records] == pytest.approx(wanted.losses, abs=1e-5)


def test_a_run_with_mirrors_loses_nothing_with_a_node(tmp_path):
    no_snapshots = job(tmp_path, steps=5000, address="auto", every_steps=0, mirrors=1)
    with ray_nodes(tmp_path, cores=(3, 3, 3)) as nodes:
        cluster = no_snapshots.cluster.model_copy(update={"address": nodes.address})
        spec = no_snapshots.model_copy(update={"cluster": cluster})
        with driving(spec, tmp_path) as driver:
            driver.wait_for(step=3)
            pids = driver.pids()
            victim = max(nodes.of(pids[f"worker-{rank}"]) for rank in range(2))
            began = time.monotonic()
            nodes.kill(victim)
            lost = driver.wait_for(kind="node_lost")["detail"]
            first = driver.wait_for(type="step")
            print(f"seconds to go on {time.monotonic() - began:.1f}")
            driver.wait_for(type="step")
            driver.signal(signal.SIGINT)
            ended = driver.end()
            del nodes.folders[victim]
            assert [list(folder.iterdir()) for folder in nodes.folders] == [[], []]
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert "resumed" not in ended.kinds()
    # The step that was under way is done again, no other.
    assert first["step"] in (lost["step"], lost["step"] + 1)
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    wanted = train_locally(job(tmp_path, steps=len(records)), tmp_path)
    assert [record.loss for record in records] == wanted.losses


def test_a_node_without_state_takes_no_step_with_it(tmp_path):
    apart = {"cpus_per_worker": 1, "optimizers": 1, "optimizer_placement": "anywhere"}
    with ray_nodes(tmp_path, cores=(1, 1, 1)) as nodes:
        spec = shrinking(job(tmp_path, steps=5000, address=nodes.address, **apart))
        with driving(spec, tmp_path) as driver:
            driver.wait_for(step=3)
            pids = driver.pids()
            # The driver is on node 0, and the actor where no worker is.
            victim = max(nodes.of(pids[f"worker-{rank}"]) for rank in range(2))
            assert nodes.of(pids["optimizer-0"]) != victim > 0
            nodes.kill(victim)
            lost = driver.wait_for(kind="node_lost")["detail"]
            first = driver.wait_for(type="step")
            driver.wait_for(type="step")
            driver.signal(signal.SIGINT)
            ended = driver.end()
            del nodes.folders[victim]
            assert nodes.left() == []
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert lost["workers"] == 1
    assert first["step"] in (lost["step"], lost["step"] + 1)
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    wanted = train_locally(job(tmp_path, steps=len(records)), tmp_path)
    assert [record.loss for record in records] == pytest.approx(wanted.losses, abs=1e-5)


def test_a_run_that_loses_a_node_goes_on_from_its_snapshot_and_says_what_it_does_again(tmp_path):
    with (
        ray_nodes(tmp_path, cores=(3, 3, 3)) as nodes,
        driving(job(tmp_path, steps=5000, address=nodes.address), tmp_path) as driver,
    ):
        while driver.wait_for(kind="snapshot")["detail"]["step"] < 3:
            pass
        driver.wait_for(type="step")
        pids = driver.pids()
        # The driver is on node 0.
        victim = max(nodes.of(pids[f"worker-{rank}"]) for rank in range(2))
        began = time.monotonic()
        nodes.kill(victim)
        lost = driver.wait_for(kind="state_lost")["detail"]
        detected = time.monotonic() - began
        resumed = driver.wait_for(kind="resumed")["detail"]["step"]
        first = driver.wait_for(type="step")
        driver.wait_for(step=lost["step"] + 1)
        print(f"seconds to find out {detected:.1f}, to go on {time.monotonic() - began:.1f}")
        driver.signal(signal.SIGINT)
        ended = driver.end()
        del nodes.folders[victim]
        assert [list(folder.iterdir()) for folder in nodes.folders] == [[], []]
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert "is gone, with the optimizer state in its memory" in lost["reason"]
    assert first["step"] == resumed + 1
    assert lost["redone_steps"] == lost["step"] - resumed >= 1
    records = driver.run.steps()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    wanted = train_locally(job(tmp_path, steps=len(records)), tmp_path)
    assert [record.loss for record in records] == wanted.losses
    # On two threads a norm is added up in another order than on the one of the reference.
    assert [record.grad_norm for record in records] == pytest.approx(wanted.norms, rel=1e-7)
