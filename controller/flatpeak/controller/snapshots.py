"""The snapshots of a run while it trains.

The actors write one beside the next step, and no update is asked for before they are done: until
then the state is that of the snapshot. It becomes whole beside the step after, since files and
folders take their time.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flatpeak.controller.optimizer_team import OptimizerTeam
from flatpeak.controller.resume import snapshot_meta
from flatpeak.controller.runs import Event, event
from flatpeak.controller.spec import Spec
from flatpeak.controller.waiting import Watch
from flatpeak.workers.errors import CheckpointError, FlatpeakError, SnapshotFailed
from flatpeak.workers.snapshot import (
    SnapshotPart,
    commit_manifest,
    discard_parts,
    keep_last,
    saved_steps,
    snapshot_folder,
)


class Snapshots:
    """Asks the actors of `team` for the parts of snapshots and makes these whole.

    `folder` is that of the run. `watch` finds actors that hang.
    """

    def __init__(self, spec: Spec, folder: Path, team: OptimizerTeam, *, watch: Watch) -> None:
        self._spec, self._folder, self._watch = spec, folder, watch
        self.team = team
        self.sizes: Mapping[str, int] = MappingProxyType({})
        """The elements of every parameter, which each snapshot holds, in so many `arenas`."""
        self.arenas = 0
        self.newest = 0
        """The step of the newest one."""
        self.failure: FlatpeakError | None = None
        """Why there is none of the last attempt, if so."""
        self._written: tuple[int, dict[str, Any]] | None = None

    def find(self, step: int) -> None:
        """Looks for those of earlier lives, up to this step."""
        self.newest = max(
            (saved for saved in saved_steps(self._folder) if saved <= step), default=0
        )

    def begin(self) -> None:
        """Asks for one of the state after the last update."""
        self.team.snapshot(str(snapshot_folder(self._folder, self.team.last.step)))

    def gather(self, step: int) -> Iterator[Event]:
        """Waits for the one under way, if there is one, which is of the committed `step`."""
        if not self.team.parts:
            return
        try:
            parts = yield from self.team.gather(
                f"snapshot of step {step}",
                self._spec.cluster.step_timeout_s,
                self.team.parts,
                watch=self._watch,
            )
        except FlatpeakError:
            self.team.parts = {}  # not to be waited for again at the end
            raise
        self.team.parts = {}
        self._written = step, parts

    def commit(self) -> Iterator[Event]:
        """Makes what was written a snapshot; takes time, but no state."""
        if self._written is None:
            return
        (step, answers), self._written = self._written, None
        folder = snapshot_folder(self._folder, step)
        found = [(who, part) for who, of_actor in answers.items() for part in of_actor]
        parts = [part for _, part in found if isinstance(part, SnapshotPart)]
        try:
            if failures := [f"{who}: {e}" for who, e in found if isinstance(e, SnapshotFailed)]:
                raise SnapshotFailed("; ".join(failures))
            if len(parts) != self.arenas:
                raise SnapshotFailed(
                    f"it has {len(parts)} of {self.arenas} arenas: the run ended while the "
                    "others changed hands; resume from the one before"
                )
            meta = snapshot_meta(self._spec, self.sizes)
            commit_manifest(folder, step=step, parts=parts, meta=meta)
        except (SnapshotFailed, CheckpointError) as error:
            # The state is well, and the last snapshot is kept: the next attempt may do better.
            self.failure = error
            discard_parts(folder, parts)
            yield event("snapshot_failed", step=step, reason=str(error), kept=self.newest)
            return
        self.newest, self.failure = step, None
        yield event("snapshot", step=step, folder=str(folder))
        section = self._spec.snapshots
        try:
            keep_last(self._folder, section.keep, every=section.keep_every_steps)
        except OSError as error:
            text = f"an old snapshot could not be removed: {error}; remove it by hand"
            yield event("warning", text=text)

    def keep(self, step: int) -> Iterator[Event]:
        """Makes one of the committed `step`, after which nothing is under way; raises why there is
        none."""
        self.begin()
        yield from self.gather(step)
        yield from self.commit()
        if self.failure is not None:
            raise self.failure
