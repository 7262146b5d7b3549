"""A run as others see it, whatever they see it by: its folder here, or its job on a cluster."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flatpeak.controller.runs import Event, RunFolder, RunState, StepRecord, list_runs, stop_run
from flatpeak.workers.errors import InputError

_POLL_S = 0.5
_DIED = (
    "its driver is gone without a word; what it left in shared memory goes when the next run "
    "starts there, and train with --resume goes on from the newest snapshot"
)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What is known of a run beside its steps; None where nothing is."""

    run: str
    state: RunState
    steps: int
    folder: str
    pid: int | None = None
    host: str | None = None
    """Where the driver is."""
    reason: str | None = None
    job: str | None = None
    """Under which a cluster has it, if it was submitted."""

    @property
    def over(self) -> bool:
        return self.state not in (RunState.PENDING, RunState.RUNNING)


class ObservedRun(Protocol):
    """Each method raises InputError or RunFailed when what it looks at cannot be read."""

    def status(self) -> RunStatus: ...

    def last_step(self) -> StepRecord | None: ...

    def follow(self) -> Iterator[Event | None]:
        """Every event so far and to come, and None whenever all that is there has been given."""
        ...

    def tails(self, lines: int) -> dict[str, list[str]]:
        """The last lines of each log, by who wrote it."""
        ...

    def last_words(self) -> dict[str, float]:
        """Seconds since each process last wrote into its log, as far as that can be seen."""
        ...

    def stop(self, *, timeout_s: float) -> RunState:
        """Asks the driver to stop, waits until it is gone, and returns the state it left."""
        ...


class FolderRun:
    """A run whose folder can be read here."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def status(self) -> RunStatus:
        info = self.folder.info
        return RunStatus(
            run=info.run,
            state=info.seen_state,
            steps=info.steps,
            folder=str(self.folder.path),
            pid=info.pid,
            host=info.host,
            reason=_DIED if info.seen_state is RunState.DIED else info.reason,
        )

    def last_step(self) -> StepRecord | None:
        steps = self.folder.steps()
        return steps[-1] if steps else None

    def follow(self) -> Iterator[Event | None]:
        new = self.folder.follow()
        while True:
            # Asked before the files are read: a run that has ended writes no more.
            ended = not self.folder.info.alive
            yield from new()
            yield None
            if ended:
                return
            time.sleep(_POLL_S)

    def tails(self, lines: int) -> dict[str, list[str]]:
        tails: dict[str, list[str]] = {}
        for path in sorted(self.folder.logs.glob("*.log")):
            if path.is_file():
                with path.open(errors="replace") as file:
                    tails[path.stem] = [line.rstrip("\n") for line in deque(file, maxlen=lines)]
        return tails

    def last_words(self) -> dict[str, float]:
        now = time.time()
        logs = sorted(self.folder.logs.glob("*.log"))
        return {path.stem: now - path.stat().st_mtime for path in logs}

    def stop(self, *, timeout_s: float) -> RunState:
        return stop_run(self.folder, timeout_s=timeout_s)


def find_run(where: Path | str, run: str) -> ObservedRun:
    """A run by name, in a folder of runs or at the address of a job server.

    Raises InputError with the names that exist when there is none of that name.
    """
    if isinstance(where, Path):
        return FolderRun(RunFolder.open(where, run))
    from flatpeak.controller.jobs.client import JobClient
    from flatpeak.controller.jobs.submitted import SubmittedRun

    return SubmittedRun.newest(JobClient(where), run)


def wait_for_run(where: Path | str, run: str, *, timeout_s: float) -> ObservedRun:
    """`find_run` of one that may just be starting: it has a folder once its job has been checked.

    Raises InputError when there is none in time.
    """
    if isinstance(where, str):
        return find_run(where, run)  # a cluster knows of it as soon as it is submitted
    list_runs(where)  # where no run can ever be, there is nothing to wait for
    deadline, said = time.monotonic() + timeout_s, False
    while True:
        try:
            return find_run(where, run)
        except InputError as absent:
            if time.monotonic() > deadline:
                raise
            if not said:
                text = f"{absent}; waiting up to {timeout_s:g} s for it to start"
                print(text, file=sys.stderr, flush=True)
        said = True
        time.sleep(_POLL_S)


def report_of(run: ObservedRun) -> dict[str, Any]:
    """What `flatpeak status` says of a run."""
    status, last = run.status(), run.last_step()
    return {
        "run": status.run,
        "state": str(status.state),
        "step": last.step if last else 0,
        "steps": status.steps,
        "loss": last.loss if last else None,
        "tokens_per_s": last.tokens_per_s if last else None,
        "pid": status.pid,
        "host": status.host,
        "folder": status.folder,
        "reason": status.reason,
        **({} if status.job is None else {"job": status.job}),
    }


def all_reports(where: Path | str) -> list[dict[str, Any]]:
    """The same of all runs, by name."""
    if isinstance(where, Path):
        return [_report_or_reason(folder) for folder in list_runs(where)]
    from flatpeak.controller.jobs.client import JobClient
    from flatpeak.controller.jobs.submitted import SubmittedRun

    return [report_of(run) for run in SubmittedRun.all(JobClient(where)).values()]


def _report_or_reason(folder: RunFolder) -> dict[str, Any]:
    # One broken folder hides none of the others; asked for by name, it is an error.
    try:
        return report_of(FolderRun(folder))
    except InputError as error:
        unknown = dict.fromkeys(("step", "steps", "loss", "tokens_per_s", "pid", "host"))
        return {
            "run": folder.path.name,
            "state": "unreadable",
            **unknown,
            "folder": str(folder.path),
            "reason": str(error),
        }
