"""Ray's job client with answers that are waited for only so long, and errors that say what to do.

Importing this imports Ray.
"""

import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import aiohttp
import ray
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from flatpeak.controller.jobs.access import authorization
from flatpeak.workers.errors import ClusterError, FlatpeakError, InputError, WaitTimeout

TAIL_ERRORS = (aiohttp.ClientError, RuntimeError)
"""What `tail_job_logs` raises when the job server goes away."""

RUN, STEPS, FOLDER = "flatpeak_run", "flatpeak_steps", "flatpeak_folder"
"""The keys in a job's metadata that make it a run of Flatpeak."""

_VARIABLE = "RAY_API_SERVER_ADDRESS"
_ANSWER_S = 30.0
_CONNECT_S = 10.0


class JobClient(JobSubmissionClient):
    """The job server of one cluster.

    Raises InputError when it refuses the token, WaitTimeout when it does not answer in time, and
    ClusterError when it cannot be reached or answers with an error.
    """

    def __init__(self, address: str) -> None:
        for handler in logging.getLogger("ray").handlers:
            handler.setLevel(logging.WARNING)  # each upload would be a line
        self.address = address
        try:
            with _preferred(address):
                super().__init__(address, headers=authorization(os.environ))
        except FlatpeakError:
            raise
        except (
            requests.RequestException,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            raise self._no_server(f"it answers like something else ({error})") from None

    def check_versions(self) -> None:
        """Raises InputError unless the cluster has the Ray and the minor Python version of here."""
        found = self._data("/api/v0/cluster_metadata")
        there = found.get("rayVersion"), found.get("pythonVersion")
        here = ray.__version__, platform.python_version()
        if there[0] == here[0] and _minor(there[1]) == _minor(here[1]):
            return
        raise InputError(
            f"the cluster at {self.address} has Ray {there[0]} and Python {there[1]}, here are Ray "
            f"{here[0]} and Python {here[1]}; submit from an environment with those of the cluster "
            f"(pip install ray[default]=={there[0]}), or give the cluster those of here"
        )

    def flatpeak_jobs(self) -> dict[str, dict[str, str]]:
        """The metadata of the jobs that are runs of Flatpeak, by submission id, oldest first."""
        return {
            job.submission_id: metadata
            for job in sorted(self._all_jobs(), key=lambda job: job.start_time or 0)
            if job.submission_id and _is_run(metadata := job.metadata or {})
        }

    def _all_jobs(self) -> list[JobDetails]:
        try:
            return self.list_jobs()
        except (LookupError, TypeError, ValueError) as error:
            raise self._no_server(f"it answers like something else ({error})") from None

    def last_lines(self, job: JobDetails, lines: int) -> list[str]:
        """Of what the job's driver printed; nothing before it has begun."""
        if job.driver_node_id is None:
            return []
        # By node and name: of a submission id alone Ray 2.60 finds no file.
        name = f"job-driver-{job.submission_id}.log"
        wanted = {"node_id": job.driver_node_id, "filename": name, "lines": lines}
        answer = self._do_request("GET", "/api/v0/logs/file", params=wanted)
        if answer.status_code != 200:
            self._raise_error(answer)
        return answer.content.decode(errors="replace").splitlines()

    def left_of(self, job_id: str) -> list[str]:
        """What is still there of a job whose driver has ended: actors and placement groups."""
        actors = self._states("actors", ("job_id", "=", job_id), ("state", "!=", "DEAD"))
        groups = self._states(
            "placement_groups", ("creator_job_id", "=", job_id), ("state", "!=", "REMOVED")
        )
        return [
            *(f"{actor['class_name']} (pid {actor['pid']})" for actor in actors),
            *(f"placement group {group['placement_group_id']}" for group in groups),
        ]

    def _states(self, what: str, *filters: tuple[str, str, str]) -> list[dict[str, Any]]:
        keys, predicates, values = zip(*filters, strict=True)
        wanted = {"filter_keys": keys, "filter_predicates": predicates, "filter_values": values}
        return self._data(f"/api/v0/{what}", **wanted)["result"]["result"]

    def _data(self, endpoint: str, **params: Any) -> dict[str, Any]:
        answer = self._do_request("GET", endpoint, params=params)
        if answer.status_code != 200:
            self._raise_error(answer)
        try:
            return answer.json()["data"]
        except (LookupError, TypeError, ValueError) as error:
            raise self._no_server(f"it answers like something else ({error})") from None

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        try:
            return super()._do_request(method, endpoint, timeout=(_CONNECT_S, _ANSWER_S), **options)
        except AuthenticationError as error:
            refusal = str(error).splitlines()[0]
            raise InputError(
                f"the cluster at {self.address} refuses this client: {refusal}; put its token "
                "into ~/.ray/auth_token, RAY_AUTH_TOKEN or the file of RAY_AUTH_TOKEN_PATH, and do "
                "not set RAY_AUTH_MODE=disabled"
            ) from None
        except requests.exceptions.ReadTimeout:
            raise WaitTimeout(
                f"the job server at {self.address} did not answer {method} {endpoint} within "
                f"{_ANSWER_S:g} s; look at the head of that cluster"
            ) from None
        except requests.RequestException as error:
            raise self._no_server(str(error)) from None

    def _no_server(self, reason: str) -> ClusterError:
        return ClusterError(
            f"no job server of Ray answers at {self.address}: {reason}; give the address of the "
            "cluster's dashboard, like http://HEAD:8265"
        )

    def _raise_error(self, r: requests.Response) -> NoReturn:
        # The text may be a traceback, of which the end says what is wrong.
        lines = [line for line in r.text.splitlines() if line.strip(" .")]
        reason = lines[-1] if lines else "no text"
        raise ClusterError(f"the job server at {self.address} answers {r.status_code}: {reason}")


def _is_run(metadata: Mapping[str, str]) -> bool:
    return {RUN, STEPS, FOLDER} <= metadata.keys() and metadata[STEPS].isdecimal()


@contextmanager
def _preferred(address: str) -> Iterator[None]:
    """Inside, Ray's client takes `address`: its variables override the argument."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = address
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        os.environ.update({} if before is None else {_VARIABLE: before})


def _minor(version: str | None) -> list[str]:
    return str(version).split(".")[:2]
