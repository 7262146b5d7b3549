"""Runs on a Ray that is there already: stops, resumes, deaths, and what is left in the cluster."""

import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from driven_run import SOURCE_ROOTS, Driver, Ended, driving, flatpeak, load, tiny_job
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.workers.snapshot import find_latest, saved_steps
from local_run import train_locally

pytestmark = pytest.mark.timeout(600)

CORES = 6
LONG = {"steps": 5000, "schedule": {"decay": "linear", "decay_steps": 200}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, Any]]:
    """The `cluster` section that leads to a Ray with `CORES` cores."""
    changed = {"PYTHONPATH": SOURCE_ROOTS, "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in (*changed, "RAY_AUTH_MODE")}
    os.environ.update(changed)
    try:
        ray.init(
            address="local",
            num_cpus=CORES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=128 * 2**20,
            _node_ip_address="127.0.0.1",
        )
        yield {"address": ray.get_runtime_context().gcs_address}
    finally:
        ray.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def nothing_left(driver: Driver) -> bool:
    """No process, no shared memory, no placement group, and every core is free again."""
    assert driver.left() == []
    groups = placement_group_table()
    assert [group["state"] for group in groups.values() if group["state"] != "REMOVED"] == []
    deadline = time.monotonic() + 15
    while (free := ray.available_resources().get("CPU", 0)) != CORES:
        assert time.monotonic() < deadline, f"{free} of {CORES} cores are free"
        time.sleep(0.1)
    return True


def state(job: Spec, folder: Path) -> dict[str, Any]:
    done = flatpeak("status", job.run, "--runs-dir", job.runs_dir, "--json", folder=folder)
    return json.loads(done.stdout)


def changed(job: Spec, **sections: Any) -> Spec:
    data = job.model_dump()
    for name, section in sections.items():
        data[name] = data[name] | section if isinstance(section, dict) else section
    return parse_spec(data)


def test_an_interrupted_and_a_stopped_run_go_on_to_what_one_run_would_have_been(tmp_path, cluster):
    degrees = {"sequence": 2, "expert": 2, "vocabulary": 2}
    job = tiny_job(tmp_path, train=LONG, cluster=cluster | {"workers": 2}, parallel=degrees)
    with driving(job, tmp_path) as driver:
        driver.wait_for(step=2)
        driver.signal(signal.SIGINT)
        interrupted = driver.end()
        assert nothing_left(driver)
    assert interrupted.err == ""
    first = check_stopped(interrupted, driver, tmp_path)

    with driving(job, tmp_path, "--resume") as driver:
        driver.wait_for(step=first + 2)
        arguments = ("stop", job.run, "--runs-dir", job.runs_dir, "--json")
        stopped = flatpeak(*arguments, folder=tmp_path)
        resumed = driver.end()
        assert nothing_left(driver)
    assert resumed.err == ""
    assert json.loads(stopped.stdout) == {"run": job.run, "state": "interrupted"}
    second = check_stopped(resumed, driver, tmp_path)
    assert resumed.steps()[0]["step"] == first + 1

    last = second + 3
    other = changed(
        job,
        train={"steps": last},
        cluster={"workers": 1, "optimizers": 2},
        parallel=dict.fromkeys(degrees, 1),
    )
    with driving(other, tmp_path, "--resume") as driver:
        ended = driver.end()
        assert nothing_left(driver)
    assert (ended.code, ended.err) == (0, "")
    assert [step["step"] for step in ended.steps()] == [last - 2, last - 1, last]

    records = driver.run.steps()
    wanted = train_locally(changed(job, train={"steps": last}), tmp_path).results
    losses = [record.loss for record in records]
    assert losses[:second] == [result.loss for result in wanted[:second]]
    assert losses[second:] == pytest.approx([r.loss for r in wanted[second:]], abs=1e-5)
    assert [record.lr for record in records] == [
        lr(step, train=job.train) for step in range(1, last + 1)
    ]
    assert [(record.first_sample, record.last_sample) for record in records] == [
        (4 * step, 4 * step + 3) for step in range(last)
    ]


def check_stopped(ended: Ended, driver: Driver, folder: Path) -> int:
    """Checks a run that was stopped early; returns the step whose snapshot it left."""
    print(f"stopped in {ended.seconds:.1f} s")
    assert ended.code == 130
    found = state(driver.spec, folder)
    assert found["state"] == "interrupted"
    kept = {path.name for path in driver.run.snapshots.iterdir()}
    assert f"step-{found['step']}" in kept
    return found["step"]


def test_a_second_interrupt_while_the_run_starts_does_not_wait(tmp_path, cluster):
    job = tiny_job(tmp_path, cluster=cluster | {"workers": 2})
    with driving(job, tmp_path) as driver:
        driver.wait_for(kind="workers_placed")
        driver.signal(signal.SIGINT)
        driver.signal(signal.SIGTERM)
        ended = driver.end()
        assert nothing_left(driver)
    print(f"ended in {ended.seconds:.1f} s")
    assert (ended.code, ended.err, ended.steps()) == (130, "", [])
    assert state(job, tmp_path)["state"] == "interrupted"


def test_an_interrupt_while_the_run_starts_ends_it(tmp_path, cluster):
    job = tiny_job(tmp_path, cluster=cluster)
    with driving(job, tmp_path) as driver:
        driver.wait_for(kind="workers_placed")
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert nothing_left(driver)
    print(f"ended in {ended.seconds:.1f} s")
    assert (ended.code, ended.err, ended.steps()) == (130, "", [])
    assert ended.kinds()[-1] == "interrupted"
    assert list(driver.run.snapshots.iterdir()) == []


def test_a_controller_that_is_killed_again_and_again_ends_the_run(tmp_path, cluster):
    job = tiny_job(tmp_path, train=LONG, cluster=cluster | {"workers": 2})
    with driving(job, tmp_path) as driver:
        driver.wait_for(step=2)
        for _ in range(2):
            driver.kill_actor("controller")
            driver.wait_for(kind="controller_lost")
            driver.wait_for(kind="starting")
        pid = driver.kill_actor("controller")
        ended = driver.end()
        assert nothing_left(driver)
    print(f"ended in {ended.seconds:.1f} s: {ended.err}")
    assert ended.code == 4
    assert ended.seconds < 20 * load()
    known = (
        r"the run had to begin anew 3 times after step \d+, last since the run: the controller "
        rf"died \(after step \d+, with peaks in bytes: .*; pid {pid}, ip "
    )
    assert re.search(known, ended.err)
    assert "worker process has died" in ended.err
    assert "Traceback" not in ended.err
    found = state(job, tmp_path)
    assert found["state"] == "failed"
    assert found["reason"] in ended.err
    assert driver.run.events()[-1].kind == "failed"
    # The arenas that nobody took over any more are in a snapshot; the last update may have begun.
    last = driver.run.steps()[-1].step
    assert saved_steps(driver.run.path)[-1] in (last - 1, last)
    assert find_latest(driver.run.path, verify=True).skipped == ()


def test_after_kill_9_of_the_driver_its_run_starts_again_in_the_same_cluster(tmp_path, cluster):
    job = tiny_job(tmp_path, train=LONG, cluster=cluster, snapshots={"every_steps": 1})
    with driving(job, tmp_path) as driver:
        driver.wait_for(kind="snapshot")
        driver.process.kill()
        driver.end()
    began = time.monotonic()
    with driving(job, tmp_path, "--resume") as driver:
        driver.wait_for(kind="started")
        restarted = time.monotonic() - began
        driver.signal(signal.SIGTERM)
        ended = driver.end()
        assert nothing_left(driver)
    print(f"started again in {restarted:.1f} s")
    assert restarted < 60 * load()
    assert (ended.code, ended.err) == (130, "")


def test_a_stop_while_an_optimizer_actor_is_replaced_keeps_what_was_committed(tmp_path, cluster):
    job = tiny_job(tmp_path, train=LONG, cluster=cluster | {"optimizers": 2})
    with driving(job, tmp_path) as driver:
        driver.wait_for(step=2)
        driver.kill_actor("optimizer-1")
        lost = driver.wait_for(kind="optimizer_lost")
        driver.signal(signal.SIGTERM)
        ended = driver.end()
        assert nothing_left(driver)
    assert "Traceback" not in ended.err
    known = r"optimizer 1 died .*had [\d,]{10,} bytes of host memory in use, at most [\d,]{10,};"
    assert re.search(known, lost["detail"]["reason"])
    assert check_stopped(ended, driver, tmp_path) == ended.steps()[-1]["step"]


def scale(driver: Driver, optimizers: int) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `flatpeak scale --json`."""
    spec = driver.spec
    arguments = ("scale", spec.run, "--optimizers", str(optimizers), "--runs-dir", spec.runs_dir)
    done = flatpeak(*arguments, "--json", folder=driver.folder)
    return done.returncode, json.loads(done.stdout)


def refused_scale(driver: Driver, optimizers: int) -> str:
    code, answer = scale(driver, optimizers)
    assert code == answer["error"]["exit_code"] == 2
    return answer["error"]["message"]


def arena_files(job: Spec) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_ino) for path in Path(job.cluster.shm_dir).iterdir()}


def steps_around(steps: list[dict[str, Any]], resize: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the step that a resize fell into, and the median of five on both sides."""
    at = resize["step"]  # the last one before: counted from 1, so the place of the next
    seconds = [step["step_seconds"] for step in steps]
    return seconds[at], median(seconds[max(0, at - 5) : at] + seconds[at + 1 : at + 6])


def test_optimizer_actors_become_more_and_fewer_and_no_bit_of_the_run_changes(tmp_path, cluster):
    job = tiny_job(
        tmp_path,
        train=LONG,
        cluster=cluster | {"workers": 2, "max_optimizers": 5},
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"bucket_parameters": 150}},
        snapshots={"every_steps": 2},
    )
    with driving(job, tmp_path) as driver:
        driver.wait_for(step=6)
        files = arena_files(job)
        assert "0 optimizer actors cannot be had, but 1 (" in (none := refused_scale(driver, 0))
        assert "free CPUs in the cluster: 3, of which 3 on the nodes with workers" in none
        assert "6 optimizer actors cannot be had, but 1 (" in refused_scale(driver, 6)
        assert "need 4 more CPUs on node" in (many := refused_scale(driver, 5))
        assert "which has 3 free; free CPUs in the cluster: 3" in many

        code, more = scale(driver, 3)
        assert (code, more["before"], more["after"], more["copied_bytes"]) == (0, 1, 3, 0)
        assert more["joined"] == ["optimizer 1", "optimizer 2"]
        driver.wait_for(step=more["step"] + 8)
        held = more["state_bytes"]  # one of five arenas each, or two
        driver.kill_actor(max(held, key=lambda who: held[who]).replace(" ", "-"))
        driver.wait_for(kind="optimizer_replaced")
        driver.wait_for(type="step")

        code, fewer = scale(driver, 2)
        assert (code, fewer["before"], fewer["after"], fewer["copied_bytes"]) == (0, 3, 2, 0)
        assert fewer["left"] == ["optimizer 2"]
        assert fewer["arenas"] == round(5 * held["optimizer 2"] / sum(held.values()))
        driver.wait_for(step=fewer["step"] + 8)
        assert arena_files(job) == files
        driver.signal(signal.SIGINT)
        ended = driver.end()
        assert nothing_left(driver)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    done = ended.steps()

    last = len(done) + 2
    fewest = {"optimizers": 1, "max_optimizers": None}
    with driving(
        changed(job, train={"steps": last}, cluster=fewest), tmp_path, "--resume"
    ) as driver:
        resumed = driver.end()
        assert nothing_left(driver)
    assert (resumed.code, resumed.err) == (0, "")

    wanted = train_locally(changed(job, train={"steps": last}), tmp_path)
    steps = done + resumed.steps()
    assert [step["loss"] for step in steps] == wanted.losses
    assert [step["grad_norm"] for step in steps] == wanted.norms

    loads = [more["state_bytes"].values(), fewer["state_bytes"].values()]
    assert [max(held) <= 2.1 * min(held) for held in loads] == [True, True]
    refusals = [event for event in ended.out if event.get("kind") == "scaling_refused"]
    assert len(refusals) == 3
    for resize in (more, fewer):
        at, usual = steps_around(done, resize)
        print(
            f"{resize['before']} to {resize['after']}: started in {resize['start_seconds']:.2f} s, "
            f"handed over {resize['arenas']} arenas of {resize['arena_bytes']:,} bytes in "
            f"{resize['seconds'] * 1e3:.1f} ms; that step took {at:.3f} s, others {usual:.3f} s"
        )
        # Twice as long as others would be; a machine that others use too gets some patience.
        assert at < 2 * usual + 0.2 * load()


def test_arenas_that_do_not_fit_together_are_refused_before_any_is_made(tmp_path, cluster):
    # Boundaries of 2**33 sequences: the slab is larger than any disk, and nothing else is large.
    job = tiny_job(
        tmp_path, train={"sequences_per_step": 2**33}, cluster=cluster | {"optimizers": 2}
    )
    with driving(job, tmp_path) as driver:
        ended = driver.end()
        assert nothing_left(driver)
    assert ended.code == 3
    assert ended.err.startswith("flatpeak: the arenas on the node of optimizer 0, of 2 optimizer ")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"workers": 4, "cpus_per_worker": 2},
            "4 workers need {'CPU': 8.0}, but the whole cluster has {'CPU': 6.0}; lower",
        ),
        (
            {"workers": 4, "cpus_per_optimizer": 3},
            "4 workers x 1 and 1 optimizer actors x 3 need 7 cores on node ",
        ),
        ({"device": "cuda"}, "cluster.workers = 1 needs as many GPUs, but 0 of the cluster's 0"),
    ],
    ids=["workers", "optimizer actors", "GPUs"],
)
def test_what_the_cluster_can_never_give_is_refused_with_the_numbers(
    tmp_path, cluster, section, message
):
    job = tiny_job(tmp_path, cluster=cluster | section)
    with driving(job, tmp_path) as driver:
        ended = driver.end()
        assert nothing_left(driver)
    assert ended.code == 4
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_a_placement_that_waits_for_others_is_given_up_with_what_is_free(tmp_path, cluster):
    held = ray.util.placement_group([{"CPU": CORES}])
    try:
        assert held.wait(60)
        job = tiny_job(tmp_path, cluster=cluster | {"start_timeout_s": 2.0})
        with driving(job, tmp_path) as driver:
            ended = driver.end()
            assert driver.left() == []
    finally:
        ray.util.remove_placement_group(held)
    assert ended.code == 4
    assert "1 workers with {'CPU': 1.0} each were not placed within cluster.start" in ended.err
    assert "(Ray says " in ended.err
    assert "free in the whole cluster: {'CPU': 0.0}. Wait for other jobs to end" in ended.err


def test_a_taken_rendezvous_port_ends_the_start(tmp_path, cluster):
    with socket.socket() as taken:
        taken.bind(("", 0))  # whatever address the worker meets its peers at
        taken.listen()
        port = taken.getsockname()[1]
        job = tiny_job(tmp_path, cluster=cluster | {"rendezvous_port": port})
        with driving(job, tmp_path) as driver:
            ended = driver.end()
            assert nothing_left(driver)
    assert ended.code == 4
    assert f"worker 0: cluster.rendezvous_port = {port} cannot be had on" in ended.err


def test_a_name_that_is_taken_in_the_cluster_is_refused(tmp_path, cluster):
    job = tiny_job(tmp_path, train=LONG, cluster=cluster)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with driving(job, tmp_path) as driver:
        driver.wait_for(step=1)
        again = changed(job, runs_dir=str(elsewhere))
        with driving(again, elsewhere) as second:
            refused = second.end()
        assert driver.process.poll() is None
        driver.signal(signal.SIGTERM)
        ended = driver.end()
    assert refused.code == 4
    assert "a run named tiny is going on in this cluster" in refused.err
    assert ended.code == 130
