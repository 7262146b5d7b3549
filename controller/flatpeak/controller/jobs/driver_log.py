"""What the driver of a submitted run prints: the lines of `flatpeak train --json` among others.

The same file has what Ray says of the job and whatever a dying process writes on standard error.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flatpeak.controller.display import event_line, step_line, summary_line
from flatpeak.controller.runs import RunEvent, StepRecord, Summary

_KINDS: dict[str, TypeAdapter[Any]] = {
    "step": TypeAdapter(StepRecord),
    "event": TypeAdapter(RunEvent),
    "summary": TypeAdapter(Summary),
}


@dataclass(frozen=True)
class Refusal:
    """Why the driver ended, in its own words."""

    message: str


Record = StepRecord | RunEvent | Summary | Refusal
Found = TypeVar("Found", StepRecord, RunEvent, Summary, Refusal)


def record_of(line: str) -> Record | None:
    """None for a line that is no record of the driver."""
    try:
        content = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    match content:
        case {"type": str(kind), **rest} if kind in _KINDS:
            try:
                return _KINDS[kind].validate_json(json.dumps(rest))
            except ValidationError:  # another program's line, or another version's
                return None
        case {"error": {"message": str(message)}}:
            return Refusal(message)
    return None


def last_of(kind: type[Found], lines: Iterable[str]) -> Found | None:
    """The last record of a kind in `lines`, or None."""
    found = (record for line in reversed([*lines]) if isinstance(record := record_of(line), kind))
    return next(found, None)


def shown_line(line: str, *, steps: int) -> str | None:
    """A line as a reader wants it; None where the record says nothing to one."""
    match record_of(line):
        case StepRecord() as step:
            return step_line(step, steps=steps)
        case RunEvent() as happened:
            return event_line(happened)
        case Summary() as summary:
            return summary_line(summary)
        case Refusal():
            return None  # it is beside it as text
    return line
