"""Mirrors: the state of every bucket on a second node, so that the loss of one node loses nothing.

The mirror of an arena is an arena of its own, with a number after those of all originals, on the
next node. An optimizer actor there owns it as it owns others: it is filled from the same source,
attached to by successors, handed over, counted in host memory and removed in the end like them. It
has no slab and no worker reads it. In each step it gets the gradients of its original and then does
the same update, so both have the same state to the bit.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatpeak.controller.host_plan import PlannedArena, plan_arenas
from flatpeak.controller.leftovers import arena_name, mirror_name
from flatpeak.controller.lives import ArenaFile
from flatpeak.controller.optimizer_team import OptimizerTeam
from flatpeak.controller.runs import Event
from flatpeak.controller.spec import Spec
from flatpeak.controller.waiting import DEATHS_IN_A_STEP
from flatpeak.workers.errors import ClusterError, RunFailed
from flatpeak.workers.mirror import Route, Sent


@dataclass(frozen=True)
class MirrorPlace:
    """A file on a node; `path` may have ~ and $NAME, which are that node's."""

    node: str
    path: str


@dataclass(frozen=True)
class Mirrored:
    """Of one step: bytes sent to mirrors, and the seconds from the first to the last."""

    nbytes: int = 0
    seconds: float = 0.0


NOTHING_MIRRORED = Mirrored()


def mirror_homes(homes: Sequence[str]) -> tuple[str, ...]:
    """The node of each arena's mirror: the one after its own `homes` among them, sorted."""
    nodes = sorted(set(homes))
    after = dict(zip(nodes, nodes[1:] + nodes[:1], strict=True))
    return tuple(after[home] for home in homes)


def mirror_places(spec: Spec, token: str, homes: Sequence[str]) -> tuple[MirrorPlace, ...]:
    """Where the mirror of each arena lies, of which `homes` are the nodes and `token` is that in
    their names."""
    folder = Path(spec.cluster.shm_dir)
    return tuple(
        MirrorPlace(node, str(folder / mirror_name(arena_name(spec.run, token, number))))
        for number, node in enumerate(mirror_homes(homes))
    )


def mirrors_of(spec: Spec, files: Sequence[ArenaFile]) -> list[str]:
    """The paths of the mirrors of these arenas, each on some node."""
    folder = Path(spec.cluster.shm_dir)
    return [str(folder / mirror_name(file.name)) for file in files if spec.memory.optimizer.mirrors]


def check_nodes(spec: Spec, nodes: Sequence[str]) -> None:
    """Raises ClusterError when mirrors are asked for and there is no second node with workers."""
    if spec.memory.optimizer.mirrors and len(nodes) < 2:
        raise ClusterError(
            "memory.optimizer.mirrors = 1 keeps the optimizer state on two nodes, and all of "
            f"cluster.workers = {spec.cluster.workers} are on one; set mirrors to 0, or have 2 "
            "workers or more and a second node with room for some"
        )


class Mirrors:
    """The mirrors of a run, if it has any, and the barrier of each step at which they get its
    gradients."""

    def __init__(self, spec: Spec) -> None:
        self.wanted = spec.memory.optimizer.mirrors > 0
        self._spare_frames = spec.memory.optimizer.slots
        self._timeout_s = spec.cluster.step_timeout_s
        self.homes: tuple[str, ...] = ()
        """The node of each, and `arenas` what it holds; of the arena of its place."""
        self.arenas: tuple[PlannedArena, ...] = ()
        self._linked: object = None

    def plan(self, arenas: Sequence[PlannedArena], homes: Sequence[str]) -> None:
        """Says what there is to be beside `arenas`, of which `homes` are the nodes."""
        if not self.wanted:
            return
        self.homes = mirror_homes(homes)
        self.arenas = plan_arenas(
            [bucket for arena in arenas for bucket in arena.buckets],
            (),
            arenas=len(arenas),
            spare_frames=self._spare_frames,
        )

    def send(self, step: int, team: OptimizerTeam) -> Generator[Event, None, Mirrored]:
        """Returns when every mirror has all gradients of `step`, whoever died on the way.

        After the workers' step, when the update before it is committed by all, and before the
        update of `step` is asked of any. So no bucket flips to `step` before both its gradient
        regions, on two nodes, have that step's gradients; and none of these is written again before
        both have flipped: by the next barrier the update has been confirmed by all, and a worker
        writes to an original only after the flip of that bucket. Whatever node is lost, and
        whenever, one of the two arenas of each bucket survives, and

        - before the update of `step` is asked for, it is at `step` - 1 (as far as the update before
          is committed; until then what follows holds for that one). Some gradient regions may be
          of `step` and some of the step before; nobody needs either, and the step is done again.
        - after that, it is at `step`, or at `step` - 1 with all gradients of `step` beside it. So
          `finish(step, lr, clip_factor)` of all survivors brings all buckets to `step`: those that
          have it stay as they are. The learning rate and factor of `step` are on record before it
          is asked for.

        A skipped step needs no gradients, and no barrier. Raises RunFailed when connections are
        lost again and again though nobody dies.
        """
        began, reason = time.perf_counter(), ""
        # Each death that the team bears may cost a round.
        for _ in range(DEATHS_IN_A_STEP * (1 + len(team.actors))):
            reason = yield from self._link(team)
            if reason is not None:
                continue
            senders = {index: step for index, _ in enumerate(team.actors) if self._own(team, index)}
            answers: dict[str, Sent | None] = yield from team.ask_of(
                f"mirroring step {step}", "mirror", senders, timeout_s=self._timeout_s
            )
            reason = _first_problem(answers)
            if reason is None:
                nbytes = sum(sent.nbytes for sent in answers.values() if sent is not None)
                return Mirrored(nbytes, time.perf_counter() - began)
            self._linked = None
        raise RunFailed(
            f"the gradients of step {step} do not reach their mirrors, last since {reason}; look "
            "at the network between the nodes, or set memory.optimizer.mirrors to 0"
        )

    def _link(self, team: OptimizerTeam) -> Generator[Event, None, str | None]:
        """Connects owners and mirrors, unless they are; why that failed, if so."""
        now = team.ownership, tuple(team.actors)
        if self._linked == now:
            return None
        self._linked = None
        holders: dict[int, list[int]] = {}
        for number, owner in enumerate(team.ownership.owners[: len(self.homes)]):
            senders = holders.setdefault(team.ownership.owners[len(self.homes) + number], [])
            if owner not in senders:
                senders.append(owner)
        addresses = yield from team.ask_of("opening the mirrors", "serve_mirrors", holders)
        if lost := [who for who, address in addresses.items() if address is None]:
            return f"{', '.join(lost)} died"
        at = {holder: addresses[team.actors[holder].name] for holder in holders}
        routes = {index: self._routes(team, index, at) for index, _ in enumerate(team.actors)}
        asked = (team.ownership, tuple(team.actors))
        # An actor answers, too, when it has waited for another as long as for a start.
        failures = yield from team.ask_of(
            "connecting the mirrors", "link_mirrors", routes, timeout_s=self._timeout_s
        )
        if asked != (team.ownership, tuple(team.actors)):
            return "an actor died"
        if failed := [f"{who}: {reason}" for who, reason in failures.items() if reason]:
            return "; ".join(failed)
        self._linked = asked
        return None

    def _own(self, team: OptimizerTeam, actor: int) -> list[int]:
        """The originals of an actor."""
        return [number for number in team.ownership.of(actor) if number < len(self.homes)]

    def _routes(
        self, team: OptimizerTeam, actor: int, at: dict[int, tuple[str, int]]
    ) -> list[Route]:
        by_holder: dict[int, list[int]] = {}
        for number in self._own(team, actor):
            holder = team.ownership.owners[len(self.homes) + number]
            by_holder.setdefault(holder, []).append(number)
        return [Route(holder, at[holder], (*own,)) for holder, own in sorted(by_holder.items())]


def _first_problem(answers: dict[str, Sent | None]) -> str | None:
    for who, sent in answers.items():
        if sent is None:
            return f"{who} died"
        if sent.lost is not None:
            return f"{who}: {sent.lost}"
    return None
