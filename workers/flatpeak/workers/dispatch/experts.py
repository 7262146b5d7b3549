"""The computation of experts, forward and backward, over rows grouped by expert.

Shapes: m rows, H hidden width, I intermediate width. Weights are read as [in, out] whatever their
layout. What varies by family (gate, clamp, interleaving) is the module's own `_apply_gate` or
`act_fn`, over the rows of all experts at once; only the projections around it are differentiated by
hand, expert by expert or as one grouped product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flatpeak.workers.dispatch.rows import Segment
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


def read_layout(experts: nn.Module) -> ExpertLayout:
    """Raises `InputError` for families whose experts do more than project, activate, project."""
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


UP, DOWN, UP_BIAS, DOWN_BIAS = range(4)


@dataclass(frozen=True)
class HeldExperts:
    """The instances of one rank: each of `natives` and `foreign` lists the tensors in the order of
    `ExpertLayout.names`, [instances, ...]; natives are numbered first."""

    natives: Sequence[torch.Tensor]
    foreign: Sequence[torch.Tensor]

    def of(self, which: int, instance: int) -> torch.Tensor:
        natives = len(self.natives[which])
        if instance < natives:
            return self.natives[which][instance]
        return self.foreign[which][instance - natives]

    def run_of(self, which: int, segments: Sequence[Segment]) -> torch.Tensor:
        """The tensors from the first instance of `segments` to the last, as one view."""
        natives = len(self.natives[which])
        first, last = segments[0].instance, segments[-1].instance
        if first < natives:
            return self.natives[which][first : last + 1]
        return self.foreign[which][first - natives : last + 1 - natives]


class Projections:
    """The matrix products of one block: rows grouped by the `segments` of its experts."""

    def __init__(
        self,
        layout: ExpertLayout,
        held: HeldExperts,
        segments: Sequence[Segment],
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.segments = segments
        self._held = held
        self._dtype = dtype

    def apply(
        self, which: int, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows @ W, expert by expert; `out` may take the result, and may not be `rows`."""
        return self._product(rows, which, transposed=False, out=out)

    def apply_transposed(
        self, which: int, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows @ W^T, expert by expert."""
        return self._product(rows, which, transposed=True, out=out)

    def bias(self, which: int, segment: Segment) -> torch.Tensor:
        return self._held.of(which, segment.instance)

    def _product(
        self, rows: torch.Tensor, which: int, *, transposed: bool, out: torch.Tensor | None
    ) -> torch.Tensor:
        stacked = self._held.run_of(which, self.segments)
        if runs_grouped(rows, stacked, len(self.segments)):
            weights = self._oriented(stacked, transposed)
            return F.grouped_mm(rows, weights, offs=self._ends(rows.device))
        if out is None:
            out = rows.new_empty((len(rows), self._oriented(stacked, transposed).shape[-1]))
        for segment in self.segments:
            part = slice(segment.start, segment.stop)
            weight = self._held.of(which, segment.instance).to(self._dtype)
            torch.mm(rows[part], self._oriented(weight, transposed), out=out[part])
        return out

    def _oriented(self, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        view = self.layout.view(weight)
        return view.mT if transposed else view

    def _ends(self, device: torch.device) -> torch.Tensor:
        """Where the rows of each instance end, instances without rows between two others too."""
        first, last = self.segments[0].instance, self.segments[-1].instance
        ends = {segment.instance: segment.stop for segment in self.segments}
        table, end = [], 0
        for instance in range(first, last + 1):
            end = ends.get(instance, end)
            table.append(end)
        # From pageable memory: the host waits for no work of the device.
        return torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True)


def runs_grouped(rows: torch.Tensor, weights: torch.Tensor, segments: int) -> bool:
    """Whether torch has one kernel for products of several experts: bf16 on CUDA, aligned rows."""
    fits = rows.dtype == weights.dtype == torch.bfloat16
    return (
        rows.is_cuda
        and segments > 1
        and fits
        and hasattr(F, "grouped_mm")
        and all(size * rows.itemsize % 16 == 0 for size in weights.shape[1:])
    )


def expert_forward(projections: Projections, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """scale * expert(x), [m, H]. Overwrites `x` [m, H]; `scale` [m, 1] is fp32 or wider."""
    layout = projections.layout
    inner = layout.activate(_up(projections, x)) * scale
    value = projections.apply(DOWN, inner.to(x.dtype), out=x)
    if layout.has_bias:
        for segment in projections.segments:
            part = slice(segment.start, segment.stop)
            value[part] += (scale[part] * projections.bias(DOWN_BIAS, segment)).to(value.dtype)
    return value


def expert_backward(
    projections: Projections,
    gradients: "Gradients | None",
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
    up = _up(projections, x).requires_grad_()
    with torch.enable_grad():
        inner = layout.activate(up)
    activated = inner.detach()
    # <W2 g, a> from the gradient before scaling: the expert's output is never recomputed.
    back = projections.apply_transposed(DOWN, upstream).to(activated.dtype)
    d_scale = (back * activated).sum(-1)
    (d_up,) = torch.autograd.grad(inner, up, back.mul_(scale))
    del inner, up, back
    if layout.has_bias:
        for segment in projections.segments:
            part = slice(segment.start, segment.stop)
            bias = projections.bias(DOWN_BIAS, segment).to(d_scale.dtype)
            d_scale[part] += upstream[part].to(d_scale.dtype) @ bias
    if gradients is not None:
        gradients.add(layout, projections.segments, (x, d_up), (activated * scale, upstream), scale)
    return projections.apply_transposed(UP, d_up.to(x.dtype), out=x), d_scale


def _up(projections: Projections, x: torch.Tensor) -> torch.Tensor:
    """The up projection in what gates are computed in: rounding is left to the products alone."""
    up = projections.apply(UP, x)
    if projections.layout.has_bias:
        for segment in projections.segments:
            up[segment.start : segment.stop] += projections.bias(UP_BIAS, segment)
    return up.to(accurate(x.dtype))


def accurate(dtype: torch.dtype) -> torch.dtype:
    """What gates, scales and sums are computed in."""
    return torch.promote_types(dtype, torch.float32)


class Gradients:
    """Sums of weight gradients in fp32 or wider, in place.

    The first product of an instance is written and later ones are added, so that nothing has to be
    zeroed but the instances without any.
    """

    def __init__(self, sums: HeldExperts) -> None:
        self.sums = sums
        self._written: set[int] = set()

    def add(
        self,
        layout: ExpertLayout,
        segments: Sequence[Segment],
        up: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
        scale: torch.Tensor,
    ) -> None:
        """Add left^T right of the (left, right) rows of both projections, and bias gradients."""
        for segment in segments:
            part = slice(segment.start, segment.stop)
            fresh = segment.instance not in self._written
            self._written.add(segment.instance)
            for which, (left, right) in ((UP, up), (DOWN, down)):
                total = layout.view(self.sums.of(which, segment.instance))
                _accumulate(total, left[part], right[part], fresh=fresh)
            if layout.has_bias:
                d_biases = (up[1][part], down[1][part] * scale[part])
                for which, d_bias in zip((UP_BIAS, DOWN_BIAS), d_biases, strict=True):
                    total = self.sums.of(which, segment.instance)
                    total.copy_(d_bias.sum(0)) if fresh else total.add_(d_bias.sum(0))

    def finish(self) -> HeldExperts:
        """The sums, zero where no product was written."""
        natives = len(self.sums.natives[UP])
        held = natives + (len(self.sums.foreign[UP]) if self.sums.foreign else 0)
        for instance in range(held):
            if instance not in self._written:
                for which in range(len(self.sums.natives)):
                    self.sums.of(which, instance).zero_()
        return self.sums


def _accumulate(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, fresh: bool
) -> None:
    """total = or += left^T right in the dtype of `total`; CUDA multiplies in that of the rows."""
    narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    if total.is_cuda and narrow != total.dtype:
        product = torch.mm(left.to(narrow).mT, right.to(narrow), out_dtype=total.dtype)
        total.copy_(product) if fresh else total.add_(product)
        return
    left, right = left.to(total.dtype), right.to(total.dtype)
    if fresh:
        torch.mm(left.mT, right, out=total)
    else:
        total.addmm_(left.mT, right)
