"""A run that scales by itself: what the policies of `autoscaling` need from step to step.

It asks for changes as a user does, by `Scaling.ask`. Whatever changes the actors, whoever asked for
it, begins a cool-down; so does a change that cannot be had, of which an event tells once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from flatpeak.controller.actor_rates import ActorRates
from flatpeak.controller.autoscaling import (
    Decision,
    Observation,
    ObservedStep,
    WorkersObservation,
    busy_share,
    rebalanced,
    waited,
    wanted_optimizers,
    wanted_workers,
)
from flatpeak.controller.ownership import HeldArena, assign_arenas, slowest
from flatpeak.controller.placement import Placed, home_of
from flatpeak.controller.scaling import Refused, Scaling
from flatpeak.controller.spec import AutoscaleSpec
from flatpeak.workers.update_report import UpdateReport

AUTO = "auto"
"""The request of what nobody asked for."""


class Autoscaler:
    """Of the thread that trains, at step boundaries.

    `arenas` are those of the run with their present owners among `actors`.
    """

    def __init__(
        self,
        settings: AutoscaleSpec,
        actors: Sequence[Placed],
        *,
        scaling: Scaling,
        arenas: Callable[[], Sequence[HeldArena]],
    ) -> None:
        self._settings, self._actors, self._scaling = settings, actors, scaling
        self._arenas = arenas
        self._rates = ActorRates()
        self._steps: deque[ObservedStep] = deque(maxlen=settings.window_steps)
        self._quiet = settings.cooldown_steps  # a run that starts is not itself yet
        self._strained_share = inf
        self._told: set[int] = set()

    def rates(self, actors: Sequence[Placed]) -> list[float | None]:
        """As `assign_arenas` takes them."""
        return self._rates.of([actor.name for actor in actors])

    def observe(
        self, seconds: float, exposed_s: Iterable[float], reports: Mapping[str, UpdateReport]
    ) -> None:
        """A step that took so long, the waiting of each rank's forward pass in it, and what the
        actors tell of the update that they waited for."""
        self._rates.observe(reports)
        if self._quiet:
            self._quiet -= 1
            return
        update_s = max((report.seconds for report in reports.values()), default=0.0)
        self._steps.append(ObservedStep(seconds, max(exposed_s), update_s))

    def look(self) -> Refused | None:
        """Asks for what the policy wants now, if it wants anything; what is to be told of it."""
        if self._scaling.closed is not None or len(self._steps) < self._settings.window_steps:
            return None
        decision = self._decide()
        if decision.wanted is None:
            return None
        reason = self._scaling.ask(AUTO, decision.wanted, reason=decision.reason)
        if reason is None or reason == self._scaling.closed:  # a user was there first
            return None
        return self.refused(decision.wanted, reason)

    def _decide(self) -> Decision:
        if waited(self._steps, self._settings):
            self._strained_share = busy_share(self._steps)
        arenas, present = self._arenas(), len(self._actors)
        times = {count: self._slowest(arenas, count) for count in self._counts(arenas)}
        seen = Observation(tuple(self._steps), present, times, self._strained_share)
        decision = wanted_optimizers(seen, self._settings)
        if decision.wanted is not None:
            return decision
        rates = self.rates(self._actors)
        now = slowest(arenas, [a.owner or 0 for a in arenas], present, rates)
        reason = rebalanced(seen.steps, now=now, better=times[present])
        return decision if reason is None else Decision(present, reason)

    def _counts(self, arenas: Sequence[HeldArena]) -> set[int]:
        """The numbers of actors worth a look: twice as many are always done sooner."""
        present, nodes = len(self._actors), len({arena.node for arena in arenas})
        least, most = self._settings.optimizers or (present, present)
        first = max(nodes, min(present - 1, most))
        return {present, *range(first, min(most, max(2 * present, least)) + 1)}

    def _slowest(self, arenas: Sequence[HeldArena], count: int) -> float:
        """How long the slowest of `count` actors would take."""
        homes = [actor.node for actor in self._actors[:count]]
        nodes = sorted({arena.node for arena in arenas})
        homes += [home_of(index, nodes) for index in range(len(homes), count)]
        rates = [*self.rates(self._actors[:count]), *[None] * (count - len(self._actors))]
        owners = assign_arenas(arenas, homes, rates).owners
        return slowest(arenas, owners, count, rates)

    def changed(self) -> None:
        """The actors, or what they own, are no longer what was observed."""
        self._told.clear()
        self._wait()

    def refused(self, wanted: int, reason: str) -> Refused | None:
        """What was asked for cannot be had; what is to be told of it."""
        self._wait()
        if wanted in self._told:
            return None
        self._told.add(wanted)
        return Refused(AUTO, f"{reason} (asked for by cluster.autoscale)", wanted)

    def _wait(self) -> None:
        self._steps.clear()
        self._quiet = self._settings.cooldown_steps


class RoomForWorkers:
    """How much room there has been for more workers, for `wanted_workers`."""

    def __init__(
        self, settings: AutoscaleSpec, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._rooms: list[tuple[float, int]] = []

    def observe(self, room: int) -> None:
        """There is room for so many more now; see `room_for_workers`."""
        now = self._clock()
        self._rooms.append((now, room))
        past = [time for time, _ in self._rooms if time <= now - self._settings.workers_free_s]
        self._rooms = [seen for seen in self._rooms if not past or seen[0] >= past[-1]]

    def decide(self, present: int, allowed: Sequence[int]) -> Decision:
        """See `autoscaling.allowed_workers`."""
        return wanted_workers(WorkersObservation(present, allowed, self._rooms), self._settings)
