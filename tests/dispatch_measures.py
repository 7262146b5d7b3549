"""How a dispatch method is measured on one rank: bytes, seconds, and the error against dense."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from device_clock import seconds_of
from dispatch_methods import NAMES, Method, Work, dense, make_experts, run_pass
from expert_parallel import Group
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.partition import part

# Dense rows are computed a block at a time, so that the reference itself fits.
DENSE_BLOCK = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True)
class Metered:
    results: dict[str, Tensor]
    resident_bytes: int
    """Inputs, expert weights, outputs, and all gradients."""
    peak_bytes: int
    """Most bytes at once, residents counted."""
    sent_bytes: int

    @property
    def increment_bytes(self) -> int:
        return self.peak_bytes - self.resident_bytes


def meter(method: Method, work: Work) -> Metered:
    if work.hidden.is_cuda:
        run_pass(method, work)  # what libraries allocate for good is no part of a peak
    given = sum(tensor.nbytes for tensor in work.inputs)
    memory, sent = PeakMeter(device=work.hidden.device), SentBytes(work.group)
    with memory, sent, waits_settled():
        for tensor in work.inputs:
            memory.track(tensor, "given")
        # The allocator of a device also holds the dense results, and what libraries keep.
        before = memory.live()[TOTAL] - given
        memory.reset_peaks()
        results = run_pass(method, work)
        peak = memory.peaks()[TOTAL] - before
    resident = given + sum(tensor.nbytes for tensor in results.values())
    return Metered(results, resident, peak, sent.total)


@contextmanager
def waits_settled() -> Iterator[None]:
    """Give gloo's thread the moment that it needs, after a wait has returned, to let go of what was
    sent, so that the peak of no method depends on who is faster."""
    wait = dist.Work.wait

    def settled(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        done = wait(self, *args, **kwargs)
        time.sleep(0.001)
        return done

    dist.Work.wait = settled
    try:
        yield
    finally:
        dist.Work.wait = wait


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends to others by all-to-all or point to point."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.total = 0
        self._rank = 0 if group is None else group.rank()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default:
            rows, splits = args[1], args[4]
            if len(rows):
                row_bytes = rows.nbytes // len(rows)
                self.total += row_bytes * (sum(splits) - splits[self._rank])
        elif func is torch.ops.c10d.send.default:
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let glibc keep freed memory for the next tensor, as a device's caching allocator does.

    Left alone it returns large buffers to the system at once, and every new one then costs a page
    fault each 4 KiB: a third of LLEP's processor time, and no part of the method.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        yield
        return
    trim_threshold, mmap_max = -1, -4  # names of malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(mmap_max, 65536)
        mallopt(trim_threshold, 2**17)
        ctypes.CDLL(None).malloc_trim(0)


def clock(method: Method, work: Work) -> tuple[float, float]:
    """Wall and CPU seconds of one pass on this rank, from a barrier; wall is the device's."""
    if work.group is not None:
        dist.barrier(work.group)
    cpu = time.process_time()
    wall = seconds_of(lambda: run_pass(method, work), work.hidden.device.type)
    return wall, time.process_time() - cpu


def dense_results(work: Work) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Dense results of this rank's tokens and of its experts' weights, and the largest entry of
    each on any rank. Every rank computes its own tokens with all experts. Collective."""
    case, wide = work.case, torch.promote_types(work.case.dtype, torch.float32)
    every = make_experts(case, slice(None)).to(work.hidden.device, case.dtype).to(wide)
    totals = {name: torch.zeros_like(getattr(every, name)) for name in NAMES}
    found: dict[str, list[Tensor]] = {"output": [], "hidden": [], "weights": []}
    size = DENSE_BLOCK[work.hidden.device.type]
    for start in range(0, max(1, case.tokens), size):
        rows = slice(start, start + size)
        tokens = [t[rows].to(wide) for t in (work.hidden, work.weights, work.upstream)]
        part_of = Work(case, every, tokens[0], work.ids[rows], tokens[1], tokens[2], None)
        results = run_pass(dense, part_of)
        for name, value in results.items():
            totals[name].add_(value) if name in NAMES else found[name].append(value)
    results = {name: torch.cat(values) for name, values in found.items() if values}
    if case.backward:
        owned = [part(case.experts, case.ranks, each) for each in range(case.ranks)]
        sizes = [stop - start for start, stop in owned]
        results |= {n: _sum_to_owner(total, sizes, work.group) for n, total in totals.items()}
    scales = torch.stack(
        [v.abs().max() if v.numel() else v.new_zeros(()) for v in results.values()]
    )
    if work.group is not None:
        dist.all_reduce(scales, dist.ReduceOp.MAX, work.group)
    return results, dict(zip(results, scales.tolist(), strict=True))


def _sum_to_owner(total: Tensor, sizes: list[int], group: Group) -> Tensor:
    """Each rank's part of dimension 0, of the given sizes, summed over the ranks."""
    if group is None:
        return total
    mine = sizes[group.rank()]
    parts = total.new_empty((group.size() * mine, *total.shape[1:]))
    dist.all_to_all_single(parts, total, [mine] * group.size(), sizes, group=group)
    return parts.view(group.size(), mine, *total.shape[1:]).sum(0)


def error(results: dict[str, Tensor], wanted: dict[str, Tensor], scales: dict[str, float]) -> float:
    """The largest deviation of any result, relative to the largest entry of the dense one."""
    assert results.keys() == wanted.keys(), f"{results.keys()} are not {wanted.keys()}"
    errors = [
        (results[name] - value).abs().max().nan_to_num(nan=torch.inf).item() / (scales[name] or 1.0)
        for name, value in wanted.items()
        if value.numel()
    ]
    return max(errors, default=0.0)
