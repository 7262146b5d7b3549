"""The optimizer actors at work: what they are asked for, a successor for each that dies, and how
more or fewer of them go on with the same arenas.

Masters, moments, gradients and versions lie in the arenas, which outlive the actors. So a successor
attaches to its arenas, finishes the update that was asked last (buckets that have it stay as they
are) and writes the snapshot under way anew: the next update is not asked for before all of its
parts are there, so the state is still that step's. Meanwhile workers wait for the weights they
need, and the updates that they do themselves go on.
"""

import time
from collections import Counter
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from flatpeak.controller.ownership import Ownership
from flatpeak.controller.placement import Placed, release
from flatpeak.controller.runs import Event, event
from flatpeak.controller.waiting import DEATHS_IN_A_STEP, Died, Watch
from flatpeak.workers.errors import RunFailed


class Update(NamedTuple):
    """What is done to the state; a `clip_factor` of None skips the step."""

    step: int
    lr: float
    clip_factor: float | None


class Collect(Protocol):
    """`waiting.collect` as the controller uses it."""

    def __call__(
        self,
        refs: Mapping[str, Any],
        what: str,
        timeout_s: float,
        *,
        mortal: Container[str] = (),
        watched: Mapping[str, Any] = ...,
        watch: Watch | None = None,
    ) -> dict[str, Any]: ...


class OptimizerTeam:
    """Asks the optimizer actors and replaces those that die while they are waited for.

    `actors` (by index) may still grow; `ownership` says which arenas each owns, `arena_path` where
    one lies. `successor` starts an actor in the place of a dead one, which has `start_timeout_s` to
    attach. `updates`, `parts` and `links` are the answers under way, by who gives them: of the last
    update, of the snapshot after it, and of `serve`. `others` are no actors of the team, and
    whoever waits for them replaces them. `watch` finds actors that hang.
    """

    def __init__(
        self,
        actors: list[Placed],
        *,
        successor: Callable[[int], Placed],
        arena_path: Callable[[int], str],
        collect: Collect,
        start_timeout_s: float,
        end: Callable[[Any], None] = lambda handle: release(None, [handle]),
    ) -> None:
        self.actors = actors
        self.last = Update(0, 0.0, None)
        self.updates: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self.ownership = Ownership()
        self.links: dict[str, Any] = {}
        self.others: Callable[[], Set[str]] = frozenset
        self.watch: Watch | None = None
        self._moves: dict[str, Any] = {}
        self._leaving: set[str] = set()
        self._served: Mapping[int, list[int]] = {}
        self._folder = ""
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._successor, self._arena_path, self._end = successor, arena_path, end
        self._collect, self._start_timeout_s = collect, start_timeout_s

    def update(self, update: Update, *, beside: Mapping[str, Any]) -> None:
        """Asks all actors for `update`; `beside` is what workers were asked to do of it."""
        self.last = update
        self.updates = {**beside} | {a.name: a.handle.update.remote(*update) for a in self.actors}

    def finish(self, update: Update, *, beside: Mapping[str, Any]) -> None:
        """`update` for actors that took over arenas of others, which may have done all of it."""
        self.last = update
        self.updates = {**beside} | {a.name: a.handle.finish.remote(*update) for a in self.actors}

    def update_beside(self, beside: Mapping[str, Any]) -> None:
        """Puts other workers' part of the last update in the place of those that were asked."""
        own = {actor.name for actor in self.actors}
        self.updates = {who: ref for who, ref in self.updates.items() if who in own} | {**beside}

    def snapshot(self, folder: str) -> None:
        """Asks all actors to write their state after the last update into `folder`."""
        # An actor runs its calls in order: after that update, before the next one.
        self._folder = folder
        self.parts = {actor.name: self._ask_part(actor) for actor in self.actors}

    def serve(self, ranks: Mapping[int, list[int]]) -> None:
        """Asks actors, by index, for an address at which these workers of other nodes reach them.

        No successor can take over the connections, and what a worker had sent and nobody confirmed
        is lost with them. So when such an actor dies, the workers that it served are of no more use
        either; it is served anew to their successors.
        """
        self._served = ranks
        asked = {index: self.actors[index] for index in ranks}
        self.links = {a.name: a.handle.serve.remote(ranks[index]) for index, a in asked.items()}

    def resize(
        self, count: int, ownership: Ownership, *, joining: Sequence[Placed] = ()
    ) -> Generator[Event, None, list[Placed]]:
        """Goes on with `count` actors, of which those `joining` are new; returns those that went.

        Between two updates: all answers to the last one and to its snapshot have been gathered.
        Arenas are released by their old owners, then taken over by the new ones. Whoever dies on
        the way is replaced as ever, by a successor that takes over what it is to own.
        """
        assert not self.parts, "a snapshot is being written"
        before, self.ownership = self.ownership, ownership
        self.actors.extend(joining)
        self._leaving = {actor.name for actor in self.actors[count:]}
        indices = range(len(self.actors))
        lost = {index: ownership.lost(index, since=before) for index in indices}
        yield from self.ask_of("releasing arenas", "release", lost)
        gained = {index: ownership.gained(index, since=before) for index in indices}
        paths = {index: self._paths(numbers) for index, numbers in gained.items()}
        yield from self.ask_of("taking over arenas", "attach", paths)
        gone = self.actors[count:]
        del self.actors[count:]
        self._leaving = set()
        for actor in gone:
            self.updates.pop(actor.name, None)
            self._end(actor.handle)
        return gone

    def ask_of(
        self,
        what: str,
        method: str,
        arguments: Mapping[int, Any],
        *,
        timeout_s: float | None = None,
    ) -> Generator[Event, None, dict[str, Any]]:
        """The answers of actors, by index, asked for `method` with their argument, where that is
        not empty; within `timeout_s`, or that of a start. Between two updates.

        Of one that died the answer is None, when its successor has attached to its arenas."""
        asked = [(self.actors[index], given) for index, given in arguments.items() if given]
        self._moves = {
            actor.name: getattr(actor.handle, method).remote(given) for actor, given in asked
        }
        longest = self._start_timeout_s if timeout_s is None else timeout_s
        answers = yield from self.gather(what, longest, self._moves, watch=self.watch)
        self._moves = {}
        replaced = {actor.name for actor, _ in asked if actor not in self.actors}
        return {who: None if who in replaced else answer for who, answer in answers.items()}

    def _paths(self, numbers: Iterable[int]) -> dict[int, str]:
        return {number: self._arena_path(number) for number in numbers}

    def gather(
        self,
        what: str,
        timeout_s: float,
        *pending: dict[str, Any],
        watched: Mapping[str, Any] = MappingProxyType({}),
        watch: Watch | None = None,
    ) -> Generator[Event, None, dict[str, Any]]:
        """The answers of all that is `pending`, of which `updates` and `parts` may be some.

        Of those `watched` the failures alone count, while there is something to wait for. `watch`
        finds those that hang, which counts as their death.
        For an actor that dies, the answers of its successor count. Raises what `collect` raises,
        `Died` for one of `others`, and `RunFailed` when an actor dies again and again.
        """
        answers: dict[str, Any] = {}
        others = self.others()
        mortal = {actor.name for actor in self.actors} | others
        while waiting := {
            who: ref for refs in pending for who, ref in refs.items() if who not in answers
        }:
            try:
                answers |= self._collect(
                    waiting, what, timeout_s, mortal=mortal, watched=watched, watch=watch
                )
            except Died as death:
                if death.who in others:
                    raise
                answers |= death.answers
                yield from self._replace(death)
        return answers

    def _replace(self, death: Died) -> Iterator[Event]:
        began = time.perf_counter()
        who, step = death.who, self.last.step
        if who in self._leaving:
            # Its arenas are free, which is all that it was asked for.
            self._moves.pop(who)
            return
        self._deaths[who, step] += 1
        deaths = self._deaths[who, step]
        if deaths <= DEATHS_IN_A_STEP:  # else it is the last one, found again at the run's end
            yield event("optimizer_lost", actor=who, step=step, reason=str(death.cause))
        if deaths >= DEATHS_IN_A_STEP:
            raise RunFailed(f"{who} died {deaths} times after step {step}, last {death.cause}")
        index = [actor.name for actor in self.actors].index(who)
        self._end(self.actors[index].handle)  # it may live, and only be out of reach
        actor = self.actors[index] = self._successor(index)
        paths = self._paths(self.ownership.of(index))
        attached = {who: actor.handle.attach.remote(paths)}
        if who in self._moves:
            self._moves[who] = attached[who]
        # Asked at once, so that nothing is owed when a stop of the run cuts this off.
        self.updates[who] = actor.handle.finish.remote(*self.last)
        if self.parts:
            self.parts[who] = self._ask_part(actor)
        if who in self.links:
            self.links[who] = actor.handle.serve.remote(self._served[index])
        try:
            answers = self._collect(
                attached, f"replacing {who}", self._start_timeout_s, mortal=(who,)
            )
        except Died:
            return  # its other answers say so too, and are waited for
        yield event(
            "optimizer_replaced",
            actor=who,
            step=step,
            attach_s=answers[who],
            seconds=time.perf_counter() - began,
        )

    def _ask_part(self, actor: Placed) -> Any:
        return actor.handle.snapshot.remote(self._folder, self.last.step)
