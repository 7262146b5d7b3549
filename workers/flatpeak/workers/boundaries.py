"""Checkpoint boundaries in host memory (SCO): what checkpointed layers keep leaves the device.

Of a checkpointed layer only its input outlives the forward pass. `CheckpointOffload.checkpoint`
copies it to a slab of host memory while the layer runs and lets go of the device copy; the backward
pass fetches it back while the layer above recomputes. A boundary that does not fit stays where it
is. Values are copied, never changed: gradients are equal to the last bit.

How order is kept. All copies of one `CheckpointOffload` run on one stream, in the order of issue,
so a region of the slab is never read before it is written nor written before it is read. A copy
follows the work issued so far on the stream that is current where it is asked for; that stream
waits for the copy before device memory that the copy reads is freed, or that it writes is used.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.errors import InputError
from flatpeak.workers.memory import attribute
from flatpeak.workers.recompute import checkpoint_contexts
from flatpeak.workers.scopes import scope

BOUNDARIES = "boundaries"

# Regions start at cache lines: any dtype can view them, and DMA engines like it.
_ALIGNMENT = 64

# A restored tensor starts at the same place within so many bytes as before: kernels are chosen by
# the alignment of their operands, and another kernel may round otherwise.
_KERNEL_ALIGNMENT = 256


def slab_bytes(tokens: int, hidden: int, dtype: torch.dtype, layers: int) -> int:
    """Bytes of a slab that takes the boundaries [tokens, hidden] of all `layers`."""
    return layers * _aligned(tokens * hidden * dtype.itemsize)


def device_bytes(
    tokens: int, hidden: int, dtype: torch.dtype, layers: int, *, capacity: int
) -> int:
    """Most bytes that the boundaries [tokens, hidden] of all `layers` take on the device at once.

    Those that a slab of `capacity` bytes has no room for, and one on its way; at least the two of
    the layer that recomputes and of the one below.
    """
    nbytes = tokens * hidden * dtype.itemsize
    kept = max(0, layers - capacity // _aligned(nbytes))
    return min(layers, max(2, kept + 1)) * nbytes


@dataclass(frozen=True)
class BoundaryStats:
    """Boundaries of the forward passes in a `with` block of an offload, or in several, in bytes."""

    offloaded_bytes: int = 0
    kept_bytes: int = 0
    count: int = 0
    slab_bytes: int = 0  # how far into the slab they reached
    slab_bytes_needed: int = 0  # the slab that would have taken all that were alive at once

    def including(self, later: "BoundaryStats") -> "BoundaryStats":
        """Those of this and of a later block."""
        return BoundaryStats(
            offloaded_bytes=self.offloaded_bytes + later.offloaded_bytes,
            kept_bytes=self.kept_bytes + later.kept_bytes,
            count=self.count + later.count,
            slab_bytes=max(self.slab_bytes, later.slab_bytes),
            slab_bytes_needed=max(self.slab_bytes_needed, later.slab_bytes_needed),
        )


class Copies(Protocol):
    """One stream of copies, each after the one before."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy after the work issued so far on the current stream; returns a ticket."""

    def wait(self, ticket: Any, tensor: torch.Tensor) -> None:
        """Let work issued to the current stream from now on follow the copy.

        `tensor` is its side on the device, which may be let go of after the work that uses it has
        been issued to that stream.
        """


class SynchronousCopies:
    """Copies on the CPU: done when asked for."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def wait(self, ticket: None, tensor: torch.Tensor) -> None:
        pass


class CudaCopies:
    """Copies on a CUDA stream of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.cuda.Event, torch.cuda.Stream]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event, current

    def wait(
        self, ticket: tuple[torch.cuda.Event, torch.cuda.Stream], tensor: torch.Tensor
    ) -> None:
        event, issuer = ticket
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        if current != issuer:
            # The allocator gives memory back to the stream that it was made on. A layer may run on
            # another one than the layer above, which fetched its boundary.
            tensor.record_stream(current)


class CheckpointOffload:
    """Checkpoints layers with their inputs in `slab`.

    `slab` is a 1-D uint8 tensor in host memory (on CUDA pinned or registered by the caller, else
    copies block). At most `host_budget` bytes of it are used; None means all of it. A boundary
    is taken if it fits the space that is free when its layer runs. That depends on the sizes and
    order of the layers alone, so ranks with equal shapes decide alike; nothing collective hangs on
    it, so others may differ.

    No process group, no Ray: any torch script can use it (README, "Use the operators alone").

    Entering the `with` block starts afresh: statistics at zero and all of the slab free. Inside,
    any number of forward and backward passes may follow or overlap; the space of a boundary is free
    again once its graph is, which the backward pass sees to.
    """

    def __init__(
        self, slab: torch.Tensor, *, host_budget: int | None, copies: Copies | None = None
    ) -> None:
        _check_slab(slab)
        if host_budget is not None and host_budget < 0:
            raise InputError(
                f"the host budget for boundaries is {host_budget} bytes; "
                "set 0 to keep all of them on the device"
            )
        self._slab = slab
        self._capacity = min(slab.numel(), slab.numel() if host_budget is None else host_budget)
        self._copies = copies
        self._restart()

    def __enter__(self) -> Self:
        self._drop_ahead()
        self._restart()
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop_ahead()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Drop-in for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

        The boundary is made of the floating-point tensors among `args`, parameters apart.
        `options` go to the checkpoint of torch, and keyword arguments of `function` through it:
        they stay on the device, so give what many layers share (a mask) by keyword. RuntimeError
        if the function changes its boundary in place.
        """
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts, **options}
        if not torch.is_grad_enabled() or self._inside:
            # What is kept within a layer that recomputes is short-lived: not worth the trip.
            return checkpoint(function, *args, **options)

        layer, stored = self._depart(args)
        first_run = [args]

        def run(_: torch.Tensor | None, *stored: Any, **keywords: Any) -> Any:
            inputs = first_run.pop() if first_run else self._restore(layer, stored)
            self._inside = True
            try:
                return function(*inputs, **keywords)
            finally:
                self._inside = False

        try:
            return checkpoint(run, _device_mark(args), *stored, **options)
        finally:
            self._release(layer)

    def stats(self) -> BoundaryStats:
        return self._space.stats()

    def _restart(self) -> None:
        self._space = _Space(self._capacity)
        self._last: weakref.ref[_Layer] | None = None
        self._ahead: tuple[_Layer, list[_Arrival]] | None = None
        self._inside = False

    def _depart(self, args: Sequence[Any]) -> tuple["_Layer", list[Any]]:
        """Start the copies out; returns the arguments that are left for torch to keep."""
        layer = _Layer(self._space, self._last)
        self._last = weakref.ref(layer)
        stored = list(args)
        for index, tensor in enumerate(args):
            if not _is_boundary(tensor):
                continue
            attribute(tensor, BOUNDARIES)
            piece = _Piece.of(tensor, index=index)
            start = layer.take(tensor.nbytes if piece is None else piece.nbytes, piece is not None)
            if piece is None or start is None:
                continue
            with torch.no_grad():
                host = piece.host(self._slab, start)
                ticket = self._copies_of(tensor).copy(host, piece.distinct(tensor))
            layer.departed[piece] = host
            layer.leaving.append((tensor, tensor._version, ticket))
            stored[index] = None
        return layer, stored

    def _release(self, layer: "_Layer") -> None:
        """Let go of the device copies, once the copies out have read them."""
        leaving, layer.leaving = layer.leaving, []
        for tensor, _, ticket in leaving:
            self._copies_of(tensor).wait(ticket, tensor)
        if any(tensor._version != version for tensor, version, _ in leaving):
            raise RuntimeError(
                "a checkpointed function changed its input in place, while the input was copied to "
                "host memory for its recomputation; clone the input first"
            )

    def _restore(self, layer: "_Layer", stored: Sequence[Any]) -> list[Any]:
        """The arguments of a layer that is about to recompute; the layer below starts its way."""
        if layer.space is not self._space:
            raise RuntimeError(
                "the backward pass reached a boundary of an earlier `with offload:` block; "
                "keep a forward pass and its backward pass within one block"
            )
        if self._ahead is not None and self._ahead[0] is layer:
            arrivals, self._ahead = self._ahead[1], None
        else:
            self._drop_ahead()
            arrivals = self._fetch(layer)
        inputs = list(stored)
        for piece, tensor, ticket in arrivals:
            self._copies_of(tensor).wait(ticket, tensor)
            inputs[piece.index] = tensor.requires_grad_(piece.requires_grad)
        below = layer.below() if layer.below is not None else None
        if below is not None and below.departed:
            self._ahead = (below, self._fetch(below))
        return inputs

    def _fetch(self, layer: "_Layer") -> "list[_Arrival]":
        arrivals = []
        with torch.no_grad(), scope(BOUNDARIES):
            for piece, host in layer.departed.items():
                tensor = piece.empty()
                ticket = self._copies_of(tensor).copy(piece.distinct(tensor), host)
                arrivals.append((piece, tensor, ticket))
        return arrivals

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            # Nobody reads it, but its memory may not be used again while the copy still writes it.
            for _, tensor, ticket in self._ahead[1]:
                self._copies_of(tensor).wait(ticket, tensor)
            self._ahead = None

    def _copies_of(self, tensor: torch.Tensor) -> Copies:
        if self._copies is None:
            on_cuda = tensor.device.type == "cuda"
            self._copies = CudaCopies(tensor.device) if on_cuda else SynchronousCopies()
        return self._copies


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """One tensor of a boundary: its place among the arguments and its exact layout.

    Dimensions that a broadcast repeats (stride 0) travel once. `lead` elements come before it.
    """

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    lead: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, *, index: int) -> "_Piece | None":
        """None where there is no plain memory to copy."""
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return None
        if tensor.numel() == 0:
            return None
        return cls(
            index=index,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            lead=int(tensor.storage_offset()) % (_KERNEL_ALIGNMENT // tensor.itemsize),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    @property
    def nbytes(self) -> int:
        return prod(self._distinct_size()) * self.dtype.itemsize

    def distinct(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of `tensor` in which each element occurs once."""
        return tensor.as_strided(self._distinct_size(), self.stride)

    def empty(self) -> torch.Tensor:
        flat = torch.empty(self.lead + self._span(), dtype=self.dtype, device=self.device)
        return flat.as_strided(self.size, self.stride, self.lead)

    def host(self, slab: torch.Tensor, start: int) -> torch.Tensor:
        size = self._distinct_size()
        flat = slab[start : start + self.nbytes].view(self.dtype)
        # Without holes the device layout is kept, so that the copy is one run of memory.
        return flat.as_strided(size, self.stride) if self._span() == prod(size) else flat.view(size)

    def _span(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((si - 1) * st for si, st in zip(self.size, self.stride, strict=True))

    def _distinct_size(self) -> tuple[int, ...]:
        return tuple(1 if st == 0 else si for si, st in zip(self.size, self.stride, strict=True))


_Arrival = tuple[_Piece, torch.Tensor, Any]


class _Layer:
    """One checkpointed call: what of its boundary lies in the slab. It dies with its graph."""

    def __init__(self, space: "_Space", below: "weakref.ref[_Layer] | None") -> None:
        self.space = space
        self.below = below
        self.departed: dict[_Piece, torch.Tensor] = {}
        self.leaving: list[tuple[torch.Tensor, int, Any]] = []
        self._regions: list[tuple[int, int]] = []
        self._bytes = 0

    def take(self, nbytes: int, movable: bool) -> int | None:
        """The start of a region for `nbytes`; None where the boundary stays on the device."""
        region = self.space.take(nbytes, movable)
        self._bytes += _aligned(nbytes)
        if region is None:
            return None
        self._regions.append(region)
        return region[0]

    def __del__(self) -> None:
        self.space.returned.append((self._regions, self._bytes))


class _Space:
    """Which regions of the slab are free, and the figures of what came and went."""

    def __init__(self, capacity: int) -> None:
        self._free = [(0, capacity)]
        # Graphs die at any moment; what they held is put back before the next region is taken.
        self.returned: deque[tuple[list[tuple[int, int]], int]] = deque()
        self._alive_bytes = 0
        self._stats = BoundaryStats()

    def take(self, nbytes: int, movable: bool) -> tuple[int, int] | None:
        self._put_back()
        size = _aligned(nbytes)
        self._alive_bytes += size
        region = self._first_fit(size) if movable else None
        was = self._stats
        self._stats = BoundaryStats(
            offloaded_bytes=was.offloaded_bytes + (nbytes if region else 0),
            kept_bytes=was.kept_bytes + (0 if region else nbytes),
            count=was.count + 1,
            slab_bytes=max(was.slab_bytes, region[1] if region else 0),
            slab_bytes_needed=max(was.slab_bytes_needed, self._alive_bytes),
        )
        return region

    def stats(self) -> BoundaryStats:
        return self._stats

    def _first_fit(self, size: int) -> tuple[int, int] | None:
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index] = (start + size, stop)
                return start, start + size
        return None

    def _put_back(self) -> None:
        while self.returned:
            regions, nbytes = self.returned.popleft()
            self._alive_bytes -= nbytes
            self._free = _merged([*self._free, *regions])


def _merged(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(regions):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _check_slab(slab: torch.Tensor) -> None:
    if slab.dtype != torch.uint8 or slab.dim() != 1 or not slab.is_contiguous():
        raise InputError(
            f"a slab is a contiguous 1-D uint8 tensor, not {slab.dtype} of shape "
            f"{tuple(slab.shape)}; view the memory as torch.uint8 and flatten it"
        )
    if slab.device.type != "cpu" or slab.storage_offset() % _ALIGNMENT:
        raise InputError(
            f"a slab is host memory that starts at a multiple of {_ALIGNMENT} bytes, not at byte "
            f"{slab.storage_offset()} of memory on {slab.device}"
        )


def _is_boundary(argument: Any) -> bool:
    # A parameter outlives the step anyway.
    return (
        isinstance(argument, torch.Tensor)
        and not isinstance(argument, torch.nn.Parameter)
        and argument.is_floating_point()
    )


def _device_mark(args: Sequence[Any]) -> torch.Tensor | None:
    # The checkpoint saves the random state of the devices that it sees among its arguments; the
    # boundary is not among them any more.
    for argument in args:
        if _is_boundary(argument):
            return torch.empty(0, device=argument.device)
    return None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
