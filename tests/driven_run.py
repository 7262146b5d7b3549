"""Runs driven as a user drives them: the `flatpeak` command as a process on a test's job file."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatpeak.controller.runs import RunFolder, process_start
from flatpeak.controller.spec import Spec
from flatpeak.controller.spec_file import dump_spec
from flatpeak.workers.host_memory import node_path
from local_run import tiny_spec
from tiny_models import tiny_content

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = os.pathsep.join(str(ROOT / root) for root in ("controller", "workers", "kernels"))
PATIENCE_S = 200.0
FAULTS = "FLATPEAK_TEST_FAULTS"
"""Environment variable with a folder of `sitecustomize.py`, which every process then imports."""
WHEN_IMPORTED = """
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class Fault(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path)
        self.execute, spec.loader.exec_module = spec.loader.exec_module, self.execute_with_fault
        return spec

    def execute_with_fault(self, module):
        self.execute(module)
        self.change(module)
"""
"""Begins one. A subclass of `Fault` in `sys.meta_path` is given the module that MODULE names."""
_MARK = "FLATPEAK_TEST_MARK"


def make_corpus(folder: Path) -> str:
    """A small text of some variety, so that the loss of a step tells which samples it had."""
    path = folder / "corpus.txt"
    path.write_text("".join(f"line {n}: {n * n % 97} and {n ^ 41}\n" for n in range(400)))
    return str(path)


def tiny_job(folder: Path, **sections: Any) -> Spec:
    """A job of seconds with two optimizer steps a second; keyword arguments replace keys."""
    config = tiny_content("qwen3_moe", num_attention_heads=4, num_key_value_heads=2, vocab_size=257)
    shm = folder / "shm"
    shm.mkdir(exist_ok=True)
    base: dict[str, Any] = {
        "run": "tiny",
        "runs_dir": str(folder / "runs"),
        "data": {"source": make_corpus(folder), "cache_dir": str(folder / "cache")},
        "cluster": {"device": "cpu", "shm_dir": str(shm), "start_timeout_s": PATIENCE_S},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return tiny_spec(config, **base)


def flatpeak(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "flatpeak.controller", *arguments],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@dataclass
class Ended:
    code: int
    out: list[dict[str, Any]]
    err: str
    seconds: float
    """From the last signal, or from the start, to the exit."""

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.out if line.get("type") == "step"]

    def kinds(self) -> list[str]:
        return [line["kind"] for line in self.out if line.get("type") == "event"]


class Driver:
    """A `flatpeak train --json` under way. Every process that it starts bears a mark of its own."""

    def __init__(self, spec: Spec, folder: Path, *arguments: str) -> None:
        self.spec, self.folder = spec, folder
        self.run = RunFolder(Path(spec.runs_dir) / spec.run)
        self.mark = f"{spec.run}-{os.getpid()}-{time.monotonic_ns()}"
        job = folder / "job.yaml"
        job.write_text(dump_spec(spec))
        self._err = (folder / "stderr").open("w+")
        self._since = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flatpeak.controller", "train", str(job), "--json", *arguments],
            env=environment() | {_MARK: self.mark},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._seen: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, **wanted: Any) -> dict[str, Any]:
        """The next line of output with these values, like `kind="started"` or `step=2`."""
        while (line := self._next()) is not None:
            if all(line.get(key) == value for key, value in wanted.items()):
                return line
        self.process.wait(PATIENCE_S)
        raise AssertionError(f"the run ended before {wanted}: {self._seen}\n{self._stderr()}")

    def signal(self, number: signal.Signals) -> None:
        self._since = time.monotonic()
        self.process.send_signal(number)

    def kill_actor(self, name: str) -> int:
        """kill -9 of the actor that logs as `name`; returns its pid."""
        pid = self.pids()[name]
        self._since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return pid

    def pids(self) -> dict[str, int]:
        """Of each actor, the pid that it last wrote into its log."""
        logs = {path.stem: path.read_text() for path in self.run.logs.glob("*.log")}
        return {name: int(re.findall(r"pid (\d+)", text)[-1]) for name, text in logs.items()}

    def end(self) -> Ended:
        code = self.process.wait(PATIENCE_S)
        seconds = time.monotonic() - self._since
        while self._next() is not None:
            pass
        return Ended(code, self._seen, self._stderr(), seconds)

    def marked(self) -> list[int]:
        """Processes that this driver started, itself included, and that still live."""
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if f"{_MARK}={self.mark}".encode() in _read_bytes(path)
        ]

    def left(self) -> list[Any]:
        """What the run left behind: actors, marked processes, shared memory. Waits a moment."""
        actors = self.pids().values() if self.run.logs.exists() else ()
        deadline = time.monotonic() + 15
        while True:
            alive = [pid for pid in actors if process_start(pid) is not None]
            files = list(node_path(self.spec.cluster.shm_dir).iterdir())
            left = [*alive, *self.marked(), *files]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._err.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self) -> dict[str, Any] | None:
        line = self._lines.get(timeout=PATIENCE_S)
        if line is None:
            self._lines.put(None)
            return None
        self._seen.append(json.loads(line))
        return self._seen[-1]

    def _stderr(self) -> str:
        self._err.seek(0)
        return self._err.read()


def load() -> float:
    """How much longer than alone a process takes here now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def driving(spec: Spec, folder: Path, *arguments: str) -> Iterator[Driver]:
    driver = Driver(spec, folder, *arguments)
    try:
        yield driver
    finally:
        driver.close()


def environment() -> dict[str, str]:
    """Of a command that is run as a user would, with the faults that a test has planted."""
    faults = [os.environ[FAULTS]] if FAULTS in os.environ else []
    roots = os.pathsep.join([*faults, SOURCE_ROOTS])
    return os.environ | {"PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended, or is not ours
        return b""
