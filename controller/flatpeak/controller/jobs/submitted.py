"""A submitted run as it is seen from any machine, by its job's details and its driver's log."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

from ray.job_submission import JobDetails, JobStatus

from flatpeak.controller.jobs.client import FOLDER, RUN, STEPS, TAIL_ERRORS, JobClient
from flatpeak.controller.jobs.driver_log import Found, Refusal, last_of, record_of, shown_line
from flatpeak.controller.observed import RunStatus
from flatpeak.controller.runs import Event, RunEvent, RunState, StepRecord, Summary
from flatpeak.workers.errors import (
    ClusterError,
    DoesNotFit,
    FlatpeakError,
    InputError,
    RunFailed,
    WaitTimeout,
)

_POLL_S = 1.0
_TAIL_LINES = 200
_INTERRUPTED = 130
_STATES = {
    JobStatus.PENDING: RunState.PENDING,
    JobStatus.RUNNING: RunState.RUNNING,
    JobStatus.SUCCEEDED: RunState.DONE,
    JobStatus.STOPPED: RunState.INTERRUPTED,
    JobStatus.FAILED: RunState.FAILED,
}


class SubmittedRun:
    """The run of one job; an earlier job of the same run is not looked at."""

    def __init__(self, client: JobClient, job: str, metadata: dict[str, str]) -> None:
        self._client, self.job, self._metadata = client, job, metadata

    @classmethod
    def newest(cls, client: JobClient, run: str) -> "SubmittedRun":
        """Raises InputError with the names that exist when no job is of this run."""
        runs = cls.all(client)
        if run not in runs:
            known = f"there are {', '.join(runs)}" if runs else "it has had none at all"
            raise InputError(f"no run {run!r} was submitted to {client.address}; {known}")
        return runs[run]

    @classmethod
    def all(cls, client: JobClient) -> dict[str, "SubmittedRun"]:
        """Each run by name, as its newest job."""
        jobs = client.flatpeak_jobs()
        runs = {meta[RUN]: cls(client, job, meta) for job, meta in jobs.items()}
        return dict(sorted(runs.items()))

    @property
    def name(self) -> str:
        return self._metadata[RUN]

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def folder(self) -> str:
        """On the cluster."""
        return self._metadata[FOLDER]

    @property
    def steps(self) -> int:
        return int(self._metadata[STEPS])

    def status(self) -> RunStatus:
        job = self._details()
        state = _STATES[job.status]
        if job.driver_exit_code == _INTERRUPTED:
            state = RunState.INTERRUPTED
        return RunStatus(
            run=self.name,
            state=state,
            steps=self.steps,
            folder=self.folder,
            pid=int(job.driver_info.pid) if job.driver_info else None,
            host=job.driver_info.node_ip_address if job.driver_info else None,
            job=self.job,
            reason=self._reason(job) if state is RunState.FAILED else None,
        )

    def last_step(self) -> StepRecord | None:
        return self._last(StepRecord)

    def summary(self) -> Summary | None:
        """What the run came to, if it came to its end."""
        return self._last(Summary)

    def has_begun(self) -> bool:
        """Whether it had a run folder: one that is refused before leaves its name free."""
        return self._last(StepRecord) is not None or self._last(RunEvent) is not None

    def follow(self) -> Iterator[Event | None]:
        with closing(_Tail(self._client.tail_job_logs(self.job))) as tail:
            while not tail.ended:
                for line in self._read(tail):
                    if isinstance(record := record_of(line), RunEvent | StepRecord):
                        yield record
                yield None
                self._details()  # raises when the cluster is gone without a word
        if not (status := self.status()).over:
            raise ClusterError(f"the log of the run {status.run} broke off; it may well go on")

    def tails(self, lines: int) -> dict[str, list[str]]:
        shown = (shown_line(line, steps=self.steps) for line in self._lines(lines))
        return {"driver": [line for line in shown if line is not None]}

    def last_words(self) -> dict[str, float]:
        return {}  # the logs of the actors are in the run folder

    def stop(self, *, timeout_s: float) -> RunState:
        deadline = time.monotonic() + timeout_s
        heard = False
        while not (status := self.status()).over:
            # A job that Ray has not begun with does not hear it.
            heard = heard or self._client.stop_job(self.job)
            where = f" (pid {status.pid} on {status.host})" if status.pid else ""
            self._wait(f"its driver{where}", timeout_s, deadline)
        job_id = self._details().job_id  # of the driver, if it came to have one
        while job_id is not None and (left := self._client.left_of(job_id)):
            self._wait(", ".join(left), timeout_s, deadline)
        return status.state

    def error(self) -> FlatpeakError | None:
        """The error that the driver ended with, if it did."""
        status, code = self.status(), self._details().driver_exit_code
        if status.state is not RunState.FAILED:
            return None
        kinds = {kind.exit_code: kind for kind in (InputError, DoesNotFit)}
        return kinds.get(code or 0, RunFailed)(status.reason or "it gave no reason")

    def _wait(self, who: str, timeout_s: float, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"of the run {self.name} (job {self.job}) is still there "
                f"{timeout_s:g} s after it was asked to stop: {who}; a snapshot may be under way, "
                f"wait longer with --timeout {2 * timeout_s:g}"
            )
        time.sleep(_POLL_S)

    def _details(self) -> JobDetails:
        return self._client.get_job_info(self.job)

    def _lines(self, lines: int) -> list[str]:
        return self._client.last_lines(self._details(), lines)

    def _last(self, kind: type[Found]) -> Found | None:
        lines = self._lines(_TAIL_LINES)
        if (found := last_of(kind, lines)) is None and len(lines) == _TAIL_LINES:
            found = last_of(kind, self._client.get_job_logs(self.job).splitlines())
        return found

    def _reason(self, job: JobDetails) -> str:
        lines = self._client.last_lines(job, _TAIL_LINES)
        if (refusal := last_of(Refusal, lines)) is not None:
            return refusal.message
        if job.driver_exit_code is None:
            return f"Ray could not run the job: {job.message}"
        reason = f"the driver ended with exit code {job.driver_exit_code}"
        if lines:
            reason += f": {lines[-1]}"
        if not any(record_of(line) for line in lines):
            reason += " (--python says by which command the cluster's Python is called there)"
        return reason

    def _read(self, tail: "_Tail") -> list[str]:
        try:
            return tail.read(_POLL_S)
        except TAIL_ERRORS as error:
            raise ClusterError(
                f"the job server at {self._client.address} went away: {error}; the run may well "
                "go on"
            ) from None


class _Tail:
    """The lines of a stream of text as they come, read from outside of its event loop."""

    def __init__(self, stream: AsyncIterator[str]) -> None:
        self._stream, self._torn = stream, ""
        self._loop = asyncio.new_event_loop()
        self._next: asyncio.Task[str | None] | None = None
        self.ended = False

    def read(self, wait_s: float) -> list[str]:
        """The whole lines of the next `wait_s` seconds, less where the stream ends before."""
        text, deadline = self._torn, time.monotonic() + wait_s
        while (chunk := self._chunk(deadline)) is not None:
            text += chunk
        *lines, self._torn = text.split("\n")
        return lines

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._loop.run_until_complete(asyncio.wait([self._next]))
        self._loop.run_until_complete(self._stream.aclose())  # type: ignore[attr-defined]
        self._loop.close()

    def _chunk(self, deadline: float) -> str | None:
        if self.ended:
            return None
        if self._next is None:
            self._next = self._loop.create_task(self._receive())
        left = max(0.0, deadline - time.monotonic())
        self._loop.run_until_complete(asyncio.wait([self._next], timeout=left))
        if not self._next.done():
            return None
        task, self._next = self._next, None
        chunk = task.result()
        self.ended = chunk is None
        return chunk

    async def _receive(self) -> str | None:
        return await anext(self._stream, None)
