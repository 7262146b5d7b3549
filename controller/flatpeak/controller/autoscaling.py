"""When a run changes its processes by itself: observations in, decisions out, nothing else here.

More optimizer actors come when forward passes wait for updates in every step of a window, and when
more would be done sooner. Fewer are enough when the actors are idle most of the time and the
passes would still not wait. What keeps this from going back and forth: going up takes a whole
window above the bound and going down half of the bound; and a run that once had too few actors for
its updates does not try that number again before these have become half as long.

More workers come when there has been room for them for a while. Fewer are never chosen here: only
the loss of a node leaves fewer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from flatpeak.controller.spec import AutoscaleSpec, Spec, parse_spec
from flatpeak.workers.errors import SpecError

BUSY_SHARE = 0.5
"""Of a step: actors that update for longer are not idle enough to do with fewer."""
HIDING_SHARE = 0.2
"""Of a step, in which the next updates can at least be hidden: the forward pass is one of about
four parts of equal length, with the recomputation and the two of the backward pass."""
SOONER = 0.95
"""Of the present time of the slowest actor: a change has to bring it below."""
BETTER = 1.3
"""How many times longer than after a better assignment the slowest actor has to take for one."""
NOTICED_SHARE = 0.1
"""Of a step: shorter updates are not worth being divided in another way."""


@dataclass(frozen=True)
class ObservedStep:
    """`exposed_s` of its `seconds` the forward pass waited for updates; the optimizer actor that
    took longest was at its own for `update_s`."""

    seconds: float
    exposed_s: float
    update_s: float

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.seconds


@dataclass(frozen=True)
class Observation:
    """The `steps` since the last change that count, oldest first, with `present` actors.

    `slowest` has the time of the slowest actor for each number of actors that there can be, as far
    as arenas can be divided; how they compare is what counts. When forward passes last waited, the
    slowest actor updated for `strained_share` of a step. Whether there are CPUs for more is for
    `scaling.refusal` to say, which knows them by node.
    """

    steps: Sequence[ObservedStep]
    present: int
    slowest: Mapping[int, float]
    strained_share: float = inf


@dataclass(frozen=True)
class Decision:
    """How many there should be; None for as many as there are. `reason` says why, in one line."""

    wanted: int | None
    reason: str


def wanted_optimizers(seen: Observation, settings: AutoscaleSpec) -> Decision:
    """What `settings.optimizers` asks for."""
    if settings.optimizers is None:
        return Decision(None, "cluster.autoscale.optimizers is null")
    least, most = settings.optimizers
    possible = [count for count in sorted(seen.slowest) if least <= count <= most]
    window = settings.window_steps
    if len(seen.steps) < window:
        return Decision(None, f"{len(seen.steps)} of {window} steps have been seen")
    steps = seen.steps[-window:]
    if possible and not possible[0] <= seen.present <= possible[-1]:
        wanted = min(max(seen.present, possible[0]), possible[-1])
        return Decision(wanted, f"cluster.autoscale.optimizers is [{least}, {most}]")
    if waited(steps, settings):
        return _more(seen, steps, possible, settings)
    return _fewer(seen, steps, possible, settings)


def waited(steps: Sequence[ObservedStep], settings: AutoscaleSpec) -> bool:
    """Whether forward passes waited for updates for too long in every one of these steps."""
    return min(step.exposed_share for step in steps) > settings.exposed_share


def busy_share(steps: Sequence[ObservedStep]) -> float:
    """For how much of a step the slowest actor updates."""
    return median(step.update_s for step in steps) / median(step.seconds for step in steps)


def _more(
    seen: Observation,
    steps: Sequence[ObservedStep],
    possible: Sequence[int],
    settings: AutoscaleSpec,
) -> Decision:
    exposed = median(step.exposed_s for step in steps)
    busy = median(step.update_s for step in steps)
    why = (
        f"in {len(steps)} steps forward passes waited for updates for more than "
        f"{settings.exposed_share:.1%} of a step, {exposed:.3f} s"
    )
    if busy < exposed / 2:
        return Decision(None, f"{why}, but the actors took only {busy:.3f} s for them")
    sooner = SOONER * seen.slowest[seen.present]
    enough = [n for n in possible if n > seen.present and seen.slowest[n] < sooner]
    if not enough:
        return Decision(None, f"{why}, but more actors would not be done sooner")
    return Decision(enough[0], why)


def _fewer(
    seen: Observation,
    steps: Sequence[ObservedStep],
    possible: Sequence[int],
    settings: AutoscaleSpec,
) -> Decision:
    seconds = median(step.seconds for step in steps)
    exposed = median(step.exposed_s for step in steps)
    busy = median(step.update_s for step in steps)
    fewer = seen.present - 1
    if fewer not in possible:
        return Decision(None, "these are the fewest that there may be")
    if busy > BUSY_SHARE * seconds:
        return Decision(None, f"the actors are busy for {busy:.3f} of {seconds:.3f} s")
    present = seen.slowest[seen.present]
    then = busy * seen.slowest[fewer] / present if present else busy
    hidden = max(busy - exposed, HIDING_SHARE * seconds)
    share = max(exposed, then - hidden) / seconds
    bound = settings.exposed_share / 2
    if share > bound:
        return Decision(None, f"with {fewer}, forward passes would wait for {share:.1%} of a step")
    if then / seconds > seen.strained_share / 2:
        return Decision(None, f"with {fewer}, forward passes had to wait before")
    return Decision(
        fewer,
        f"the actors were busy for {busy:.3f} of {seconds:.3f} s, and with {fewer} forward passes "
        f"would wait for no more than {bound:.1%} of a step",
    )


def rebalanced(steps: Sequence[ObservedStep], *, now: float, better: float) -> str | None:
    """Why arenas should change hands between as many actors: the slowest one, which takes `now`,
    would take `better`. None where they should not."""
    seconds, busy = median(s.seconds for s in steps), median(s.update_s for s in steps)
    if not better or now < BETTER * better or busy < NOTICED_SHARE * seconds:
        return None
    return (
        f"the slowest actor updated for {busy:.3f} of {seconds:.3f} s, {now / better:.1f} times as "
        "long as it would with other arenas"
    )


# Workers


@dataclass(frozen=True)
class WorkersObservation:
    """`rooms`: at what time (seconds) there was room for how many more workers, oldest first.

    `allowed` are the numbers of workers that suit the batch and the model, see `allowed_workers`.
    """

    present: int
    allowed: Sequence[int]
    rooms: Sequence[tuple[float, int]]


def wanted_workers(seen: WorkersObservation, settings: AutoscaleSpec) -> Decision:
    """What `settings.workers` asks for: as many as there has been room for all the time."""
    if settings.workers is None:
        return Decision(None, "cluster.autoscale.workers is null")
    free_s = settings.workers_free_s
    if not seen.rooms or seen.rooms[-1][0] - seen.rooms[0][0] < free_s:
        return Decision(None, f"the room for workers has been watched for less than {free_s:g} s")
    since = max(time for time, _ in seen.rooms if time <= seen.rooms[-1][0] - free_s)
    room = min(room for time, room in seen.rooms if time >= since)
    most = min(settings.workers[1], seen.present + room)
    wanted = max((n for n in seen.allowed if seen.present < n <= most), default=None)
    if wanted is None:
        return Decision(None, f"there is room for {room} more workers, and no number that suits")
    return Decision(wanted, f"for {free_s:g} s there has been room for {room} more workers")


def room_for_workers(
    free: Mapping[str, Mapping[str, float]],
    *,
    worker: Mapping[str, float],
    optimizer: Mapping[str, float],
    served: Iterable[str],
) -> int:
    """For how many workers there is room, each on one node with all of what a `worker` takes.

    `free` are the resources of each node. A node that is not `served` by an optimizer actor yet
    needs one beside its workers, which takes what an `optimizer` takes.
    """
    served, room = {*served}, 0
    for node, has in free.items():
        rest = dict(has)
        if node not in served:
            for name, amount in optimizer.items():
                rest[name] = rest.get(name, 0.0) - amount
        fits = (rest.get(name, 0.0) // amount for name, amount in worker.items() if amount)
        room += max(0, int(min(fits)))
    return room


def allowed_workers(asked: Spec, suits: Callable[[Spec], bool]) -> tuple[int, ...]:
    """The numbers of workers in `cluster.autoscale.workers` that the job `asked` for can have.

    `asked` still has its degrees as the user wrote them; `suits` says whether they can be resolved
    for the model, as `resolve_parallel` does it.
    """
    if asked.cluster.autoscale.workers is None:
        return ()
    least, most = asked.cluster.autoscale.workers
    found = []
    for workers in range(least, most + 1):
        cluster = asked.cluster.model_dump() | {"workers": workers}
        try:
            spec = parse_spec(asked.model_dump() | {"cluster": cluster})
        except SpecError:
            continue
        if suits(spec):
            found.append(workers)
    return tuple(found)
