"""Which ranks work together: overlapping groups over one set of W ranks.

Sequence groups of D and expert groups of E_p and vocabulary groups of P are each cut from the same
ranks, independently of each other, as consecutive runs. Ranks at the same place of different runs
hold the same shard and form a replica group.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

ProcessGroup = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of a generation. Each divides `world`."""

    world: int
    sequence: int = 1
    expert: int = 1
    vocabulary: int = 1

    def __post_init__(self) -> None:
        for name in ("sequence", "expert", "vocabulary"):
            degree = getattr(self, name)
            assert degree >= 1, f"{name} degree {degree} must be at least 1"
            assert self.world % degree == 0, f"{name} degree {degree} must divide {self.world}"

    @property
    def data(self) -> int:
        """Groups that read different sequences."""
        return self.world // self.sequence


def runs(world: int, degree: int) -> list[list[int]]:
    return [list(range(first, first + degree)) for first in range(0, world, degree)]


def replicas(world: int, degree: int) -> list[list[int]]:
    return [list(range(first, world, degree)) for first in range(degree)]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """This rank's place on one axis: its group, and the ranks that hold the same shard.

    `group` and `replica_group` are None where they would hold this rank alone.
    """

    degree: int
    index: int
    group: ProcessGroup | None
    replica: int
    replica_ranks: tuple[int, ...]
    replica_group: ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class Groups:
    layout: Layout
    rank: int
    sequence: Axis
    expert: Axis
    vocabulary: Axis


def make_groups(layout: Layout, rank: int, *, timeout: timedelta) -> Groups:
    """Makes every group of the layout. Collective: all W ranks call it once, at the same point."""

    def own_group(members: list[list[int]]) -> ProcessGroup | None:
        own = None
        # Every rank takes part in the making of every group, in the same order.
        for ranks in members:
            group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
            if isinstance(group, ProcessGroup) and rank in ranks:
                own = group
        return own

    def axis(degree: int) -> Axis:
        index, replica = rank % degree, rank // degree
        return Axis(
            degree=degree,
            index=index,
            group=own_group(runs(layout.world, degree)),
            replica=replica,
            replica_ranks=tuple(replicas(layout.world, degree)[index]),
            replica_group=own_group(replicas(layout.world, degree)),
        )

    return Groups(
        layout=layout,
        rank=rank,
        sequence=axis(layout.sequence),
        expert=axis(layout.expert),
        vocabulary=axis(layout.vocabulary),
    )
