"""Host memory in use is what was planned, no more and no less, and holds no gradient twice."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatpeak.controller.host_plan import plan_arenas
from flatpeak.controller.spec import Spec
from flatpeak.workers.trainer import SlabRegion
from local_run import LocalRun, job
from ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

# 2.4M parameters: the header of an arena is far below a hundredth of it.
MODEL = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "vocab_size": 1024}


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory, where pages of files count as shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def shared_bytes() -> int:
    """Of this process, each page once however often it is mapped."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss_Shmem: +(\d+) kB$", rollup, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _measure(rank: int, spec: Spec, folder: str) -> dict[str, int]:
    before = shared_bytes()
    run = LocalRun(rank, spec, folder)
    assert run.core is not None
    (planned,) = plan_arenas(
        run.core.buckets,
        [SlabRegion(0, 0, run.trainer.slab_bytes())],
        arenas=1,
        spare_frames=spec.memory.optimizer.slots,
    )
    alive = {}
    for _ in range(2):
        run.forward_and_backward()
        alive = run.trainer._meter.live() if run.trainer._meter else {}
        run.apply()
    file = run.core.arenas[0].path.stat()
    found = {
        "planned": planned.nbytes,
        "file": file.st_size,
        "allocated": 512 * file.st_blocks,
        "resident": shared_bytes() - before,
        "alive_beside_weights": alive["total"] - alive["weights"],
        "parameters": sum(bucket.size for bucket in run.core.buckets),
    }
    run.close()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_bytes_in_use_are_those_of_the_plan(memory_folder: Path, dtype: str):
    spec = job(
        "qwen3_moe",
        (1, 1, 1, 1),
        model=MODEL,
        train={"dtype": dtype},
        # One spare frame: the host's update never needs two, and would leave the other untouched.
        memory={"optimizer": {"bucket_parameters": 300_000, "slots": 1}},
    )
    (found,) = run_ranks(1, _measure, spec, str(memory_folder))
    print(found)
    assert found["parameters"] > 2_000_000
    assert found["file"] == found["allocated"] == found["planned"]
    assert found["resident"] == pytest.approx(found["planned"], rel=0.01)
    # Gradients have left for the arena: what backward made is gone when it ends.
    assert found["alive_beside_weights"] < 0.01 * torch.float32.itemsize * found["parameters"]
