"""The arenas of a run: which there are, on which nodes, and in which files.

An arena stays on its node, whoever owns it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from flatpeak.controller.host_plan import PlannedArena, plan_arenas
from flatpeak.controller.leftovers import arena_name, mirror_name
from flatpeak.controller.mirrors import Mirrors
from flatpeak.controller.ownership import HeldArena
from flatpeak.controller.spec import Spec
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.trainer import SlabRegion


class ArenaSet:
    """All arenas by number: those that workers use, then the mirror of each, if they have any.

    `token` is in the names of their files.
    """

    def __init__(self, spec: Spec, token: str) -> None:
        self._spec, self.token = spec, token
        self.homes: Sequence[str] = ()
        """The node of each that workers use, and `used` what it holds."""
        self.used: tuple[PlannedArena, ...] = ()
        self.mirrors = Mirrors(spec)

    def plan(self, buckets: Sequence[Bucket], regions: Sequence[SlabRegion]) -> None:
        """Says what there is to be on the `homes`."""
        slots = self._spec.memory.optimizer.slots
        self.used = plan_arenas(buckets, regions, arenas=len(self.homes), spare_frames=slots)
        self.mirrors.plan(self.used, self.homes)

    @property
    def planned(self) -> tuple[PlannedArena, ...]:
        """What each of all holds, and `nodes` where it is."""
        return (*self.used, *self.mirrors.arenas)

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.homes, *self.mirrors.homes)

    def held_by(self, owners: Iterable[int | None]) -> list[HeldArena]:
        """All of them with the index of the actor that owns each."""
        return [
            HeldArena(arena.state_bytes, node, owner)
            for arena, node, owner in zip(self.planned, self.nodes, owners, strict=True)
        ]

    def path(self, number: int) -> str:
        """On its node."""
        mirror, index = divmod(number, len(self.homes))
        name = arena_name(self._spec.run, self.token, index)
        return str(Path(self._spec.cluster.shm_dir) / (mirror_name(name) if mirror else name))

    def paths(self, numbers: Iterable[int]) -> dict[int, str]:
        return {number: self.path(number) for number in numbers}
