"""Two lanes of work: one computes, one gathers, sends, receives and adds what travels.

On CUDA each lane is a stream and an event orders one after the other. On CPU both are the program
itself: only the collectives run beside it.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch


class Lanes(Protocol):
    def travelling(self) -> AbstractContextManager[Any]:
        """Work issued inside goes to the travel lane, all other to the compute lane."""
        ...

    def mark(self) -> Any:
        """A point in the current lane, after all work issued to it so far."""
        ...

    def follow(self, mark: Any) -> None:
        """Work issued to the current lane from now on waits for the mark."""
        ...


class OneLane:
    """Work happens when it is issued."""

    def travelling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def follow(self, mark: None) -> None:
        pass


class SideStream:
    """The compute lane is the stream that is current outside of `travelling`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def travelling(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


@cache
def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device, one pair for all layers."""
    return SideStream(device) if device.type == "cuda" else OneLane()
