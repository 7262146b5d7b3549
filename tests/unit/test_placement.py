"""Who works beside whom: boundaries and buckets stay on the node of their worker."""

import pytest

from flatpeak.controller.placement import Placed, actors_beside, slab_regions
from flatpeak.workers.trainer import SlabRegion


def on(*nodes: str) -> list[Placed]:
    return [Placed(f"process {index}", None, node) for index, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("node", "beside"), [("a", [0, 2]), ("b", [1]), ("c", [])], ids=["two", "one", "none"]
)
def test_a_worker_reaches_the_actors_of_its_node(node, beside):
    assert actors_beside(on(node)[0], on("a", "b", "a")) == beside


def test_regions_of_a_node_follow_each_other_on_pages_in_order_of_rank():
    regions = slab_regions([5000, 100, 8192, 0], on("a", "b", "a", "a"), on("b", "a", "a"))
    assert regions == [
        SlabRegion(actor=1, offset=0, nbytes=5000),
        SlabRegion(actor=0, offset=0, nbytes=100),
        SlabRegion(actor=1, offset=8192, nbytes=8192),
        SlabRegion(actor=1, offset=16384, nbytes=0),
    ]
