"""A pass over the chunks of one layer, forward or backward, with its pipeline of exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flatpeak.workers.dispatch.buffers import Slot, make_buffers
from flatpeak.workers.dispatch.exchange import Arriving, exchange
from flatpeak.workers.dispatch.experts import (
    ExpertLayout,
    HeldExperts,
    Projections,
    block_routes,
    expert_backward,
    expert_forward,
)
from flatpeak.workers.dispatch.lanes import Lanes, lanes_of
from flatpeak.workers.dispatch.migration import ForeignWeights, Migration
from flatpeak.workers.dispatch.routing import Chunk, Group, Routing
from flatpeak.workers.dispatch.rows import Block, Journey, RowFormat, blocks


class Layer(Protocol):
    """What a pass needs to know of its layer."""

    layout: ExpertLayout
    group: Group
    lanes: Lanes | None


@dataclass(frozen=True)
class Inputs:
    """What a layer is given; the rows of a rank's tokens are [N, ...]."""

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    route_weights: torch.Tensor
    parameters: Sequence[torch.Tensor]
    """Those of the rank's experts, in the order of `ExpertLayout.names`."""


class _Flight:
    """One chunk on its way: out, computed, and back."""

    def __init__(self, chunk: Chunk, journey: Journey, slot: Slot, coming: Arriving) -> None:
        self.chunk = chunk
        self.journey = journey
        self.slot = slot
        self.coming = coming
        self.returning: list[Arriving] = []
        self.computed: Any = None
        """The point in the lanes where the sums are computed."""

    @property
    def sent(self) -> int:
        return sum(self.chunk.send)

    @property
    def received(self) -> int:
        return sum(self.chunk.receive)


class _Pass(ABC):
    """Rows of `values` [N, H] each go out, and what a subclass computes of them comes back."""

    def __init__(
        self,
        layer: Layer,
        routing: Routing,
        inputs: Inputs,
        values: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        device = values[0].device
        self._layout = layer.layout
        self._group = layer.group
        self._lanes = layer.lanes or lanes_of(device)
        self._routing = routing
        self._values = values
        self._route_weights = inputs.route_weights
        self._parameters = inputs.parameters
        self._labels = routing.label(inputs.expert_ids)
        self._owners = routing.owners(device)
        self._rows = RowFormat(
            hidden=values[0].shape[1],
            k=inputs.expert_ids.shape[1],
            values=len(values),
            dtype=values[0].dtype,
            weight_dtype=inputs.route_weights.dtype,
        )
        self._buffers = make_buffers(routing.extent(len(values[0])), self._rows, device)
        self._migration = Migration(routing, layer.group)
        self._projections = Projections(
            self._layout, HeldExperts(inputs.parameters), self._rows.dtype
        )
        # All ranks have kept theirs or none has: the same passes ran on all of them.
        self._foreign = ForeignWeights(kept) if kept else None
        self._holds_foreign = False
        self._result = torch.zeros_like(values[0], memory_format=torch.contiguous_format)

    @abstractmethod
    def _compute_block(
        self,
        flight: _Flight,
        block: Block,
        landed: Sequence[torch.Tensor],
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """What the block's routes add to their rows, [routes, H]."""

    def _go(self) -> Sequence[torch.Tensor]:
        """Compute each chunk while the next is on its way out and the last on its way back. Returns
        the foreign weights.

        The loop is the same on all ranks, so each exchange is issued where the others issue theirs.
        """
        self._start()
        chunks = self._routing.chunks
        here = ahead = self._send_out(0)
        behind: _Flight | None = None
        if self._foreign is None:
            self._foreign = self._migration.send_weights(self._parameters, self._rows.dtype)
        for number in range(len(chunks)):
            here = ahead
            self._land(here)
            if number + 1 < len(chunks):
                ahead = self._send_out(number + 1)
            self._compute(here)
            if behind is not None:
                self._bring_home(behind)
            self._send_back(here)
            behind = here
        self._bring_home(here)
        self._end()
        foreign = self._foreign.wait()
        del self._buffers, self._projections, self._foreign
        return foreign

    def _start(self) -> None:
        started = self._lanes.mark()
        with self._lanes.travelling():
            self._lanes.follow(started)

    def _end(self) -> None:
        with self._lanes.travelling():
            ended = self._lanes.mark()
        self._lanes.follow(ended)

    def _send_out(self, number: int) -> _Flight:
        chunk = self._routing.chunks[number]
        slot = self._buffers.slots[number % len(self._buffers.slots)]
        with self._lanes.travelling():
            positions = chunk.share.positions(len(self._labels), self._labels.device)
            ranks_of = self._owners[self._labels[positions].long()]
            journey = Journey(positions, ranks_of, self._routing, chunk)
            outgoing = self._buffers.outgoing[: sum(chunk.send)]
            for which, value in enumerate(self._values):
                journey.gather(value, self._rows.value(outgoing, which))
            journey.gather(self._route_weights, self._rows.route_weights(outgoing))
            journey.gather(self._labels, self._rows.labels(outgoing))
            landing = slot.landing[: sum(chunk.receive)]
            coming = exchange(outgoing, landing, chunk.send, chunk.receive, self._group)
        return _Flight(chunk, journey, slot, coming)

    def _land(self, flight: _Flight) -> None:
        with self._lanes.travelling():
            flight.coming.wait()
            # Behind the results of the chunk before last too, whose slot this one takes over.
            landed = self._lanes.mark()
        self._lanes.follow(landed)

    def _compute(self, flight: _Flight) -> None:
        chunk, slot = flight.chunk, flight.slot
        landing = slot.landing[: flight.received]
        positions = flight.journey.positions
        labels = _own_and_landed(self._labels, positions, self._rows.labels(landing))
        weights = _own_and_landed(
            self._route_weights, positions, self._rows.route_weights(landing)
        ).view(-1)
        landed = [self._rows.value(landing, which) for which in range(len(self._values))]
        sums = slot.sums if self._buffers.wide is None else self._buffers.wide
        sums = sums[: flight.received].zero_()
        own = self._result if slot.own is None else slot.own.zero_()
        size = block_routes(self._result.device)
        for block in blocks(labels, positions, self._routing, chunk, size=size):
            scale = weights[block.routes].to(sums.dtype).unsqueeze(-1)
            self._wait_for_foreign(block)
            values = self._compute_block(flight, block, landed, scale)
            block.add(own, sums, values.to(sums.dtype), chunk_sized=slot.own is not None)
            del values  # not beside those of the next block
        if self._buffers.wide is not None:
            slot.sums[: flight.received].copy_(sums)
        flight.computed = self._lanes.mark()

    def _wait_for_foreign(self, block: Block) -> None:
        """The first block of foreign experts needs their weights."""
        if self._holds_foreign or block.instances[0] < len(self._parameters[0]):
            return
        assert self._foreign is not None, "weights leave before the first block"
        held = HeldExperts(self._parameters, self._foreign.wait())
        self._projections = Projections(self._layout, held, self._rows.dtype)
        self._holds_foreign = True

    def _send_back(self, flight: _Flight) -> None:
        with self._lanes.travelling():
            self._lanes.follow(flight.computed)
            flight.returning = [
                self._return(flight, flight.slot.sums[: flight.received], self._buffers.returned)
            ]

    def _return(self, flight: _Flight, rows: torch.Tensor, landing: torch.Tensor) -> Arriving:
        chunk = flight.chunk
        return exchange(rows, landing[: flight.sent], chunk.receive, chunk.send, self._group)

    def _bring_home(self, flight: _Flight) -> None:
        own = flight.slot.own
        with self._lanes.travelling():
            returned = flight.returning[0].wait()
            if own is None:
                flight.journey.scatter(self._result, returned)
            else:
                flight.journey.scatter(own, returned, chunk_sized=True)
                # In pieces, since each is first made as narrow as the result.
                size = block_routes(own.device)
                for places in flight.journey.positions.split(size):
                    own, part = own[len(places) :], own[: len(places)]
                    self._result.index_copy_(0, places, part.to(self._result.dtype))


def _own_and_landed(
    of_layer: torch.Tensor, positions: torch.Tensor, landed: torch.Tensor
) -> torch.Tensor:
    """[n + received, ...]: the rows of the layer-sized table at `positions` [n], then `landed`."""
    joined = of_layer.new_empty((len(positions) + len(landed), *of_layer.shape[1:]))
    torch.index_select(of_layer, 0, positions, out=joined[: len(positions)])
    joined[len(positions) :] = landed
    return joined


class Forward(_Pass):
    """Sends x, brings home the weighted sums of the experts."""

    def __init__(self, layer: Layer, routing: Routing, inputs: Inputs) -> None:
        super().__init__(layer, routing, inputs, [inputs.hidden])

    def run(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The output [N, H], and the foreign weights, which the backward pass may be given.
        Collective."""
        foreign = self._go()
        return self._result, foreign

    def _compute_block(
        self,
        flight: _Flight,
        block: Block,
        landed: Sequence[torch.Tensor],
        scale: torch.Tensor,
    ) -> torch.Tensor:
        return expert_forward(
            self._projections, block, block.take(self._values[0], landed[0]), scale
        )


class Backward(_Pass):
    """Sends x and the gradient of the output, brings home those of x and of the route weights."""

    def __init__(
        self,
        layer: Layer,
        routing: Routing,
        inputs: Inputs,
        upstream: torch.Tensor,
        *,
        kept: Sequence[torch.Tensor],
        train_experts: bool,
    ) -> None:
        super().__init__(layer, routing, inputs, [inputs.hidden, upstream], kept)
        self._d_route_weights = torch.zeros_like(
            inputs.route_weights, memory_format=torch.contiguous_format
        )
        self._gradients = (
            self._migration.gradients(self._layout, inputs.parameters) if train_experts else None
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        """Gradients of hidden, of the route weights, and of the parameters: fp32 or wider, none
        where they are frozen. Collective."""
        self._go()
        if self._gradients is None:
            return self._result, self._d_route_weights, ()
        sums = self._gradients.finish()
        self._migration.return_gradients(sums)
        return self._result, self._d_route_weights, sums.natives

    def _compute_block(
        self,
        flight: _Flight,
        block: Block,
        landed: Sequence[torch.Tensor],
        scale: torch.Tensor,
    ) -> torch.Tensor:
        x, upstream = (
            block.take(own, rows) for own, rows in zip(self._values, landed, strict=True)
        )
        d_x, d_scale = expert_backward(
            self._projections, self._gradients, block, x=x, upstream=upstream, scale=scale
        )
        d_route_weights = flight.slot.d_route_weights.view(-1)
        d_route_weights.index_copy_(0, block.routes, d_scale.to(d_route_weights.dtype))
        return d_x

    def _compute(self, flight: _Flight) -> None:
        flight.slot.d_route_weights.zero_()
        super()._compute(flight)

    def _send_back(self, flight: _Flight) -> None:
        super()._send_back(flight)
        with self._lanes.travelling():
            own = len(flight.journey.positions)
            rows = flight.slot.d_route_weights[own : own + flight.received]
            flight.returning.append(
                self._return(flight, rows, self._buffers.returned_d_route_weights)
            )

    def _bring_home(self, flight: _Flight) -> None:
        with self._lanes.travelling():
            places = flight.journey.positions
            own = flight.slot.d_route_weights[: len(places)]
            self._d_route_weights.index_copy_(0, places, own)
            flight.journey.scatter(self._d_route_weights, flight.returning[1].wait())
        super()._bring_home(flight)
