"""The operators in a script of their own: the one in the README, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The operators must not drag in what only a cluster needs.
FOREIGN = """
import sys
loaded = {"ray", "transformers", "pydantic", "flatpeak.controller"} & sys.modules.keys()
assert not loaded, loaded
"""


def script() -> str:
    section = (ROOT / "README.md").read_text().partition("## Use the operators alone\n")[2]
    found = re.search(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert found is not None
    return found[1]


def test_the_script_of_the_readme_trains_with_its_state_in_host_memory(tmp_path: Path):
    path = tmp_path / "alone.py"
    path.write_text(script() + FOREIGN)
    sources = os.pathsep.join(str(ROOT / root) for root in ("workers", "kernels"))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env=os.environ | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.returncode, done.stderr) == (0, "")
    steps = re.findall(r"step (\d+): loss ([\d.]+), (\d+) bytes offloaded", done.stdout)
    assert [int(step) for step, _, _ in steps] == list(range(10))
    assert {int(nbytes) for _, _, nbytes in steps} == {8 * 16 * 8 * 32 * 4}
    assert float(steps[-1][1]) < 0.9 * float(steps[0][1])
