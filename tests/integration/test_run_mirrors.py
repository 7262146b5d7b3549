"""A run whose optimizer state lies on two nodes, on two Ray nodes with an arena folder each."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from driven_run import driving, flatpeak, tiny_job
from flatpeak.controller.spec import Spec
from flatpeak.workers.arena import Arena
from local_run import holds_state_of, train_locally
from ray_nodes import SHM, ray_nodes

pytestmark = pytest.mark.timeout(600)


def job(folder: Path, *, steps: int, address: str, mirrors: int) -> Spec:
    return tiny_job(
        folder,
        train={
            "steps": steps,
            "schedule": {"decay": "linear", "decay_steps": 200},
            "dtype": "bfloat16",
        },
        cluster={
            "workers": 2,
            "optimizers": 2,
            "max_optimizers": 4,
            "address": address,
            "shm_dir": f"${SHM}",
        },
        memory={"optimizer": {"mirrors": mirrors, "bucket_parameters": 4096}},
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
        snapshots={"every_steps": 4},
    )


def held(arena: Arena) -> list[torch.Tensor]:
    """Versions, and all that frames hold."""
    versions = [[arena.version(b.index), arena.updates(b.index)] for b in arena.buckets]
    frames = [arena.frame(bucket.index) for bucket in arena.buckets]
    return [torch.tensor(versions), *(part for f in frames for part in (*f.state, f.weights))]


def test_mirrors_have_the_state_of_their_originals_whatever_happens_to_their_actors(tmp_path):
    with (
        ray_nodes(tmp_path, cores=(4, 4)) as nodes,
        ExitStack() as stack,
        driving(job(tmp_path, steps=5000, address=nodes.address, mirrors=1), tmp_path) as driver,
    ):
        started = driver.wait_for(kind="started")["detail"]
        files = [sorted(folder.iterdir()) for folder in nodes.folders]
        sizes = [sum(path.stat().st_size for path in found) for found in files]
        assert sorted(sizes) == sorted(started["planned_host_bytes"].values())
        # Mapped here, they can be looked at when the run has ended.
        arenas = [
            stack.enter_context(Arena.attach(path, run="tiny")) for own in files for path in own
        ]
        driver.wait_for(step=2)
        driver.kill_actor("optimizer-0")
        driver.wait_for(kind="optimizer_replaced")
        driver.wait_for(type="step")
        scaled = flatpeak("scale", "tiny", "--optimizers", "4", folder=tmp_path)
        assert scaled.returncode == 0, scaled.stderr
        driver.wait_for(type="step")
        driver.wait_for(type="step")
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert driver.left() == []
        assert [list(folder.iterdir()) for folder in nodes.folders] == [[], []]
        mirrors = [arena for arena in arenas if "-mirror" in arena.path.name]
        originals = {a.buckets: a for a in arenas if "-mirror" not in a.path.name}
        assert (len(mirrors), len(originals)) == (4, 4)
        for mirror in mirrors:
            original = originals.pop(mirror.buckets)
            assert original.path.parent != mirror.path.parent
            assert all(map(torch.equal, held(mirror), held(original)))
            assert held(mirror)[0][:, 0].unique().tolist() == [driver.run.steps()[-1].step]
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert ended.kinds().count("worker_lost") == 0
    records = driver.run.steps()
    wanted = train_locally(job(tmp_path, steps=len(records), address="local", mirrors=0), tmp_path)
    assert [record.loss for record in records] == wanted.losses
    assert holds_state_of(driver.run.path / "snapshots" / f"step-{len(records)}", wanted)
    for record in records:
        assert 1 < record.optimizer["mirrored_bytes"] / (4 * started["parameters"]) < 1.1
        assert 0 < record.optimizer["mirror_s"] < record.step_seconds
    seconds = sorted(record.optimizer["mirror_s"] for record in records)
    print(f"{started['parameters']} parameters, {seconds} s of {records[-1].step_seconds}")


def test_a_run_whose_workers_share_a_node_is_refused(tmp_path):
    with ray_nodes(tmp_path, cores=(6,)) as nodes:
        spec = job(tmp_path, steps=2, address=nodes.address, mirrors=1)
        with driving(spec, tmp_path) as driver:
            ended = driver.end()
    assert ended.code == 4
    assert "all of cluster.workers = 2 are on one; set mirrors to 0, or have 2 workers" in ended.err
    assert "Traceback" not in ended.err
