"""SIGINT and SIGTERM of a process that drives a run.

Before there is anything to clean up, both raise KeyboardInterrupt. From the start of Ray on they
are only counted, and the driver looks at the count between two waits: an exception that comes up
in the middle of Ray's own code would leave half of it behind.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM (`flatpeak stop`, a batch system) raises KeyboardInterrupt like SIGINT."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class StopSignals(AbstractContextManager["StopSignals"]):
    """Inside, SIGINT and SIGTERM are counted and do nothing else.

    In a thread that is not the main one no signal arrives, and the count stays 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            # One that is ignored stays so: a shell's background job is not meant for Ctrl-C.
            handlers = {number: signal.getsignal(number) for number in _STOPPING}
            self._before = {n: h for n, h in handlers.items() if h is not signal.SIG_IGN}
            self.catch()
        return self

    def catch(self) -> None:
        """Takes the signals, also from Ray, which handles SIGTERM itself once it has started."""
        for number in self._before:
            signal.signal(number, self._note)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: Any) -> None:
        self.count += 1
