"""How `flatpeak scale` reaches a running job: a file in the run folder, answered by an event.

Whoever asks puts `scale.json` there, of which there is one at a time. The driver takes it away and
hands it to the controller; the event with the request's id, in `events.jsonl`, is the answer.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from flatpeak.controller.display import count
from flatpeak.controller.runs import RunEvent, RunFolder
from flatpeak.workers.errors import InputError, RunFailed, WaitTimeout

DONE, REFUSED = "optimizers_scaled", "scaling_refused"
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """The content of scale.json: what is wanted, of one of the two. `degrees` are those of the
    groups of workers that are not to be as the job says."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    optimizers: int | None = None
    workers: int | None = None
    degrees: dict[str, int | Literal["auto"]] = field(default_factory=dict)

    @property
    def wanted(self) -> str:
        if self.workers is not None:
            return count(self.workers, "worker")
        return count(self.optimizers or 0, "optimizer actor")


_REQUEST = TypeAdapter(ScaleRequest)


def scale_request(
    *, optimizers: int | None, workers: int | None, degrees: Mapping[str, str | None]
) -> ScaleRequest:
    """What a user asks for, where a degree is a number or `auto`; raises InputError for what is
    not one change."""
    if (optimizers is None) == (workers is None):
        raise InputError("give one of --optimizers and --workers, like --workers 4")
    given = {name: value for name, value in degrees.items() if value is not None}
    if given and workers is None:
        raise InputError(f"--{next(iter(given))} is for another number of --workers")
    found: dict[str, int | Literal["auto"]] = {}
    for name, value in given.items():
        if value != "auto" and not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise InputError(f"--{name} {value} is no degree; give a number of 1 or more, or auto")
        found[name] = "auto" if value == "auto" else int(value)
    return ScaleRequest(optimizers=optimizers, workers=workers, degrees=found)


def scale_run(folder: RunFolder, request: ScaleRequest, *, timeout_s: float) -> RunEvent:
    """Asks the driver of a run for what is wanted; returns the event that tells of its end.

    Raises InputError when the run does not live, or refuses, with its reason; RunFailed when it
    ends first; WaitTimeout when nothing happened in time, and takes the request back if it can.
    """
    info = folder.info
    if not info.alive:
        raise InputError(
            f"the run {info.run} does not go on ({info.seen_state}): there is nothing to scale"
        )
    new_events = folder.follow_events()
    new_events()
    put_request(folder, request)
    deadline = time.monotonic() + timeout_s
    while True:
        # In this order: what a run says last it says before it ends.
        ended = not folder.info.alive
        for happened in new_events():
            if happened.detail.get("request") == request.id:
                return _granted(happened)
        if ended:
            _take_back(folder, request)
            raise RunFailed(f"the run {info.run} ended ({folder.info.seen_state}) before it scaled")
        if time.monotonic() > deadline:
            stands = "was not looked at and is taken back"
            if not _take_back(folder, request):
                stands = "is under way, and flatpeak watch will show its end"
            raise WaitTimeout(
                f"process {info.pid} on {info.host}, which drives the run {info.run}, did not get "
                f"to {request.wanted} within {timeout_s:g} s; the request {stands}. "
                "It takes a step or two, and the start of processes: wait longer with --timeout"
            )
        time.sleep(_POLL_S)


def put_request(folder: RunFolder, request: ScaleRequest) -> None:
    """Raises InputError when another request has not been looked at yet."""
    path = _path(folder)
    making = path.with_name(f".{path.name}.{request.id}")
    try:
        making.write_text(json.dumps(asdict(request)))
        try:
            os.link(making, path)  # whole, and never over another one
        finally:
            making.unlink()
    except FileExistsError:
        raise InputError(f"another request waits in {path}; wait until it was heard") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def take_request(folder: RunFolder) -> ScaleRequest | None:
    """The request that waits, if there is one, which is then gone; one that is none is dropped."""
    path = _path(folder)
    try:
        content = path.read_bytes()
        path.unlink()
    except OSError:  # none there; or a folder out of reach, which is no reason to end a run
        return None
    with suppress(ValidationError):
        return _REQUEST.validate_json(content)
    return None


def _granted(happened: RunEvent) -> RunEvent:
    if happened.kind == REFUSED:
        raise InputError(happened.detail["reason"])
    return happened


def _take_back(folder: RunFolder, request: ScaleRequest) -> bool:
    path = _path(folder)
    try:
        if _REQUEST.validate_json(path.read_bytes()) != request:
            return False  # it was taken, and this is another one
        path.unlink()
    except (FileNotFoundError, ValidationError):
        return False
    return True


def _path(folder: RunFolder) -> Path:
    return folder.path / "scale.json"
