"""Named scopes that say which component the work on this thread belongs to.

Operators open a scope around what they allocate; a `PeakMeter` attributes live bytes to the
innermost open one. Without a meter a scope costs a list append and a pop.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

OTHER = "other"


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_stack = _Stack()


@contextmanager
def scope(name: str) -> Iterator[None]:
    _stack.names.append(name)
    try:
        yield
    finally:
        _stack.names.pop()


def current_scope() -> str:
    """The innermost open scope of this thread, or `other`."""
    return _stack.names[-1] if _stack.names else OTHER
