"""How fast each optimizer actor has been of late, by what it reports of its updates."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from flatpeak.workers.update_report import UpdateReport

_KEPT, _NEEDED = 8, 4
_SHORTEST_S = 0.05
_ALIKE = 1.5


class ActorRates:
    """Parameters a second of each actor, by name: the median of its last updates.

    Updates of less than 50 ms tell of the machine's noise, and are left out. Actors of which none
    is 1.5 times as fast as another count as alike: so much comes and goes with what else a node
    does, and no arena should go to and fro with it.
    """

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = {}

    def observe(self, reports: Mapping[str, UpdateReport]) -> None:
        """After an update. Those that are not in it have gone, and are forgotten."""
        for gone in self._rates.keys() - reports.keys():
            del self._rates[gone]
        for who, report in reports.items():
            if report.parameters and report.seconds >= _SHORTEST_S:
                kept = self._rates.setdefault(who, deque(maxlen=_KEPT))
                kept.append(report.parameters / report.seconds)

    def of(self, actors: Sequence[str]) -> list[float | None]:
        """Of each of these; None of who has not been measured, and of all where they are alike."""
        rates = [
            median(kept) if len(kept := self._rates.get(who, ())) >= _NEEDED else None
            for who in actors
        ]
        known = [rate for rate in rates if rate is not None]
        if not known or max(known) < _ALIKE * min(known):
            return [None] * len(rates)
        return rates
