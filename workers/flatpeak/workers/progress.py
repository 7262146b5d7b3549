"""What this process does now, for another thread of it to read while it works or hangs.

One thread at a time computes: the one that runs the step or, in a backward pass on CUDA, autograd's
thread of the device, for which the first one waits. Whichever opened or closed a scope last says
where the process is. Nothing here takes a lock: who reads may see a moment's mixture, who writes
never waits.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

IDLE = "idle"
PEERS = "its peers"
WEIGHTS = "its weights"
_OURS = f"{os.sep}flatpeak{os.sep}"


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a process did at one moment."""

    step: int = 0
    phase: str = IDLE
    """Part of the step."""
    scope: str = ""
    """The innermost open one, where any is."""
    waits_for: str = ""
    """For whom it stands still, where it does so by its own word: `PEERS` or `WEIGHTS`."""
    moves: int = 0
    """Scopes, phases and waits that it came to so far; ranks of a job come to the same ones."""
    still_s: float = 0.0
    """Since the last of these began or ended."""
    line: str = ""
    """The line of this package under way."""

    def described(self) -> str:
        """As it stands in a message, after the name of the process."""
        where = f"in {self.scope}, " if self.scope else ""
        during = f"{self.phase} {'after' if self.phase == IDLE else 'of'} step {self.step}"
        waits = f", waiting for {self.waits_for}" if self.waits_for else ""
        line = f" ({self.line})" if self.line else ""
        return f"{where}{during}{waits}, for {self.still_s:.1f} s{line}"


class _Now:
    def __init__(self) -> None:
        self.step, self.moves = 0, 0
        self.phase, self.scope, self.waits_for = IDLE, "", ""
        self.since = time.monotonic()
        self.thread = 0
        self.waited_s = 0.0

    def move(self) -> None:
        self.moves += 1
        self.thread = threading.get_ident()
        self.since = time.monotonic()


_now = _Now()


def begin(step: int) -> None:
    """From now on the process works on `step`."""
    _now.step = step
    enter("begin")


def enter(phase: str) -> None:
    """From now on it does this part of its step."""
    _now.phase = phase
    _now.move()


def in_scope(scope: str) -> None:
    """From now on this is the innermost scope that is open; none where it is empty."""
    _now.scope = scope
    _now.move()


@contextmanager
def waiting(for_whom: str = PEERS) -> Iterator[None]:
    """Around what returns only when others have done their part."""
    before, _now.waits_for = _now.waits_for, for_whom
    _now.move()
    began = time.perf_counter()
    try:
        yield
    finally:
        if for_whom == PEERS:
            _now.waited_s += time.perf_counter() - began
        _now.waits_for = before
        _now.move()


def waited_s() -> float:
    """Seconds that the host stood still for its peers since the process began."""
    return _now.waited_s


def beat() -> Beat:
    """What the process does now. From any thread."""
    return Beat(
        step=_now.step,
        phase=_now.phase,
        scope=_now.scope,
        waits_for=_now.waits_for,
        moves=_now.moves,
        still_s=time.monotonic() - _now.since,
        line=_line(sys._current_frames().get(_now.thread)),
    )


def _line(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if _OURS in code.co_filename and code.co_filename != __file__:
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
