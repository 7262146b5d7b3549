"""The lives of a run: what each of its controllers begins from, one after the other.

A controller owns the processes that it started, so they end with it, in whatever way it ends. The
state does not: it lies in arenas, which outlive them all. The driver therefore starts the next
controller from these, or from the newest snapshot where a node took an arena with it.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatpeak.controller.leftovers import arena_name, mirror_name
from flatpeak.controller.regrouping import LEAVING, OPTIMIZERS_MOVED, REGROUPED, Regroup
from flatpeak.controller.runs import Event, RunEvent, StepRecord, event
from flatpeak.controller.scale_requests import DONE, REFUSED
from flatpeak.controller.spec import ClusterSpec, Spec
from flatpeak.controller.waiting import DEATHS_IN_A_STEP
from flatpeak.workers.errors import (
    DoesNotFit,
    FlatpeakError,
    ProcessLost,
    RunFailed,
    StateLost,
    UpdateLost,
)
from flatpeak.workers.snapshot import Latest, find_latest

STATE_BYTES = 12
"""Of a parameter, that move: fp32 master and two moments."""
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
    mirrored: bool = False

    def survivors(self, run: str, alive: Collection[str]) -> tuple["ArenaFile", ...] | None:
        """Of each arena the file, or that of its mirror, on a node that is `alive`; None when one
        has neither."""
        found = []
        mirrors = mirror_homes(self.arena_nodes) if self.mirrored else self.arena_nodes
        for file, mirror_node in zip(self.files(run), mirrors, strict=True):
            if file.node in alive:
                found.append(file)
            elif self.mirrored and mirror_node in alive:
                found.append(ArenaFile(mirror_node, mirror_name(file.name)))
            else:
                return None
        return tuple(found)

    def files(self, run: str) -> tuple["ArenaFile", ...]:
        return tuple(
            ArenaFile(node, arena_name(run, self.token, number))
            for number, node in enumerate(self.arena_nodes)
        )


def mirror_homes(homes: Sequence[str]) -> tuple[str, ...]:
    """The node of each arena's mirror: the one after its own `homes` among them, sorted."""
    nodes = sorted(set(homes))
    after = dict(zip(nodes, nodes[1:] + nodes[:1], strict=True))
    return tuple(after[home] for home in homes)


@dataclass(frozen=True)
class ArenaFile:
    """One on a node, by its name in the folder of arenas there."""

    node: str
    name: str


@dataclass(frozen=True)
class Life:
    """What a controller begins from: the arenas that were `left`, or else what `moved` hold, which
    were cut for another layout, or else the `snapshot`, or else fresh weights.

    `spec` has its degrees resolved, and as many optimizer actors as the life before had in the end.
    `token` marks what this life makes in names that all lives and runs share, `generation` is the
    first one of its workers. Arenas with a token that is `stale` are of no more use. `device` is
    that of the lives before.
    """

    spec: Spec
    token: str
    number: int = 0
    generation: int = 0
    snapshot: Path | None = None
    left: Left | None = None
    moved: tuple[ArenaFile, ...] = ()
    stale: tuple[str, ...] = ()
    device: str | None = None

    @property
    def inherits(self) -> bool:
        """Whether it has state that would be lost if it ended before it has taken that over."""
        return self.left is not None or bool(self.moved)


class Lives:
    """Follows the events of a run and says what the next life begins from."""

    def __init__(
        self,
        spec: Spec,
        folder: Path,
        snapshot: Path | None,
        *,
        find: Callable[[Path], Latest] = lambda folder: find_latest(folder, verify=True),
        alive: Callable[[], set[str]] = set,
        new_token: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._folder, self._find, self._new_token = folder, find, new_token
        self._alive = alive  # the nodes
        self.life = Life(spec, new_token(), snapshot=snapshot)
        self.tokens = [self.life.token]
        """Of all lives so far, each of which may have left something."""
        self.settled = False
        """Whether this life has state of its own, in arenas."""
        self._mirrors = spec.memory.optimizer.mirrors
        self._left: Left | None = None
        self._wanted: dict[str, Regroup] = {}  # by request
        self._change: Regroup | None = None  # the one that is carried out
        self._failures = 0  # of that
        self._before: tuple[Spec, float] | None = None  # while processes change, and since when
        self._leaving: str | None = None  # for which request
        self._optimizers = spec.cluster.optimizers
        self._step = 0
        self._deaths: Counter[int] = Counter()

    @property
    def spec(self) -> Spec:
        """The job of the present life, with as many optimizer actors as it has now."""
        return sized(self.life.spec, self._optimizers)

    @property
    def arenas(self) -> str | None:
        """The token of those that hold the state; None before there are any."""
        return None if self._left is None else self._left.token

    @property
    def devices(self) -> dict[str, float]:
        """What a worker takes of them."""
        return {"GPU": 1.0} if self.life.device == "cuda" else {}

    @property
    def nodes(self) -> set[str]:
        """Those with workers."""
        return set() if self._left is None else set(self._left.worker_nodes)

    def orphans(self, error: FlatpeakError) -> tuple[ArenaFile, ...]:
        """The arenas whose state nobody has kept, when the run ends after a life that ended with
        `error`. A controller that lives to the end keeps what it has itself."""
        if self.settled:
            survivors = self._survivors() if isinstance(error, ControllerLost) else None
            return survivors or ()
        return self.life.moved or (self._survivors() or () if self.life.left else ())

    def observe(self, happened: Event) -> None:
        """What the present life tells of itself."""
        if isinstance(happened, StepRecord):
            self._step = happened.step
            return
        detail = happened.detail
        if happened.kind == STARTED:
            nodes = tuple(detail["worker_nodes"]), tuple(detail["arena_nodes"])
            self._left = Left(self.life.token, *nodes, mirrored=detail["mirrored"])
            self._optimizers = detail["optimizers"]
            self._step = detail["step"]
        elif happened.kind == "workers_placed":
            self.life = replace(self.life, device=detail["device"])
        elif happened.kind == LEAVING:
            self._leaving = detail["for_request"]
        elif happened.kind == DONE:
            self._optimizers = detail["after"]
        elif happened.kind == "workers_replaced":
            self.life = replace(self.life, generation=detail["generation"])
        self.settled |= happened.kind in (STARTED, REPLACED)

    def go_on(
        self, error: FlatpeakError, *, fitting: Callable[[], Spec | None] = lambda: None
    ) -> Iterator[RunEvent]:
        """Sets `life` to the one after the present one, which ended with `error`; tells of it.

        Raises `error` where another life would not help: at any error but the death of a process or
        a node, and when that comes again and again in the same step. While there is state that
        nobody has taken over yet, everything else is tried again too: only who is to carry it on is
        missing, for whom there may be room soon. When other workers cannot be had, the next life
        has those of before. After the loss of a node `fitting` is asked for the job with as many
        workers as there is room for then, if that is another.
        """
        dead = isinstance(error, ControllerLost | ProcessLost)
        unsettled = self.life.inherits and not self.settled
        if self._before is not None:
            self._failures += 1
            if not dead or self._failures >= DEATHS_IN_A_STEP:
                yield self._refuse(str(error))
                spec, self._before = self._before[0], None
                self._optimizers = spec.cluster.optimizers
                self._begin(spec, left=self._left)
                return
        elif not dead and not isinstance(error, StateLost) and not unsettled:
            raise error
        self._deaths[self._step] += self._before is None
        if self._deaths[self._step] >= DEATHS_IN_A_STEP:
            raise RunFailed(
                f"the run had to begin anew {self._deaths[self._step]} times after step "
                f"{self._step}, last since {error}"
            )
        if isinstance(error, ControllerLost):
            yield event("controller_lost", step=self._step, reason=str(error))
        elif dead or (unsettled and not isinstance(error, StateLost | DoesNotFit)):
            yield event("start_failed", step=self._step, reason=str(error))
        elif not isinstance(error, UpdateLost | DoesNotFit) and (files := self._survivors()):
            spec = fitting() or self.life.spec
            workers = spec.cluster.workers
            yield event("node_lost", step=self._step, reason=str(error), workers=workers)
            self._begin(spec, moved=files)
            return
        else:
            yield self._back_to_snapshot(error, fitting() or self.life.spec)
            return
        if unsettled and self.life.moved:
            self._begin(self.life.spec, moved=self.life.moved)
        else:
            self._begin(self.life.spec, left=self._left)

    def _survivors(self) -> tuple[ArenaFile, ...] | None:
        if self._left is None:
            return None
        return self._left.survivors(self.life.spec.run, self._alive())

    def _back_to_snapshot(self, error: FlatpeakError, spec: Spec) -> RunEvent:
        latest = self._find(self._folder)
        self._left = None
        self.life = replace(self.life, snapshot=latest.folder)
        self._begin(spec)
        after = 0 if latest.folder is None else int(latest.folder.name.removeprefix("step-"))
        return event(
            "state_lost",
            step=self._step,
            reason=str(error),
            snapshot=None if latest.folder is None else str(latest.folder),
            skipped=list(latest.skipped),
            redone_steps=self._step - after,
            workers=spec.cluster.workers,
        )

    def _begin(
        self, spec: Spec, *, left: Left | None = None, moved: tuple[ArenaFile, ...] = ()
    ) -> None:
        mirrors = self._mirrors if left is None else int(left.mirrored)
        kept = None if self._left is None else self._left.token
        self._leaving = None
        self.life = replace(
            self.life,
            spec=mirrored(sized(spec, self._optimizers), mirrors),
            stale=tuple(token for token in self.tokens if token != kept),
            token=self._new_token(),
            number=self.life.number + 1,
            generation=self.life.generation + 1,
            left=left,
            moved=moved,
        )
        self.tokens.append(self.life.token)
        self.settled = False

    # Other processes

    def want(self, regroup: Regroup) -> None:
        """What the present life is asked for; if it makes way for that, the next one has it."""
        self._wanted[regroup.request] = regroup

    @property
    def moving(self) -> str | None:
        """The request for other processes that the present life is to have, and has not yet."""
        assert self._before is None or self._change is not None
        return None if self._before is None or self._change is None else self._change.request

    def move(self) -> bool:
        """Whether the life that ended made way for another, which `life` then is."""
        if self._leaving is None:
            return False
        assert self._left is not None
        self._change, self._failures = self._wanted[self._leaving], 0
        self._wanted = {}
        self._before = self.spec, time.monotonic()
        if self._change.spec.cluster.optimizer_placement == "anywhere":
            # Beside the workers they change without this, and may have done so since it was asked.
            self._optimizers = self._change.spec.cluster.optimizers
        self._begin(self._change.spec, moved=self._left.files(self.life.spec.run))
        return True

    def moved(self, started: RunEvent) -> Iterator[RunEvent]:
        """Tells of the change once it is done."""
        if self._before is None or started.kind != STARTED:
            return
        assert self._change is not None
        (before, began), self._before = self._before, None
        now = self._change.spec
        counts: dict[str, Any] = {
            "before": before.cluster.workers,
            "after": now.cluster.workers,
            **now.parallel.degrees,
        }
        kind, optimizers = REGROUPED, (before.cluster.optimizers, now.cluster.optimizers)
        if counts["before"] == counts["after"] and optimizers[0] != optimizers[1]:
            kind, counts = OPTIMIZERS_MOVED, {"before": optimizers[0], "after": optimizers[1]}
        yield event(
            kind,
            request=self._change.request,
            step=started.detail["step"],
            **counts,
            copied_bytes=STATE_BYTES * started.detail["parameters"],
            seconds=time.monotonic() - began,
        )

    def _refuse(self, reason: str) -> RunEvent:
        assert self._change is not None
        return event(REFUSED, request=self._change.request, reason=reason)


def sized(spec: Spec, optimizers: int) -> Spec:
    """The job with so many optimizer actors, for as many arenas as it has."""
    changed = {"optimizers": optimizers, "max_optimizers": _arenas(spec.cluster)}
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=changed)})


def mirrored(spec: Spec, mirrors: int) -> Spec:
    """The job with so many mirrors of each arena."""
    optimizer = spec.memory.optimizer.model_copy(update={"mirrors": mirrors})
    memory = spec.memory.model_copy(update={"optimizer": optimizer})
    return spec.model_copy(update={"memory": memory})


def _arenas(cluster: ClusterSpec) -> int | None:
    return None if cluster.optimizer_placement == "anywhere" else cluster.arenas
