"""Arenas of an earlier life that were cut for other workers: their state is moved into new ones."""

import logging
from collections.abc import Callable, Iterable, Sequence

from flatpeak.controller.lives import ArenaFile
from flatpeak.controller.mirrors import mirrors_of
from flatpeak.controller.optimizer_team import Update
from flatpeak.controller.placement import Placed, start_sources
from flatpeak.controller.spec import Spec
from flatpeak.controller.waiting import Died
from flatpeak.controller.worker_group import Ask
from flatpeak.workers.actors import Sources

log = logging.getLogger("flatpeak")


class OldArenas:
    """Opens the `files`, each by an actor on its node, and removes them in the end."""

    def __init__(self, spec: Spec, files: Sequence[ArenaFile], *, ask: Ask) -> None:
        self._spec, self._files, self._ask = spec, files, ask
        self.actors: list[Placed] = []

    def open(self, last_update: Callable[[Iterable[int]], Update]) -> tuple[int, Sources]:
        """Brings them to one step, which is returned with what others read of them.

        `last_update` says with what, by the versions of their buckets.
        """
        self.actors, paths = start_sources(self._spec, self._files)
        versions = self._ask(self.actors, "opening the old arenas", "versions")
        update = last_update(version for found in versions.values() for version in found)
        held = self._ask(self.actors, "finishing the last update", "finish", *update)
        sources = Sources(
            handles=tuple(source.handle for source in self.actors),
            nodes=tuple(source.node for source in self.actors),
            paths=tuple(paths),
            held=tuple(held[source.name] for source in self.actors),
        )
        return update.step, sources

    def remove(self) -> list[Placed]:
        """Once another life has told that it has the state. Returns who is of no more use."""
        actors, self.actors = self.actors, []
        mirrors = mirrors_of(self._spec, self._files)
        try:
            self._ask(actors, "removing the old arenas", "remove", mirrors)
        except Died as death:
            log.warning("old arenas are left until the next run starts: %s", death.cause)
        return actors
