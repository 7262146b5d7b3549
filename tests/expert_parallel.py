"""Expert parallelism as it is trained today, to measure against: a row a route, the layer at once.

Routes are permuted by destination, exchanged, sorted by local expert, computed one matrix product
an expert, go the same way back and are summed by their route weights. The plan is a parameter:
`plan_native` gives plain expert parallelism, `plan_least_loaded` gives LLEP. There are two ways:

`expert_parallel_autograd`, as it is commonly written: indexing and sums by ordinary autograd, the
all-to-all in the usual differentiable wrapper, each expert's products under `checkpoint`.

`expert_parallel`, by hand and leaner than published, so that what any method may do is no credit to
bounded memory: gathers are gathers in backward too, a batched product sums the routes, and each
expert's gradients are written where they belong. What remains at the peak, in the experts' backward
pass, is three sets of routes: the rows, the gradients of their outputs, and their own.

In both, experts keep only their sorted input and recompute from it, one expert's activations are
alive at a time, weight gradients accumulate in place in fp32, foreign weights stay from forward to
backward, and autograd frees each buffer when its last reader is done.

Shapes: N tokens, k routes a token, H hidden width, M routes that land on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.dispatch.assignment import Counts, DispatchPlan

Group = dist.ProcessGroup | None
Planner = Callable[[Counts], DispatchPlan]


def expert_parallel(
    experts: nn.Module,
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    group: Group,
    planner: Planner,
    gradients: Sequence[Tensor],
) -> Tensor:
    """Sum over each token's experts of route weight times expert output, [N, H].

    experts: gated experts without biases, `gate_up_proj` and `down_proj` this rank's slices.
    hidden [N, H] (must require grad), expert_ids [N, k], expert_weights [N, k]: this rank's tokens.
    gradients: fp32 buffers shaped like the two slices; backward adds to them in place.

    Collective over `group`, forward and backward.
    """
    routes = agree(expert_ids, experts.num_experts, group, planner)  # type: ignore[arg-type]
    weights = (experts.gate_up_proj, experts.down_proj)
    rows = hidden.index_select(0, routes.order // expert_ids.shape[1])
    rows = _exchange(rows, routes.send, routes.receive, group)
    rows = _permute(rows, routes.by_expert, routes.by_source)
    rows = _Experts.apply(rows, experts, _Migration(routes, group), weights, gradients, routes.rows)
    rows = _permute(rows, routes.by_source, routes.by_expert)  # type: ignore[arg-type]
    rows = _exchange(rows, routes.receive, routes.send, group)
    rows = _permute(rows, routes.place, routes.order)
    rows = rows.view(*expert_ids.shape, hidden.shape[1])
    return torch.bmm(expert_weights.to(rows.dtype).unsqueeze(1), rows).squeeze(1)


def expert_parallel_autograd(
    experts: nn.Module,
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    group: Group,
    planner: Planner,
    gradients: Sequence[Tensor],
) -> Tensor:
    """`expert_parallel` by ordinary autograd: the same arguments, result and gradients."""
    routes = agree(expert_ids, experts.num_experts, group, planner)  # type: ignore[arg-type]
    rows = hidden.index_select(0, routes.order // expert_ids.shape[1])
    rows = _exchange(rows, routes.send, routes.receive, group)
    rows = rows if routes.by_expert is None else rows.index_select(0, routes.by_expert)
    rows = _experts_autograd(rows, experts, _Migration(routes, group), gradients, routes.rows)
    rows = rows if routes.by_source is None else rows.index_select(0, routes.by_source)
    rows = _exchange(rows, routes.receive, routes.send, group)
    rows = rows.index_select(0, routes.place).view(*expert_ids.shape, hidden.shape[1])
    return (rows * expert_weights.to(rows.dtype).unsqueeze(2)).sum(1)


@dataclass(frozen=True)
class Routes:
    """What the ranks agreed on for one layer, as this rank sees it."""

    rank: int
    plan: DispatchPlan
    send: list[int]
    receive: list[int]
    rows: list[int]
    """Landed routes of each local instance, natives before foreigners."""
    order: Tensor
    """[N k] flat routes in the order in which they leave: by instance, hence by rank."""
    place: Tensor
    """Inverse of `order`."""
    by_expert: Tensor | None
    """[M] landed rows by local instance; None where they land so, from one source."""
    by_source: Tensor | None
    """Inverse of `by_expert`."""


def agree(expert_ids: Tensor, experts: int, group: Group, planner: Planner) -> Routes:
    """One all-gather of counts per expert; everything else follows from it."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    flat, device = expert_ids.flatten(), expert_ids.device
    table = _gather(torch.bincount(flat, minlength=experts), group).cpu()
    plan = planner(table.tolist())
    instances, inside = _pieces(plan, table)
    landing = table.new_zeros(ranks, plan.first_instance[-1])
    landing[:, instances] = inside
    order = flat.argsort(stable=True)
    if plan.moves_weights:
        labels = _repeat(instances, inside[rank], flat.numel(), device)
        order = order[labels.argsort(stable=True)]
    held = [range(*bounds) for bounds in pairwise(plan.first_instance)]
    mine = landing[:, held[rank].start : held[rank].stop]
    by_expert = None
    if ranks > 1:
        local = torch.arange(len(held[rank])).repeat(ranks)
        by_expert = _repeat(local, mine.flatten(), int(mine.sum()), device).argsort(stable=True)
    return Routes(
        rank=rank,
        plan=plan,
        send=[int(landing[rank, each.start : each.stop].sum()) for each in held],
        receive=mine.sum(1).tolist(),
        rows=mine.sum(0).tolist(),
        order=order,
        place=_inverse(order),
        by_expert=by_expert,
        by_source=None if by_expert is None else _inverse(by_expert),
    )


def _pieces(plan: DispatchPlan, table: Tensor) -> tuple[Tensor, Tensor]:
    """The instance of each segment of the plan, and each source's routes inside it [E_p, segments].

    A segment is an interval of its expert's routes, which are numbered by source.
    """
    found: list[tuple[int, int, int, int]] = []
    for expert, segments in enumerate(plan.segments):
        begin = 0
        for rank, routes in segments:
            found.append((expert, plan.instance(expert, rank), begin, begin + routes))
            begin += routes
    expert, instance, begin, end = torch.tensor(found, dtype=torch.long).view(-1, 4).unbind(1)
    stop = table.cumsum(0)[:, expert]
    start = stop - table[:, expert]
    return instance, (torch.minimum(stop, end) - torch.maximum(start, begin)).clamp(min=0)


def _repeat(values: Tensor, times: Tensor, total: int, device: torch.device) -> Tensor:
    return torch.repeat_interleave(values.to(device), times.to(device), output_size=total)


def _inverse(order: Tensor) -> Tensor:
    positions = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def _gather(row: Tensor, group: Group) -> Tensor:
    if group is None:
        return row.unsqueeze(0)
    gathered = row.new_empty((group.size(), *row.shape))
    dist.all_gather(list(gathered.unbind(0)), row, group=group)
    return gathered


def _all_to_all(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
) -> tuple[Tensor, dist.Work | None]:
    landing = rows.new_empty((sum(receive), *rows.shape[1:]))
    work = dist.all_to_all_single(
        landing, rows.contiguous(), list(receive), list(send), group=group, async_op=True
    )
    return landing, work


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group):
        ctx.way_back = (receive, send, group)
        landing, work = _all_to_all(rows, send, receive, group)
        work.wait()  # type: ignore[union-attr]
        return landing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        landing, work = _all_to_all(upstream, *ctx.way_back)
        work.wait()  # type: ignore[union-attr]
        return landing, None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    return rows if group is None else _Exchange.apply(rows, send, receive, group)  # type: ignore[return-value]


class _Permute(torch.autograd.Function):
    """A gather both ways; the derivative of `index_select` would fill zeros and add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        (inverse,) = ctx.saved_tensors
        return upstream.index_select(0, inverse), None, None


def _permute(rows: Tensor, order: Tensor | None, inverse: Tensor | None) -> Tensor:
    return rows if order is None else _Permute.apply(rows, order, inverse)  # type: ignore[return-value]


class _Experts(torch.autograd.Function):
    """Rows grouped by instance to their outputs; keeps the rows, and the weights it was brought."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        experts: nn.Module,
        migration: "_Migration",
        native: Sequence[Tensor],
        gradients: Sequence[Tensor],
        sizes: list[int],
    ):
        foreign = migration.bring(native)
        ctx.save_for_backward(rows)
        ctx.rest = (experts, migration, native, foreign, gradients, sizes)
        output = torch.empty_like(rows)
        parts = zip(_joined(native, foreign), rows.split(sizes), output.split(sizes), strict=True)
        for (up, down), x, y in parts:
            if len(x):
                torch.mm(experts._apply_gate(x @ up.T), down.T, out=y)  # type: ignore[operator]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        (rows,) = ctx.saved_tensors
        experts, migration, native, foreign, gradients, sizes = ctx.rest
        ctx.rest = None
        arrived = [torch.zeros_like(weight, dtype=gradients[0].dtype) for weight in foreign]
        d_rows = torch.empty_like(rows)
        by_expert = zip(
            _joined(native, foreign),
            _joined(gradients, arrived),
            *(each.split(sizes) for each in (rows, upstream, d_rows)),
            strict=True,
        )
        for weights, totals, x, g, d_x in by_expert:
            if len(x):
                _expert_backward(experts._apply_gate, weights, totals, x, g, d_x)
        del foreign
        migration.give_back(arrived, gradients)
        return d_rows, None, None, None, None, None


def _experts_autograd(
    rows: Tensor,
    experts: nn.Module,
    migration: "_Migration",
    gradients: Sequence[Tensor],
    sizes: list[int],
) -> Tensor:
    """`_Experts` by ordinary autograd: every instance's weights are leaves, whose gradients hooks
    move to their totals as they come."""
    native = (experts.gate_up_proj, experts.down_proj)
    foreign = migration.bring(native)  # type: ignore[arg-type]
    arrived: list[Tensor] = []
    totals: list[tuple[Tensor, ...]] = []

    def begin(_: Tensor) -> None:
        arrived.extend(torch.zeros_like(weight, dtype=gradients[0].dtype) for weight in foreign)
        totals.extend(_joined(gradients, arrived))

    def end(_: Tensor) -> None:
        migration.give_back(arrived, gradients)
        arrived.clear()
        totals.clear()

    def leaf(weight: Tensor, which: int, instance: int) -> Tensor:
        def add(leaf: Tensor) -> None:
            totals[instance][which].add_(leaf.grad)
            leaf.grad = None

        weight = weight.detach().requires_grad_()
        weight.register_post_accumulate_grad_hook(add)
        return weight

    def products(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts._apply_gate(x @ up.T) @ down.T  # type: ignore[operator]

    outputs = []
    parts = zip(_joined(native, foreign), rows.split(sizes), strict=True)
    for instance, (weights, x) in enumerate(parts):
        if len(x):
            up, down = (leaf(weight, which, instance) for which, weight in enumerate(weights))
            x = checkpoint(products, x, up, down, use_reentrant=False, preserve_rng_state=False)
        outputs.append(x)
    output = torch.cat(outputs) if outputs else rows  # a rank may hold no expert at all
    output.register_hook(begin)
    # Runs once the gradient of every row is there, by when those of the weights are added:
    # autograd accumulates into leaves before anything else.
    rows.register_hook(end)
    return output


def _joined(native: Sequence[Tensor], foreign: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each instance's tensors, natives first."""
    found = list(zip(*(tensor.detach().unbind(0) for tensor in native), strict=True))
    return found + list(zip(*(tensor.unbind(0) for tensor in foreign), strict=True))


def _expert_backward(
    gate: Callable[[Tensor], Tensor],
    weights: tuple[Tensor, ...],
    totals: tuple[Tensor, ...],
    x: Tensor,
    g: Tensor,
    d_x: Tensor,
) -> None:
    """Write the gradient of one expert's rows to `d_x` and add those of its weights to `totals`."""
    up, down = weights
    projected = (x @ up.T).requires_grad_()
    with torch.enable_grad():
        inner = gate(projected)
    _accumulate(totals[1], g, inner.detach())
    (d_projected,) = torch.autograd.grad(inner, projected, g @ down)
    del inner, projected
    _accumulate(totals[0], d_projected, x)
    torch.mm(d_projected, up, out=d_x)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:
        total.add_(torch.mm(left.T, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))


class _Migration:
    """Foreign weights come once, before the first product; their gradients return once, added."""

    def __init__(self, routes: Routes, group: Group) -> None:
        plan, natives = routes.plan, routes.plan.natives[routes.rank]
        leaving = [[e - natives.start for e in held if e in natives] for held in plan.foreign]
        self._needed = plan.moves_weights
        self._group = group
        self._local = [expert for experts in leaving for expert in experts]
        self._send = [len(experts) for experts in leaving]
        # Foreigners are listed by rising number, hence by owner: the order of arrival.
        foreign = plan.foreign[routes.rank]
        self._receive = [sum(e in owned for e in foreign) for owned in plan.natives]

    def bring(self, native: Sequence[Tensor]) -> list[Tensor]:
        if not self._needed:
            return []
        leaving = [weight.detach()[self._local] for weight in native]
        return self._move(leaving, self._send, self._receive)

    def give_back(self, foreign: list[Tensor], gradients: Sequence[Tensor]) -> None:
        if not self._needed:
            return
        returned = self._move(foreign, self._receive, self._send)
        for total, arrived in zip(gradients, returned, strict=True):
            for local, gradient in zip(self._local, arrived, strict=True):
                total[local] += gradient

    def _move(self, tensors: list[Tensor], send: list[int], receive: list[int]) -> list[Tensor]:
        moving = [_all_to_all(tensor, send, receive, self._group) for tensor in tensors]
        for _, work in moving:
            work.wait()  # type: ignore[union-attr]
        return [landing for landing, _ in moving]
