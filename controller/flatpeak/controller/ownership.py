"""Which optimizer actor owns which arena: an observation in, a decision out, nothing else here."""

from collections.abc import Sequence
from dataclasses import dataclass


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


def assign_arenas(arenas: Sequence[HeldArena], actors: Sequence[str]) -> Ownership:
    """Owners among `actors`, given by their nodes, which has one for every node with an arena.

    An arena stays on its node. Those whose owner is none of the actors go, largest first, to the
    actor with the fewest bytes. Others change hands only where that relieves the fuller of two
    actors by half of the arena or more, until no single arena does that any more. For arenas of
    about one size these are the fewest that can change hands so that no actor has two more than
    another.
    """
    owners: dict[int, int] = {}
    for node in {arena.node for arena in arenas}:
        here = {number: arena for number, arena in enumerate(arenas) if arena.node == node}
        on_node = [index for index, home in enumerate(actors) if home == node]
        assert on_node, f"no optimizer actor on node {node}, which has arenas"
        owners |= _assign_on_node(here, on_node)
    return Ownership(tuple(owners[number] for number in range(len(arenas))))


def _assign_on_node(arenas: dict[int, HeldArena], actors: list[int]) -> dict[int, int]:
    owners = {n: a.owner for n, a in arenas.items() if a.owner is not None and a.owner in actors}
    load = dict.fromkeys(actors, 0)
    for number, owner in owners.items():
        load[owner] += arenas[number].nbytes
    orphans = sorted(arenas.keys() - owners.keys(), key=lambda n: (-arenas[n].nbytes, n))
    for number in orphans:
        owners[number] = min(actors, key=lambda actor: (load[actor], actor))
        load[owners[number]] += arenas[number].nbytes
    while (move := _best_move(arenas, owners, load)) is not None:
        number, to = move
        load[owners[number]] -= arenas[number].nbytes
        load[to] += arenas[number].nbytes
        owners[number] = to
    return owners


def _best_move(
    arenas: dict[int, HeldArena], owners: dict[int, int], load: dict[int, int]
) -> tuple[int, int] | None:
    """The arena to take from the fullest actor that can be relieved, and who gets it."""
    to = min(load, key=lambda actor: (load[actor], actor))
    for fullest in sorted(load, key=lambda actor: (-load[actor], actor)):
        sizes = {n: arenas[n].nbytes for n, owner in owners.items() if owner == fullest}
        apart = load[fullest] - load[to]
        relief = {n: min(size, apart - size) for n, size in sizes.items()}
        worth = [n for n, size in sizes.items() if size and 2 * relief[n] >= size]
        if worth:
            return max(worth, key=lambda n: (relief[n], -n)), to
    return None
