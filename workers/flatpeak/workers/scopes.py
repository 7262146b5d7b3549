"""Named scopes that say which component the work on this thread belongs to.

Operators open a scope around what they allocate; a `PeakMeter` attributes live bytes to the
innermost open one, and `progress` tells other threads of it. Without a meter a scope costs about a
microsecond.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from flatpeak.workers import progress

OTHER = "other"


class ScopeObserver(Protocol):
    def entered(self, name: str) -> None: ...

    def left(self) -> None: ...


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_stack = _Stack()
_observers: list[ScopeObserver] = []


@contextmanager
def scope(name: str) -> Iterator[None]:
    _stack.names.append(name)
    progress.in_scope(name)
    # The observers of the entry see the exit too, even when one joins or goes in between.
    observers = tuple(_observers)
    for observer in observers:
        observer.entered(name)
    try:
        yield
    finally:
        for observer in observers:
            observer.left()
        _stack.names.pop()
        progress.in_scope(_stack.names[-1] if _stack.names else "")


@contextmanager
def operator_scope(name: str, device: torch.device) -> Iterator[None]:
    """`scope(name)` in the dtypes that the operator writes down: autocast, off inside, would round
    what it takes care to keep in fp32."""
    with scope(name), torch.autocast(device.type, enabled=False):
        yield


def current_scope() -> str:
    """The innermost open scope of this thread, or `other`."""
    return _stack.names[-1] if _stack.names else OTHER


@contextmanager
def observed(observer: ScopeObserver) -> Iterator[None]:
    """Tell `observer` of every scope that opens and closes, on any thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
