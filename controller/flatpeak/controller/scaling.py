"""Changing the number of optimizer actors while a run goes on, up to the boundary where it happens.

A request is checked at once, against a pure rule. New actors then start beside the training, which
takes them in at the first step boundary where all of them are ready; one that cannot start undoes
the request, and the training has not noticed.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError

from flatpeak.controller.host_plan import PlannedArena
from flatpeak.controller.ownership import Ownership
from flatpeak.controller.placement import Placed, home_of, release
from flatpeak.controller.waiting import Answers, describe


@dataclass(frozen=True)
class Capacity:
    """What a run can have beside what it has: an optimizer actor lives at `home`, on one of the
    `nodes` with workers, and takes `cpus_per_actor` of `free_cpus` there."""

    nodes: tuple[str, ...]
    arenas: int
    cpus_per_actor: int
    free_cpus: Mapping[str, float]

    def home(self, actor: int) -> str:
        return home_of(actor, self.nodes)

    @property
    def free(self) -> str:
        total = sum(self.free_cpus.values())
        here = sum(self.free_cpus.get(node, 0.0) for node in self.nodes)
        return f"free CPUs in the cluster: {total:g}, of which {here:g} on the nodes with workers"


def refusal(wanted: int, present: int, capacity: Capacity) -> str | None:
    """Why there cannot be `wanted` optimizer actors instead of `present`; None where there can."""
    least, most = len(capacity.nodes), capacity.arenas
    if not least <= wanted <= most:
        return (
            f"{wanted} optimizer actors cannot be had, but {least} (one for each node with "
            f"workers) to {most} (the arenas that cluster.max_optimizers asked for at the start), "
            f"and there are {present}; {capacity.free}. For more, stop the run and resume it with "
            "a larger cluster.max_optimizers"
        )
    needed = Counter(capacity.home(actor) for actor in range(present, wanted))
    for node, count in sorted(needed.items()):
        cpus, free = count * capacity.cpus_per_actor, capacity.free_cpus.get(node, 0.0)
        if cpus > free:
            return (
                f"{wanted} optimizer actors instead of {present} need {cpus} more CPUs on node "
                f"{node}, which has {free:g} free; {capacity.free}. Wait for other jobs to end, or "
                "ask for fewer"
            )
    return None


def handed_over(
    before: Ownership,
    now: Ownership,
    *,
    arenas: Sequence[PlannedArena],
    homes: Sequence[str],
    actors: Sequence[Placed],
) -> dict[str, Any]:
    """What a change of owners moved, and what each of `actors` has now; `homes` are the arenas'
    nodes. An arena whose new owner is on another node would have to be copied."""
    moved = [n for n, owner in enumerate(now.owners) if owner != before.owners[n]]
    copied = [n for n in moved if actors[now.owners[n]].node != homes[n]]
    return {
        "arenas": len(moved),
        "arena_bytes": sum(arenas[n].nbytes for n in moved),
        "copied_bytes": sum(arenas[n].nbytes for n in copied),
        "state_bytes": {
            actor.name: sum(arenas[n].state_bytes for n in now.of(index))
            for index, actor in enumerate(actors)
        },
    }


ASKED = "asked for"
"""The reason of what a user wants."""


@dataclass(frozen=True)
class Change:
    """An accepted request under way: the actors that are starting, and their answers."""

    request: str
    wanted: int
    joining: tuple[Placed, ...] = ()
    answers: tuple[Any, ...] = ()
    reason: str = ASKED
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Refused:
    request: str
    reason: str
    wanted: int


class Starter(Protocol):
    def __call__(self, index: int, node: str) -> Placed: ...


class Scaling:
    """The requests of one run: `ask` in any thread, `due` and `settle` in the one that trains.

    `capacity` observes the cluster, `start` starts an actor, which must be ready in `timeout_s`.
    """

    def __init__(
        self,
        actors: Sequence[Placed],
        *,
        capacity: Callable[[], Capacity],
        start: Starter,
        timeout_s: float,
        end: Callable[[Any], None] = lambda handle: release(None, [handle]),
        answers: Answers = ray,
    ) -> None:
        self._actors, self._capacity, self._start, self._end = actors, capacity, start, end
        self._timeout_s, self._answers = timeout_s, answers
        self._lock = threading.Lock()
        self._change: Change | None = None
        self._closed: str | None = "the run is still starting; ask again when it trains"

    @property
    def closed(self) -> str | None:
        """Why requests are not heard now; None where they are."""
        if self._change is not None:
            return f"a change to {self._change.wanted} optimizer actors is under way; wait"
        return self._closed

    def open(self) -> None:
        """From now on requests are heard."""
        self._closed = None

    def ask(self, request: str, wanted: int, *, reason: str = ASKED) -> str | None:
        """Begins to go to `wanted` actors, for a `reason`; why not, where that is refused."""
        with self._lock:
            if self.closed is not None:
                return self.closed
            present, capacity = len(self._actors), self._capacity()
            if (refused := refusal(wanted, present, capacity)) is not None:
                return refused
            joining: list[Placed] = []
            try:
                for index in range(present, wanted):
                    joining.append(self._start(index, capacity.home(index)))
            except ActorAlreadyExistsError:
                self._end_all(joining)
                return "optimizer actors of before are still ending; ask again in a few seconds"
            answers = tuple(actor.handle.ready.remote() for actor in joining)
            self._change = Change(request, wanted, tuple(joining), answers, reason)
            return None

    def due(self) -> Change | Refused | None:
        """At a step boundary: what can be done now, or what had to be given up; None if neither."""
        change = self._change
        if change is None:
            return None
        late = []
        for actor, answer in zip(change.joining, change.answers, strict=True):
            if not self._answers.wait([answer], timeout=0)[0]:
                late.append(actor.name)
                continue
            try:
                self._answers.get(answer)
            except RayError as error:
                return self._give_up(str(describe(error, actor.name, f"starting {actor.name}")))
        if not late:
            return change
        if time.monotonic() - change.began > self._timeout_s:
            return self._give_up(
                f"{', '.join(late)} did not start within cluster.start_timeout_s = "
                f"{self._timeout_s:g} s; {self._capacity().free}"
            )
        return None

    def settle(self) -> None:
        """What was due is done; the next request may come."""
        self._change = None

    def close(self, reason: str) -> Refused | None:
        """Hears no more requests; ends what was starting."""
        with self._lock:
            self._closed = reason
            return self._give_up(reason) if self._change is not None else None

    def _give_up(self, reason: str) -> Refused:
        change, self._change = self._change, None
        assert change is not None
        self._end_all(change.joining)
        return Refused(change.request, reason, change.wanted)

    def _end_all(self, actors: Sequence[Placed]) -> None:
        for actor in actors:
            self._end(actor.handle)
