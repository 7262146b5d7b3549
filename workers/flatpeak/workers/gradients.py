"""The worker's way into and out of the arenas: gradients there, weights back, and the norm.

One step, seen from an arena: the worker writes gradients (`begin_step`, `write`, `finish`), all
ranks agree on the norm and so on one clipping factor, the optimizer actor updates bucket after
bucket, and the worker's next forward fetches each bucket's weights as soon as it has flipped.

A parameter without a gradient in a step has gradient zero: its moments decay and weight decay
applies, as for an expert that got no token. Never does a step see another step's gradient.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate as running_sum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flatpeak.workers.buckets import Bucket, BucketIndex, Piece
from flatpeak.workers.progress import waiting
from flatpeak.workers.streams import Streams, Synchronous

InPlace = Callable[[int, int], bool]
"""Whether a bucket's weights, by its index and version, are where they are wanted already."""


def clipping_factor(norm: float, max_norm: float | None) -> float | None:
    """The factor of `torch.nn.utils.clip_grad_norm_`; None when `norm` is not finite: skip."""
    if not math.isfinite(norm):
        return None
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def global_norm(squared: Tensor, group: dist.ProcessGroup | None = None) -> float:
    """The norm over all ranks of `group` from each rank's `squared_norm`, equal on all of them.

    The sum travels on the group's device, wherever the gradients are.
    """
    if dist.is_initialized():
        on_host = dist.get_backend(group) in ("gloo", "mpi", "fake")
        device = torch.device("cpu")
        if not on_host:
            device = torch.device("cuda", torch.cuda.current_device())
        squared = squared.to(device, copy=True)
        with waiting():
            dist.all_reduce(squared, group=group)
    return math.sqrt(squared.item())


class BucketHome(Protocol):
    """What holds the buckets of one arena, as a worker uses it: the `Arena` itself where both
    share memory, else a `RemoteArena`. Their methods do the same to the last bit."""

    def wait_version(self, i: int, version: int, *, timeout_s: float) -> None: ...

    def read_places(self, i: int, version: int, places: Sequence[tuple[int, Tensor]]) -> None:
        """Copies elements [offset, offset + n) of the weights of `version` to each out [n]."""
        ...

    def check_version(self, i: int, version: int) -> None:
        """Raises `ClusterError` when what `read_places` has copied may be of another version."""
        ...

    def count_before(self, version: int, *, rank: int) -> int: ...

    def write_gradient(self, i: int, offset: int, values: Tensor, *, accumulate: bool) -> None: ...

    def zero_gradient(self, i: int, start: int, stop: int) -> None: ...

    def square_gradient(self, i: int, start: int, stop: int) -> Tensor:
        """The sum [] (fp64), which may be there only after `settle`."""
        ...

    def settle(self) -> None:
        """Return when all that was asked about gradients is done."""
        ...


class GradientStream:
    """One rank's gradients into the arenas, and its weights out of them.

    `buckets` are the rank's own, `arenas` maps each one's arena to what holds them. In one step:
    `begin_step`, any number of `write`, `finish`, `squared_norm`; then the next forward's `fetch`.
    """

    def __init__(self, buckets: Sequence[Bucket], arenas: Mapping[int, BucketHome]) -> None:
        self._buckets = sorted(buckets, key=lambda bucket: bucket.index)
        self._home = {bucket.index: arenas[bucket.arena] for bucket in buckets}
        self._shares = {(bucket.arena, bucket.rank) for bucket in buckets}
        self._homes = {arena: arenas[arena] for arena, _ in sorted(self._shares)}
        self._index = BucketIndex(buckets)
        self._offsets = {
            bucket.index: list(running_sum((held.size for held in bucket.ranges), initial=0))
            for bucket in buckets
        }
        self._written: dict[int, set[int]] = {}
        self._squares: dict[tuple[int, int], Tensor] = {}
        self._required: int | None = None
        self._timeout_s = 0.0

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    def buckets_before(self, version: int) -> int:
        """How many buckets are not yet at `version`."""
        return sum(
            self._homes[arena].count_before(version, rank=rank) for arena, rank in self._shares
        )

    def begin_step(self, *, version: int, timeout_s: float) -> None:
        """Forget the last step's gradients.

        `version` is the last step whose update must be committed before its gradients may be
        overwritten; the first write into each bucket waits for it, at most `timeout_s`.
        """
        self._written = {bucket.index: set() for bucket in self._buckets}
        self._required, self._timeout_s = version, timeout_s

    def write(
        self, name: str, start: int, gradient: Tensor, *, accumulate: bool, final: bool = False
    ) -> None:
        """Store `gradient` [n, any float dtype and device] for elements [start, start + n).

        With `accumulate` it is added in fp32 to what this step wrote there, if it did. `final`
        says that nothing follows, and takes its share of the norm now, beside the backward pass,
        rather than in `squared_norm`; the result is the same.
        """
        for piece in self._index.pieces(name, start, start + gradient.numel()):
            values = gradient[piece.start - start : piece.stop - start]
            first = self._touch(piece)
            self._home[piece.bucket.index].write_gradient(
                piece.bucket.index, piece.offset, values, accumulate=accumulate and not first
            )
            self._squares.pop((piece.bucket.index, piece.slot), None)
            if final and piece.bucket.rule != "bias":
                self._square(piece.bucket, piece.slot)

    def _touch(self, piece: Piece) -> bool:
        """Whether this is the step's first write to the piece; if so it is ready to be written."""
        assert self._required is not None, "write() outside begin_step() ... finish()"
        index, written = piece.bucket.index, self._written[piece.bucket.index]
        if piece.slot in written:
            return False
        if not written:
            self._home[index].wait_version(index, self._required, timeout_s=self._timeout_s)
        written.add(piece.slot)
        if piece.whole:
            return True
        self._zero(piece.bucket, piece.slot)
        return False

    def _zero(self, bucket: Bucket, slot: int) -> None:
        start, stop = self._offsets[bucket.index][slot : slot + 2]
        self._home[bucket.index].zero_gradient(bucket.index, start, stop)

    def _square(self, bucket: Bucket, slot: int) -> Tensor:
        key = (bucket.index, slot)
        if key not in self._squares:
            start, stop = self._offsets[bucket.index][slot : slot + 2]
            home = self._home[bucket.index]
            self._squares[key] = home.square_gradient(bucket.index, start, stop)
        return self._squares[key]

    def squared_norm(self) -> Tensor:
        """Sum of squares [] (fp64) of all that this step wrote, without rule "bias"."""
        squares = [
            self._square(bucket, slot)
            for bucket in self._buckets
            if bucket.rule != "bias"
            for slot in sorted(self._written[bucket.index])
        ]
        self._settle()
        # Added up in the order of the buckets, whichever arenas they lie in.
        total = torch.zeros((), dtype=torch.float64)
        for square in squares:
            total += square
        return total

    def _settle(self) -> None:
        for home in self._homes.values():
            home.settle()

    def finish(self) -> int:
        """Zero what this step did not write; returns how many elements that were.

        All gradients of the step are then where the update will read them.
        """
        unwritten = 0
        for bucket in self._buckets:
            missing = set(range(len(bucket.ranges))) - self._written[bucket.index]
            if missing and not self._written[bucket.index]:
                assert self._required is not None, "finish() without begin_step()"
                arena = self._home[bucket.index]
                arena.wait_version(bucket.index, self._required, timeout_s=self._timeout_s)
            for slot in missing:
                self._zero(bucket, slot)
                unwritten += bucket.ranges[slot].size
        self._settle()
        self._required = None
        return unwritten

    def deliveries(self, wanted: Iterable[tuple[str, int, Tensor]]) -> tuple["Delivery", ...]:
        """How weights get to where they are wanted, a bucket each, in order of need.

        Each of `wanted` is (name, start, out [n]): elements [start, start + n) go to `out`, of any
        dtype and device.
        """
        places: dict[int, list[tuple[int, Tensor]]] = {}
        for name, start, out in wanted:
            for piece in self._index.pieces(name, start, start + out.numel()):
                target = out[piece.start - start : piece.stop - start]
                places.setdefault(piece.bucket.index, []).append((piece.offset, target))
        return tuple(Delivery(index, tuple(places[index])) for index in sorted(places))

    def deliver(
        self,
        deliveries: Sequence["Delivery"],
        *,
        version: int,
        timeout_s: float,
        streams: Streams | None = None,
        after: Sequence[Any] = (),
        in_place: InPlace | None = None,
    ) -> None:
        """Copy the weights of `version` to their places; returns when all of them are there.

        Waits for one bucket after the other, each at most `timeout_s`, and lets the copies of one
        run, on a lane of `streams` and after the marks `after`, while it waits for the next. What
        is `in_place` is waited for and not copied. Raises `WaitTimeout`, and `ClusterError` when an
        arena has gone past `version`.
        """
        streams, mark, copied = streams or Synchronous(), None, []
        for delivery in deliveries:
            home = self._home[delivery.bucket]
            home.wait_version(delivery.bucket, version, timeout_s=timeout_s)
            if in_place is None or not in_place(delivery.bucket, version):
                read = partial(home.read_places, delivery.bucket, version, delivery.places)
                mark = streams.issue("weights", read, after=after)
                copied.append((home, delivery.bucket))
        if copied:
            streams.finish(mark)  # a lane keeps the order: all others have ended before
        for home, bucket in copied:
            home.check_version(bucket, version)

    def fetch(self, name: str, start: int, out: Tensor, *, version: int, timeout_s: float) -> None:
        """`deliver` elements [start, start + n) of `name` to `out` [n], once."""
        self.deliver(self.deliveries([(name, start, out)]), version=version, timeout_s=timeout_s)


@dataclass(frozen=True)
class Delivery:
    """What goes where of a bucket's weights: elements [offset, offset + n) to each target [n]."""

    bucket: int
    places: tuple[tuple[int, Tensor], ...]
