"""Which component holds device memory, now and at its worst.

A `PeakMeter` charges every byte to the scope that was innermost when the memory was made. On CPU it
watches storages through a dispatch mode and is exact to the byte; on CUDA it reads the caching
allocator where scopes open and close. Memory made inside `scope(HOST)` stands for host memory
(arenas, slabs) and is not counted.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, Protocol, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from flatpeak.workers.scopes import OTHER, current_scope, observed, scope

__all__ = ["HOST", "TOTAL", "PeakMeter", "attribute", "exclude", "scope"]

HOST = "host"
TOTAL = "total"

_active: list["PeakMeter"] = []


def attribute(tensor: torch.Tensor, component: str) -> None:
    """Charge the memory of `tensor` to `component` in every meter that is running."""
    for meter in _active:
        meter.attribute(tensor, component)


def exclude(tensor: torch.Tensor) -> None:
    """Tell every running meter that the memory of `tensor` stands for host memory."""
    attribute(tensor, HOST)


class PeakMeter:
    """Live and peak bytes of device memory by component, inside a `with` block.

    On `device="cpu"` it sees the operations of the entering thread, and of the backward pass that
    this thread runs: the memory of every tensor they return, from its making until its storage is
    freed, views once. Scratch memory inside a kernel is not seen. A storage keeps its component
    when it is resized, until `attribute` moves it.

    On `device="cuda"` the total is the allocator's own peak. A component's peak is the most that
    any of its scopes rose above the bytes allocated at its entry, scopes nested inside not counted;
    or, where larger, the most bytes alive of tensors given to `track` and `attribute`. Bytes made
    elsewhere that are freed within a scope count against its rise. `allocator` stands in for that
    of the device.
    """

    def __init__(
        self, *, device: torch.device | str = "cpu", allocator: "Allocator | None" = None
    ) -> None:
        device = torch.device(device)
        if allocator is None and device.type == "cuda":
            allocator = _CudaAllocator(device)
        self._ledger = _Ledger()
        self._rises = None if allocator is None else ScopeRises(allocator)
        self._running = ExitStack()

    def __enter__(self) -> Self:
        assert self not in _active, "this PeakMeter is already running"
        with ExitStack() as stack:
            if self._rises is not None:
                self._rises.start()
                stack.callback(self._rises.stop)
                stack.enter_context(observed(self._rises))
            else:
                stack.enter_context(_Watch(self._ledger))
                stack.enter_context(_resizes_seen(self._ledger.resized))
            _active.append(self)
            stack.callback(_active.remove, self)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()

    def peaks(self) -> dict[str, int]:
        """Most bytes alive at once since `reset_peaks`, by component and in `"total"`."""
        return self._with_rises(self._ledger.peaks())

    def lifetime_peaks(self) -> dict[str, int]:
        """Most bytes alive at once since the meter was made."""
        return self._with_rises(self._ledger.lifetime_peaks(), lifetime=True)

    def live(self) -> dict[str, int]:
        """Bytes alive now; on CUDA, by component, only those of tracked and attributed tensors."""
        live = self._ledger.live()
        if self._rises is not None:
            live[TOTAL] = self._rises.allocator.allocated()
        return live

    def largest_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of the tensor with most elements made since `reset_peaks`, by component (CPU)."""
        assert self._rises is None, "single allocations are seen on CPU alone"
        return dict(self._ledger.largest)

    def reset_peaks(self) -> None:
        """Start a step: its peaks begin at the bytes that are alive now."""
        self._ledger.reset()
        if self._rises is not None:
            self._rises.reset()

    def track(self, tensor: torch.Tensor, component: str) -> None:
        """Count a tensor that was made before the meter ran (a parameter, say)."""
        for storage in _storages(tensor):
            self._ledger.hold(storage, component)

    def attribute(self, tensor: torch.Tensor, component: str) -> None:
        """Charge the memory of `tensor` to `component` from now on, if it counts at all."""
        hold = self._rises is not None
        for storage in _storages(tensor):
            if hold:
                self._ledger.hold(storage, component)
            self._ledger.move(storage, component)

    def exclude(self, tensor: torch.Tensor) -> None:
        """Never count the memory of `tensor`: it stands for host memory."""
        self.attribute(tensor, HOST)

    def _with_rises(self, peaks: dict[str, int], *, lifetime: bool = False) -> dict[str, int]:
        if self._rises is None:
            return peaks
        # The tracked tensors are a part of what is allocated: the allocator's total stands alone.
        del peaks[TOTAL]
        return _larger(peaks, self._rises.lifetime_peaks() if lifetime else self._rises.peaks())


class _Held(weakref.ref[torch.UntypedStorage]):
    """A storage under watch: the weak reference carries what was charged for it."""

    __slots__ = ("component", "key", "nbytes")
    component: str
    key: int
    nbytes: int


class _Ledger:
    """Bytes of live storages by component, and their peaks."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        # A storage can die in the middle of any line here (garbage collection). Its death is only
        # noted then, and settled before the next reading or charge.
        self._dead: deque[_Held] = deque()
        self._live = {TOTAL: 0}
        self._peaks = {TOTAL: 0}
        self._lifetime = {TOTAL: 0}
        self.largest: dict[str, tuple[int, ...]] = {}

    def hold(self, storage: torch.UntypedStorage, component: str) -> None:
        self._settle()
        key = storage._cdata
        if key in self._held:
            return
        held = self._held[key] = _Held(storage, self._dead.append)
        held.component, held.key, held.nbytes = component, key, storage.nbytes()
        self._charge(component, held.nbytes)

    def made(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.hold(storage, current_scope())
        self._note_shape(tensor, current_scope())

    def changed(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """An operation wrote into `tensor`, and may have given it a larger storage for that."""
        held = self._held.get(storage._cdata)
        if held is not None and held.nbytes != storage.nbytes():
            self.resized(storage)
            self._note_shape(tensor, held.component)

    def move(self, storage: torch.UntypedStorage, component: str) -> None:
        self._settle()
        held = self._held.get(storage._cdata)
        if held is not None and held.component != HOST:
            self._charge(held.component, -held.nbytes)
            held.component = component
            self._charge(component, held.nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        held = self._held.get(storage._cdata)
        if held is not None and held.nbytes != (nbytes := storage.nbytes()):
            change, held.nbytes = nbytes - held.nbytes, nbytes
            self._charge(held.component, change)

    def live(self) -> dict[str, int]:
        self._settle()
        return dict(self._live)

    def peaks(self) -> dict[str, int]:
        return dict(self._peaks)

    def lifetime_peaks(self) -> dict[str, int]:
        return _larger(self._lifetime, self._peaks)

    def reset(self) -> None:
        self._lifetime = self.lifetime_peaks()
        self._peaks = self.live()
        self.largest.clear()

    def _note_shape(self, tensor: torch.Tensor, component: str) -> None:
        if component != HOST and tensor.numel() > prod(self.largest.get(component, (0,))):
            self.largest[component] = tuple(tensor.shape)

    def _settle(self) -> None:
        while self._dead:
            held = self._dead.popleft()
            del self._held[held.key]
            self._charge(held.component, -held.nbytes)

    def _charge(self, component: str, nbytes: int) -> None:
        if component == HOST:
            return
        for name in (component, TOTAL):
            live = self._live[name] = self._live.get(name, 0) + nbytes
            self._peaks[name] = max(self._peaks.get(name, 0), live)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


class _Watch(TorchDispatchMode):
    """Shows a ledger every storage that an operation makes or resizes."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A wrapper (DTensor) unwraps itself first; its local operations then come by here.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func is _WAIT and isinstance(args[0], FakeTensor):
            # Real waiting returns its argument; the fake one would make a second tensor.
            return args[0]
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages(args)}
        if kwargs:
            given.update(storage._cdata for storage in _storages(kwargs))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in given:
                self._ledger.changed(tensor, storage)
            elif tensor.device.type == "cpu":
                self._ledger.made(tensor, storage)
        return result


@contextmanager
def _resizes_seen(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    # FSDP2 frees and refills its buffers in this way, which passes no dispatcher.
    plain = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = plain(self, size)
        resized(self)
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain


def _leaves(tree: Any) -> list[Any]:
    """What an operation takes or returns, flat: tensors come bare, in lists, tuples and dicts.

    Runs twice for every operation while a meter is on; torch's own pytree took half of its cost.
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return [tree]
    leaves = []
    for item in tree:
        if isinstance(item, (list, tuple, dict)):
            leaves += _leaves(item)
        else:
            leaves.append(item)
    return leaves


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in _leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from _plain(leaf)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in _leaves(tree):
        if isinstance(leaf, torch.Tensor):
            for tensor in _plain(leaf):
                yield tensor.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage):
            yield leaf
        elif isinstance(leaf, torch.TypedStorage):
            yield leaf._untyped_storage


_BARE = (torch.Tensor, torch.nn.Parameter)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that `tensor` is, or wraps."""
    # Most tensors are of these two types: a look that spares the slow question.
    if type(tensor) not in _BARE and is_traceable_wrapper_subclass(tensor):
        # A wrapper may list other things too (DTensor: its mesh).
        yield from _tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
    elif tensor.layout is torch.strided:
        yield tensor


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


class Allocator(Protocol):
    """What `ScopeRises` reads: bytes allocated now, and at most since `restart`."""

    def allocated(self) -> int: ...

    def peak(self) -> int: ...

    def restart(self) -> None: ...


class _CudaAllocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _Frame:
    """One open scope: the bytes its own work has added, and the most they were."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self.peak = 0


class ScopeRises:
    """How far the allocator's bytes rise within each scope, innermost scope only.

    The time between two scope borders belongs to the scope that is innermost then. The allocator's
    peak counter restarts at every border, so that it gives the peak of that stretch alone.
    The allocator is one for all threads while the backward pass of a device has a thread of its
    own, so there is one stack of frames; the threads take turns.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self._frames: list[_Frame] = []
        self._peaks: dict[str, int] = {}
        self._lifetime: dict[str, int] = {}
        self._before = 0

    def start(self) -> None:
        self._frames = [_Frame(OTHER)]
        self.allocator.restart()
        self._before = self.allocator.allocated()

    def stop(self) -> None:
        self._close_stretch()
        self._frames = []

    def entered(self, name: str) -> None:
        self._close_stretch()
        self._frames.append(_Frame(name))

    def left(self) -> None:
        self._close_stretch()
        self._frames.pop()

    def peaks(self) -> dict[str, int]:
        self._close_stretch()
        return dict(self._peaks)

    def lifetime_peaks(self) -> dict[str, int]:
        return _larger(self._lifetime, self.peaks())

    def reset(self) -> None:
        self._lifetime = self.lifetime_peaks()
        self._peaks = dict.fromkeys(self._peaks, 0)
        for frame in self._frames:
            frame.peak = frame.bytes
            self._peaks[frame.name] = max(self._peaks[frame.name], frame.bytes)
        self._peaks[TOTAL] = self._before

    def _close_stretch(self) -> None:
        if not self._frames:
            return
        now, top, frame = self.allocator.allocated(), self.allocator.peak(), self._frames[-1]
        self.allocator.restart()
        frame.peak = max(frame.peak, frame.bytes + top - self._before)
        # A scope that frees what others made has not gone below nothing.
        frame.bytes = max(0, frame.bytes + now - self._before)
        self._before = now
        self._peaks[frame.name] = max(self._peaks.get(frame.name, 0), frame.peak)
        self._peaks[TOTAL] = max(self._peaks.get(TOTAL, 0), top)
