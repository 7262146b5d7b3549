"""The bytes that dispatch takes above its inputs and results, from sizes alone.

A backward pass takes more than a forward pass, so it alone counts.
"""

from dataclasses import dataclass

import torch

from flatpeak.workers.dispatch.buffers import Extent, slab_bytes
from flatpeak.workers.dispatch.experts import accurate
from flatpeak.workers.dispatch.rows import RowFormat

# Intermediate values of a gate and its derivative alive at once, in widths of its input. Measured
# over the supported families; the tests hold them to it.
_GATE_WIDTHS = 7
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
    def foreign_expert_bytes(self) -> int:
        """A foreign expert's weights and the accumulators of its gradients."""
        parameters = self.hidden * (self.up + self.inner)
        parameters += (self.up + self.hidden) * self.biases
        return parameters * (self.dtype.itemsize + accurate(self.held_dtype).itemsize)


def pass_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """What a pass takes above inputs, results and foreign experts."""
    tables = _table_bytes(sizes, extent)
    return slab_bytes(extent, sizes.rows) + tables + _block_bytes(sizes, extent)


def _table_bytes(sizes: LayerSizes, extent: Extent) -> int:
    """Labels of the layer, and which rows go where and which routes to whom in a chunk."""
    routes = (extent.tokens + extent.received) * sizes.k
    return (
        extent.layer_tokens * sizes.k * _LABEL
        + routes * (_LABEL + sizes.weight_dtype.itemsize + _INDEX)
        + extent.computed * 2 * _INDEX
        + extent.sent * 2 * _INDEX * (1 + extent.slots)
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
