"""What can be said of a submission before there is a cluster: paths and environment."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from flatpeak.controller.spec import Spec
from flatpeak.workers.errors import InputError

ON_CLUSTER = ("cluster.address=auto",)
"""What is set in every spec that is sent: the driver joins the cluster that it is in."""


def check_paths(spec: Spec) -> None:
    """Raises InputError for paths that are relative: nobody knows to what on the cluster."""
    paths = {
        "runs_dir": spec.runs_dir,
        "model.path": spec.model.path,
        "data.source": None if spec.data.source == "stdlib" else spec.data.source,
        "data.tokenizer": None if spec.data.tokenizer == "bytes" else spec.data.tokenizer,
        "data.cache_dir": spec.data.cache_dir,
        "cluster.shm_dir": spec.cluster.shm_dir,
        "metrics.token_file": spec.metrics.token_file,
    }
    relative = {key: path for key, path in paths.items() if path and path[0] not in "/~$"}
    if relative:
        first, path = next(iter(relative.items()))
        raise InputError(
            "paths of a submitted run are paths on the cluster and begin with / or ~; relative are "
            f"{', '.join(f'{key} = {given}' for key, given in relative.items())}; set each like "
            f"--set {first}=/shared/{Path(path).name}"
        )


def given_environment(given: Iterable[str], here: Mapping[str, str]) -> dict[str, str]:
    """The variables of `--env NAME=VALUE`; NAME alone has the value that it has here."""
    environment = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name.isidentifier() or (not equals and name not in here):
            raise InputError(
                f"--env {each} names no variable; write it like --env NAME=VALUE, or NAME of one "
                "that is set here"
            )
        environment[name] = value if equals else here[name]
    return environment
