"""Which process of a run hangs, from what each one says of itself while a step is waited for.

Every actor answers `heartbeat` on a thread of its own. One that does not answer for long is stopped
or kept by a call that never gives the interpreter back. One that answers may hang all the same:
then its peers wait for it in a collective, and when the step is overdue whoever does not wait is
the cause.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from flatpeak.controller.placement import Placed
from flatpeak.controller.waiting import Answers, Hung
from flatpeak.controller.worker_group import UPDATE_ON
from flatpeak.workers.progress import PEERS, Beat

_EVERY_S = 5.0
_MOST_BETWEEN_LOOKS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What is known of one process."""

    who: str
    silent_s: float = 0.0
    """For which it has left a question open."""
    beat: Beat | None = None
    """Its last answer."""
    beat_age_s: float = 0.0

    def described(self) -> str:
        if self.beat is None:
            return f"{self.who} has not said what it does"
        return f"{self.who} was {self.beat.described()}, {self.beat_age_s:.1f} s ago"


def silent(pulses: Sequence[Pulse], timeout_s: float) -> Pulse | None:
    """The process that has been silent for longest, if that is longer than `timeout_s`."""
    worst = max(pulses, key=lambda pulse: pulse.silent_s, default=None)
    return worst if worst is not None and worst.silent_s > timeout_s else None


def culprit(pulses: Sequence[Pulse], owed: Collection[str], *, stalled_s: float) -> Pulse | None:
    """Of the processes that owe an answer, the one for which the others wait.

    None when one of them has moved within `stalled_s`: the work goes on, if slowly.
    """
    names = {who.removeprefix(UPDATE_ON) for who in owed}
    late = [pulse for pulse in pulses if pulse.who in names]
    if (mute := silent(late, stalled_s)) is not None:
        return mute
    stuck = [(pulse, pulse.beat) for pulse in late if pulse.beat is not None]
    if not stuck or any(beat.still_s < stalled_s for _, beat in stuck):
        return None
    at_work = [one for one in stuck if not one[1].waits_for]
    if at_work:
        return max(at_work, key=lambda one: one[1].still_s)[0]
    # All wait for somebody. The rest of an update is waited for by the workers that want its
    # weights, which their peers wait for.
    updating = [one for one in stuck if UPDATE_ON + one[0].who in owed]
    if updating:
        return max(updating, key=lambda one: one[1].still_s)[0]
    # Peers come to the same waits one by one: whoever came to fewest is missed in the next.
    meeting = [one for one in stuck if one[1].waits_for == PEERS]
    return min(meeting or stuck, key=lambda one: one[1].moves)[0]


class _Heart:
    """The questions to one process."""

    def __init__(self, placed: Placed, now: float) -> None:
        self.placed = placed
        self.question: Any = None
        self.owes = False
        self.asked, self.heard = float("-inf"), now
        self.silent_s = 0.0
        self.beat: Beat | None = None
        self.dead = False


class Heartbeats:
    """Asks `actors`, whoever they are at the moment, while it is looked at again and again.

    A process hangs when it is silent for `timeout_s`. Time in which nobody looked does not count:
    the answers may be there.
    """

    def __init__(
        self,
        actors: Callable[[], Sequence[Placed]],
        *,
        timeout_s: float,
        step_timeout_s: float,
        answers: Answers = ray,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors, self._timeout_s = actors, timeout_s
        self._stalled_s = min(timeout_s, step_timeout_s / 2)
        self._every_s = min(_EVERY_S, self._stalled_s / 4)
        self._answers, self._clock = answers, clock
        self._hearts: dict[str, _Heart] = {}
        self._looked = clock()

    def look(self) -> Hung | None:
        """Takes answers, asks again who is due, and names one that has been silent too long."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, _MOST_BETWEEN_LOOKS_S), now
        present = {placed.name: placed for placed in self._actors()}
        self._hearts = {
            name: heart
            for name, heart in self._hearts.items()
            if name in present and heart.placed.handle is present[name].handle
        }
        for name, placed in present.items():
            self._follow(self._hearts.setdefault(name, _Heart(placed, now)), now, passed)
        found = silent(self._pulses(), self._timeout_s)
        if found is None:
            return None
        return Hung(
            found.who,
            f"hangs: it has not answered for {found.silent_s:.1f} s, longer than "
            f"cluster.heartbeat_timeout_s = {self._timeout_s:g}; {found.described()}",
        )

    def overdue(self, owed: Collection[str]) -> Hung | None:
        """The one for whose sake `owed` are late, if they stand still."""
        found = culprit(self._pulses(), owed, stalled_s=self._stalled_s)
        return None if found is None else Hung(found.who, f"hangs: {found.described()}")

    def described(self, owed: Collection[str]) -> str:
        """What those `owed` do, for the message that they are late."""
        names = {who.removeprefix(UPDATE_ON) for who in owed}
        return "; ".join(pulse.described() for pulse in self._pulses() if pulse.who in names)

    def _follow(self, heart: _Heart, now: float, passed: float) -> None:
        if heart.dead:
            return  # whoever waits for it hears of that
        if heart.owes:
            heart.silent_s += passed
        if heart.question is not None:
            self._take(heart, now)
        if heart.question is None and now - heart.asked >= self._every_s:
            heart.question, heart.asked = heart.placed.handle.heartbeat.remote(), now
            heart.owes = True

    def _take(self, heart: _Heart, now: float) -> None:
        ready, _ = self._answers.wait([heart.question], timeout=0)
        if not ready:
            return
        try:
            beat = self._answers.get(heart.question)
        except (ActorDiedError, OutOfMemoryError):
            heart.dead = True
            return
        except RayError:  # out of reach for the moment: asked again, and silent until it answers
            heart.question = None
            return
        heart.question, heart.owes, heart.silent_s = None, False, 0.0
        heart.beat, heart.heard = beat, now

    def _pulses(self) -> list[Pulse]:
        now = self._clock()
        return [
            Pulse(
                who=name,
                silent_s=heart.silent_s,
                beat=heart.beat,
                beat_age_s=now - heart.heard,
            )
            for name, heart in self._hearts.items()
            if not heart.dead
        ]
