"""Seconds by the clock that sees the work: the device's own, or the wall."""

import time
from collections.abc import Callable

import torch


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Of one call: on `cuda` between two events of the current stream, on `cpu` by the wall."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000
