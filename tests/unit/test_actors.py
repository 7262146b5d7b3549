"""The actor classes without Ray: each computes on the cores that it was given."""

from pathlib import Path

import pytest
import torch

from flatpeak.controller.spec import Spec
from flatpeak.workers.actors import OptimizerActor, TrainWorker
from local_run import tiny_spec
from ranks import run_ranks
from tiny_models import tiny_content


def _threads(rank: int, kind: str, spec: Spec, folder: str) -> int:
    before = torch.get_num_threads()
    try:
        if kind == "optimizer":
            OptimizerActor(spec, 0, folder)
        else:
            TrainWorker(spec, 0, "cpu", folder)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "cores"), [("optimizer", 3), ("worker", 2)])
def test_an_actor_has_as_many_threads_as_it_was_given_cores(tmp_path: Path, kind: str, cores: int):
    spec = tiny_spec(
        tiny_content("qwen3_moe", vocab_size=257),
        cluster={"cpus_per_worker": 2, "cpus_per_optimizer": 3, "shm_dir": str(tmp_path)},
    )
    assert run_ranks(1, _threads, kind, spec, str(tmp_path)) == [cores]
