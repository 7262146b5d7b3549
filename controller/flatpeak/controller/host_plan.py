"""The host memory of a run: the arenas that there will be, and whether their nodes have room.

Beside the arenas nothing on the host grows with the model or the context: gradients and boundaries
are copied into them, CUDA registers them where they lie, snapshots are written from them. Between
nodes they pass through `remote.STAGING_BYTES` for each worker and actor, and half of that for each
two actors of which one has mirrors of the other's arenas; these are not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatpeak.controller.placement import Placed
from flatpeak.workers.arena import arena_bytes
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.errors import DoesNotFit
from flatpeak.workers.host_memory import Room
from flatpeak.workers.trainer import SlabRegion

STATE_BYTES = 16
"""Of a parameter: fp32 master, two moments, gradient."""


@dataclass(frozen=True)
class PlannedArena:
    """`nbytes` is the exact size of the file."""

    buckets: tuple[Bucket, ...]
    slab_bytes: int
    nbytes: int

    @property
    def state_bytes(self) -> int:
        """Of masters, two moments and gradients: what its owner has to do with."""
        return STATE_BYTES * sum(bucket.size for bucket in self.buckets)


def plan_arenas(
    buckets: Sequence[Bucket], regions: Sequence[SlabRegion], *, arenas: int, spare_frames: int
) -> tuple[PlannedArena, ...]:
    """Each arena: its buckets, and the slab that holds all regions in it."""
    planned = []
    for number in range(arenas):
        own = tuple(bucket for bucket in buckets if bucket.arena == number)
        ends = [region.offset + region.nbytes for region in regions if region.arena == number]
        slab_bytes = max(ends, default=0)
        planned.append(PlannedArena(own, slab_bytes, arena_bytes(own, spare_frames, slab_bytes)))
    return tuple(planned)


def planned_host_bytes(
    arenas: Sequence[PlannedArena],
    homes: Sequence[str],
    regions: Sequence[SlabRegion] = (),
    workers: Sequence[Placed] = (),
) -> dict[str, int]:
    """Bytes of host memory that the run takes on each node, by arenas, of which `homes` are the
    nodes, and by those `workers` that keep their own `regions`."""
    planned: dict[str, int] = {}
    for arena, node in zip(arenas, homes, strict=True):
        planned[node] = planned.get(node, 0) + arena.nbytes
    for region, worker in zip(regions, workers, strict=True):
        if region.arena is None:
            own = arena_bytes((), 1, region.nbytes)
            planned[worker.node] = planned.get(worker.node, 0) + own
    return planned


def first_of_nodes(optimizers: Sequence[Placed]) -> list[Placed]:
    """An actor of each node."""
    return list({actor.node: actor for actor in reversed(optimizers)}.values())


def check_host_bytes(
    planned: Mapping[str, int], optimizers: Sequence[Placed], rooms: Mapping[str, Room]
) -> None:
    """Raises DoesNotFit when a node has not the room for all that is planned there.

    `rooms` is what an actor of each node found, by its name. Before any arena is made: those of a
    node are made at the same time, and each would fit alone.
    """
    for actor in optimizers:
        left = rooms.get(actor.name)
        if left is not None and planned[actor.node] > left.nbytes:
            beside = sum(other.node == actor.node for other in optimizers)
            raise DoesNotFit(
                f"the arenas on the node of {actor.name}, of {beside} optimizer actors, take "
                f"{planned[actor.node]:,} bytes, and {left.where} has {left.nbytes:,} free; set "
                "cluster.shm_dir to a folder with that much, raise the limit, lower "
                "cluster.max_optimizers or memory.boundaries.host_budget_bytes, or use more nodes"
            )
