"""Waiting for actors: the first failure surfaces at once, a timeout names who was waited for."""

import re
import time
from collections.abc import Callable, Collection, Container, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import ray
from ray.exceptions import (
    ActorDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from flatpeak.workers.errors import ConnectionLost, FlatpeakError, RunFailed, WaitTimeout

DEATHS_IN_A_STEP = 3
"""So many of one actor, or of the workers, in the same step end the run: a fourth try would not
help."""
_POLL_S = 0.25
_CAUSE_S = 2.0
_COLOURS = re.compile(r"\x1b\[\d*m")
_DEATHS = (RayActorError, OutOfMemoryError)


class Interrupted(Exception):
    """Somebody asked the run to stop while it waited."""


class Died(Exception):
    """`who` died, or lost a peer, as `cause` tells; the others had given `answers` until then."""

    def __init__(self, who: str, cause: FlatpeakError, answers: dict[str, Any]) -> None:
        super().__init__(who, cause, answers)
        self.who, self.cause, self.answers = who, cause, answers


class Hung(NamedTuple):
    """`who` lives and gets nowhere, as `how` tells."""

    who: str
    how: str


class Watch(Protocol):
    """Looks at those who are waited for, as `Heartbeats` do; each may be replaced."""

    def look(self) -> Hung | None: ...

    def overdue(self, owed: Collection[str], /) -> Hung | None: ...

    def described(self, owed: Collection[str], /) -> str: ...


class Answers(Protocol):
    """Where the answers come from: `ray`, or a stand-in in a test."""

    def wait(self, refs: list[Any], /, *, timeout: float) -> tuple[list[Any], list[Any]]: ...

    def get(self, ref: Any, /) -> Any: ...


def collect(
    refs: Mapping[str, Any],
    *,
    what: str,
    timeout_s: float,
    interrupted: Callable[[], bool] = lambda: False,
    last_seen: Callable[[str], str] = lambda who: "",
    mortal: Container[str] = (),
    watched: Mapping[str, Any] = MappingProxyType({}),
    watch: Watch | None = None,
    answers: Answers = ray,
) -> dict[str, Any]:
    """The results of `refs` (who was asked, to the object reference of the answer).

    Raises the first failure as soon as it is there, without waiting for the others: a rank that
    fails leaves its peers in a collective; so it does for `watched`, which are not waited for.
    `last_seen` says what is known of a process that died.
    Raises Died for one of `mortal` that is dead or cut off and for one that hangs as `watch` sees
    it, at once or when the time is over; WaitTimeout naming those that did not answer; and
    Interrupted when `interrupted` says so.
    """
    names = {ref: name for name, ref in (*refs.items(), *watched.items())}
    waiting, owed, results = [*refs.values(), *watched.values()], set(refs.values()), {}
    deadline = time.monotonic() + timeout_s
    while owed:
        if interrupted():
            raise Interrupted
        late = [names[ref] for ref in owed] if time.monotonic() > deadline else []
        if watch is not None:
            hung = watch.look() or (watch.overdue(late) if late else None)
            if hung is not None:
                raise Died(hung.who, RunFailed(f"{what}: {hung.who} {hung.how}"), results)
        if late:
            raise _timeout(what, sorted(late), timeout_s, watch)
        ready, waiting = answers.wait(waiting, timeout=_POLL_S)
        for ref in ready:
            try:
                answer = answers.get(ref)
            except RayError as error:
                others = [other for other in ready if other is not ref] + waiting
                failed, cause = _root_cause(ref, error, others, answers)
                described = describe(cause, names[failed], what, last_seen)
                if names[failed] in mortal and _is_death(cause):
                    raise Died(names[failed], described, results) from None
                raise described from None
            if ref in owed:
                owed.remove(ref)
                results[names[ref]] = answer
    return results


def _timeout(what: str, late: list[str], timeout_s: float, watch: Watch | None) -> WaitTimeout:
    doing = f" ({told})" if watch is not None and (told := watch.described(late)) else ""
    return WaitTimeout(
        f"{what}: no answer from {', '.join(late)} within {timeout_s:g} s{doing}; raise "
        "cluster.step_timeout_s or cluster.start_timeout_s if they only need longer"
    )


def _is_death(error: RayError) -> bool:
    """Whether the process is gone, or of no more use because a peer hung up on it."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, ConnectionLost)
    return isinstance(error, _DEATHS)


def describe(
    error: RayError, who: str, what: str, last_seen: Callable[[str], str] = lambda who: ""
) -> FlatpeakError:
    """What Ray says of a failed call, as an error of ours that names the process."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, FlatpeakError):
            return type(error.cause)(f"{who}: {error.cause}")
        return RunFailed(f"{what}: {who} raised\n{_COLOURS.sub('', str(error))}")
    known = "; ".join(part for part in (last_seen(who), _where(error)) if part)
    happened = "died" if isinstance(error, _DEATHS) else "did not answer"
    return RunFailed(f"{what}: {who} {happened}{f' ({known})' if known else ''}: {_why(error)}")


def listed(peaks: Mapping[str, int]) -> str:
    """Peaks as they stand in a message about a death."""
    return ", ".join(f"{name} {nbytes:,}" for name, nbytes in peaks.items()) or "not measured"


def _where(error: RayError) -> str:
    """Ray's facts are indented lines of its message; the names among them are of no use here."""
    facts = dict(re.findall(r"^\t(pid|ip): (.*)$", str(error), re.MULTILINE))
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _why(error: RayError) -> str:
    general = ActorDiedError.BASE_ERROR_MSG
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    return _COLOURS.sub("", "\n".join([line for line in lines if line != general] or lines))


def _root_cause(
    ref: Any, error: RayError, others: list[Any], answers: Answers
) -> tuple[Any, RayError]:
    """The failure to report: a rank whose peer dies fails too, and often before Ray says who died.

    Errors of ours say what is wrong, except that a peer hung up; to that and to any other one a
    death in the next moment is preferred.
    """
    if not isinstance(error, RayTaskError):
        return ref, error
    if isinstance(error.cause, FlatpeakError) and not isinstance(error.cause, ConnectionLost):
        return ref, error
    deadline = time.monotonic() + _CAUSE_S
    while others and (left := deadline - time.monotonic()) > 0:
        ready, others = answers.wait(others, timeout=left)
        for other in ready:
            try:
                answers.get(other)
            except _DEATHS as death:
                return other, death
            except RayError:
                continue
    return ref, error
