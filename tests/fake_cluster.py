"""Stand-ins for a Ray cluster's job server: its HTTP API, and the client of one job."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from platform import python_version
from typing import Any
from urllib.parse import urlparse

import ray
from ray.job_submission import DriverInfo, JobDetails, JobStatus, JobType

from fake_server import serving

TOKEN = "the-token-of-the-cluster"


def job_details(run: str, status: str, *, number: int = 1, **fields: Any) -> JobDetails:
    """A job as `flatpeak submit` makes one."""
    metadata = {"flatpeak_run": run, "flatpeak_steps": "9", "flatpeak_folder": f"/shared/{run}"}
    return JobDetails(
        type=JobType.SUBMISSION,
        submission_id=f"flatpeak-{run}-{number}",
        status=JobStatus(status),
        entrypoint="exec python",
        start_time=number,
        driver_node_id="7f",
        **({"metadata": metadata} | fields),
    )


@dataclass
class JobServer:
    """Answers as the dashboard does. `broken` is the answer to every request instead."""

    jobs: list[JobDetails] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    """By submission id."""
    versions: tuple[str, str] = (ray.__version__, python_version())
    broken: tuple[int, str] | None = None
    delay_s: float = 0.0
    requests: list[tuple[str, str]] = field(default_factory=list)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, url: str, body: bytes, token: str | None) -> tuple[int, str]:
        path = urlparse(url).path
        self.requests.append((method, path))
        time.sleep(self.delay_s)
        if self.broken is not None:
            return self.broken
        if token is None:
            return 401, "Unauthorized: Missing authentication token"
        if token != f"Bearer {TOKEN}":
            return 403, "Forbidden: Invalid authentication token"
        return self._route(method, path, body)

    def _route(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        ray_version, python = self.versions
        match method, path.strip("/").split("/"):
            case "GET", ["api", "version"]:
                return 200, json.dumps({"version": "4", "ray_version": ray_version})
            case "GET", ["api", "v0", "cluster_metadata"]:
                found = {"rayVersion": ray_version, "pythonVersion": python}
                return 200, json.dumps({"data": found})
            case "GET", ["api", "v0", "logs", "file"]:
                # The newest job's: which one is asked for is in the query.
                return 200, "\n".join(self.logs.get(str(self.jobs[-1].submission_id), []))
            case "GET", ["api", "jobs"]:
                return 200, json.dumps([job.model_dump(mode="json") for job in self.jobs])
            case "GET", ["api", "jobs", name]:
                [job] = [job for job in self.jobs if job.submission_id == name]
                return 200, job.model_dump_json()
            case "GET", ["api", "packages", *_]:
                return 404, "Package does not exist"
            case "PUT", ["api", "packages", *_]:
                return 200, ""
            case "POST", ["api", "jobs"]:
                request = json.loads(body)
                if request["submission_id"] in {job.submission_id for job in self.jobs}:
                    return 500, "Traceback ...\nValueError: Job with that id already exists.\n.\n"
                self.submitted.append(request)
                return 200, json.dumps(
                    {"job_id": request["submission_id"], "submission_id": request["submission_id"]}
                )
        return 404, f"{path} does not exist"


@contextmanager
def job_server(**fields: Any) -> Iterator[JobServer]:
    server = JobServer(**fields)
    with serving(server.answer) as server.url:
        yield server


class OneJob:
    """A `JobClient` that knows one job, whose state and log a test moves on."""

    address = "http://head:8265"

    def __init__(self, status: str, log: str = "", **fields: Any) -> None:
        self.job = job_details("tiny", status, **fields)
        self.log = log
        self.chunks: list[str | Exception] = []
        """What the following of the log gives before it ends."""
        self.stopping: list[str] = []
        """The states that the job goes through, one a look, once it was asked to stop."""
        self.left: list[list[str]] = []
        self.deaf = 0
        """How many requests to stop come before the job can hear one."""
        self.stops = 0

    def get_job_info(self, job: str) -> JobDetails:
        assert job == self.job.submission_id
        if self.stops and self.stopping:
            self.job.status = JobStatus(self.stopping.pop(0))
        return self.job

    def get_job_logs(self, job: str) -> str:
        return self.log

    def last_lines(self, job: JobDetails, lines: int) -> list[str]:
        return self.log.splitlines()[-lines:]

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def stop_job(self, job: str) -> bool:
        self.deaf -= 1
        self.stops += self.deaf < 0
        return self.deaf < 0

    def left_of(self, job_id: str) -> list[str]:
        assert job_id == self.job.job_id
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


DRIVER = DriverInfo(id="04000000", node_ip_address="10.0.0.7", pid="4711")
