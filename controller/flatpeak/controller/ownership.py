"""Which optimizer actor owns which arena: an observation in, a decision out, nothing else here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

Rates = Sequence[float | None]
"""Of each actor, of which None has not been measured; only how they compare counts."""


@dataclass(frozen=True)
class HeldArena:
    """An arena as it is: bytes of optimizer state, its node, and the actor that owns it, if any."""

    nbytes: int
    node: str
    owner: int | None = None


@dataclass(frozen=True)
class Ownership:
    """The owner of each arena, by number: the index of an optimizer actor."""

    owners: tuple[int, ...] = ()

    def of(self, actor: int) -> list[int]:
        """The arenas of an actor."""
        return [number for number, owner in enumerate(self.owners) if owner == actor]

    def gained(self, actor: int, *, since: "Ownership") -> list[int]:
        return sorted({*self.of(actor)} - {*since.of(actor)})

    def lost(self, actor: int, *, since: "Ownership") -> list[int]:
        return since.gained(actor, since=self)


def assign_arenas(
    arenas: Sequence[HeldArena], actors: Sequence[str], rates: Rates | None = None
) -> Ownership:
    """Owners among `actors`, given by their nodes, which has one for every node with an arena.

    An arena stays on its node. What an actor has to do takes it as long as its bytes divided by its
    rate; an actor without a rate counts with the mean of the others', and without `rates` all are
    alike. Arenas whose owner is none of the actors go, largest first, to the actor that is then
    done first. Others change hands only where that relieves the busier of two actors by half of the
    arena's time or more, until no single arena does that any more; nobody's last one does. For
    arenas of about one size and actors that are alike these are the fewest that can change hands so
    that no actor has two more than another.
    """
    speeds = _speeds(len(actors), rates)
    owners: dict[int, int] = {}
    for node in {arena.node for arena in arenas}:
        here = {number: arena for number, arena in enumerate(arenas) if arena.node == node}
        on_node = {index: speeds[index] for index, home in enumerate(actors) if home == node}
        assert on_node, f"no optimizer actor on node {node}, which has arenas"
        owners |= _Node(here, on_node).assigned()
    return Ownership(tuple(owners[number] for number in range(len(arenas))))


def slowest(
    arenas: Sequence[HeldArena], owners: Iterable[int], actors: int, rates: Rates | None = None
) -> float:
    """How long the slowest of so many actors takes for its arenas, in bytes at the mean rate."""
    speeds, held = _speeds(actors, rates), [0] * actors
    for arena, owner in zip(arenas, owners, strict=True):
        held[owner] += arena.nbytes
    return max(nbytes / speed for nbytes, speed in zip(held, speeds, strict=True))


def _speeds(actors: int, rates: Rates | None) -> list[float]:
    """Of each actor, in mean rates."""
    rates = rates or [None] * actors
    known = [rate for rate in rates if rate is not None]
    usual = mean(known) if known else 1.0
    return [1.0 if rate is None else rate / usual for rate in rates]


class _Node:
    """The arenas and the speeds of the actors of one node, by their numbers."""

    def __init__(self, arenas: dict[int, HeldArena], speeds: dict[int, float]) -> None:
        self._arenas, self._speeds = arenas, speeds
        self._alike = len({*speeds.values()}) == 1
        self._owners = {n: a.owner for n, a in arenas.items() if a.owner in speeds}
        self._held = dict.fromkeys(speeds, 0)
        for number, owner in self._owners.items():
            self._held[owner] += arenas[number].nbytes

    def assigned(self) -> dict[int, int]:
        orphans = self._arenas.keys() - self._owners.keys()
        for number in sorted(orphans, key=lambda n: (-self._arenas[n].nbytes, n)):
            nbytes = self._arenas[number].nbytes
            self._give(number, min(self._speeds, key=lambda a: (self._time(a, nbytes), a)))
        while (move := self._best_move()) is not None:
            self._give(*move)
        return self._owners

    def _time(self, actor: int, more: int = 0) -> float:
        return (self._held[actor] + more) / self._speeds[actor]

    def _give(self, number: int, to: int) -> None:
        nbytes, owner = self._arenas[number].nbytes, self._owners.get(number)
        if owner is not None:
            self._held[owner] -= nbytes
        self._held[to] += nbytes
        self._owners[number] = to

    def _best_move(self) -> tuple[int, int] | None:
        """The arena to take from the busiest actor that can be relieved, and who gets it."""
        times = {actor: self._time(actor) for actor in self._speeds}
        by_time = sorted(times, key=lambda actor: (times[actor], actor))
        # Where all are alike nobody can relieve another better than the idlest.
        to = by_time[:1] if self._alike else by_time
        for busiest in sorted(times, key=lambda actor: (-times[actor], actor)):
            own = [n for n, owner in self._owners.items() if owner == busiest]
            if len(own) == 1:
                continue
            worth = []
            for number in own:
                taken = self._arenas[number].nbytes / self._speeds[busiest]
                for other in to:
                    after = self._time(other, self._arenas[number].nbytes)
                    relief = min(taken, times[busiest] - after)
                    if taken and 2 * relief >= taken:
                        worth.append((relief, -times[other], -other, -number))
            if worth:
                _, _, other, number = max(worth)
                return -number, -other
        return None
