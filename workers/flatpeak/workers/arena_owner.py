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
    counters as they come and go.

    Those from number `mirrors_from` on are mirrors of arenas of others: `mirrors` works on them, so
    that no worker waits for an update of theirs.
    """

    def __init__(self, run: str, settings: AdamW, *, mirrors_from: int | None = None) -> None:
        self.run = run
        self.core, self.mirrors = OptimizerCore([], settings), OptimizerCore([], settings)
        self._mirrors_from = mirrors_from
        self._owned: dict[int, Arena] = {}
        self._released: list[Arena] = []

    @property
    def arenas(self) -> Mapping[int, Arena]:
        """Mirrors too."""
        return self._owned

    @property
    def originals(self) -> dict[int, Arena]:
        """Those that workers use."""
        return {n: self._owned[n] for n in sorted(self._owned) if not self._is_mirror(n)}

    @property
    def cores(self) -> tuple[OptimizerCore, OptimizerCore]:
        """In the order in which they are to be updated."""
        return self.core, self.mirrors

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
        self._renew_cores()

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
        self._renew_cores()

    def release(self, numbers: Iterable[int]) -> None:
        """Gives up these arenas; what they hold stays as it is for whoever owns them next."""
        left = [self._owned.pop(number) for number in numbers]
        self._renew_cores()  # first: what is not owned is not touched
        for arena in left:
            arena.disown()
        self._released += left

    def forget(self) -> None:
        """Unmaps what was released and has another owner by now."""
        for arena in self._released:
            arena.close()
        self._released = []

    def _renew_cores(self) -> None:
        mirrors = [self._owned[number] for number in sorted(self._owned) if self._is_mirror(number)]
        self.core = _renewed(self.core, [*self.originals.values()])
        self.mirrors = _renewed(self.mirrors, mirrors)

    def _is_mirror(self, number: int) -> bool:
        return self._mirrors_from is not None and number >= self._mirrors_from


def _renewed(before: OptimizerCore, arenas: Sequence[Arena]) -> OptimizerCore:
    return OptimizerCore(arenas, before.settings, counters=before.counters)
