"""The run folder on disk: what a run writes, and how others see whether it lives.

    runs_dir/RUN/
        run.json       the driver process and the state of the run
        spec.yaml      the resolved spec
        steps.jsonl    one StepRecord a line
        events.jsonl   one RunEvent a line
        scale.json     a request that the driver has not seen yet (`scale_requests`)
        snapshots/  logs/
        lock           held by the driver as long as it is in the folder

A run is alive while the process that `run.json` names exists with the same start time: a pid alone
may have been given to somebody else since.
"""

import errno
import fcntl
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from flatpeak.controller.spec import Spec
from flatpeak.controller.spec_file import dump_spec
from flatpeak.controller.strict_json import to_json
from flatpeak.workers.errors import InputError, SpecError, WaitTimeout

TOTAL = "total"
"""Key of `StepRecord.peak_bytes` with the peak over all components together."""

_EXACT = ConfigDict(strict=True, extra="forbid")
_NullAsNan = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that is null on disk where it was not finite."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step did. `loss` and `grad_norm` are NaN where they were not finite."""

    __pydantic_config__ = _EXACT

    step: int
    time: float | None = None
    """Unix time at which it was done; None in the records of old runs."""
    loss: _NullAsNan
    nll: float | None = None
    """Mean negative log likelihood of the targets: the loss without what is added to it, which
    makes runs comparable. None where it was not finite, and in the records of old runs."""
    grad_norm: _NullAsNan
    lr: float
    tokens: int
    tokens_per_s: float
    step_seconds: float
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Device memory by component, each of the rank where it was highest."""
    device_budget_bytes: int | None = None
    """The bound on the total, as the spec has it."""
    planned_peak_bytes: dict[str, int] = field(default_factory=dict)
    """Bounds on components that follow from the job alone, each of the rank where it is highest."""
    dispatch: dict[str, float | None] = field(default_factory=dict)
    """The figures of a `DispatchReport` on all ranks, and the budget of its bytes."""
    optimizer: dict[str, float] = field(default_factory=dict)
    """Buckets of all ranks, those updated beside this step's forward pass (`overlapped_buckets`),
    and the seconds that the slowest forward pass stood still for weights (`exposed_s`)."""
    boundaries: dict[str, int] = field(default_factory=dict)
    """The figures of the step's `BoundaryStats`, each of the rank where it was highest."""
    straggler: int | None = None
    """The rank that waited least for the others, which so waited for it; None where there is one
    rank alone, where nobody measures it (on CUDA), and in the records of old runs."""
    lag_s: float | None = None
    """Seconds that the rank that waited longest waited longer than that."""
    skipped: bool = False
    first_sample: int
    last_sample: int

    def bound(self, component: str) -> int | None:
        """Of its whole peak, where it has one."""
        return (
            self.device_budget_bytes
            if component == TOTAL
            else self.planned_peak_bytes.get(component)
        )


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened beside the steps: a start, a snapshot, a failure, a resize."""

    __pydantic_config__ = _EXACT

    kind: str
    time: float
    detail: dict[str, Any] = field(default_factory=dict)


Event = StepRecord | RunEvent


def event(kind: str, **detail: Any) -> RunEvent:
    """What happens now."""
    return RunEvent(kind=kind, time=time.time(), detail=detail)


def highest_of(figures: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Each name's highest figure: peaks of ranks, or of steps. What is missing counts as 0."""
    figures = list(figures)
    names = sorted({name for each in figures for name in each})
    return {name: max(each.get(name, 0) for each in figures) for name in names}


def in_order_of_peaks(peaks: Mapping[str, int]) -> list[str]:
    """The names of the components, the total first and then from the highest on."""
    return sorted(peaks, key=lambda name: (name != TOTAL, -peaks[name]))


def runs_folder(runs_dir: str | Path) -> Path:
    """Where the run folders are; an unknown ~user stays as it is, and is then found missing."""
    return Path(os.path.expanduser(runs_dir))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished run came to."""

    run: str
    folder: str
    steps: int
    loss: _NullAsNan
    seconds: float
    peak_bytes: dict[str, int] = field(default_factory=dict)
    device_budget_bytes: int | None = None


class RunState(StrEnum):
    PENDING = "pending"
    """Never written: submitted to a cluster that has not begun with it."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DIED = "died"
    """Never written: the state says running, but the driver is gone."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The content of run.json."""

    __pydantic_config__ = _EXACT

    run: str
    host: str
    pid: int
    process_start: str
    state: RunState
    steps: int
    started: float
    address: str | None = None
    namespace: str | None = None
    ended: float | None = None
    reason: str | None = None

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether the driver still runs. On another host only its own word is known."""
        if self.state is not RunState.RUNNING:
            return False
        return not self.is_here or process_start(self.pid) == self.process_start

    @property
    def seen_state(self) -> RunState:
        if self.state is RunState.RUNNING and not self.alive:
            return RunState.DIED
        return self.state


_STEP = TypeAdapter(StepRecord)
_EVENT = TypeAdapter(RunEvent)
_INFO = TypeAdapter(RunInfo)
_Record = TypeVar("_Record")


class RunFolder(AbstractContextManager["RunFolder"]):
    """One run's folder.

    The driver makes it with `create` and works inside `with`, which writes the final state however
    the run ends. Everybody else reads it through `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = ExitStack()
        self._owed: dict[str, bytes] = {}

    @classmethod
    def create(cls, spec: Spec) -> Self:
        """The folder of a run that starts now, driven by this process, with `spec` as resolved.

        With `spec.resume` the folder of an earlier run of the same name, if there is one, is gone
        on with. Raises SpecError when that run is alive, when there is one and `resume` is off, and
        when the folder cannot be written.
        """
        folder = cls(runs_folder(spec.runs_dir) / spec.run)
        info = RunInfo(
            run=spec.run,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()) or "",
            state=RunState.RUNNING,
            steps=spec.train.steps,
            started=time.time(),
        )
        try:
            with ExitStack() as held:
                folder._claim(spec, held)
                folder._write_info(info)
                folder._prepare(spec)
                folder._held = held.pop_all()
        except OSError as error:
            raise SpecError(
                f"cannot write the run folder {folder.path}: {error.strerror}; "
                "set runs_dir to a directory that you can write, like --set runs_dir=/tmp/runs"
            ) from None
        return folder

    @classmethod
    def open(cls, runs_dir: str | Path, run: str) -> Self:
        """The folder of an existing run; raises InputError with the names that exist."""
        names = [found.path.name for found in list_runs(runs_dir)]
        if run not in names:  # a path, like ../other, is no name
            raise InputError(
                f"no run {run!r} in {runs_dir}; "
                + (f"there are {', '.join(names)}" if names else "it holds no run at all")
            )
        return cls(runs_folder(runs_dir) / run)

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def info(self) -> RunInfo:
        path = self.path / "run.json"
        try:
            return _INFO.validate_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except ValidationError as error:
            raise InputError(f"{path} is not the record of a run: {_first(error)}") from None

    def record(self, event: Event) -> None:
        """Append `event` to its file as one flushed line.

        A full disk ends no run: what it does not take comes before the next record of its file.
        """
        name = "steps.jsonl" if isinstance(event, StepRecord) else "events.jsonl"
        lines = self._owed.pop(name, b"") + to_json(asdict(event)).encode() + b"\n"
        try:
            _append(self.path / name, lines)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._owed[name] = lines

    def steps(self) -> list[StepRecord]:
        """The records of the steps that count, in order.

        A resumed run does the steps after its snapshot again; the later records replace the earlier
        ones, also those it has not come to again. Raises InputError with the line that is no
        record; the last one, where its newline is missing, is left out.
        """
        records: list[StepRecord] = []
        for record in _read_lines(self.path / "steps.jsonl", _STEP):
            while records and records[-1].step >= record.step:
                records.pop()
            records.append(record)
        return records

    def events(self) -> list[RunEvent]:
        return list(_read_lines(self.path / "events.jsonl", _EVENT))

    def follow(self) -> Callable[[], list[Event]]:
        """A function that returns what was recorded since its last call, in order of time.

        Steps come as they were done: those after the snapshot of a resumed run once more. Those of
        old runs bear no time, and come first.
        """
        readers = [
            _Appended(self.path / "events.jsonl", _EVENT),
            _Appended(self.path / "steps.jsonl", _STEP),
        ]

        def new() -> list[Event]:
            records = [record for reader in readers for record in reader.read()]
            return sorted(
                records, key=lambda record: -math.inf if record.time is None else record.time
            )

        return new

    def follow_events(self) -> Callable[[], list[RunEvent]]:
        """A function that returns the events since its last call."""
        reader = _Appended(self.path / "events.jsonl", _EVENT)
        return lambda: list(reader.read())

    def set_cluster(self, *, address: str, namespace: str) -> None:
        """Note the Ray cluster that the run uses, once it is up."""
        self._write_info(replace(self.info, address=address, namespace=namespace))

    def finish(self, state: RunState, *, reason: str | None = None) -> None:
        self._write_info(replace(self.info, state=state, ended=time.time(), reason=reason))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._held:
            if error is None:
                self.finish(RunState.DONE)
            elif isinstance(error, KeyboardInterrupt | SystemExit):
                self.finish(RunState.INTERRUPTED)
            else:
                self.finish(RunState.FAILED, reason=str(error) or type(error).__name__)

    def _claim(self, spec: Spec, held: ExitStack) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir()  # atomic: of two drivers with one name only one gets past
            self._lock(held)
            return
        except FileExistsError:
            pass
        if not (self.path / "run.json").is_file():
            raise SpecError(
                f"{self.path} exists and is no run folder; "
                f"choose a free name, like --set run={self._free_name()}"
            )
        # Before the look at the state: of two that resume at once, both would see the same one.
        locked = self._lock(held)
        info = self.info
        if info.alive or not locked:
            raise SpecError(self._going_on(info))
        if not spec.resume:
            raise SpecError(
                f"the run {spec.run} exists ({info.seen_state}); go on with it by --resume, or "
                f"choose a free name, like --set run={self._free_name()}"
            )

    def _lock(self, held: ExitStack) -> bool:
        """Lock the folder until `held` closes; False when another has it.

        The kernel takes the lock from a process that dies, however it dies. Processes started by
        this one do not inherit it.
        """
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        held.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _going_on(self, info: RunInfo) -> str:
        stop = f"end it with `flatpeak stop {info.run}`"
        if info.is_here:
            process = f"process {info.pid}"
        else:
            process = f"process {info.pid} on {info.host}"
            file = self.path / "run.json"
            stop += f' there (if that machine is gone, set "state": "failed" in {file})'
        return (
            f"the run {info.run} is going on in {process}; {stop}, or choose a free name, like "
            f"--set run={self._free_name()}"
        )

    def _free_name(self) -> str:
        number = 2
        while (free := self.path.with_name(f"{self.path.name}-{number}")).exists():
            number += 1
        return free.name

    def _prepare(self, spec: Spec) -> None:
        (self.path / "spec.yaml").write_text(dump_spec(spec))
        for folder in (self.snapshots, self.logs):
            folder.mkdir(exist_ok=True)
            with TemporaryFile(dir=folder):  # it may be there and not be ours to write
                pass
        (self.path / "scale.json").unlink(missing_ok=True)  # not meant for this start
        for name in ("steps.jsonl", "events.jsonl"):
            _cut_torn_line(self.path / name)

    def _write_info(self, info: RunInfo) -> None:
        # Rename, so that a reader never sees half a file.
        new = self.path / f".run.json.{os.getpid()}"
        new.write_text(json.dumps(asdict(info), indent=2) + "\n")
        new.replace(self.path / "run.json")


def list_runs(runs_dir: str | Path) -> list[RunFolder]:
    """The run folders in `runs_dir`, by name; raises InputError when it is a file."""
    folder = runs_folder(runs_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{runs_dir} is no directory; give the one of the runs, like runs")
    return [RunFolder(path.parent) for path in sorted(folder.glob("*/run.json")) if path.is_file()]


def stop_run(folder: RunFolder, *, timeout_s: float) -> RunState:
    """Ask the driver of a run on this host to stop, and wait until it is gone.

    Returns the state it left. A run that had ended already is left alone. Raises InputError when
    the driver is on another host, WaitTimeout when it does not go in time.
    """
    info = folder.info
    if not info.alive:
        return info.seen_state
    if not info.is_here:
        raise InputError(f"the run {info.run} is driven from {info.host}; stop it there")
    try:
        os.kill(info.pid, signal.SIGTERM)
    except PermissionError:
        raise InputError(
            f"process {info.pid} of the run {info.run} belongs to another user; stop it as that one"
        ) from None
    except ProcessLookupError:
        pass  # it went between the look and the signal
    deadline = time.monotonic() + timeout_s
    while process_start(info.pid) == info.process_start:
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"process {info.pid} of the run {info.run} is still there {timeout_s:g} s after "
                f"SIGTERM; wait longer with --timeout {2 * timeout_s:g}, or end it with "
                f"`kill -9 {info.pid}`"
            )
        time.sleep(0.05)
    return folder.info.seen_state


def process_start(pid: int) -> str | None:
    """What tells this process from all others that had its pid; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so count from its end; field 22 is the start time.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else f"{boot}/{fields[18]}"


def _read_lines(path: Path, kind: TypeAdapter[_Record]) -> Iterator[_Record]:
    return _Appended(path, kind).read()


class _Appended(Generic[_Record]):
    """The records of a file, each once, as it grows."""

    def __init__(self, path: Path, kind: TypeAdapter[_Record]) -> None:
        self._path, self._kind = path, kind
        self._bytes = self._lines = 0

    def read(self) -> Iterator[_Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes)
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}") from None
        # What follows the last newline is a record that is being written, or was when its writer
        # died: it is read when it is whole.
        *lines, _torn = content.split(b"\n")
        for line in lines:
            self._bytes += len(line) + 1
            self._lines += 1
            try:
                record = self._kind.validate_json(line)
            except ValidationError as error:
                where = f"{self._path}, line {self._lines}"
                raise InputError(f"{where}, is no record: {_first(error)}") from None
            yield record


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def _append(path: Path, lines: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(lines) < len(lines):  # the disk was full in the middle of them
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _cut_torn_line(path: Path) -> None:
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
