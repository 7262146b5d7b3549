"""Lanes of work beside the caller, and marks by which they wait for each other."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

Lane = Literal["in", "update", "out", "weights"]


class Streams(Protocol):
    """Lanes, each of which does its work in the order of issue."""

    def issue(self, lane: Lane, work: Callable[[], None], *, after: Sequence[Any] = ()) -> Any:
        """Have `work` done on `lane` after all `after`; returns the mark of its end."""
        ...

    def now(self) -> Any:
        """A mark that all work issued so far to the current stream comes before."""
        ...

    def finish(self, mark: Any) -> None:
        """Return when the mark is reached."""
        ...


class Synchronous:
    """On the CPU: work is done when it is issued."""

    def issue(self, lane: Lane, work: Callable[[], None], *, after: Sequence[None] = ()) -> None:
        work()

    def now(self) -> None:
        return None

    def finish(self, mark: None) -> None:
        pass


class CudaStreams:
    """A stream a lane, made when it is first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {}

    def issue(
        self, lane: Lane, work: Callable[[], None], *, after: Sequence[torch.cuda.Event] = ()
    ) -> torch.cuda.Event:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self._device)
        stream = self._streams[lane]
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            work()
        return self._mark(stream)

    def now(self) -> torch.cuda.Event:
        return self._mark(torch.cuda.current_stream(self._device))

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Who waits for it sleeps: the core belongs to the forward pass.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Synchronous()
