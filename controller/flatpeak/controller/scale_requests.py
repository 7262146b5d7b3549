"""How `flatpeak scale` reaches a running job: a file in the run folder, answered by an event.

Whoever asks puts `scale.json` there, of which there is one at a time. The driver takes it away and
hands it to the controller; the event with the request's id, in `events.jsonl`, is the answer.
"""

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from flatpeak.controller.runs import RunEvent, RunFolder
from flatpeak.workers.errors import InputError, RunFailed, WaitTimeout

DONE, REFUSED = "optimizers_scaled", "scaling_refused"
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """The content of scale.json: so many optimizer actors are wanted."""

    id: str
    optimizers: int


_REQUEST = TypeAdapter(ScaleRequest)


def scale_run(folder: RunFolder, optimizers: int, *, timeout_s: float) -> RunEvent:
    """Asks the driver of a run for so many optimizer actors; returns the event `DONE`.

    Raises InputError when the run does not live, or refuses, with its reason; RunFailed when it
    ends first; WaitTimeout when nothing happened in time, and takes the request back if it can.
    """
    info = folder.info
    if not info.alive:
        raise InputError(f"the run {info.run} is {info.seen_state}: there is nothing to scale")
    new_events = folder.follow_events()
    new_events()
    request = ScaleRequest(id=secrets.token_hex(8), optimizers=optimizers)
    put_request(folder, request)
    deadline = time.monotonic() + timeout_s
    while True:
        # In this order: what a run says last it says before it ends.
        ended = not folder.info.alive
        for happened in new_events():
            if happened.detail.get("request") == request.id:
                return _granted(happened)
        if ended:
            _take_back(folder)
            raise RunFailed(f"the run {info.run} ended ({folder.info.seen_state}) before it scaled")
        if time.monotonic() > deadline:
            stands = "was not looked at and is taken back"
            if not _take_back(folder):
                stands = "is under way, and flatpeak watch will show its end"
            raise WaitTimeout(
                f"process {info.pid} on {info.host}, which drives the run {info.run}, did not get "
                f"to {optimizers} optimizer actors within {timeout_s:g} s; the request {stands}. "
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


def _take_back(folder: RunFolder) -> bool:
    try:
        _path(folder).unlink()
    except FileNotFoundError:
        return False
    return True


def _path(folder: RunFolder) -> Path:
    return folder.path / "scale.json"
