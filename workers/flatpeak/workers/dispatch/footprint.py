"""The bytes that dispatch takes above its inputs and results, from sizes alone.

A backward pass takes more than a forward pass, so it alone counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flatpeak.workers.dispatch.buffers import slab_bytes, slots_of
from flatpeak.workers.dispatch.cutting import Extent
from flatpeak.workers.dispatch.experts import DOWN, UP, ExpertLayout, accurate, block_routes
from flatpeak.workers.dispatch.rows import RowFormat

# Intermediate values of a gate and its derivative alive at once, in widths of its input. Measured
# over the supported families; the tests hold them to it.
_GATE_WIDTHS = 5
_INDEX = torch.int64.itemsize
_LABEL = torch.int16.itemsize


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

    @property
    def rows(self) -> RowFormat:
        """What travels in a backward pass."""
        return RowFormat(self.hidden, self.k, 2, self.dtype, self.weight_dtype)

    @property
    def expert_parameters(self) -> int:
        biases = (self.up + self.hidden) * self.biases
        return self.hidden * (self.up + self.inner) + biases


def layer_sizes(
    layout: ExpertLayout,
    parameters: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    expert_weights: torch.Tensor,
) -> LayerSizes:
    up, down = (layout.view(parameters[which]) for which in (UP, DOWN))
    return LayerSizes(
        hidden=hidden.shape[1],
        up=up.shape[-1],
        inner=down.shape[-2],
        k=expert_weights.shape[1],
        dtype=hidden.dtype,
        weight_dtype=expert_weights.dtype,
        held_dtype=parameters[UP].dtype,
        biases=layout.has_bias,
        block_routes=block_routes(hidden.device),
    )


def dispatch_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """What dispatch takes on a rank above its inputs and results."""
    gradient = sizes.expert_parameters * accurate(sizes.held_dtype).itemsize
    weights = sizes.expert_parameters * sizes.dtype.itemsize
    chunks = slab_bytes(extent, sizes.rows) + _block_bytes(sizes, extent)
    # After the last chunk an owner takes in the gradients of some experts at a time.
    return (
        _table_bytes(sizes, extent)
        + extent.foreign * gradient
        + max(chunks + extent.foreign * weights, extent.most_foreign * gradient)
    )


def _table_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """Labels of the layer, and which rows go where and which routes to whom in a chunk."""
    routes = (extent.tokens + extent.received) * sizes.k
    return (
        extent.layer_tokens * sizes.k * _LABEL
        + routes * (_LABEL + sizes.weight_dtype.itemsize + _INDEX)
        + extent.computed * 2 * _INDEX
        + extent.sent * 2 * _INDEX * (1 + slots_of(extent))
    )


def _block_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """Rows taken and intermediate values of the largest block; or what sorting its routes takes."""
    wide = accurate(sizes.dtype)
    narrow = wide != sizes.dtype
    values = 2 * sizes.hidden * sizes.dtype.itemsize
    values += (sizes.up * _GATE_WIDTHS + 2 * sizes.inner) * wide.itemsize
    if narrow or sizes.biases:
        values += sizes.hidden * wide.itemsize
    block = min(sizes.block_routes, extent.computed) * values
    return max(block, extent.computed * 4 * _INDEX)


def smallest_budget(sizes: LayerSizes, *, ranks: int, tokens: int, max_foreign: int) -> int:
    """The least `budget_bytes` that holds for any routing: one token of one rank at a time.

    `tokens` are those of a rank in a layer.
    """
    one_token = Extent(
        tokens=1,
        sent=min(sizes.k, ranks - 1),
        received=min(1, ranks - 1),
        computed=sizes.k,
        chunks=ranks * max(1, tokens),
        layer_tokens=tokens,
        foreign=max_foreign if ranks > 1 else 0,
        most_foreign=max_foreign if ranks > 1 else 0,
    )
    return dispatch_bytes(sizes, one_token)
