"""Where the optimizer runs does not show: updates by the workers equal those by the actors."""

import json

import pytest
import torch

from driven_run import driving, tiny_job
from flatpeak.controller.spec import Spec
from local_run import Outcome, job, train_locally

pytestmark = pytest.mark.timeout(400)


def optimizer(update_on: str, slots: int = 2) -> dict:
    return {"optimizer": {"bucket_parameters": 3000, "slots": slots, "update_on": update_on}}


def parameters_equal(one: Outcome, other: Outcome) -> bool:
    return all(
        torch.equal(found[name], wanted[name])
        for found, wanted in [
            (one.parameters, other.parameters),
            *zip(one.moments, other.moments, strict=True),
        ]
        for name in wanted
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_by_the_workers_leave_the_bits_of_those_by_the_actors(tmp_path, dtype):
    found = {}
    for where in ("host", "device"):
        folder = tmp_path / where
        folder.mkdir()
        spec = job(
            "deepseek_v3",  # with balancing biases, which stay with the actor
            (2, 1, 2, 2),
            train={"steps": 4, "dtype": dtype, "router_bias_update_rate": 0.01},
            memory=optimizer(where, slots=1 if dtype == "float32" else 3),
        )
        found[where] = train_locally(spec, folder)
    assert found["device"].losses == found["host"].losses
    assert found["device"].norms == found["host"].norms
    assert parameters_equal(found["device"], found["host"])


def test_a_run_whose_workers_update_commits_resumes_and_equals_one_whose_actors_do(tmp_path):
    def job_of(where: str, steps: int) -> Spec:
        folder = tmp_path / where
        folder.mkdir(exist_ok=True)
        return tiny_job(
            folder,
            train={"steps": steps, "schedule": {"decay_steps": 6}},
            cluster={"workers": 2, "optimizers": 2},
            parallel={"sequence": 2, "expert": 2, "vocabulary": 2},
            memory=optimizer(where),
            snapshots={"every_steps": 2},
        )

    spec, steps = job_of("device", 4), []
    for more in ([], ["--resume", "--set", "train.steps=6"]):
        with driving(spec, tmp_path / "device", *more) as driver:
            ended = driver.end()
        assert (ended.code, ended.err) == (0, "")
        steps += ended.steps()
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    manifest = driver.run.snapshots / "step-6" / "manifest.json"
    assert json.loads(manifest.read_text())["updates"] == 6
    wanted = train_locally(job_of("host", 6), tmp_path / "host")
    assert [step["loss"] for step in steps] == wanted.losses
    assert [step["grad_norm"] for step in steps] == wanted.norms
