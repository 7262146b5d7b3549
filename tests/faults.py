"""Faults that every process of a run gets by `sitecustomize.py`: a module changed as it is
imported."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from driven_run import FAULTS

_HEAD = """
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class Fault(MetaPathFinder):
    def __init__(self, module, change):
        self.module, self.change = module, change

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        spec = PathFinder.find_spec(name, path)
        self.execute, spec.loader.exec_module = spec.loader.exec_module, self.execute_with_fault
        return spec

    def execute_with_fault(self, module):
        self.execute(module)
        self.change(module)
"""

_SLOW = """
def slow_{name}(module):
    quick = module.{name}

    def slowly(*arguments, **options):
        time.sleep({seconds})
        return quick(*arguments, **options)

    module.{name} = slowly


sys.meta_path.insert(0, Fault({module!r}, slow_{name}))
"""


def slow_down(
    monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: Mapping[tuple[str, str], float]
) -> None:
    """Every call of each (module, function) takes so many seconds more, in runs that start from
    now on."""
    assert FAULTS not in os.environ
    parts = [
        _SLOW.format(module=module, name=name, seconds=more)
        for (module, name), more in seconds.items()
    ]
    faults = folder / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(_HEAD + "".join(parts))
    monkeypatch.setenv(FAULTS, str(faults))
