"""The computation of single experts, forward and backward, over rows grouped by expert.

Shapes: m rows of one expert, H hidden width, I intermediate width. Weights are read as [in, out]
whatever their layout. What varies by family (gate, clamp, interleaving) is the module's own
`_apply_gate` or `act_fn`; only the projections around it are differentiated by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

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
        """A projection as [in, out]."""
        return weight if self.transposed else weight.T


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


# One expert's tensors in the order of `ExpertLayout.names`.
Tensors = tuple[torch.Tensor, ...]


def expert_forward(layout: ExpertLayout, weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Expert output [m, H] of x [m, H], not yet scaled by the route weights."""
    inner = layout.activate(_project(layout, weights, 0, x).to(_accurate(x.dtype)))
    return _project(layout, weights, 1, inner.to(x.dtype))


def expert_backward(
    layout: ExpertLayout,
    weights: Tensors,
    gradients: Tensors,
    *,
    x: torch.Tensor,
    upstream: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [m, H] and of the route weights [m], for output = scale * expert(x).

    `upstream` [m, H] is the gradient of the scaled output, `scale` [m] the route weights. Weight
    gradients are added to `gradients`, which are fp32 or wider; empty, they are not wanted.
    """
    accurate = _accurate(x.dtype)
    up = _project(layout, weights, 0, x).to(accurate).requires_grad_()
    with torch.enable_grad():
        inner = layout.activate(up)
    activated = inner.detach()
    scale = scale.to(accurate).unsqueeze(-1)
    # <W2 g, a> from the gradient before scaling: the expert's output is never recomputed.
    back = (upstream @ layout.view(weights[1]).T).to(accurate)
    d_scale = (back * activated).sum(-1)
    (d_up,) = torch.autograd.grad(inner, up, back.mul_(scale))
    if layout.has_bias:
        d_scale += upstream.to(accurate) @ weights[3].to(accurate)
    if gradients:
        _accumulate(layout.view(gradients[0]), x, d_up, x.dtype)
        _accumulate(layout.view(gradients[1]), activated * scale, upstream, x.dtype)
        if layout.has_bias:
            gradients[2].add_(d_up.sum(0))
            gradients[3].add_((upstream * scale).sum(0))
    return d_up.to(x.dtype) @ layout.view(weights[0]).T, d_scale


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """What gates, scales and sums are computed in: rounding is left to the projections alone."""
    return torch.promote_types(dtype, torch.float32)


def _project(layout: ExpertLayout, weights: Tensors, which: int, x: torch.Tensor) -> torch.Tensor:
    out = x @ layout.view(weights[which])
    return out.add_(weights[which + 2]) if layout.has_bias else out


def _accumulate(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> None:
    """total += left.T @ right in the dtype of `total`; CUDA multiplies in `dtype`."""
    if total.is_cuda and dtype != total.dtype:
        total.add_(torch.mm(left.to(dtype).T, right.to(dtype), out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype).T, right.to(total.dtype))
