"""The bytes that dispatch takes above its inputs and results, from sizes alone.

A backward pass takes more than a forward pass, so it alone counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from flatpeak.workers.dispatch.buffers import slab_bytes
from flatpeak.workers.dispatch.counting import TOKENS_AT_ONCE, steps_at_once
from flatpeak.workers.dispatch.cutting import Extent
from flatpeak.workers.dispatch.experts import DOWN, UP, ExpertLayout, accurate, block_routes
from flatpeak.workers.dispatch.rows import RowFormat
from flatpeak.workers.memory import TOTAL, PeakMeter

_INDEX = torch.int64.itemsize
_LABEL = torch.int16.itemsize
_COUNT = torch.int32.itemsize
# Chunks whose tables a pass keeps: one to come, one that is computed, one behind.
_FLIGHTS = 3
MOST_FACTS = 32
"""Numbers at most that each rank tells of itself beside its counts."""


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """One layer's experts, the same on every rank."""

    hidden: int
    up: int
    """Columns of the up projection, gate included."""
    inner: int
    """Rows of the down projection."""
    k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    """Of the route weights."""
    held_dtype: torch.dtype
    """Of the experts' parameters."""
    biases: bool
    block_routes: int
    gate_bytes: int
    """Of one route: what the gate and its derivative have alive at once."""
    separate_products: bool
    """Whether the product of a weight gradient is formed before it is added."""

    @property
    def rows(self) -> RowFormat:
        """What travels in a backward pass."""
        return RowFormat(self.hidden, self.k, 2, self.dtype, self.weight_dtype)

    @property
    def expert_parameters(self) -> int:
        biases = (self.up + self.hidden) * self.biases
        return self.hidden * (self.up + self.inner) + biases

    @property
    def narrow(self) -> bool:
        return self.dtype != accurate(self.dtype)


def layer_sizes(
    layout: ExpertLayout,
    parameters: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    device: torch.device | None = None,
) -> LayerSizes:
    """`device` is where the layer will run, where the tensors are not yet there."""
    device = device or hidden.device
    up, down = (layout.view(parameters[which]) for which in (UP, DOWN))
    wide = accurate(hidden.dtype)
    return LayerSizes(
        hidden=hidden.shape[1],
        up=up.shape[-1],
        inner=down.shape[-2],
        k=expert_weights.shape[1],
        dtype=hidden.dtype,
        weight_dtype=expert_weights.dtype,
        held_dtype=parameters[UP].dtype,
        biases=layout.has_bias,
        block_routes=block_routes(device),
        gate_bytes=_gate_values(layout, up.shape[-1]) * wide.itemsize,
        separate_products=device.type == "cuda" and hidden.dtype != wide,
    )


_measured: WeakKeyDictionary[object, int] = WeakKeyDictionary()
_SAMPLE = 16


def _gate_values(layout: ExpertLayout, columns: int) -> int:
    """Values of one route that the gate and its derivative have alive at once.

    Measured once a layer, on a few rows: families differ, and only their code says how.
    """
    owner = getattr(layout.activate, "__self__", layout.activate)
    if owner not in _measured:
        _measured[owner] = -(-_sample_gate(layout, columns) // (_SAMPLE * torch.float32.itemsize))
    return _measured[owner]


def _sample_gate(layout: ExpertLayout, columns: int) -> int:
    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    # Neither the checkpoint nor the offload of the layer may see what the sample saves.
    hidden = saved_tensors_hooks(kept, kept)
    with torch.inference_mode(False), torch.enable_grad(), hidden, PeakMeter() as meter:
        up = torch.zeros(_SAMPLE, columns, dtype=torch.float32, device="cpu").requires_grad_()
        inner = layout.activate(up)
        torch.autograd.grad(inner, up, torch.zeros_like(inner))
        return meter.peaks()[TOTAL]


def dispatch_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """What dispatch takes on a rank above its inputs and results."""
    gradient = sizes.expert_parameters * accurate(sizes.held_dtype).itemsize
    weights = sizes.expert_parameters * sizes.dtype.itemsize
    moving = extent.foreign + (extent.leaving if sizes.held_dtype != sizes.dtype else 0)
    chunks = slab_bytes(extent, sizes.rows) + _table_bytes(sizes, extent)
    chunks += _block_bytes(sizes, extent) + moving * weights
    # After the last chunk an owner takes in the gradients of some experts at a time.
    landing = extent.most_foreign * gradient if extent.leaving else 0
    # Beside weights that were kept since the forward pass.
    landing += extent.foreign * weights
    layer = extent.layer_tokens * sizes.k * _LABEL + extent.instances * _INDEX
    layer += extent.foreign * gradient
    return max(layer + max(chunks, landing), _agreeing_bytes(sizes, extent))


def _table_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """Which rows of a chunk go where, and which routes to whom."""
    routes = (extent.tokens + extent.received) * sizes.k
    return (
        routes * (_LABEL + sizes.weight_dtype.itemsize + _INDEX)
        + extent.computed * 2 * _INDEX
        + (extent.tokens + extent.sent * 2) * _INDEX * min(_FLIGHTS, extent.chunks)
    )


def _agreeing_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """Labels of the layer's routes, and their counts, before the slab is there."""
    columns = extent.instances + extent.ranks
    steps = min(extent.chunks, steps_at_once(columns))
    # Without foreign experts the ids are the labels.
    labelling = sizes.k * (4 * _LABEL + _INDEX) if extent.most_foreign else sizes.k * _LABEL
    labelling *= extent.layer_tokens
    # A backward pass labels beside the weights that were kept since the forward pass.
    labelling += extent.foreign * sizes.expert_parameters * sizes.dtype.itemsize
    # Experts of some tokens, the ranks that compute them, and ones to add up; and what all gather.
    summing = min(extent.layer_tokens, TOKENS_AT_ONCE)
    summing *= sizes.k * (2 * _INDEX + _COUNT) + extent.ranks
    summing += (extent.ranks + 2) * (MOST_FACTS + columns) * _INDEX
    # All labels; then the table of a turn, first with the labels that are counted, the ranks that
    # compute them and the sums of rows, then with what the other ranks counted. Coarser cuts were
    # counted before, of as many tokens in a turn.
    turn = max(min(extent.layer_tokens, TOKENS_AT_ONCE), steps)
    taking = 3 * _INDEX + sizes.k * (_LABEL + _INDEX)
    counting = extent.layer_tokens * sizes.k * _LABEL + 2 * steps * (columns + 1) * _COUNT
    counting += max(
        turn * taking,
        turn * (2 * sizes.k * _INDEX + extent.ranks) + steps * extent.ranks * _COUNT,
        steps * extent.ranks * (1 + extent.held) * _COUNT,
    )
    counting += 4 * columns * _INDEX
    return max(labelling, summing, counting)


def _block_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """The largest block at its fullest; or, when none is computed, what it takes to find the rows
    that leave, to sort the routes, and to add results that came home."""
    finding = extent.tokens * (2 * sizes.k * _INDEX + extent.ranks * (2 + 2 * _INDEX))
    # The places of own tokens and of landed rows, then of the routes among them.
    sorting = extent.computed * 2 * _INDEX
    sorting += max(sorting, (extent.tokens + extent.received) * _INDEX)
    adding = extent.sent_to_one * accurate(sizes.dtype).itemsize
    adding = max(adding, min(sizes.block_routes, extent.tokens) * sizes.dtype.itemsize)
    adding *= sizes.hidden * sizes.narrow
    block = min(sizes.block_routes, extent.computed)
    part = min(sizes.block_routes, extent.computed_by_one)
    return max(finding, sorting, adding, _fullest(sizes, block, part))


def _fullest(sizes: LayerSizes, block: int, part: int) -> int:
    """The most of what is alive at the steps of `expert_backward`, in their order, for the routes
    of a block and those of one expert."""
    item, wide = sizes.dtype.itemsize, accurate(sizes.dtype).itemsize
    narrow = wide if sizes.narrow else 0
    rows = 2 * sizes.hidden * item + 2 * wide
    kept = rows + (sizes.inner + sizes.up) * wide
    converted = item * sizes.hidden if sizes.held_dtype != sizes.dtype else 0
    product = sizes.hidden * wide if sizes.separate_products else 0
    # Products of several experts in one kernel never take the place of their rows.
    grouped = sizes.hidden * item if sizes.separate_products else 0
    # A part's rows of H, widened for its product.
    widened = part * sizes.hidden * narrow
    return max(
        # up = x W1, then widened
        block * (rows + sizes.up * item) + sizes.up * converted,
        block * (rows + sizes.up * (item + narrow)),
        # a = act(up) and its derivative
        block * (rows + sizes.gate_bytes),
        # dW1 += x^T du
        block * kept + widened + sizes.up * product,
        # dW2 += (s a)^T g
        block * (kept + sizes.inner * wide) + widened + sizes.inner * product,
        # db2 += s^T g
        block * (kept + sizes.hidden * wide * sizes.biases),
        # dx = du W1^T
        block * (kept + sizes.up * item * sizes.narrow + grouped) + sizes.up * converted,
        # dx, widened, is added to the sums of its tokens
        block * (sizes.hidden * (item + narrow) + wide),
    )


def smallest_budget(
    sizes: LayerSizes, *, experts: int, ranks: int, tokens: int, max_foreign: int
) -> int:
    """The least `budget_bytes` that holds for any routing: one token of one rank at a time.

    `tokens` are those of a rank in a layer, `experts` those of all ranks.
    """
    foreign = min(max_foreign, experts - experts // ranks)
    one_token = Extent(
        tokens=1,
        sent=min(sizes.k, ranks - 1),
        sent_to_one=min(1, ranks - 1),
        received=min(1, ranks - 1),
        computed=sizes.k,
        computed_by_one=sizes.k,
        chunks=ranks * max(1, tokens),
        layer_tokens=tokens,
        foreign=foreign,
        most_foreign=foreign,
        leaving=min(-(-experts // ranks), foreign * (ranks - 1)),
        ranks=ranks,
        instances=experts + ranks * foreign,
        held=-(-experts // ranks) + foreign,
    )
    # Of more instances fewer chunks are counted at once, so those in between may take more.
    return max(
        dispatch_bytes(sizes, replace(one_token, instances=instances))
        for instances in range(experts, one_token.instances + 1)
    )
