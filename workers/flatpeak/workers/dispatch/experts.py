"""The computation of experts, forward and backward, over rows grouped by expert.

Shapes: m rows, H hidden width, I intermediate width. Weights are read as [in, out] whatever their
layout. What varies by family (gate, clamp, interleaving) is the module's own `_apply_gate` or
`act_fn`, over the rows of all experts at once; only the projections around it are differentiated by
hand, expert by expert or as one grouped product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from flatpeak.workers.dispatch.rows import Block
from flatpeak.workers.errors import InputError


@dataclass(frozen=True)
class ExpertLayout:
    """How one experts module of transformers computes, read from its attributes."""

    names: tuple[str, ...]
    """Parameters: up projection, down projection, and their biases where the family has them."""
    transposed: bool
    activate: Callable[[torch.Tensor], torch.Tensor]

    @property
    def has_bias(self) -> bool:
        return len(self.names) > 2

    def view(self, weight: torch.Tensor) -> torch.Tensor:
        """A projection as [..., in, out]."""
        return weight if self.transposed else weight.mT


_READ = ("has_gate", "has_bias", "is_transposed", "num_experts")


def read_layout(experts: nn.Module) -> ExpertLayout:
    """The layout of an experts module, from its `has_gate`, `has_bias`, `is_transposed`,
    `num_experts`, its parameters, and `_apply_gate` or `act_fn`.

    Raises `InputError` for other modules, and for families whose experts do more than project,
    activate, project.
    """
    if not all(hasattr(experts, name) for name in _READ):
        raise InputError(
            f"{type(experts).__name__} is no experts module of transformers: pass the one inside "
            "the MoE block, like model.layers[0].mlp.experts"
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise InputError(
            f"{type(experts).__name__} normalises the output of each expert, which expert dispatch "
            "does not support: use an experts_implementation of transformers, such as 'grouped_mm'"
        )
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = (up, "down_proj")
    if experts.has_bias:
        names += (f"{up}_bias", "down_proj_bias")
    activate = experts._apply_gate if experts.has_gate else experts.act_fn
    return ExpertLayout(names, bool(experts.is_transposed), activate)  # type: ignore[arg-type]


UP, DOWN = range(2)


def block_routes(device: torch.device) -> int:
    """Routes that are computed together: enough for products at full speed, no more, because their
    intermediate values are alive at once."""
    return 4096 if device.type == "cuda" else 512


@dataclass(frozen=True)
class HeldExperts:
    """The instances of one rank: each of `natives` and `foreign` lists the tensors in the order of
    `ExpertLayout.names`, [instances, ...]; natives are numbered first."""

    natives: Sequence[torch.Tensor]
    foreign: Sequence[torch.Tensor] = ()

    def each(
        self, which: int, view: Callable[[torch.Tensor], torch.Tensor] = lambda stack: stack
    ) -> list[torch.Tensor]:
        """The tensor of every instance, of stacks [instances, ...] seen through `view`."""
        stacks = (self.natives[which], *(self.foreign[which : which + 1]))
        return [tensor for stack in stacks for tensor in view(stack).unbind(0)]

    def stacked(self, which: int, first: int, last: int) -> torch.Tensor:
        """The tensors of instances `first` to `last`, all native or all foreign, as one view."""
        natives = len(self.natives[which])
        if first < natives:
            return self.natives[which][first : last + 1]
        return self.foreign[which][first - natives : last + 1 - natives]


class Projections:
    """Products of rows, grouped by instance, with the weights of a pass's experts.

    `block` tells the instances and how many rows each of them has. `grouped` says where one kernel
    may take all instances of a block.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        held: HeldExperts,
        dtype: torch.dtype,
        *,
        grouped: Callable[[torch.Tensor, torch.Tensor], bool] | None = None,
    ) -> None:
        self.layout = layout
        self._grouped = grouped or runs_grouped
        self._held = held
        self._dtype = dtype
        self._casts = held.natives[UP].dtype != dtype
        self._forward = [held.each(which, layout.view) for which in (UP, DOWN)]
        self._backward = [held.each(which, lambda w: layout.view(w).mT) for which in (UP, DOWN)]
        self._biases = [held.each(which) for which in range(DOWN + 1, len(layout.names))]

    def apply(
        self, which: int, block: Block, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows @ W; `out` may take the result, and may not be `rows`."""
        return self._product(which, block, rows, out, transposed=False)

    def apply_transposed(
        self, which: int, block: Block, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows @ W^T"""
        return self._product(which, block, rows, out, transposed=True)

    def biases(self, which: int, block: Block) -> list[torch.Tensor]:
        """The bias of projection `which` for each of the block's instances."""
        return [self._biases[which][instance] for instance in block.instances]

    def _product(
        self,
        which: int,
        block: Block,
        rows: torch.Tensor,
        out: torch.Tensor | None,
        *,
        transposed: bool,
    ) -> torch.Tensor:
        matrices = self._backward[which] if transposed else self._forward[which]
        first, last = block.instances[0], block.instances[-1]
        if last > first and self._grouped(rows, matrices[first]):
            stacked = self.layout.view(self._held.stacked(which, first, last))
            if transposed:
                stacked = stacked.mT
            return F.grouped_mm(rows, stacked, offs=_ends(block, rows.device))
        if out is None:
            out = rows.new_empty((len(rows), matrices[first].shape[1]))
        parts = zip(block.instances, _split(rows, block), _split(out, block), strict=True)
        for instance, part, result in parts:
            weight = matrices[instance]
            torch.mm(part, weight.to(self._dtype) if self._casts else weight, out=result)
        return out


def _split(rows: torch.Tensor, block: Block) -> tuple[torch.Tensor, ...]:
    """The rows of each instance. `Tensor.split` does the same with some Python around it."""
    return torch.split_with_sizes(rows, block.sizes)  # type: ignore[return-value]


def _ends(block: Block, device: torch.device) -> torch.Tensor:
    """Where the rows of each instance end, of those without rows between two others too."""
    sizes = dict.fromkeys(range(block.instances[0], block.instances[-1] + 1), 0)
    sizes.update(zip(block.instances, block.sizes, strict=True))
    # From pageable memory: the host waits for no work of the device.
    ends = torch.tensor(list(accumulate(sizes.values())), dtype=torch.int32)
    return ends.to(device, non_blocking=True)


def runs_grouped(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for products of several experts: bf16 on CUDA, aligned rows."""
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and all(size * rows.itemsize % 16 == 0 for size in weight.shape)
    )


def expert_forward(
    projections: Projections, block: Block, x: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """scale * expert(x), [m, H]. Overwrites `x` [m, H]; `scale` [m, 1] is fp32 or wider."""
    inner = projections.layout.activate(_up(projections, block, x)) * scale
    value = projections.apply(DOWN, block, inner.to(x.dtype), out=x)
    if projections.layout.has_bias:
        parts = zip(_split(value, block), _split(scale, block), strict=True)
        for (part, factor), bias in zip(parts, projections.biases(DOWN, block), strict=True):
            part += (factor * bias).to(value.dtype)
    return value


def expert_backward(
    projections: Projections,
    gradients: "Gradients | None",
    block: Block,
    *,
    x: torch.Tensor,
    upstream: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [m, H] and of the route weights [m], for output = scale * expert(x).

    `upstream` [m, H] is the gradient of the scaled output, `scale` [m, 1] the route weights.
    Overwrites `x`. `gradients` is None where the experts are frozen.
    """
    layout = projections.layout
    up = _up(projections, block, x).requires_grad_()
    with torch.enable_grad():
        inner = layout.activate(up)
    activated = inner.detach()
    # <W2 g, a> from the gradient before scaling: the expert's output is never recomputed.
    back = projections.apply_transposed(DOWN, block, upstream).to(activated.dtype)
    d_scale = (back * activated).sum(-1)
    (d_up,) = torch.autograd.grad(inner, up, back.mul_(scale))
    del inner, up, back
    if layout.has_bias:
        parts = zip(_split(d_scale, block), _split(upstream, block), strict=True)
        for (part, g), bias in zip(parts, projections.biases(DOWN, block), strict=True):
            part += g.to(part.dtype) @ bias.to(part.dtype)
    if gradients is not None:
        gradients.add(UP, block, x, d_up)
        gradients.add(DOWN, block, activated * scale, upstream)
        if layout.has_bias:
            gradients.add_biases(block, d_up, upstream * scale)
        gradients.written.update(block.instances)
    return projections.apply_transposed(UP, block, d_up.to(x.dtype), out=x), d_scale


def _up(projections: Projections, block: Block, x: torch.Tensor) -> torch.Tensor:
    """The up projection in what gates are computed in: rounding is left to the products alone."""
    up = projections.apply(UP, block, x)
    if projections.layout.has_bias:
        parts = zip(_split(up, block), projections.biases(UP, block), strict=True)
        for part, bias in parts:
            part += bias
    return up.to(accurate(x.dtype))


def accurate(dtype: torch.dtype) -> torch.dtype:
    """What gates, scales and sums are computed in."""
    return torch.promote_types(dtype, torch.float32)


class Gradients:
    """Sums of weight gradients in fp32 or wider, in place.

    The first product of an instance is written and later ones are added, so that nothing has to be
    zeroed but the instances without any.
    """

    def __init__(self, layout: ExpertLayout, sums: HeldExperts) -> None:
        self.written: set[int] = set()
        self._sums = sums
        self._matrices = [sums.each(which, layout.view) for which in (UP, DOWN)]
        self._biases = [sums.each(which) for which in range(DOWN + 1, len(layout.names))]

    def add(self, which: int, block: Block, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right of each instance's rows to its gradient of projection `which`."""
        parts = zip(_split(left, block), _split(right, block), strict=True)
        for instance, (rows, columns) in zip(block.instances, parts, strict=True):
            fresh = instance not in self.written
            _accumulate(self._matrices[which][instance], rows, columns, fresh=fresh)

    def add_biases(self, block: Block, *d_biases: torch.Tensor) -> None:
        for totals, rows in zip(self._biases, d_biases, strict=True):
            for instance, part in zip(block.instances, _split(rows, block), strict=True):
                total = totals[instance]
                total.add_(part.sum(0)) if instance in self.written else total.copy_(part.sum(0))

    def finish(self) -> HeldExperts:
        """The sums, zero where nothing was written."""
        for totals in [*self._matrices, *self._biases]:
            for instance, total in enumerate(totals):
                if instance not in self.written:
                    total.zero_()
        return self._sums


def _accumulate(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, fresh: bool
) -> None:
    """total = or += left^T right in the dtype of `total`; CUDA multiplies in that of the rows."""
    if total.is_cuda and not left.dtype == right.dtype == total.dtype:
        narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
        product = torch.mm(left.to(narrow).mT, right.to(narrow), out_dtype=total.dtype)
        total.copy_(product) if fresh else total.add_(product)
        return
    if left.dtype != total.dtype or right.dtype != total.dtype:
        left, right = left.to(total.dtype), right.to(total.dtype)
    if fresh:
        torch.mm(left.mT, right, out=total)
    else:
        total.addmm_(left.mT, right)
