"""A rank that raises in the middle of a step, while its peers wait for it in a collective."""

from pathlib import Path

import pytest

from driven_run import FAULTS, driving, tiny_job

pytestmark = pytest.mark.timeout(500)

FAIL_ON_RANK_3_IN_STEP_2 = """
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class Fault(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "flatpeak.workers.model":
            return None
        spec = PathFinder.find_spec(name, path)
        self.execute, spec.loader.exec_module = spec.loader.exec_module, self.execute_with_fault
        return spec

    def execute_with_fault(self, module):
        self.execute(module)
        forward = module.ShardedModel.forward
        calls = []

        def forward_or_fail(model, *arguments):
            calls.append(model)
            if module.torch.distributed.get_rank() == 3 and len(calls) == 2:
                raise ZeroDivisionError("a bug of rank 3")
            return forward(model, *arguments)

        module.ShardedModel.forward = forward_or_fail


sys.meta_path.insert(0, Fault())
"""


def test_the_driver_stops_with_the_traceback_of_the_rank_that_raised(tmp_path: Path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(FAIL_ON_RANK_3_IN_STEP_2)
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
