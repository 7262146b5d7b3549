"""The arenas that one optimizer actor owns: made, taken over from others, let go again.

Ownership passes from process to process between two updates: the old owner lets go (`release`), the
new one maps the arena and owns it (`attach`). The lock in the file is what counts, whoever dies
when: two processes never own an arena. Nothing is copied. The old owner keeps it mapped until it is
told to `forget` it, so that no sweep takes it for a dead run's in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.optimizer import AdamW, OptimizerCore


class ArenaOwner:
    """Arenas of `run` by their numbers. `core` works on those that are owned, and keeps its
    counters as they come and go."""

    def __init__(self, run: str, settings: AdamW) -> None:
        self.run = run
        self.core = OptimizerCore([], settings)
        self._owned: dict[int, Arena] = {}
        self._released: list[Arena] = []

    @property
    def arenas(self) -> Mapping[int, Arena]:
        return self._owned

    def create(
        self,
        number: int,
        path: Path,
        *,
        buckets: Sequence[Bucket],
        spare_frames: int,
        slab_bytes: int,
    ) -> None:
        """Makes an arena that is this owner's; raises as `Arena.create` does."""
        arena = Arena.create(
            path, run=self.run, buckets=buckets, spare_frames=spare_frames, slab_bytes=slab_bytes
        )
        arena.own()
        self._owned[number] = arena
        self._renew_core()

    def attach(self, paths: Mapping[int, Path], *, timeout_s: float) -> None:
        """Takes over arenas that nobody updates: released, or of a process that died.

        Leaves alone what it owns already. Raises as `Arena.attach` does, and `WaitTimeout` when
        another process owns one for longer than `timeout_s`.
        """
        for number in sorted(paths.keys() - self._owned.keys()):
            arena = Arena.attach(paths[number], run=self.run)
            try:
                arena.own(timeout_s=timeout_s)
            except BaseException:
                arena.close()
                raise
            self._owned[number] = arena
        self._renew_core()

    def release(self, numbers: Iterable[int]) -> None:
        """Gives up these arenas; what they hold stays as it is for whoever owns them next."""
        left = [self._owned.pop(number) for number in numbers]
        self._renew_core()  # first: what is not owned is not touched
        for arena in left:
            arena.disown()
        self._released += left

    def forget(self) -> None:
        """Unmaps what was released and has another owner by now."""
        for arena in self._released:
            arena.close()
        self._released = []

    def _renew_core(self) -> None:
        before = self.core
        arenas = [self._owned[number] for number in sorted(self._owned)]
        self.core = OptimizerCore(arenas, before.settings, counters=before.counters)
