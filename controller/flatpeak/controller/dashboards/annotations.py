"""Marks in Grafana for what happens to a run, made beside it and never in its way."""

import queue
import threading
from contextlib import suppress
from typing import Self

from flatpeak.controller.dashboards.grafana import Grafana
from flatpeak.controller.display import event_line
from flatpeak.controller.runs import Event, RunEvent
from flatpeak.workers.errors import FlatpeakError

MARKED = frozenset(
    {
        "started",
        "resumed",
        "snapshot",
        "snapshot_failed",
        "optimizer_lost",
        "optimizer_replaced",
        "optimizers_scaled",
        "worker_lost",
        "workers_replaced",
        "interrupted",
        "failed",
        "finished",
    }
)
_WAITING = 1000
_LAST_WORDS_S = 5.0


class Annotator:
    """Sends the marked events of a run to Grafana, if there is one, on a thread of its own.

    The first failure ends it: `take_failure` then gives the reason, once. Leaving waits a few
    seconds for what is still to be sent.
    """

    def __init__(self, grafana: Grafana | None, run: str) -> None:
        self._grafana, self._run = grafana, run
        self._failure: str | None = None
        self._events: queue.Queue[RunEvent | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="annotations", daemon=True)

    def __call__(self, event: Event) -> None:
        if self._grafana is None:
            return
        if isinstance(event, RunEvent) and event.kind in MARKED:
            self._put(event)

    def take_failure(self) -> str | None:
        failure, self._failure = self._failure, None
        return failure

    def __enter__(self) -> Self:
        if self._grafana is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._grafana is not None:
            self._put(None)
            self._thread.join(_LAST_WORDS_S)

    def _put(self, event: RunEvent | None) -> None:
        # Where Grafana is that slow, a mark less, and no wait for the run.
        with suppress(queue.Full):
            self._events.put_nowait(event)

    def _send_all(self) -> None:
        assert self._grafana is not None
        while (event := self._events.get()) is not None:
            text = event_line(event) or event.kind
            try:
                self._grafana.annotate(
                    text, tags=["flatpeak", self._run, event.kind], time_s=event.time
                )
            except FlatpeakError as failure:
                self._failure = f"{failure}; no more marks are made there"
                return
