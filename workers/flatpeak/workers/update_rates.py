"""How fast this machine updates buckets, measured: what `update_on: auto` divides by."""

import time
from collections.abc import Callable
from statistics import median

import torch

from flatpeak.kernels.adamw import Coefficients, adamw
from flatpeak.kernels.adamw_device import adamw_
from flatpeak.workers.buckets import ITEM_BYTES
from flatpeak.workers.update_split import DeviceRates

# Far beyond any cache, and milliseconds on any link.
_ELEMENTS = 16_777_216
_REPEATS = 5
_COEFFICIENTS = Coefficients.of(updates=1, lr=0.0, betas=(0.9, 0.95), eps=1e-8, decay=0.0)


def measure_device_rates(device: torch.device, *, elements: int = _ELEMENTS) -> DeviceRates:
    """Of the link in both directions and of the update; for all ranks of a node at once."""
    host = torch.zeros(elements, pin_memory=device.type == "cuda")
    p, m, v, g = torch.zeros(4, elements, device=device)
    weights = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    into = _seconds(device, lambda: p.copy_(host, non_blocking=True))
    out = _seconds(device, lambda: host.copy_(p, non_blocking=True))
    update = _seconds(device, lambda: adamw_(p, m, v, g, weights, _COEFFICIENTS))
    nbytes = elements * ITEM_BYTES["float32"]
    return DeviceRates(nbytes / into, nbytes / out, elements / update)


def measure_host_rate(*, elements: int = _ELEMENTS) -> float:
    """Parameters that this process updates a second; for all actors of a node at once."""
    p, m, v, g = torch.zeros(4, elements)
    new = torch.zeros(3, elements)
    weights = torch.zeros(elements, dtype=torch.bfloat16)
    update = _seconds(
        torch.device("cpu"),
        lambda: adamw(p, m, v, g, new[0], new[1], new[2], weights, _COEFFICIENTS),
    )
    return elements / update


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median of a few runs, after one that warms up."""
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    return median([clock(work) for _ in range(1 + _REPEATS)][1:])


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cuda_seconds(work: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
