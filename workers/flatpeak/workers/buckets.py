"""The global flat index space of parameters and how it is cut into buckets; no torch here.

A parameter element is addressed by the canonical name of its global parameter and its flat index
there, whatever the layout of ranks. A `Shard` is what one worker rank alone writes gradients for;
a `Bucket` is a run of at most `bucket_parameters` elements of one rank's shards, and the unit in
which gradients arrive, masters are updated and weights go back. The cut is a pure function of the
shards and does not depend on the arenas, and these do not on the actors that own them: scaling the
actors hands arenas over and never re-cuts a bucket.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from flatpeak.workers.errors import InputError
from flatpeak.workers.partition import parts

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
RULES = ("adamw", "bias")


@dataclass(frozen=True)
class Range:
    """Flat elements [start, stop) of the canonical global parameter `name`."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """What worker `rank` alone writes gradients for.

    `dtype` is the working dtype of the weights, `decay` whether weight decay applies. `rule` is
    "adamw", or "bias" for balancing biases of routers (see `optimizer.update_bucket`).
    """

    range: Range
    rank: int
    dtype: str
    decay: bool
    rule: str = "adamw"


@dataclass(frozen=True)
class Bucket:
    """Ranges that lie one after the other in each of the bucket's arrays.

    Worker `rank` writes its gradients and fetches its weights, arena `arena` holds it for the whole
    run, whichever actor owns that. `index` counts all buckets of the run in the order in which the
    next forward needs them. One side alone updates it for the whole run: the arena's owner where
    `update_on` is "host", its worker where it is "device".
    """

    index: int
    rank: int
    arena: int
    ranges: tuple[Range, ...]
    dtype: str
    decay: bool
    rule: str
    update_on: str = "host"

    @property
    def updater(self) -> int | None:
        """The rank of the worker that updates it; None for the owner of its arena."""
        return self.rank if self.update_on == "device" else None

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.ranges)


def cut_buckets(
    shards: Sequence[Shard],
    *,
    bucket_parameters: int,
    arenas_of_rank: Callable[[int], Sequence[int]],
) -> tuple[Bucket, ...]:
    """Cut `shards`, given in order of first use in the forward, into buckets.

    The shards of one rank, dtype, decay and rule are cut in order into the fewest buckets of at
    most `bucket_parameters` elements. These are of equal size (to one element), because frames
    are: a last bucket of odd size would waste most of its frame. Each bucket goes to the arena
    with the fewest elements so far among `arenas_of_rank(rank)`, in order of need, so that the
    buckets a forward needs first come from all arenas at once. Empty shards vanish.

    Raises `InputError` for a size, dtype, rule or list of arenas that cannot work.
    """
    _check(shards, bucket_parameters)
    groups: dict[tuple[int, str, bool, str], list[tuple[int, Range]]] = {}
    seen: dict[int, int] = {}
    for shard in shards:
        order = seen[shard.rank] = seen.get(shard.rank, -1) + 1
        if shard.range.size:
            key = (shard.rank, shard.dtype, shard.decay, shard.rule)
            groups.setdefault(key, []).append((order, shard.range))

    # All ranks walk the layers together, so their buckets are interleaved by place in the forward.
    cut = [
        (order, position, key, ranges)
        for key, group in groups.items()
        for position, (order, ranges) in enumerate(_cut_group(group, bucket_parameters))
    ]
    cut.sort(key=lambda bucket: bucket[:3])

    load: dict[int, int] = {}
    buckets = []
    for index, (_, _, (rank, dtype, decay, rule), ranges) in enumerate(cut):
        arenas = arenas_of_rank(rank)
        if not arenas:
            raise InputError(
                f"no arena may hold the buckets of rank {rank}; set cluster.optimizers to 1 or more"
            )
        arena = min(arenas, key=lambda arena: (load.get(arena, 0), arena))
        bucket = Bucket(index, rank, arena, ranges, dtype, decay, rule)
        load[arena] = load.get(arena, 0) + bucket.size
        buckets.append(bucket)
    return tuple(buckets)


def _check(shards: Sequence[Shard], bucket_parameters: int) -> None:
    if bucket_parameters < 1:
        raise InputError(
            f"a bucket cannot hold {bucket_parameters} parameters; "
            "set memory.optimizer.bucket_parameters to 1 or more, e.g. 4194304"
        )
    of_name: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        if shard.dtype not in ITEM_BYTES:
            raise InputError(
                f"{shard.range.name} has working dtype {shard.dtype}; "
                f"the optimizer handles {' and '.join(ITEM_BYTES)}"
            )
        if shard.rule not in RULES:
            raise InputError(f"{shard.range.name} has rule {shard.rule}; known: {', '.join(RULES)}")
        assert 0 <= shard.range.start <= shard.range.stop, shard
        if shard.range.size:
            of_name.setdefault(shard.range.name, []).append((shard.range.start, shard.range.stop))
    for name, intervals in of_name.items():
        for (_, stop), (start, _) in pairwise(sorted(intervals)):
            assert stop <= start, f"two shards hold element {start} of {name}"


def _cut_group(
    group: Sequence[tuple[int, Range]], bucket_parameters: int
) -> Iterator[tuple[int, tuple[Range, ...]]]:
    """Yield (order of the first shard, ranges) of each bucket of a group."""
    total = sum(piece.size for _, piece in group)
    ends = iter([stop for _, stop in parts(total, -(-total // bucket_parameters))])
    position, end = 0, next(ends)
    first, ranges = group[0][0], []
    for order, piece in group:
        start = piece.start
        while start < piece.stop:
            if position == end:
                yield first, tuple(ranges)
                end, first, ranges = next(ends), order, []
            stop = min(piece.stop, start + end - position)
            ranges.append(Range(piece.name, start, stop))
            position += stop - start
            start = stop
    yield first, tuple(ranges)


@dataclass(frozen=True)
class Piece:
    """The part of one bucket range that meets a queried range.

    `offset` is its place in the bucket's arrays; `slot` names the bucket range it lies in.
    """

    bucket: Bucket
    slot: int
    start: int
    stop: int
    offset: int

    @property
    def whole(self) -> bool:
        piece = self.bucket.ranges[self.slot]
        return (self.start, self.stop) == (piece.start, piece.stop)


class BucketIndex:
    """Finds where the elements of a parameter lie in a set of buckets."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        found: dict[str, list[Piece]] = {}
        for bucket in buckets:
            offset = 0
            for slot, piece in enumerate(bucket.ranges):
                found.setdefault(piece.name, []).append(
                    Piece(bucket, slot, piece.start, piece.stop, offset)
                )
                offset += piece.size
        self._pieces = {
            name: sorted(pieces, key=lambda p: p.start) for name, pieces in found.items()
        }
        self._starts = {name: [p.start for p in pieces] for name, pieces in self._pieces.items()}

    def pieces(self, name: str, start: int, stop: int) -> list[Piece]:
        """The pieces that make up elements [start, stop) of `name`, in order.

        Raises `LookupError` when an element is in none of the buckets.
        """
        found = []
        place = max(bisect_right(self._starts.get(name, []), start) - 1, 0)
        at = start
        for piece in self._pieces.get(name, [])[place:]:
            if at >= stop or piece.start > at:
                break
            end = min(stop, piece.stop)
            if end > at:
                offset = piece.offset + at - piece.start
                found.append(Piece(piece.bucket, piece.slot, at, end, offset))
                at = end
        if at < stop:
            raise LookupError(f"no bucket holds element {at} of {name} (asked up to {stop})")
        return found


def to_json(buckets: Iterable[Bucket]) -> list[dict[str, Any]]:
    return [asdict(bucket) for bucket in buckets]


def from_json(described: Iterable[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    return tuple(
        Bucket(**{**fields, "ranges": tuple(Range(**piece) for piece in fields["ranges"])})
        for fields in described
    )
