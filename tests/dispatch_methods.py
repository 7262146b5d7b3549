"""Expert dispatch and what it is compared with, on one case.

A case is one MoE layer of random weights and tokens with a routing profile. Every method computes
its output and, with `backward`, all gradients: of the tokens and the route weights, and of this
rank's expert weights in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from expert_parallel import Group, Planner, expert_parallel, expert_parallel_autograd
from flatpeak.workers.dispatch import DispatchOptions, Routing, moe_forward, plan_least_loaded
from flatpeak.workers.dispatch.assignment import Counts, DispatchPlan, plan_native
from flatpeak.workers.partition import part
from moe_families import PlainExperts, profile

BALANCED = "balanced"
NAMES = ("gate_up_proj", "down_proj")


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
        """[N, k], on every rank."""
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
    routings: list[Routing] = field(default_factory=list)
    """What our method agreed on, pass by pass."""

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
        on_routing=work.routings.append,
    )


def _baseline(
    layer: Callable[..., Tensor],
    planner: Callable[[Case], Planner],
    work: Work,
    hidden: Tensor,
    weights: Tensor,
    gradients: Gradients,
) -> Tensor:
    if work.case.backward:
        wide = torch.promote_types(work.case.dtype, torch.float32)
        gradients |= {n: torch.zeros_like(p, dtype=wide) for n, p in work.parameters.items()}
    return layer(
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
    "llep": partial(_baseline, expert_parallel, least_loaded),
    "llep_autograd": partial(_baseline, expert_parallel_autograd, least_loaded),
    "plain_ep": partial(_baseline, expert_parallel, lambda case: plan_native),
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
