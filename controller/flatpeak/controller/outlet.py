"""Where the events of a run go beside its folder: sent from a thread, never in the run's way."""

import queue
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self

from flatpeak.controller.runs import Event
from flatpeak.workers.errors import FlatpeakError

_WAITING = 1000


class Outlet(ABC):
    """Hands the events that it wants to `send`, one after the other, on a thread of its own.

    The first failure ends it: `take_failure` then gives the reason, once. Leaving waits for what is
    still to be sent, `last_words_s` at most.
    """

    def __init__(self, name: str, *, consequence: str, last_words_s: float) -> None:
        """`consequence` is what a failure means for the user, who is told of it."""
        self._name, self._consequence, self._last_words_s = name, consequence, last_words_s
        self._failure: str | None = None
        self._over = False
        self._run_failed = False
        self._events: queue.Queue[Event | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._send_all, name=name, daemon=True)

    @abstractmethod
    def wants(self, event: Event) -> bool: ...

    @abstractmethod
    def send(self, event: Event) -> None:
        """On the thread; may take its time, and may raise."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """On the thread, after the last event, unless `send` raised. `failed` is of the run."""

    def __call__(self, event: Event) -> None:
        if self._over or not self.wants(event):
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:  # an event less, and no wait for the run
            self._over = True
            self._fail(f"{self._name} is {_WAITING} records behind")

    def take_failure(self) -> str | None:
        failure, self._failure = self._failure, None
        return failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run_failed = isinstance(error, Exception)  # and not Ctrl-C
        with suppress(queue.Full):
            self._events.put(None, timeout=self._last_words_s)
        self._thread.join(self._last_words_s)
        if self._thread.is_alive():
            self._fail(f"{self._name} had not taken everything after {self._last_words_s:g} s")

    def _send_all(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self.send(event)
            self.finish(failed=self._run_failed)
        except Exception as error:  # whatever a library raises, the run goes on
            self._over = True
            known = isinstance(error, FlatpeakError)
            self._fail(str(error) if known else f"{self._name}: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self._failure = f"{reason}; {self._consequence}"
