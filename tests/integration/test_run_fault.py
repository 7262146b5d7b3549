"""A rank that raises while its peers are in a collective, and one that dies in an update."""

from pathlib import Path

import pytest

from driven_run import FAULTS, WHEN_IMPORTED, driving, tiny_job
from local_run import holds_state_of, train_locally

pytestmark = pytest.mark.timeout(500)

FAIL_ON_RANK_3_IN_STEP_2 = """
MODULE = "flatpeak.workers.model"


class ForwardFault(Fault):
    def change(self, module):
        forward = module.ShardedModel.forward
        calls = []

        def forward_or_fail(model, *arguments):
            calls.append(model)
            if module.torch.distributed.get_rank() == 3 and len(calls) == 2:
                raise ZeroDivisionError("a bug of rank 3")
            return forward(model, *arguments)

        module.ShardedModel.forward = forward_or_fail


sys.meta_path.insert(0, ForwardFault())
"""

DIE_ON_RANK_1_IN_UPDATE_3 = """
import os
import time

MODULE = "flatpeak.workers.trainer"


class UpdateFault(Fault):
    def change(self, module):
        update = module.Trainer.update

        def update_or_die(trainer, step, **how):
            flag = os.path.join(os.path.dirname(__file__), "died")
            if trainer.rank == 1 and step == 3 and not os.path.exists(flag):
                open(flag, "w").close()
                trainer._device_update.update = die  # in its thread, when the answer is on its way
            update(trainer, step, **how)

        def die(*arguments, **how):
            time.sleep(0.5)
            os._exit(9)

        module.Trainer.update = update_or_die


sys.meta_path.insert(0, UpdateFault())
"""


def test_the_driver_stops_with_the_traceback_of_the_rank_that_raised(tmp_path: Path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WHEN_IMPORTED + FAIL_ON_RANK_3_IN_STEP_2)
    monkeypatch.setenv(FAULTS, str(tmp_path))
    job = tiny_job(tmp_path, cluster={"workers": 4}, parallel={"expert": 4, "vocabulary": 2})
    with driving(job, tmp_path) as driver:
        driver.wait_for(step=1)
        ended = driver.end()
        assert driver.left() == []
    print(f"ended in {ended.seconds:.1f} s: {ended.err}")
    assert (ended.code, len(ended.steps())) == (4, 1)
    assert ended.err.startswith("flatpeak: step 2: worker 3 raised\n")
    for frame in ("in step", "in _forward_backward", "in forward_or_fail"):
        assert frame in ended.err
    assert "ZeroDivisionError: a bug of rank 3" in ended.err
    assert "worker 0" not in ended.err
    assert driver.run.info.reason in ended.err
    assert "step 2 failed" in (driver.run.logs / "worker-3.log").read_text()


def test_a_worker_that_dies_in_the_last_update_leaves_it_to_its_successor(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WHEN_IMPORTED + DIE_ON_RANK_1_IN_UPDATE_3)
    job = tiny_job(
        tmp_path,
        train={"steps": 3},
        cluster={"workers": 2},
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
        memory={"optimizer": {"bucket_parameters": 3000, "update_on": "device"}},
    )
    with monkeypatch.context() as faulty:
        faulty.setenv(FAULTS, str(tmp_path))
        with driving(job, tmp_path) as driver:
            ended = driver.end()
            assert driver.left() == []
    assert ended.code == 0, ended.err
    assert ended.kinds().count("worker_lost") == ended.kinds().count("workers_replaced") == 1
    wanted = train_locally(job, tmp_path)
    assert [step["loss"] for step in ended.steps()] == wanted.losses
    assert holds_state_of(driver.run.snapshots / "step-3", wanted)
