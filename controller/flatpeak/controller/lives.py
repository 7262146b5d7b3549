"""The lives of a run: what each of its controllers begins from, one after the other.

A controller owns the processes that it started, so they end with it, in whatever way it ends. The
state does not: it lies in arenas, which outlive them all. The driver therefore starts the next
controller from these, or from the newest snapshot where a node took an arena with it.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flatpeak.controller.runs import Event, RunEvent, StepRecord, event
from flatpeak.controller.scale_requests import DONE
from flatpeak.controller.spec import ClusterSpec, Spec
from flatpeak.controller.waiting import DEATHS_IN_A_STEP
from flatpeak.workers.errors import FlatpeakError, ProcessLost, RunFailed, StateLost
from flatpeak.workers.snapshot import Latest, find_latest

STARTED, REPLACED = "started", "controller_replaced"


class ControllerLost(RunFailed):
    """The controller's process is gone; the message has all that is known of it."""


@dataclass(frozen=True)
class Left:
    """Arenas that an earlier life made, and the nodes that they were cut for: of each worker by
    rank, and of each arena by number. `token` is in their names."""

    token: str
    worker_nodes: tuple[str, ...]
    arena_nodes: tuple[str, ...]


@dataclass(frozen=True)
class Life:
    """What a controller begins from: the arenas that were `left`, or else the `snapshot`, or else
    fresh weights.

    `spec` has its degrees resolved, and as many optimizer actors as the life before had in the end.
    `token` marks what this life makes in names that all lives and runs share, `generation` is the
    first one of its workers.
    """

    spec: Spec
    token: str
    number: int = 0
    generation: int = 0
    snapshot: Path | None = None
    left: Left | None = None


class Lives:
    """Follows the events of a run and says what the next life begins from."""

    def __init__(
        self,
        spec: Spec,
        folder: Path,
        snapshot: Path | None,
        *,
        find: Callable[[Path], Latest] = lambda folder: find_latest(folder, verify=True),
        new_token: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._folder, self._find, self._new_token = folder, find, new_token
        self.life = Life(spec, new_token(), snapshot=snapshot)
        self.tokens = [self.life.token]
        """Of all lives so far, each of which may have left something."""
        self.settled = False
        """Whether this life has state of its own, in arenas."""
        self._left: Left | None = None
        self._optimizers = spec.cluster.optimizers
        self._step = 0
        self._deaths: Counter[int] = Counter()

    @property
    def arenas(self) -> str | None:
        """The token of those that hold the state; None before there are any."""
        return None if self._left is None else self._left.token

    def observe(self, happened: Event) -> None:
        """What the present life tells of itself."""
        if isinstance(happened, StepRecord):
            self._step = happened.step
            return
        detail = happened.detail
        if happened.kind == STARTED:
            nodes = tuple(detail["worker_nodes"]), tuple(detail["arena_nodes"])
            self._left = Left(self.life.token, *nodes)
        elif happened.kind == DONE:
            self._optimizers = detail["after"]
        elif happened.kind == "workers_replaced":
            self.life = replace(self.life, generation=detail["generation"])
        self.settled |= happened.kind in (STARTED, REPLACED)

    def go_on(self, error: FlatpeakError) -> Iterator[RunEvent]:
        """Sets `life` to the one after the present one, which ended with `error`; tells of it.

        Raises `error` where another life would not help: at any error but the death of a process or
        a node, and when that comes again and again in the same step.
        """
        if not isinstance(error, ControllerLost | StateLost | ProcessLost):
            raise error
        self._deaths[self._step] += 1
        if self._deaths[self._step] >= DEATHS_IN_A_STEP:
            raise RunFailed(
                f"the run had to begin anew {self._deaths[self._step]} times after step "
                f"{self._step}, last since {error}"
            )
        if isinstance(error, StateLost):
            yield self._back_to_snapshot(error)
        elif isinstance(error, ControllerLost):
            yield event("controller_lost", step=self._step, reason=str(error))
        else:
            yield event("start_failed", step=self._step, reason=str(error))
        self._begin(left=self._left)

    def _back_to_snapshot(self, error: StateLost) -> RunEvent:
        latest = self._find(self._folder)
        self._left = None
        self.life = replace(self.life, snapshot=latest.folder)
        after = 0 if latest.folder is None else int(latest.folder.name.removeprefix("step-"))
        return event(
            "state_lost",
            step=self._step,
            reason=str(error),
            snapshot=None if latest.folder is None else str(latest.folder),
            skipped=list(latest.skipped),
            redone_steps=self._step - after,
        )

    def _begin(self, *, left: Left | None) -> None:
        cluster = self.life.spec.cluster
        cluster = cluster.model_copy(
            update={"optimizers": self._optimizers, "max_optimizers": _arenas(cluster)}
        )
        self.life = replace(
            self.life,
            spec=self.life.spec.model_copy(update={"cluster": cluster}),
            token=self._new_token(),
            number=self.life.number + 1,
            generation=self.life.generation + 1,
            left=left,
        )
        self.tokens.append(self.life.token)
        self.settled = False


def _arenas(cluster: ClusterSpec) -> int | None:
    return None if cluster.optimizer_placement == "anywhere" else cluster.arenas
