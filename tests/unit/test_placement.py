"""Who works beside whom, and which actors a worker reaches over the network."""

from collections import Counter

import pytest

from flatpeak.controller.placement import (
    Placed,
    arenas_beside,
    homes_anywhere,
    homes_beside,
    remote_ranks,
    slab_regions,
    suited_to,
)
from flatpeak.controller.spec import ClusterSpec
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.errors import ClusterError
from flatpeak.workers.trainer import SlabRegion
from local_run import tiny_spec
from tiny_models import tiny_content


def on(*nodes: str) -> list[Placed]:
    return [Placed(f"process {index}", None, node) for index, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("node", "beside"), [("a", [0, 2]), ("b", [1]), ("c", [])], ids=["two", "one", "none"]
)
def test_a_worker_maps_the_arenas_of_its_node(node, beside):
    assert arenas_beside(on(node)[0], "aba") == beside


def test_regions_of_a_node_follow_each_other_on_pages_in_order_of_rank():
    regions = slab_regions([5000, 100, 8192, 0], on("a", "b", "a", "a"), "baa")
    assert regions == [
        SlabRegion(arena=1, offset=0, nbytes=5000),
        SlabRegion(arena=0, offset=0, nbytes=100),
        SlabRegion(arena=1, offset=8192, nbytes=8192),
        SlabRegion(arena=1, offset=16384, nbytes=0),
    ]


def test_without_an_arena_beside_it_a_rank_keeps_its_boundaries_itself():
    regions = slab_regions([5000, 100], on("a", "b"), "b")
    assert regions == [
        SlabRegion(arena=None, offset=0, nbytes=5000),
        SlabRegion(arena=0, offset=0, nbytes=100),
    ]


CORES = {"a": 4.0, "b": 2.0, "c": 5.0, "head": 0.0}
WORKERS = Counter({"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("optimizers", "homes"),
    [(1, "c"), (3, "cab"), (4, "cabc"), (8, "cabcaccc")],
)
def test_anywhere_fills_nodes_without_workers_first_and_never_more_than_their_cores(
    optimizers, homes
):
    cluster = ClusterSpec(workers=3, optimizers=optimizers)
    assert homes_anywhere(cluster, WORKERS, CORES) == list(homes)


def test_more_actors_than_the_cluster_has_cores_for_are_refused_with_the_numbers():
    cluster = ClusterSpec(workers=3, optimizers=4, cpus_per_optimizer=2)
    with pytest.raises(ClusterError, match=r"4 optimizer actors x 2 cores .* has room for 3; low"):
        homes_anywhere(cluster, WORKERS, CORES)


def test_beside_needs_an_actor_for_every_node_with_workers():
    cores = {"a": 4.0, "b": 3.0, "c": 5.0}
    assert homes_beside(ClusterSpec(workers=3, optimizers=3), WORKERS, cores) == ["a", "b", "a"]
    with pytest.raises(ClusterError, match=r"at least 2, not 1; or set .*optimizer_placement"):
        homes_beside(ClusterSpec(workers=3, optimizers=1), WORKERS, cores)


def test_ranks_are_remote_to_the_arenas_of_other_nodes_that_have_their_buckets():
    pairs = [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1), (2, 1)]
    buckets = [
        Bucket(index, rank, arena, (), "float32", True, "adamw")
        for index, (rank, arena) in enumerate(pairs)
    ]
    assert remote_ranks(buckets, on("a", "b", "c"), "ab") == {0: [2], 1: [0, 2]}


@pytest.mark.parametrize(
    ("workers", "cores", "asked", "optimizers", "mirrors"),
    [
        ({"a": 1, "b": 1}, {"a": 3.0, "b": 3.0}, 2, 2, 1),  # as before
        ({"a": 1, "b": 2}, {"a": 3.0, "b": 3.0}, 1, 2, 1),  # on more nodes than before
        ({"a": 2}, {"a": 3.0}, 2, 1, 0),  # the lost node had one of the actors
        ({"a": 3, "b": 2}, {"a": 5.0, "b": 3.0}, 4, 3, 1),
        ({"a": 3}, {"a": 3.0}, 2, 2, 0),  # not even one: its placement says so
    ],
)
def test_a_later_life_has_the_actors_that_its_nodes_need_and_have_cores_for(
    workers, cores, asked, optimizers, mirrors
):
    spec = tiny_spec(
        tiny_content("qwen3_moe"),
        cluster={"workers": 2, "optimizers": asked, "max_optimizers": 4, "address": "auto"},
        memory={"optimizer": {"mirrors": 1}},
    )
    found = suited_to(spec, Counter(workers), cores)
    assert (found.cluster.optimizers, found.cluster.arenas) == (optimizers, 4)
    assert found.memory.optimizer.mirrors == mirrors


def test_actors_anywhere_are_as_many_as_there_are_cores_for():
    cluster = {"workers": 2, "optimizers": 4, "optimizer_placement": "anywhere", "address": "auto"}
    spec = tiny_spec(tiny_content("qwen3_moe"), cluster=cluster)
    found = suited_to(spec, Counter(a=2), {"a": 4.0, "b": 1.0}).cluster
    assert (found.optimizers, found.arenas) == (3, 3)
