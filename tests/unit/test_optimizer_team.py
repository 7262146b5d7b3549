"""Successors of optimizer actors, with actors by hand that die when asked for something."""

from collections.abc import Collection, Container, Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from flatpeak.controller.optimizer_team import OptimizerTeam, Update
from flatpeak.controller.ownership import Ownership
from flatpeak.controller.placement import Placed
from flatpeak.controller.runs import RunEvent
from flatpeak.controller.waiting import DEATHS_IN_A_STEP, Died, Hung, Interrupted, Watch
from flatpeak.workers.errors import RunFailed

UPDATE = Update(7, 1e-3, 0.5)


class Ref(NamedTuple):
    """A call and its answer; a dead actor gives none."""

    answer: str | None
    call: tuple[Any, ...]


@dataclass
class Actor:
    """Answers every call with its name and the method's, until it is asked for `dies_in`."""

    name: str
    dies_in: str | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    dead: bool = False

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(self, method)


class Method(NamedTuple):
    actor: Actor
    name: str

    def remote(self, *arguments: Any) -> Ref:
        actor = self.actor
        actor.calls.append((self.name, *arguments))
        actor.dead = actor.dead or self.name == actor.dies_in
        return Ref(None if actor.dead else f"{actor.name}: {self.name}", actor.calls[-1])


class World:
    """Two optimizer actors, with three arenas; `lives` gives when the holders of each place die."""

    def __init__(self, *lives: tuple[int, str | None], stop_at: str = "") -> None:
        self.lives = {index: [dies for at, dies in lives if at == index] for index in (0, 1, 2)}
        self.stop_at = stop_at
        self.started: list[Actor] = []
        self.ended: list[Actor] = []
        self.team = OptimizerTeam(
            [self.start(0), self.start(1)],
            successor=self.start,
            arena_path=lambda number: f"{number}.arena",
            collect=self.collect,
            start_timeout_s=30.0,
            end=lambda actor: self.ended.append(actor),
        )
        self.team.ownership = Ownership((0, 1, 1))

    def start(self, index: int) -> Placed:
        coming = self.lives[index]
        actor = Actor(f"actor {len(self.started)}", coming.pop(0) if coming else None)
        self.started.append(actor)
        return Placed(f"optimizer {index}", actor, "node")

    def collect(
        self,
        refs: Mapping[str, Ref],
        what: str,
        timeout_s: float,
        *,
        mortal: Container[str] = (),
        watched: Mapping[str, Any] = MappingProxyType({}),
        watch: Watch | None = None,
    ) -> dict[str, str]:
        if watch is not None and (hung := watch.look()) is not None:
            raise Died(hung.who, RunFailed(f"{hung.who} {hung.how}"), {})
        if what == self.stop_at:
            raise Interrupted
        answers = {}
        for who, ref in refs.items():
            if ref.answer is None:
                cause = RunFailed(f"{who} died: in {ref.call[0]}")
                raise Died(who, cause, answers) if who in mortal else cause
            answers[who] = ref.answer
        return answers


def run(steps: Generator[Any, None, dict[str, Any]]) -> tuple[list[RunEvent], dict[str, Any]]:
    """Events and answers of a `gather`."""
    events = []
    while True:
        try:
            events.append(next(steps))
        except StopIteration as stop:
            return events, stop.value


def gather(world: World, *pending: dict[str, Any]) -> tuple[list[RunEvent], dict[str, Any]]:
    return run(world.team.gather("step 8", 5.0, *pending))


def test_without_a_death_all_are_asked_once():
    world = World()
    world.team.update(UPDATE, beside={"worker 0": Ref("updated", ())})
    events, answers = gather(world, {"worker 1": Ref("done", ())}, world.team.updates)
    assert events == []
    assert answers == {
        "worker 1": "done",
        "worker 0": "updated",
        "optimizer 0": "actor 0: update",
        "optimizer 1": "actor 1: update",
    }
    assert world.ended == []


def test_the_successor_attaches_to_the_arena_and_finishes_the_update():
    world = World((1, "update"))
    world.team.update(UPDATE, beside={})
    events, answers = gather(world, {"worker 0": Ref("done", ())}, world.team.updates)
    assert answers == {
        "worker 0": "done",
        "optimizer 0": "actor 0: update",
        "optimizer 1": "actor 2: finish",
    }
    assert world.started[2].calls == [("attach", {1: "1.arena", 2: "2.arena"}), ("finish", *UPDATE)]
    assert world.team.actors[1].handle is world.started[2]
    assert world.ended == [world.started[1]]
    lost, replaced = events
    assert (lost.kind, lost.detail["actor"], lost.detail["step"]) == (
        "optimizer_lost",
        "optimizer 1",
        7,
    )
    assert lost.detail["reason"] == "optimizer 1 died: in update"
    assert (replaced.kind, replaced.detail["step"]) == ("optimizer_replaced", 7)
    assert replaced.detail["seconds"] >= 0


class Watchman:
    """Finds these to hang, one each time it looks."""

    def __init__(self, *hung: str) -> None:
        self.hung = [*hung]

    def look(self) -> Hung | None:
        return Hung(self.hung.pop(0), "hangs") if self.hung else None

    def overdue(self, owed: Collection[str], /) -> None:
        raise AssertionError(f"nobody is late: {owed}")

    def described(self, owed: Collection[str], /) -> str:
        raise AssertionError(f"nobody is late: {owed}")


def test_an_actor_that_hangs_is_replaced_as_if_it_had_died():
    world = World()
    world.team.update(UPDATE, beside={})
    steps = world.team.gather("step 8", 5.0, world.team.updates, watch=Watchman("optimizer 1"))
    (lost, replaced), answers = run(steps)
    assert answers == {"optimizer 0": "actor 0: update", "optimizer 1": "actor 2: finish"}
    assert world.ended == [world.started[1]]
    assert (lost.kind, lost.detail["reason"]) == ("optimizer_lost", "optimizer 1 hangs")
    assert replaced.kind == "optimizer_replaced"


@pytest.mark.parametrize("dies_in", ["update", "snapshot"])
def test_the_successor_writes_the_snapshot_anew_after_the_update_that_it_is_of(dies_in):
    world = World((0, dies_in))
    world.team.update(UPDATE, beside={})
    world.team.snapshot("step-7")
    run(world.team.gather("step 8", 5.0, world.team.updates))
    _, parts = run(world.team.gather("the snapshot", 5.0, world.team.parts))
    assert parts == {"optimizer 0": "actor 2: snapshot", "optimizer 1": "actor 1: snapshot"}
    assert world.started[2].calls == [
        ("attach", {0: "0.arena"}),
        ("finish", *UPDATE),
        ("snapshot", "step-7", 7),
    ]


@pytest.mark.parametrize("dies_in", ["attach", "finish"])
def test_a_successor_that_dies_is_replaced_too(dies_in):
    world = World((0, "update"), (0, dies_in))
    world.team.update(UPDATE, beside={})
    events, answers = gather(world, world.team.updates)
    assert answers["optimizer 0"] == "actor 3: finish"
    assert world.ended == [world.started[0], world.started[2]]
    replaced = ["optimizer_replaced"] if dies_in == "finish" else []
    lost = ["optimizer_lost"]
    assert [event.kind for event in events] == lost + replaced + lost + ["optimizer_replaced"]


def test_one_that_dies_again_and_again_in_a_step_ends_the_run():
    world = World(*[(0, "update")] + DEATHS_IN_A_STEP * [(0, "finish")])
    world.team.update(UPDATE, beside={})
    kinds = []
    events = world.team.gather("step 8", 5.0, world.team.updates)
    with pytest.raises(RunFailed) as caught:
        kinds.extend(event.kind for event in events)
    assert str(caught.value) == (
        "optimizer 0 died 3 times after step 7, last optimizer 0 died: in finish"
    )
    with pytest.raises(RunFailed):  # whoever keeps what can be kept finds it dead as well
        next(world.team.gather("the last update", 5.0, world.team.updates))
    assert kinds == 2 * ["optimizer_lost", "optimizer_replaced"] + ["optimizer_lost"]
    assert len(world.started) == 2 + DEATHS_IN_A_STEP - 1


def test_deaths_in_different_steps_and_of_different_actors_do_not_add_up():
    world = World(*[(index, "update") for index in (0, 1)])
    for step in range(1, 6):
        world.team.update(Update(step, 1e-3, None), beside={})
        _, answers = gather(world, world.team.updates)
        assert len(answers) == 2
        for placed in world.team.actors:
            placed.handle.dies_in = "update"
    assert len(world.started) == 2 + 2 * 5


def test_a_stop_while_one_is_replaced_leaves_nothing_owed():
    world = World((0, "update"), stop_at="replacing optimizer 0")
    world.team.update(UPDATE, beside={})
    world.team.snapshot("step-7")
    with pytest.raises(Interrupted):
        gather(world, world.team.updates)
    _, answers = run(world.team.gather("the last update", 5.0, world.team.updates))
    _, parts = run(world.team.gather("the snapshot", 5.0, world.team.parts))
    assert (answers["optimizer 0"], parts["optimizer 0"]) == (
        "actor 2: finish",
        "actor 2: snapshot",
    )
    assert len(world.started) == 3


def test_a_successor_is_served_to_workers_of_other_nodes_as_its_predecessor_was_to_be():
    world = World((1, "serve"))
    world.team.serve({1: [0, 2]})
    _, addresses = gather(world, world.team.links)
    assert addresses == {"optimizer 1": "actor 2: serve"}
    assert world.started[2].calls[-1] == ("serve", [0, 2])
    assert ("serve", [0, 2]) not in world.started[0].calls


def test_the_death_of_another_is_for_who_waits_to_mend():
    world = World()
    world.team.others = lambda: {"worker 0", "the update on worker 0"}
    world.team.update(UPDATE, beside={"the update on worker 0": Ref("updated", ())})
    with pytest.raises(Died) as death:
        gather(world, {"worker 0": Ref(None, ("step", 8))}, world.team.updates)
    assert death.value.who == "worker 0"
    assert len(world.started) == 2
    world.team.update_beside({"the update on worker 0": Ref("again", ())})
    _, answers = gather(world, world.team.updates)
    assert answers == {
        "the update on worker 0": "again",
        "optimizer 0": "actor 0: update",
        "optimizer 1": "actor 1: update",
    }


def resize(world: World, count: int, owners: tuple[int, ...]) -> tuple[list[RunEvent], Any]:
    """To `count` actors, after an update whose answers have been heard."""
    world.team.update(UPDATE, beside={})
    gather(world, world.team.updates)
    for actor in world.started:
        actor.calls.clear()
    joining = [world.start(index) for index in range(len(world.team.actors), count)]
    return run(world.team.resize(count, Ownership(owners), joining=joining))


def calls(world: World) -> list[list[tuple[Any, ...]]]:
    return [actor.calls for actor in world.started]


def test_old_owners_let_go_before_new_ones_take_over():
    world = World()
    order: list[str] = []
    collect = world.team._collect
    world.team._collect = lambda refs, what, *a, **k: (
        order.append(what) or collect(refs, what, *a, **k)
    )
    events, gone = resize(world, 3, (0, 1, 2))
    assert (events, gone) == ([], [])
    assert calls(world) == [[], [("release", [2])], [("attach", {2: "2.arena"})]]
    assert order[-2:] == ["releasing arenas", "taking over arenas"]
    assert [actor.handle for actor in world.team.actors] == world.started
    world.team.update(UPDATE, beside={})
    assert sorted(world.team.updates) == ["optimizer 0", "optimizer 1", "optimizer 2"]


def test_who_leaves_is_ended_when_others_own_its_arenas():
    world = World()
    events, gone = resize(world, 1, (0, 0, 0))
    assert calls(world) == [[("attach", {1: "1.arena", 2: "2.arena"})], [("release", [1, 2])]]
    assert world.ended == [world.started[1]] == [placed.handle for placed in gone]
    assert events == []
    assert gather(world, world.team.updates)[1] == {"optimizer 0": "actor 0: update"}


def test_the_successor_of_one_that_dies_while_it_lets_go_has_what_is_left():
    world = World((1, "release"))
    events, _ = resize(world, 3, (0, 1, 2))
    assert [event.kind for event in events] == ["optimizer_lost", "optimizer_replaced"]
    successor = world.team.actors[1].handle
    assert successor.calls == [("attach", {1: "1.arena"}), ("finish", *UPDATE)]
    assert world.team.actors[2].handle.calls == [("attach", {2: "2.arena"})]


def test_the_successor_of_one_that_dies_while_it_takes_over_has_all_that_it_should():
    world = World((0, "attach"))
    events, gone = resize(world, 1, (0, 0, 0))
    assert [event.kind for event in events] == ["optimizer_lost", "optimizer_replaced"]
    paths = {0: "0.arena", 1: "1.arena", 2: "2.arena"}
    assert world.team.actors[0].handle.calls == [("attach", paths), ("finish", *UPDATE)]
    assert [placed.name for placed in gone] == ["optimizer 1"]


def test_who_dies_while_it_leaves_is_not_replaced():
    world = World((1, "release"))
    events, gone = resize(world, 1, (0, 0, 0))
    assert (events, len(world.started)) == ([], 2)
    assert world.started[0].calls == [("attach", {1: "1.arena", 2: "2.arena"})]
    assert [placed.name for placed in gone] == ["optimizer 1"]
