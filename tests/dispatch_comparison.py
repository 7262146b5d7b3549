"""Expert dispatch and what it is compared with: one case, the methods, and how they are measured.

A case is one MoE layer of random weights and tokens with a routing profile. Every method computes
its output and, with `backward`, all gradients: of the tokens and the route weights, and of this
rank's expert weights in fp32.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expert_parallel import Group, Planner, expert_parallel
from flatpeak.workers.dispatch import DispatchOptions, moe_forward, plan_least_loaded
from flatpeak.workers.dispatch.assignment import Counts, DispatchPlan, plan_native
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.partition import part
from moe_families import PlainExperts, profile

BALANCED = "balanced"
NAMES = ("gate_up_proj", "down_proj")
# Dense rows are computed a block at a time, so that the reference itself fits.
DENSE_BLOCK = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer on `ranks` ranks; picklable."""

    ranks: int
    profile: str
    """`balanced`, or `r/h`: r percent of the tokens choose among h hot experts."""
    tokens: int
    """On each rank."""
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: torch.dtype
    backward: bool
    options: DispatchOptions

    def expert_ids(self) -> Tensor:
        percent, hot = (0, 0) if self.profile == BALANCED else map(int, self.profile.split("/"))
        return profile(self.tokens, self.experts, self.top_k, percent, hot)


@dataclass(frozen=True)
class Work:
    """What one rank computes with."""

    case: Case
    experts: PlainExperts
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    upstream: Tensor
    group: Group

    @property
    def inputs(self) -> list[Tensor]:
        return [self.hidden, self.ids, self.weights, self.upstream, *self.parameters.values()]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: getattr(self.experts, name) for name in NAMES}


def make_work(case: Case, rank: int, *, group: Group, device: str = "cpu") -> Work:
    make = torch.Generator().manual_seed(rank)
    ids = case.expert_ids()
    hidden, upstream = torch.randn(2, case.tokens, case.hidden, generator=make)
    weights = torch.rand(ids.shape, generator=make) + 0.1
    weights = weights / weights.sum(-1, keepdim=True)
    hidden, weights, upstream = (
        # Copies: halves of one storage would both count while one of them lives.
        value.to(device, case.dtype, copy=True)
        for value in (hidden, weights, upstream)
    )
    owned = slice(*part(case.experts, case.ranks, rank))
    experts = make_experts(case, owned).to(device, case.dtype)
    return Work(case, experts, hidden, ids.to(device), weights, upstream, group)


def make_experts(case: Case, owned: slice) -> PlainExperts:
    """A slice of all experts, in fp32; `num_experts` stays global."""
    module = PlainExperts(0)
    module.num_experts = case.experts
    for name, weight in zip(
        NAMES, _all_experts(case.experts, case.hidden, case.intermediate), strict=True
    ):
        setattr(module, name, nn.Parameter(weight[owned].clone()))
    return module


@lru_cache(maxsize=1)  # the same in every case of a run
def _all_experts(experts: int, hidden: int, intermediate: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(-1)
    gate_up = torch.randn(experts, 2 * intermediate, hidden, generator=make)
    down = torch.randn(experts, hidden, intermediate, generator=make)
    return gate_up.mul_(hidden**-0.5), down.mul_(intermediate**-0.5)


# A method computes the output of leaves (hidden, route weights) and lets the backward pass leave
# the gradients of the expert weights in the dictionary, by name.
Gradients = dict[str, Tensor]
Method = Callable[[Work, Tensor, Tensor, Gradients], Tensor]


def ours(work: Work, hidden: Tensor, weights: Tensor, gradients: Gradients) -> Tensor:
    names = {id(parameter): name for name, parameter in work.parameters.items()}

    def receive(parameter: nn.Parameter, gradient: Tensor) -> None:
        gradients[names[id(parameter)]] = gradient

    return moe_forward(
        work.experts,
        hidden,
        work.ids,
        weights,
        group=work.group,
        options=work.case.options,
        grad_sink=receive,
    )


def _expert_parallel(
    planner: Callable[[Case], Planner],
    work: Work,
    hidden: Tensor,
    weights: Tensor,
    gradients: Gradients,
) -> Tensor:
    if work.case.backward:
        wide = torch.promote_types(work.case.dtype, torch.float32)
        gradients |= {n: torch.zeros_like(p, dtype=wide) for n, p in work.parameters.items()}
    return expert_parallel(
        work.experts,
        hidden,
        work.ids,
        weights,
        group=work.group,
        planner=planner(work.case),
        gradients=list(gradients.values()),
    )


def least_loaded(case: Case) -> Planner:
    """The published plan: any number of foreign experts, native while the load is balanced."""

    def plan(counts: Counts) -> DispatchPlan:
        native, options = plan_native(counts), case.options
        if max(native.loads) * native.ranks <= options.balance_above * sum(native.loads):
            return native
        return plan_least_loaded(
            counts,
            capacity_factor=options.capacity_factor,
            min_chunk=options.min_chunk,
            max_foreign=case.experts,
        )

    return plan


def dense(work: Work, hidden: Tensor, weights: Tensor, gradients: Gradients) -> Tensor:
    """Eager autograd over all experts, which must all be here."""
    output = torch.zeros_like(hidden)
    # Unbound once: indexing would make a gradient of all experts for each of them.
    parts = (parameter.unbind(0) for parameter in work.parameters.values())
    for expert, (up, down) in enumerate(zip(*parts, strict=True)):
        token, slot = torch.where(work.ids == expert)
        value = work.experts._apply_gate(hidden[token] @ up.T) @ down.T
        output.index_add_(0, token, value * weights[token, slot, None])
    return output


METHODS: dict[str, Method] = {
    "ours": ours,
    "llep": partial(_expert_parallel, least_loaded),
    "plain_ep": partial(_expert_parallel, lambda case: plan_native),
    "dense": dense,
}


def run_pass(method: Method, work: Work) -> dict[str, Tensor]:
    """One forward pass and, where the case says so, one backward: all results by name."""
    hidden, weights = (t.detach().requires_grad_() for t in (work.hidden, work.weights))
    gradients: Gradients = {}
    output = method(work, hidden, weights, gradients)
    results = {"output": output.detach()}
    if not work.case.backward:
        return results
    output.backward(work.upstream)
    assert hidden.grad is not None
    assert weights.grad is not None
    for name, parameter in work.parameters.items():
        if parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad, None
    return results | {"hidden": hidden.grad, "weights": weights.grad} | gradients


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
    fault each 4 KiB: on layer-sized buffers half of a method's time, and no part of the method.
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
    if work.hidden.is_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run_pass(method, work)
        end.record()
        end.synchronize()
        wall = begin.elapsed_time(end) / 1000
    else:
        start = time.perf_counter()
        run_pass(method, work)
        wall = time.perf_counter() - start
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
