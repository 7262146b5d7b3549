"""PipelinedLLEP: the experts of one layer as one autograd function, chunk by chunk.

The function keeps its inputs alone. Its backward sends the rows of a chunk again, recomputes that
chunk's experts, differentiates them, returns the gradients and frees everything before the next
chunk, so that memory is bounded by the chunk however long the sequence is. See README.md.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from flatpeak.workers.dispatch.exchange import Arriving
from flatpeak.workers.dispatch.experts import (
    ExpertLayout,
    Tensors,
    expert_backward,
    expert_forward,
    read_layout,
)
from flatpeak.workers.dispatch.migration import Migration
from flatpeak.workers.dispatch.options import DispatchOptions
from flatpeak.workers.dispatch.routing import Chunk, Group, Routing, make_routing
from flatpeak.workers.dispatch.rows import Block, Journey, Rows, blocks, pack, unpack
from flatpeak.workers.errors import InputError
from flatpeak.workers.partition import part
from flatpeak.workers.recompute import is_recomputing
from flatpeak.workers.scopes import scope

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
) -> torch.Tensor:
    """Sum over each token's experts of route weight times expert output, [N, H].

    experts: an experts module of transformers whose parameters are this rank's slices,
        `part(experts.num_experts, E_p, rank)` of dimension 0; of any dtype, `num_experts` global.
    hidden [N, H], expert_ids [N, k] long, expert_weights [N, k]: this rank's tokens. N may differ
        between ranks and be 0; k may not differ.
    group: the E_p ranks that share the experts, or None for one process without collectives.
    grad_sink: called in backward with each parameter and its finished gradient, in fp32 and summed
        over the group, instead of handing it to autograd.
    value_needed_in_recompute: False where nothing else in a checkpointed layer reads the output's
        value: the recomputation then returns NaN without doing the work.
    routing: what the ranks would agree on, for simulation (see `assumed_routing`).

    Collective over `group`, forward and backward. Raises `InputError` for ids outside [0, E) on any
    rank, for parameters that are not this rank's slice, and for unsupported families.
    """
    layer = _Layer(read_layout(experts), experts, group, options, grad_sink, routing)
    layer.check_slices()
    if expert_weights.shape != expert_ids.shape or len(hidden) != len(expert_ids):
        raise InputError(
            f"hidden {tuple(hidden.shape)}, expert_ids {tuple(expert_ids.shape)} and "
            f"expert_weights {tuple(expert_weights.shape)} do not belong together: pass "
            "[N, H], [N, k] and [N, k]"
        )
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

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [getattr(self.module, name) for name in self.layout.names]

    @property
    def experts(self) -> int:
        return self.module.num_experts  # type: ignore[return-value]

    def check_slices(self) -> None:
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

    def agree(self, expert_ids: torch.Tensor) -> Routing:
        if self.routing is not None:
            return self.routing
        return make_routing(
            expert_ids, experts=self.experts, group=self.group, options=self.options
        )


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
        ctx.save_for_backward(hidden, expert_ids, expert_weights, *parameters)
        ctx.layer = layer
        ctx.routing = None
        with scope("dispatch"):
            if skip:
                # Loud where the promise that nobody reads it does not hold.
                return torch.full_like(hidden, torch.nan)
            ctx.routing = layer.agree(expert_ids)
            return _Pass(
                layer, ctx.routing, hidden, expert_ids, expert_weights, parameters
            ).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: torch.Tensor):
        hidden, expert_ids, expert_weights, *parameters = ctx.saved_tensors
        layer: _Layer = ctx.layer
        with scope("dispatch"):
            # A skipped recomputation leaves the routing to us: a function of the same ids, so it is
            # the forward's.
            routing = ctx.routing or layer.agree(expert_ids)
            work = _Pass(layer, routing, hidden, expert_ids, expert_weights, parameters)
            d_hidden, d_weights, gradients = work.backward(
                upstream, train_experts=any(ctx.needs_input_grad[5:])
            )
            if gradients and layer.grad_sink is not None:
                _hand_over(layer.grad_sink, layer.parameters, gradients)
                gradients = ()
            delivered = (
                [
                    gradient.to(parameter.dtype)
                    for gradient, parameter in zip(gradients, parameters, strict=True)
                ]
                if gradients
                else [None] * len(parameters)
            )
            return None, None, d_hidden, None, d_weights, *delivered


def _hand_over(
    sink: GradSink, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.requires_grad:
            sink(parameter, gradient)


@dataclass
class _Landing:
    """One chunk on its way to the ranks that compute it."""

    chunk: Chunk
    journey: Journey
    labels: torch.Tensor
    weights: torch.Tensor
    packed: Arriving
    values: list[tuple[torch.Tensor, Arriving]]

    def wait(self) -> tuple[torch.Tensor, torch.Tensor, list[Rows]]:
        """Labels and route weights [rows, k], and each dispatched value as rows."""
        labels, weights = unpack(self.packed.wait(), like=self.weights)
        values = [Rows(own, arriving.wait()) for own, arriving in self.values]
        return torch.cat([self.labels, labels]), torch.cat([self.weights, weights]), values


@dataclass
class _Share:
    """A chunk's part of one layer-sized result: own sums here, those of other ranks on their way.

    Sums are fp32 or wider; where the result is as wide they are taken in place.
    """

    place: torch.Tensor
    own: torch.Tensor
    arriving: Arriving

    def finish(self, journey: Journey) -> None:
        journey.add_returned(self.own, self.arriving.wait())
        if self.own is not self.place:
            self.place.copy_(self.own)


Shares = tuple[Journey, list[_Share]]


class _Pass:
    """One pass, forward or backward, over the chunks of a layer."""

    def __init__(
        self,
        layer: _Layer,
        routing: Routing,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.layout = layer.layout
        self.group = layer.group
        self.routing = routing
        self.hidden = hidden
        self.weights = expert_weights
        self.parameters = parameters
        self.labels = routing.label(expert_ids)
        self.owners = routing.owners(hidden.device)
        self.migration = Migration(routing, layer.group)
        self.held = self.migration.bring_weights(parameters, hidden.dtype)

    def forward(self) -> torch.Tensor:
        output = torch.zeros_like(self.hidden)

        def compute(landing: _Landing) -> Shares:
            labels, weights, (x,) = landing.wait()
            place, total = self._total(output, landing.chunk, x)
            for block in blocks(labels, self.routing, landing.chunk):
                value = expert_forward(self.layout, self._expert(block), x.take(block))
                scale = weights.view(-1)[block.routes].to(total.own.dtype)
                total.add(block, value * scale[:, None])
            return landing.journey, [self._share(place, total, landing.journey)]

        self._run([self.hidden], compute)
        return output

    def backward(
        self, upstream: torch.Tensor, *, train_experts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        """Gradients of hidden, of the route weights, and of the parameters (none, if frozen)."""
        d_hidden, d_weights = torch.zeros_like(self.hidden), torch.zeros_like(self.weights)
        gradients = self.migration.zero_gradients(self.parameters) if train_experts else None

        def compute(landing: _Landing) -> Shares:
            labels, weights, (x, g) = landing.wait()
            x_place, d_x = self._total(d_hidden, landing.chunk, x)
            tokens = len(x.own)
            d_scales = torch.zeros_like(weights, dtype=d_x.own.dtype)
            for block in blocks(labels, self.routing, landing.chunk):
                d_rows, d_scale = expert_backward(
                    self.layout,
                    self._expert(block),
                    gradients.of(block.instance) if gradients else (),
                    x=x.take(block),
                    upstream=g.take(block),
                    scale=weights.view(-1)[block.routes],
                )
                d_x.add(block, d_rows)
                d_scales.view(-1).index_copy_(0, block.routes, d_scale)
            w_place = d_weights[landing.chunk.tokens]
            d_w = Rows(d_scales[:tokens], d_scales[tokens:])
            return landing.journey, [
                self._share(x_place, d_x, landing.journey),
                self._share(w_place, d_w, landing.journey),
            ]

        self._run([self.hidden, upstream], compute)
        if gradients is None:
            return d_hidden, d_weights, ()
        self.migration.return_gradients(gradients)
        return d_hidden, d_weights, gradients.native

    def _run(self, values: list[torch.Tensor], compute: Callable[[_Landing], Shares]) -> None:
        """Compute each chunk while the next one arrives and the results of the last one return.

        Exchanges are issued in the order of this loop, which is the same on all ranks.
        """
        chunks = iter(self.routing.chunks)
        ahead = deque(self._send(chunk, values) for chunk in islice(chunks, 1))
        returning: Shares | None = None
        for _ in self.routing.chunks:
            ahead.extend(self._send(chunk, values) for chunk in islice(chunks, 1))
            # Popped in the call, so that the chunk's buffers are free once it is computed.
            computed = compute(ahead.popleft())
            _finish(returning)
            returning = computed
        _finish(returning)

    def _send(self, chunk: Chunk, values: list[torch.Tensor]) -> _Landing:
        labels, weights = self.labels[chunk.tokens], self.weights[chunk.tokens]
        journey = Journey(self.owners[labels.long()], self.routing, chunk, self.group)
        packed = journey.send(pack(labels, weights))
        parts = [value[chunk.tokens] for value in values]
        sent = [(own, journey.send(own)) for own in parts]
        return _Landing(chunk, journey, labels, weights, packed, sent)

    def _expert(self, block: Block) -> Tensors:
        return tuple(weight.to(self.hidden.dtype) for weight in self.held.of(block.instance))

    def _total(self, result: torch.Tensor, chunk: Chunk, rows: Rows) -> tuple[torch.Tensor, Rows]:
        """The chunk's place in a result, and zeros to sum one chunk's rows into."""
        accurate = torch.promote_types(result.dtype, torch.float32)
        place = result[chunk.tokens]
        own = place if result.dtype == accurate else torch.zeros_like(place, dtype=accurate)
        return place, Rows(own, torch.zeros_like(rows.landed, dtype=accurate))

    def _share(self, place: torch.Tensor, total: Rows, journey: Journey) -> _Share:
        return _Share(place, total.own, journey.send_back(total.landed.to(place.dtype)))


def _finish(shares: Shares | None) -> None:
    if shares is not None:
        journey, parts = shares
        for share in parts:
            share.finish(journey)
