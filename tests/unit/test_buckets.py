"""Cutting shards into buckets: every element once, none too large, nothing mixed."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatpeak.workers.buckets import (
    BucketIndex,
    Range,
    Shard,
    cut_buckets,
    from_json,
    to_json,
)
from flatpeak.workers.errors import InputError

KINDS = [("bfloat16", True, "adamw"), ("bfloat16", False, "adamw"), ("float32", False, "bias")]


@st.composite
def shard_lists(draw):
    """Parameters of random size, each cut into random (possibly empty) shards of random ranks."""
    shards = []
    for number in range(draw(st.integers(0, 6))):
        size = draw(st.integers(0, 40))
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        dtype, decay, rule = draw(st.sampled_from(KINDS))
        for start, stop in pairwise([0, *cuts, size]):
            rank = draw(st.integers(0, 3))
            shards.append(Shard(Range(f"p{number}", start, stop), rank, dtype, decay, rule))
    return shards


def cut(shards, bucket_parameters, actors=2):
    return cut_buckets(
        shards, bucket_parameters=bucket_parameters, arenas_of_rank=lambda rank: range(actors)
    )


def elements(ranges):
    return sorted((r.name, at) for r in ranges for at in range(r.start, r.stop))


@settings(deadline=None)
@given(shard_lists(), st.integers(1, 50), st.integers(1, 4))
def test_every_element_lies_in_one_bucket_of_its_own_kind(shards, limit, actors):
    buckets = cut(shards, limit, actors)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert all(0 < bucket.size <= limit for bucket in buckets)

    def kind(item):
        return item.rank, item.dtype, item.decay, item.rule

    for wanted in {kind(item) for item in (*shards, *buckets)}:
        given_ranges = [shard.range for shard in shards if kind(shard) == wanted]
        cut_ranges = [r for b in buckets if kind(b) == wanted for r in b.ranges]
        assert elements(cut_ranges) == elements(given_ranges)
        sizes = [b.size for b in buckets if kind(b) == wanted]
        assert not sizes or max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(shard_lists(), st.integers(1, 50), st.integers(1, 4))
def test_actors_carry_equal_loads_to_one_bucket(shards, limit, actors):
    buckets = cut(shards, limit, actors)
    load = [sum(b.size for b in buckets if b.arena == actor) for actor in range(actors)]
    assert max(load) - min(load) <= max((b.size for b in buckets), default=0)


@settings(deadline=None)
@given(shard_lists(), st.integers(1, 50), st.data())
def test_the_index_finds_any_range_without_gap(shards, limit, data):
    index = BucketIndex(cut(shards, limit))
    for shard in shards:
        start = data.draw(st.integers(shard.range.start, shard.range.stop))
        stop = data.draw(st.integers(start, shard.range.stop))
        pieces = index.pieces(shard.range.name, start, stop)
        assert elements(pieces_to_ranges(pieces)) == elements(
            [Range(shard.range.name, start, stop)]
        )
        for piece in pieces:
            before = sum(r.size for r in piece.bucket.ranges[: piece.slot])
            held = piece.bucket.ranges[piece.slot]
            assert held.start <= piece.start < piece.stop <= held.stop
            assert piece.offset == before + piece.start - held.start


def pieces_to_ranges(pieces):
    return [
        Range(piece.bucket.ranges[piece.slot].name, piece.start, piece.stop) for piece in pieces
    ]


def test_the_index_refuses_elements_it_does_not_hold():
    index = BucketIndex(cut([Shard(Range("a", 4, 8), 0, "float32", True)], 3))
    for start, stop in [(0, 2), (3, 5), (7, 9), (8, 9)]:
        with pytest.raises(LookupError, match="no bucket holds element"):
            index.pieces("a", start, stop)
    with pytest.raises(LookupError, match="of b"):
        index.pieces("b", 0, 1)


def test_buckets_of_all_ranks_are_interleaved_by_place_in_the_forward():
    shards = [
        Shard(Range(f"layer{layer}", rank * 4, rank * 4 + 4), rank, "float32", True)
        for rank in range(2)
        for layer in range(3)
    ]
    buckets = cut(shards, 4, actors=2)
    assert [(b.ranges[0].name, b.rank, b.arena) for b in buckets] == [
        (f"layer{layer}", rank, rank) for layer in range(3) for rank in range(2)
    ]


def test_a_change_of_actors_moves_buckets_and_never_cuts_them_anew():
    shards = [Shard(Range(f"p{n}", 0, 7 + n), n % 2, "float32", True) for n in range(6)]
    one, three = cut(shards, 5, actors=1), cut(shards, 5, actors=3)
    assert [(b.index, b.rank, b.ranges) for b in one] == [
        (b.index, b.rank, b.ranges) for b in three
    ]
    assert {b.arena for b in three} == {0, 1, 2}


def test_only_the_actors_of_a_rank_hold_its_buckets():
    shards = [Shard(Range(f"p{n}", 0, 9), n % 2, "float32", True) for n in range(6)]
    buckets = cut_buckets(shards, bucket_parameters=4, arenas_of_rank=lambda rank: [rank + 5])
    assert all(bucket.arena == bucket.rank + 5 for bucket in buckets)


@pytest.mark.parametrize(
    ("shard", "limit", "actors", "message"),
    [
        (Shard(Range("a", 0, 1), 0, "float32", True), 0, [0], "bucket_parameters"),
        (Shard(Range("a", 0, 1), 0, "float16", True), 1, [0], "a has working dtype float16"),
        (Shard(Range("a", 0, 1), 0, "float32", True, "sgd"), 1, [0], "a has rule sgd"),
        (Shard(Range("a", 0, 1), 7, "float32", True), 1, [], "rank 7"),
    ],
    ids=["empty buckets", "unknown dtype", "unknown rule", "no actor"],
)
def test_what_cannot_work_is_refused_by_name(shard, limit, actors, message):
    with pytest.raises(InputError, match=message):
        cut_buckets([shard], bucket_parameters=limit, arenas_of_rank=lambda rank: actors)


def test_two_shards_may_not_share_an_element():
    shards = [
        Shard(Range("a", 0, 5), 0, "float32", True),
        Shard(Range("a", 4, 6), 1, "float32", True),
    ]
    with pytest.raises(AssertionError, match="two shards hold element 4 of a"):
        cut(shards, 10)


def test_a_cut_survives_json():
    buckets = cut([Shard(Range("a", 3, 20), 1, "bfloat16", False)], 4)
    assert from_json(to_json(buckets)) == buckets


def test_buckets_import_no_torch():
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import flatpeak.workers.buckets; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
