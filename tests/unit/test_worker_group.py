"""Generations of workers, with workers by hand that die when asked for something."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from flatpeak.controller.placement import Placed
from flatpeak.controller.runs import Event, event
from flatpeak.controller.waiting import DEATHS_IN_A_STEP, Died
from flatpeak.controller.worker_group import WorkerGroup
from flatpeak.workers.errors import RunFailed, StateLost

ANSWERS = {
    "node": "n0",
    "open_rendezvous": ("127.0.0.1", 7),
    "join": None,
    "build": ("shard",),
    "slab_bytes": 64,
}


class Worker(NamedTuple):
    rank: int
    generation: int


class World:
    """Two workers a generation; `dies` says in which call of which generation worker 1 dies."""

    def __init__(self, *dies: tuple[int, str], nodes: tuple[str, ...] = ("n0",)) -> None:
        self.dies, self.nodes = set(dies), nodes
        self.calls: list[tuple[int, str]] = []
        self.attached: list[int] = []
        self.ended: list[Worker] = []
        self.group = WorkerGroup(start=self.start, ask=self.ask, end=self.ended.extend)

    def start(self, generation: int) -> Iterator[Placed]:
        for rank in range(2):
            yield Placed(f"worker {rank}", Worker(rank, generation), "")

    def ask(self, actors: list[Placed], what: str, method: str, *args: Any) -> dict[str, Any]:
        self.call(method)
        answer = ANSWERS[method]
        if method == "node":
            answer = self.nodes[min(self.group.generation, len(self.nodes) - 1)]
        return {actor.name: answer for actor in actors}

    def attach(self) -> Iterator[Event]:
        yield event("attaching")
        self.call("attach")
        self.attached.append(self.group.generation)

    def call(self, method: str) -> None:
        self.calls.append((self.group.generation, method))
        if self.calls[-1] in self.dies:
            raise death(method)


def death(method: str = "step") -> Died:
    return Died("worker 1", RunFailed(f"worker 1 died in {method}"), {})


def started(*dies: tuple[int, str], nodes: tuple[str, ...] = ("n0",)) -> World:
    world = World(*dies, nodes=nodes)
    world.group.launch()
    world.group.form()
    return world


def test_a_generation_meets_builds_and_says_what_it_has():
    world = started()
    assert [method for _, method in world.calls] == [
        *("node", "open_rendezvous", "join", "build", "slab_bytes"),
    ]
    assert [worker.node for worker in world.group.workers] == ["n0", "n0"]
    assert world.group.shards == [("shard",), ("shard",)]
    assert world.group.slab_bytes == [64, 64]


def test_the_death_of_one_ends_all_and_the_next_generation_gets_what_they_had():
    world = started()
    old = [worker.handle for worker in world.group.workers]
    workers = world.group.workers
    lost, attaching, replaced = world.group.replace(death(), step=7, attach=world.attach)
    assert attaching.kind == "attaching"
    assert world.ended == old
    assert world.group.workers is workers
    assert [worker.handle for worker in workers] == [Worker(0, 1), Worker(1, 1)]
    assert world.attached == [1]
    assert (lost.kind, lost.detail) == (
        "worker_lost",
        {"actor": "worker 1", "step": 7, "reason": "worker 1 died in step"},
    )
    assert replaced.kind == "workers_replaced"
    assert (replaced.detail["generation"], replaced.detail["step"]) == (1, 7)
    parts = [replaced.detail[name] for name in ("place_s", "build_s", "attach_s")]
    assert 0 <= sum(parts) <= replaced.detail["seconds"]


@pytest.mark.parametrize("method", ["node", "open_rendezvous", "join", "build", "attach"])
def test_one_that_dies_while_the_next_generation_begins_is_replaced_too(method):
    world = started((1, method))
    events = list(world.group.replace(death(), step=7, attach=world.attach))
    events = [event for event in events if event.kind != "attaching"]
    assert [event.kind for event in events] == ["worker_lost", "worker_lost", "workers_replaced"]
    assert events[1].detail["reason"] == f"worker 1 died in {method}"
    assert [worker.handle.generation for worker in world.group.workers] == [2, 2]
    assert world.attached == [2]
    assert len(world.ended) == 4


def test_deaths_in_the_same_step_end_the_run_and_those_in_others_do_not():
    world = started()
    for step in range(1, 6):
        list(world.group.replace(death(), step=step, attach=world.attach))
    for _ in range(DEATHS_IN_A_STEP - 1):
        list(world.group.replace(death(), step=9, attach=world.attach))
    events = world.group.replace(death(), step=9, attach=world.attach)
    assert next(events).kind == "worker_lost"
    with pytest.raises(RunFailed) as caught:
        next(events)
    assert str(caught.value) == "workers were lost 3 times in step 9, last worker 1 died in step"


def test_workers_that_come_back_elsewhere_have_lost_their_arenas():
    world = started(nodes=("n0", "n1"))
    events = world.group.replace(death(), step=7, attach=world.attach)
    assert next(events).kind == "worker_lost"
    with pytest.raises(StateLost, match=r"worker 0 came back on node n1, .* node n0"):
        next(events)
    assert world.attached == []


def test_a_death_before_all_have_a_node_binds_nobody_to_one():
    world = World((0, "node"), nodes=("n0", "n1"))
    with pytest.raises(Died):
        world.group.launch()
    list(world.group.replace(death("node"), step=0))
    assert [worker.node for worker in world.group.workers] == ["n1", "n1"]
    world.nodes = ("n0", "n1", "n2")
    events = world.group.replace(death(), step=1, attach=world.attach)
    assert next(events).kind == "worker_lost"
    with pytest.raises(StateLost, match=r"worker 0 came back on node n2, .* node n1"):
        next(events)
