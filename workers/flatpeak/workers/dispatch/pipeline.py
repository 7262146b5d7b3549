"""PipelinedLLEP: the experts of one layer as one autograd function, chunk by chunk.

The function keeps its inputs alone. Its backward sends the rows of a chunk again, recomputes that
chunk's experts, differentiates them and returns the gradients before the next chunk, so that memory
is bounded by the chunk however long the sequence is. See README.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from flatpeak.workers.dispatch.agreement import make_routing
from flatpeak.workers.dispatch.experts import UP, ExpertLayout, read_layout
from flatpeak.workers.dispatch.footprint import dispatch_bytes, layer_sizes
from flatpeak.workers.dispatch.lanes import Lanes
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.dispatch.passes import Backward, Forward, Inputs
from flatpeak.workers.dispatch.routing import Group, Routing
from flatpeak.workers.errors import InputError
from flatpeak.workers.partition import part
from flatpeak.workers.recompute import decide_once, is_checkpointed, is_recomputing
from flatpeak.workers.scopes import operator_scope

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
GradSink = Callable[[nn.Parameter, torch.Tensor], None]


def moe_forward(
    experts: nn.Module,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    group: Group,
    options: DispatchOptions,
    grad_sink: GradSink | None = None,
    value_needed_in_recompute: bool = True,
    routing: Routing | None = None,
    lanes: Lanes | None = None,
    on_routing: Callable[[Routing], None] | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of route weight times expert output, [N, H].

        experts = model.layers[0].mlp.experts                # this rank's slice of the weights
        scores, ids = router(hidden).softmax(-1).topk(8)     # [N, 8] each
        options = DispatchOptions(budget_bytes=2**30)
        output = moe_forward(experts, hidden, ids, scores, group=group, options=options)

    experts: an experts module of transformers whose parameters are this rank's slices,
        `part(experts.num_experts, E_p, rank)` of dimension 0; of any dtype, `num_experts` global.
    hidden [N, H], expert_ids [N, k] long, expert_weights [N, k]: this rank's tokens. N may differ
        between ranks and be 0; k may not differ.
    group: the E_p ranks that share the experts, or None for one process without collectives.
    grad_sink: called in backward with each parameter and its finished gradient, in fp32 and summed
        over the group, instead of handing it to autograd.
    value_needed_in_recompute: False where nothing else in a checkpointed layer reads the output's
        value: the recomputation then returns NaN without doing the work. It is known by the
        checkpoint's `context_fn`, which must be
        `flatpeak.workers.recompute.checkpoint_contexts`.
    routing: what the ranks would agree on, for simulation (see `assumed_routing`).
    lanes: where compute and travel are issued; None takes those of the device.
    on_routing: called with what the ranks agreed on, once a forward pass, recomputations left out.

    Collective over `group`, forward and backward. Raises `InputError` on all ranks for ids outside
    [0, E) on any of them, for k, dtypes or options that differ, and for a budget that one token at
    a time exceeds; on this rank for tensors that do not belong together, parameters that are not
    its slice or not contiguous, and unsupported families.

    The budget counts weight gradients in fp32 as results: it holds with a `grad_sink`, or for
    parameters in fp32.

    Outside of a checkpoint the weights of foreign experts, at most `max_foreign_experts`, stay
    until the backward pass.
    """
    layer = _Layer(
        layout=read_layout(experts),
        module=experts,
        group=group,
        options=options,
        grad_sink=grad_sink,
        routing=routing,
        lanes=lanes,
        on_routing=on_routing,
        value_needed=value_needed_in_recompute,
    )
    layer.check_parameters()
    layer.check_tokens(hidden, expert_ids, expert_weights)
    trained = [t.requires_grad for t in (hidden, expert_weights, *layer.parameters)]
    layer.differentiates = torch.is_grad_enabled() and any(trained)
    skip = is_recomputing() and not value_needed_in_recompute
    return _Dispatch.apply(layer, skip, hidden, expert_ids, expert_weights, *layer.parameters)  # type: ignore[return-value]


@dataclass
class _Layer:
    layout: ExpertLayout
    module: nn.Module
    group: Group
    options: DispatchOptions
    grad_sink: GradSink | None
    routing: Routing | None
    lanes: Lanes | None
    on_routing: Callable[[Routing], None] | None
    value_needed: bool
    differentiates: bool = False
    """Whether a backward pass may follow."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [getattr(self.module, name) for name in self.layout.names]

    @property
    def experts(self) -> int:
        return self.module.num_experts  # type: ignore[return-value]

    def check_parameters(self) -> None:
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        if self.routing is not None:
            rank, ranks = self.routing.rank, self.routing.plan.ranks
        start, stop = part(self.experts, ranks, rank)
        for name, parameter in zip(self.layout.names, self.parameters, strict=True):
            if len(parameter) != stop - start:
                raise InputError(
                    f"{name} holds {len(parameter)} experts, but rank {rank} of {ranks} owns "
                    f"experts {start} to {stop - 1} of {self.experts}: pass that slice"
                )
            if not parameter.is_contiguous():
                raise InputError(
                    f"{name} has the strides {parameter.stride()}, but experts can only be sent "
                    "from contiguous memory: pass a contiguous parameter"
                )

    def check_tokens(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        given = {"hidden": hidden, "expert_ids": ids, "expert_weights": weights}
        if odd := [name for name, value in given.items() if not isinstance(value, torch.Tensor)]:
            kinds = ", ".join(f"{name} a {type(given[name]).__name__}" for name in odd)
            raise InputError(f"{kinds} where tensors are wanted, one row a token")
        width = self.layout.view(self.parameters[UP]).shape[-2]
        shapes = hidden.dim() == ids.dim() == 2 and len(hidden) == len(ids)
        shapes = shapes and weights.shape == ids.shape and hidden.shape[1] == width
        floats = hidden.is_floating_point() and weights.is_floating_point()
        if shapes and floats and ids.dtype in _ID_DTYPES:
            return
        found = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in given.items())
        raise InputError(
            f"{found} do not belong together: pass floats [N, {width}], integers [N, k] and floats "
            "[N, k]"
        )

    def agree(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Routing:
        if self.routing is not None:
            return self.routing

        def decide() -> Routing:
            footprint = None
            if self.options.budget_bytes is not None:
                sizes = layer_sizes(self.layout, self.parameters, hidden, weights)
                footprint = partial(dispatch_bytes, sizes)
            return make_routing(
                ids,
                experts=self.experts,
                group=self.group,
                options=self.options,
                footprint=footprint,
                alike=self._terms(hidden, weights),
            )

        return decide_once(decide)

    def _terms(self, hidden: torch.Tensor, weights: torch.Tensor) -> dict[str, object]:
        """What decides which bytes travel in which pass."""
        return {
            "k": weights.shape[1],
            "width of hidden": hidden.shape[1],
            "dtype of hidden": hidden.dtype,
            "dtype of expert_weights": weights.dtype,
            "list of dtypes of the experts": [p.dtype for p in self.parameters],
            "list of shapes of an expert": [tuple(p.shape[1:]) for p in self.parameters],
            "possibility of a backward pass": self.differentiates,
            "use of checkpoint_contexts": is_checkpointed(),
            "value_needed_in_recompute": self.value_needed,
            "list of which parameters of the experts are trained": [
                p.requires_grad for p in self.parameters
            ],
        }


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        layer: _Layer,
        skip: bool,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        ctx.layer = layer
        saved = (hidden, expert_ids, expert_weights, *parameters)
        with operator_scope("dispatch", hidden.device):
            ctx.routing = layer.agree(hidden, expert_ids, expert_weights)
            if layer.on_routing is not None and not is_recomputing():
                layer.on_routing(ctx.routing)
            if skip:
                # Loud where the promise that nobody reads it does not hold.
                output = torch.full_like(hidden, torch.nan)
            else:
                inputs = Inputs(hidden, expert_ids, expert_weights, parameters)
                output, foreign = Forward(layer, ctx.routing, inputs).run()
                # A checkpoint is there so that nothing of a layer stays but its input.
                if ctx.routing.plan.moves_weights and not is_checkpointed():
                    saved += tuple(foreign)
            ctx.save_for_backward(*saved)
            return output

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: torch.Tensor):
        layer: _Layer = ctx.layer
        hidden, expert_ids, expert_weights, *rest = ctx.saved_tensors
        parameters, kept = rest[: len(layer.parameters)], rest[len(layer.parameters) :]
        with operator_scope("dispatch", hidden.device):
            # The pass and its buffers are gone when the gradients are handed on.
            d_hidden, d_weights, gradients = Backward(
                layer,
                ctx.routing,
                Inputs(hidden, expert_ids, expert_weights, parameters),
                upstream,
                kept=kept,
                train_experts=any(ctx.needs_input_grad[5:]),
            ).run()
            if gradients and layer.grad_sink is not None:
                _hand_over(layer.grad_sink, layer.parameters, gradients)
                gradients = ()
            delivered: list[torch.Tensor | None] = list(gradients) or [None] * len(parameters)
            del gradients
            for place, parameter in enumerate(parameters):
                gradient = delivered[place]
                if gradient is not None:  # one at a time, so that two sets of them never live
                    delivered[place] = gradient.to(parameter.dtype)
            return None, None, d_hidden, None, d_weights, *delivered


def _hand_over(
    sink: GradSink, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.requires_grad:
            sink(parameter, gradient)
