"""Where mirrors lie, and the barrier that brings a step's gradients there, with actors by hand."""

from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from flatpeak.controller.host_plan import PlannedArena, planned_host_bytes
from flatpeak.controller.lives import mirror_homes
from flatpeak.controller.mirrors import Mirrors, check_nodes
from flatpeak.controller.optimizer_team import OptimizerTeam, Update
from flatpeak.controller.ownership import Ownership
from flatpeak.controller.placement import Placed
from flatpeak.controller.spec import Spec
from flatpeak.controller.waiting import Died, Watch
from flatpeak.workers.arena import arena_bytes
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.errors import ClusterError, RunFailed
from flatpeak.workers.mirror import Route, Sent
from local_run import tiny_spec
from tiny_models import tiny_content

HOMES = ["b", "a", "b", "a"]
# Two actors a node: of arenas 0 to 3 and of their mirrors 4 to 7.
OWNERS = Ownership((0, 1, 2, 1, 1, 0, 3, 2))


def spec_of(**cluster: Any) -> Spec:
    return tiny_spec(
        tiny_content("qwen3_moe", vocab_size=257),
        cluster={"address": "auto", "workers": 2, "optimizers": 2, **cluster},
        memory={"optimizer": {"mirrors": 1}},
    )


def test_a_mirror_is_on_the_next_node_and_never_on_that_of_its_arena():
    assert mirror_homes(HOMES) == ("a", "b", "a", "b")
    assert mirror_homes(["c", "a", "b", "a"]) == ("a", "b", "c", "b")


def test_workers_on_one_node_are_refused_with_what_would_help():
    check_nodes(spec_of(), ["a", "b"])
    check_nodes(tiny_spec(tiny_content("qwen3_moe", vocab_size=257)), ["a"])
    with pytest.raises(
        ClusterError, match=r"all of cluster\.workers = 2 are on one; set mirrors to 0, or"
    ):
        check_nodes(spec_of(), ["a"])


def test_mirrors_have_the_buckets_without_the_slab_and_count_on_their_nodes():
    buckets = [
        Bucket(n, 0, n, (Range("p", 1000 * n, 1000 * n + size),), "bfloat16", True, "adamw")
        for n, size in enumerate((1000, 700, 30, 4))
    ]
    arenas = [PlannedArena((bucket,), 8192, arena_bytes((bucket,), 2, 8192)) for bucket in buckets]
    mirrors = Mirrors(spec_of())
    mirrors.plan(arenas, HOMES)
    assert [arena.buckets for arena in mirrors.arenas] == [arena.buckets for arena in arenas]
    assert [arena.nbytes for arena in mirrors.arenas] == [
        arena_bytes((bucket,), 2) for bucket in buckets
    ]
    planned = planned_host_bytes([*arenas, *mirrors.arenas], [*HOMES, *mirrors.homes])
    sizes, copies = [a.nbytes for a in arenas], [a.nbytes for a in mirrors.arenas]
    assert planned["a"] == sizes[1] + sizes[3] + copies[0] + copies[2]
    assert planned["a"] + planned["b"] == sum(sizes) + sum(copies)


class Ref(NamedTuple):
    answer: Any
    alive: bool


@dataclass
class Actor:
    """Answers as an `OptimizerActor` without mirrors to lose, until it is asked for `dies_in`;
    `answers` come before those."""

    number: int
    dies_in: str = ""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(self, method)

    def __eq__(self, other: object) -> bool:
        return self is other


class Method(NamedTuple):
    actor: Actor
    name: str

    def remote(self, *arguments: Any) -> Ref:
        actor, name = self.actor, self.name
        actor.calls.append((name, arguments[0]))
        if coming := actor.answers.get(name):
            return Ref(coming.pop(0), True)
        usual = {
            "serve_mirrors": ("host", actor.number),
            "link_mirrors": None,
            "mirror": Sent(100 + actor.number),
        }
        return Ref(usual.get(name), name != actor.dies_in)


class World:
    """Four optimizer actors on two nodes."""

    def __init__(self, *actors: Actor) -> None:
        by_number = {actor.number: actor for actor in actors}
        self.started = 4
        self.team = OptimizerTeam(
            [self.placed(by_number.get(n, Actor(n))) for n in range(4)],
            successor=self.successor,
            arena_path=lambda number: f"{number}.arena",
            collect=self.collect,
            start_timeout_s=30.0,
            end=lambda handle: None,
        )
        self.team.ownership = OWNERS
        self.team.last = Update(4, 1e-3, 0.5)
        self.mirrors = Mirrors(spec_of())
        empty = [PlannedArena((), 0, 0)] * len(HOMES)
        self.mirrors.plan(empty, HOMES)

    def placed(self, actor: Actor, index: int | None = None) -> Placed:
        at = actor.number if index is None else index
        return Placed(f"optimizer {at}", actor, "ba"[at % 2])

    def successor(self, index: int) -> Placed:
        self.started += 1
        return self.placed(Actor(10 + self.started), index)

    def collect(
        self,
        refs: Mapping[str, Ref],
        what: str,
        timeout_s: float,
        *,
        mortal: Container[str] = (),
        watched: Mapping[str, Any] = MappingProxyType({}),
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        answers = {}
        for who, ref in refs.items():
            if not ref.alive:
                raise Died(who, RunFailed(f"{who} died"), answers)
            answers[who] = ref.answer
        return answers

    def send(self, step: int) -> tuple[list[str], Any]:
        """The events of a barrier, and what it returns."""
        return run(self.mirrors.send(step, self.team))

    def calls(self, index: int) -> list[tuple[str, Any]]:
        return self.team.actors[index].handle.calls


def run(steps: Generator[Any, None, Any]) -> tuple[list[str], Any]:
    kinds = []
    while True:
        try:
            kinds.append(next(steps).kind)
        except StopIteration as stop:
            return kinds, stop.value


def test_actors_are_connected_once_and_those_with_arenas_send_each_step():
    world = World()
    for step in (5, 6):
        kinds, mirrored = world.send(step)
        assert kinds == []
        assert mirrored.nbytes == 100 + 101 + 102
        assert mirrored.seconds > 0
    assert world.calls(0) == [
        ("serve_mirrors", [1]),
        ("link_mirrors", [Route(1, ("host", 1), (0,))]),
        ("mirror", 5),
        ("mirror", 6),
    ]
    assert world.calls(1) == [
        ("serve_mirrors", [0]),
        ("link_mirrors", [Route(0, ("host", 0), (1,)), Route(2, ("host", 2), (3,))]),
        ("mirror", 5),
        ("mirror", 6),
    ]
    assert world.calls(3) == [("serve_mirrors", [2])]  # it has a mirror alone


@pytest.mark.parametrize("dies_in", ["serve_mirrors", "link_mirrors", "mirror"])
def test_after_a_death_all_are_connected_anew_and_all_is_sent_again(dies_in):
    world = World(Actor(1, dies_in))
    kinds, mirrored = world.send(5)
    assert kinds == ["optimizer_lost", "optimizer_replaced"]
    assert mirrored.nbytes == 100 + 115 + 102
    successor = world.calls(1)
    assert successor[:2] == [
        ("attach", {number: f"{number}.arena" for number in (1, 3, 4)}),
        ("finish", 4),
    ]
    assert [name for name, _ in successor[2:]] == ["serve_mirrors", "link_mirrors", "mirror"]
    assert world.calls(0)[-2:] == [
        ("link_mirrors", [Route(1, ("host", 15), (0,))]),
        ("mirror", 5),
    ]


def test_a_death_between_two_steps_is_seen_by_who_is_there_now():
    world = World()
    world.send(5)
    world.team.actors[3] = world.successor(3)
    world.send(6)
    assert [name for name, _ in world.calls(0)][2:] == [
        "mirror",
        "serve_mirrors",
        "link_mirrors",
        "mirror",
    ]
    world.team.ownership = Ownership((0, 1, 0, 1, 1, 0, 1, 2))
    world.send(7)
    assert ("serve_mirrors", [0]) in world.calls(1)[-3:]


@pytest.mark.parametrize(
    "answers", [{"mirror": [Sent(lost="gone")]}, {"link_mirrors": ["gone"]}], ids=["send", "link"]
)
def test_a_connection_that_is_lost_is_made_anew(answers):
    world = World(Actor(0, answers=answers))
    kinds, mirrored = world.send(5)
    assert (kinds, mirrored.nbytes) == ([], 303)
    assert [name for name, _ in world.calls(0)].count("link_mirrors") == 2


def test_connections_that_are_lost_again_and_again_end_the_run():
    world = World(Actor(0, answers={"mirror": [Sent(lost="the link is down")] * 100}))
    with pytest.raises(
        RunFailed, match=r"step 5 do not reach .* optimizer 0: the link is down; lo"
    ):
        world.send(5)
