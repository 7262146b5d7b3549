"""The largest value of the recent past."""

import threading
import time
from collections import deque
from collections.abc import Callable


class WindowPeak:
    """The largest value recorded in the last `window_s` seconds, and at least the newest one.

    Reading consumes nothing. Values are recorded on one thread and read on others.
    """

    def __init__(self, window_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
        # Times ascend and values descend: a value hides all earlier ones that are not larger.
        self._held: deque[tuple[float, float]] = deque()
        self._lock = threading.Lock()

    def record(self, value: float) -> None:
        with self._lock:
            while self._held and self._held[-1][1] <= value:
                self._held.pop()
            self._held.append((self._clock(), value))
            self._forget()

    def peak(self) -> float:
        """0 before the first value."""
        with self._lock:
            self._forget()
            return self._held[0][1] if self._held else 0.0

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while len(self._held) > 1 and self._held[0][0] < oldest:
            self._held.popleft()
