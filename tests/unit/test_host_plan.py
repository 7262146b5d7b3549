"""What the arenas of a run take, node by node, before any is made."""

import pytest

from flatpeak.controller.host_plan import (
    check_host_bytes,
    first_of_nodes,
    plan_arenas,
    planned_host_bytes,
)
from flatpeak.controller.placement import Placed
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.errors import DoesNotFit
from flatpeak.workers.host_memory import Room
from flatpeak.workers.trainer import SlabRegion

ACTORS = [Placed(f"optimizer {index}", None, node) for index, node in enumerate("abab")]
BUCKETS = [
    Bucket(n, 0, actor, (Range("p", 1000 * n, 1000 * n + size),), dtype, True, "adamw")
    for n, (actor, size, dtype) in enumerate(
        [(0, 1000, "bfloat16"), (1, 700, "float32"), (0, 90, "float32"), (2, 300, "bfloat16")]
    )
]
REGIONS = [SlabRegion(0, 0, 5000), SlabRegion(1, 0, 100), SlabRegion(0, 8192, 5000)]


def test_each_arena_is_as_large_as_planned_and_nodes_add_them_up(tmp_path):
    arenas = plan_arenas(BUCKETS, REGIONS, arenas=4, spare_frames=2)
    assert [[b.index for b in arena.buckets] for arena in arenas] == [[0, 2], [1], [3], []]
    assert [arena.slab_bytes for arena in arenas] == [13192, 100, 0, 0]
    for index, planned in enumerate(arenas):
        with Arena.create(
            tmp_path / f"{index}.arena",
            run="r",
            buckets=planned.buckets,
            spare_frames=2,
            slab_bytes=planned.slab_bytes,
        ) as arena:
            assert arena.path.stat().st_size == planned.nbytes
    sizes = [arena.nbytes for arena in arenas]
    assert planned_host_bytes(arenas, "abab") == {"a": sizes[0] + sizes[2], "b": sum(sizes[1::2])}


def test_what_a_worker_keeps_itself_counts_on_its_node(tmp_path):
    regions = [SlabRegion(0, 0, 5000), SlabRegion(None, 0, 5000), SlabRegion(None, 0, 0)]
    workers = [Placed(f"worker {rank}", None, node) for rank, node in enumerate("acc")]
    path = tmp_path / "own.arena"
    with Arena.create(path, run="r", buckets=(), spare_frames=1, slab_bytes=5000) as own:
        size = own.path.stat().st_size
    planned = planned_host_bytes((), (), regions, workers)
    assert planned == {"c": 2 * size - 8192}  # the second has no slab


def test_a_node_is_refused_that_has_room_for_each_of_its_arenas_but_not_for_all():
    planned = {"a": 1500, "b": 900}
    asked = first_of_nodes(ACTORS)
    assert {actor.name for actor in asked} == {"optimizer 0", "optimizer 1"}
    check_host_bytes(planned, ACTORS, {actor.name: Room(1500, "here") for actor in asked})
    rooms = {"optimizer 0": Room(1499, "the limit of 1"), "optimizer 1": Room(900, "here")}
    with pytest.raises(DoesNotFit) as caught:
        check_host_bytes(planned, ACTORS, rooms)
    assert (
        "the arenas on the node of optimizer 0, of 2 optimizer actors, take 1,500 bytes, and the "
        "limit of 1 has 1,499 free; set"
    ) in str(caught.value)
