"""Sends a run to a cluster: the code that runs here, the spec as a file, and the command.

The code goes as one folder of Ray's `py_modules`, named by its content, so that the nodes take it
once, and its path is before that of any copy they have installed. It is no wheel, since for a wheel
every node would call pip, which fetches what the wheel depends on.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from flatpeak.controller.jobs.client import FOLDER, RUN, STEPS, JobClient
from flatpeak.controller.jobs.submitted import SubmittedRun
from flatpeak.controller.spec import Spec
from flatpeak.controller.spec_file import dump_spec
from flatpeak.workers.errors import ClusterError, InputError

_SPEC_FILE = "job.yaml"
_CLEANUP_S = 120.0


def submit(
    spec: Spec, client: JobClient, *, python: str, environment: Mapping[str, str]
) -> SubmittedRun:
    """Starts the run on the cluster and returns at once.

    `python` is the command of the cluster's Python there, `environment` is set in all processes of
    the run. Raises InputError when the versions differ or the name is taken by another run.
    """
    client.check_versions()
    job = f"flatpeak-{spec.run}-{_number(spec, client)}"
    metadata = {
        RUN: spec.run,
        STEPS: str(spec.train.steps),
        FOLDER: str(Path(spec.runs_dir) / spec.run),
    }
    with packed(spec) as (code, folder):
        try:
            client.submit_job(
                # exec: signals of a stop are for the driver, not for a shell around it.
                entrypoint=f"exec {python} -m flatpeak.controller train {_SPEC_FILE} --json",
                submission_id=job,
                runtime_env={
                    "working_dir": str(folder),
                    "py_modules": [str(code)],
                    "env_vars": {**environment, "RAY_JOB_STOP_WAIT_TIME_S": str(_patience(spec))},
                },
                metadata=metadata,
            )
        except ClusterError as error:
            if "already exists" in str(error):
                raise InputError(f"the run {spec.run} is being submitted by another") from None
            raise
    return SubmittedRun(client, job, metadata)


def _number(spec: Spec, client: JobClient) -> int:
    """Of the run's next job: Ray never takes the id of a job again."""
    earlier = SubmittedRun.all(client).get(spec.run)
    if earlier is None:
        return 1
    status = earlier.status()
    if not status.over:
        raise InputError(
            f"the run {spec.run} is going on at {client.address} ({status.state}, job "
            f"{earlier.job}); end it with `flatpeak stop {spec.run} --address {client.address}`, "
            "or choose another name by --set run=..."
        )
    if not spec.resume and earlier.has_begun():
        raise InputError(
            f"the run {spec.run} exists at {client.address} ({status.state}, in {status.folder}); "
            "go on with it by --resume, or choose another name by --set run=..."
        )
    return int(earlier.job.rpartition("-")[2]) + 1


def _patience(spec: Spec) -> int:
    """Seconds after which Ray kills a driver that was asked to stop.

    More than a run waits at its end: for the last update, for the snapshot that is under way and
    for one more, and until its processes are gone.
    """
    cluster = spec.cluster
    return math.ceil(cluster.start_timeout_s + 2 * cluster.step_timeout_s + _CLEANUP_S)


@contextmanager
def packed(spec: Spec) -> Iterator[tuple[Path, Path]]:
    """The folder of the package `flatpeak` with all its parts, and one with the spec."""
    with TemporaryDirectory(prefix="flatpeak-submit-") as temporary:
        code, folder = Path(temporary, "flatpeak"), Path(temporary, "job")
        for part in ("controller", "workers", "kernels"):
            # Where Python finds it: in a root of its own or not, and before any other copy.
            found = find_spec(f"flatpeak.{part}")
            assert found is not None, part
            assert found.submodule_search_locations, part
            source = found.submodule_search_locations[0]
            shutil.copytree(source, code / part, ignore=shutil.ignore_patterns("__pycache__"))
        folder.mkdir()
        (folder / _SPEC_FILE).write_text(dump_spec(spec), encoding="utf-8")
        yield code, folder
