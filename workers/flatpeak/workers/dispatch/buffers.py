"""The memory of one pass over a layer: one slab, cut into buffers that chunks take in turn.

Nothing that travels is ever freed on the way, so no free can race with a collective in flight or
with another stream, and the bytes of a pass are known before its first chunk.
"""

from dataclasses import dataclass
from math import prod

import torch

from flatpeak.workers.dispatch.cutting import Extent
from flatpeak.workers.dispatch.experts import accurate
from flatpeak.workers.dispatch.rows import RowFormat, aligned


@dataclass
class Slot:
    """What one chunk needs from the arrival of its rows to the return of the results."""

    landing: torch.Tensor
    """[received, bytes of a row]"""
    sums: torch.Tensor
    """[received, H], what goes back for each landed row."""
    own: torch.Tensor | None
    """[tokens, H] sums of own tokens, where the result itself is not wide enough to add in."""
    d_route_weights: torch.Tensor
    """[tokens + received, k] gradients of route weights; empty in a forward pass."""


@dataclass
class Buffers:
    outgoing: torch.Tensor
    """[sent, bytes of a row]"""
    returned: torch.Tensor
    """[sent, H]"""
    returned_d_route_weights: torch.Tensor
    """[sent, k]; empty in a forward pass."""
    wide: torch.Tensor | None
    """[received, H] sums, where the rows that go back are not wide enough to add in."""
    slots: list[Slot]


def slots_of(extent: Extent) -> int:
    """Chunks that are on a rank at once: one arrives or returns while another computes."""
    return min(2, extent.chunks)


def slab_bytes(extent: Extent, rows: RowFormat) -> int:
    """Bytes that `make_buffers` takes."""
    slab = _Slab()
    _carve(slab, extent, rows)
    return slab.used


def make_buffers(extent: Extent, rows: RowFormat, device: torch.device) -> Buffers:
    # In elements of the rows, so that who watches the sizes of tensors sees how many there are.
    elements = slab_bytes(extent, rows) // rows.dtype.itemsize
    slab = _Slab(torch.empty(elements, dtype=rows.dtype, device=device).view(torch.uint8))
    return _carve(slab, extent, rows)


_NOTHING = torch.empty(0)


class _Slab:
    """Hands out consecutive pieces of `memory`; without memory it only adds them up."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        self._memory = memory
        self._next = 0
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes, start = prod(shape) * dtype.itemsize, self._next
        self._next += aligned(nbytes)
        self.used = max(self.used, self._next)
        if self._memory is None:
            return _NOTHING
        return self._memory[start : start + nbytes].view(dtype).view(shape)

    def rewind(self) -> None:
        """Hand out the pieces so far once more."""
        self._next = 0

    def skip(self) -> None:
        """Go on after all pieces so far."""
        self._next = self.used


def _carve(slab: _Slab, extent: Extent, rows: RowFormat) -> Buffers:
    wide = accurate(rows.dtype)
    narrow = rows.dtype != wide
    sent, received = extent.sent, extent.received

    def values(count: int, dtype: torch.dtype = rows.dtype) -> torch.Tensor:
        return slab.take((count, rows.hidden), dtype)

    def d_route_weights(count: int) -> torch.Tensor:
        return slab.take((count if rows.values > 1 else 0, rows.k), rows.weight_dtype)

    outgoing = slab.take((sent, rows.nbytes), torch.uint8)
    if extent.chunks == 1:
        slab.rewind()  # nothing leaves any more when the results return
    returned, returned_d_route_weights = values(sent), d_route_weights(sent)
    slab.skip()
    slots = [
        Slot(
            slab.take((received, rows.nbytes), torch.uint8),
            values(received),
            values(extent.tokens, wide) if narrow else None,
            d_route_weights(extent.tokens + received),
        )
        for _ in range(slots_of(extent))
    ]
    return Buffers(
        outgoing,
        returned,
        returned_d_route_weights,
        values(received, wide) if narrow else None,
        slots,
    )
