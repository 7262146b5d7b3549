"""A run whose updates are slow, and which takes more optimizer actors by itself."""

from statistics import median

import pytest

from driven_run import FAULTS, WHEN_IMPORTED, driving, tiny_job
from local_run import holds_state_of, train_locally

pytestmark = pytest.mark.timeout(300)

SLOW_UPDATES = """
import time

MODULE = "flatpeak.workers.optimizer"


class SlowUpdates(Fault):
    def change(self, module):
        update = module.OptimizerCore._update_bucket

        def update_slowly(core, bucket, *how):
            time.sleep(bucket.size * 2e-5)
            update(core, bucket, *how)

        module.OptimizerCore._update_bucket = update_slowly


sys.meta_path.insert(0, SlowUpdates())
"""


def test_a_run_that_waits_for_its_updates_takes_more_actors_and_no_bit_changes(
    tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(WHEN_IMPORTED + SLOW_UPDATES)
    job = tiny_job(
        tmp_path,
        train={"steps": 20},
        parallel={"sequence": 1, "expert": 1, "vocabulary": 1},
        cluster={
            "max_optimizers": 2,
            "autoscale": {"optimizers": [1, 2], "window_steps": 3, "cooldown_steps": 2},
        },
        memory={"optimizer": {"bucket_parameters": 1000}},
    )
    with monkeypatch.context() as faulty:
        faulty.setenv(FAULTS, str(tmp_path))
        with driving(job, tmp_path) as driver:
            scaled = driver.wait_for(kind="optimizers_scaled")["detail"]
            ended = driver.end()
            assert driver.left() == []
    assert ended.code == 0, ended.err
    assert (scaled["request"], scaled["before"], scaled["after"]) == ("auto", 1, 2)
    assert "forward passes waited for updates" in scaled["reason"]
    assert ended.kinds().count("optimizers_scaled") == 1
    steps = ended.steps()
    at = scaled["step"]
    seconds = [step["step_seconds"] for step in steps]
    print(ended.out[:9])
    print(f"{scaled}\nseconds of steps {max(1, at - 4)} to {at + 6}: {seconds[at - 5 : at + 6]}")
    exposed = [step["optimizer"]["exposed_s"] for step in steps]
    waited = median(exposed[1:at]), median(exposed[at + 1 :])
    print(f"waited for updates: {waited[0]:.3f} s before, {waited[1]:.3f} s after")
    assert waited[1] < 0.8 * waited[0]
    wanted = train_locally(job, tmp_path)
    assert [step["loss"] for step in steps] == wanted.losses
    assert holds_state_of(driver.run.snapshots / "step-20", wanted)
