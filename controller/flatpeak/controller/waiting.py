"""Waiting for actors: the first failure surfaces at once, a timeout names who was waited for."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from flatpeak.workers.errors import FlatpeakError, RunFailed, WaitTimeout

_POLL_S = 0.25


class Interrupted(Exception):
    """Somebody asked the run to stop while it waited."""


def collect(
    refs: Mapping[str, Any],
    *,
    what: str,
    timeout_s: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The results of `refs` (who was asked, to the object reference of the answer).

    Raises the first failure as soon as it is there, without waiting for the others: a rank that
    fails leaves its peers in a collective. Raises WaitTimeout naming those that did not answer, and
    Interrupted when `interrupted` says so.
    """
    names = {ref: name for name, ref in refs.items()}
    waiting, results = list(refs.values()), {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        if interrupted():
            raise Interrupted
        if time.monotonic() > deadline:
            missing = ", ".join(sorted(names[ref] for ref in waiting))
            raise WaitTimeout(
                f"{what}: no answer from {missing} within {timeout_s:g} s; raise "
                "cluster.step_timeout_s or cluster.start_timeout_s if they only need longer"
            )
        ready, waiting = ray.wait(waiting, timeout=_POLL_S)
        for ref in ready:
            results[names[ref]] = _get(ref, names[ref], what)
    return results


def _get(ref: Any, who: str, what: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, FlatpeakError):
            raise type(cause)(f"{who}: {cause}") from None
        raise RunFailed(f"{what}: {who} raised\n{error}") from None
    except RayActorError as error:
        raise RunFailed(f"{what}: {who} died: {error}") from None
