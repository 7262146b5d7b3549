"""Requests for more or fewer optimizer actors, with a cluster and actors by hand."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError

from flatpeak.controller.host_plan import PlannedArena
from flatpeak.controller.ownership import Ownership
from flatpeak.controller.placement import Placed
from flatpeak.controller.scaling import (
    Capacity,
    Change,
    Refused,
    Scaling,
    handed_over,
    refusal,
)
from flatpeak.workers.buckets import Bucket, Range

FREE = MappingProxyType({"a": 2.0, "b": 3.0, "other": 9.0})


def capacity(*, arenas: int = 8, free: Mapping[str, float] = FREE, **more: Any) -> Capacity:
    return Capacity(("a", "b"), arenas=arenas, cpus_per_actor=2, free_cpus=free, **more)


@pytest.mark.parametrize(
    ("wanted", "present", "reason"),
    [
        (2, 6, None),
        (4, 4, None),
        (4, 2, None),
        (0, 2, "0 optimizer actors cannot be had, but 2 (one for each node with workers) to 8 ("),
        (-1, 2, "-1 optimizer actors cannot be had, but 2 "),
        (1, 2, "and there are 2; free CPUs in the cluster: 14, of which 5 on the nodes with work"),
        (9, 2, "to 8 (the arenas that cluster.max_optimizers asked for at the start), and there"),
        (6, 2, "6 optimizer actors instead of 2 need 4 more CPUs on node a, which has 2 free; fre"),
        (7, 4, "7 optimizer actors instead of 4 need 4 more CPUs on node a, which has 2 free; fre"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_what_is_free(wanted, present, reason):
    found = refusal(wanted, present, capacity())
    assert found is None if reason is None else reason in found


def test_what_was_handed_over_is_counted_and_copies_are_to_other_nodes():
    buckets = [Bucket(n, 0, n, (Range("p", n, n + 1),), "float32", True, "adamw") for n in range(3)]
    report = handed_over(
        Ownership((0, 0, 0)),
        Ownership((0, 1, 2)),
        arenas=[PlannedArena((bucket,), 0, 100 * bucket.index) for bucket in buckets],
        homes=["a", "a", "a"],
        actors=[Placed(f"optimizer {n}", None, node) for n, node in enumerate("aab")],
    )
    assert report == {
        "arenas": 2,
        "arena_bytes": 300,
        "copied_bytes": 200,
        "state_bytes": {"optimizer 0": 16, "optimizer 1": 16, "optimizer 2": 16},
    }


class Cluster:
    """Starts actors that answer with what `says` has for them, and are late without."""

    def __init__(self, present: int = 2, *, timeout_s: float = 60.0) -> None:
        self.actors = [Placed(f"optimizer {n}", None, "ab"[n % 2]) for n in range(present)]
        self.says: dict[int, Any] = {}
        self.started: list[tuple[int, str]] = []
        self.ended: list[int] = []
        self.names_taken = False
        self.scaling = Scaling(
            self.actors,
            capacity=lambda: capacity(free={"a": 8.0, "b": 8.0}),
            start=self.start,
            timeout_s=timeout_s,
            end=lambda handle: self.ended.append(handle.index),
            answers=self,
        )
        self.scaling.open()

    def start(self, index: int, node: str) -> Placed:
        if self.names_taken and index == 3:
            raise ActorAlreadyExistsError("optimizer 3")
        self.started.append((index, node))
        ready = SimpleNamespace(remote=lambda: index)
        return Placed(f"optimizer {index}", SimpleNamespace(index=index, ready=ready), node)

    def wait(self, refs: list[Any], /, *, timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0, "a step boundary waits for nobody"
        ready = [ref for ref in refs if ref in self.says]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any, /) -> Any:
        if isinstance(self.says[ref], Exception):
            raise self.says[ref]


def test_new_actors_are_taken_in_when_all_of_them_are_ready():
    cluster = Cluster()
    assert cluster.scaling.due() is None
    assert cluster.scaling.ask("r", 4) is None
    assert cluster.started == [(2, "a"), (3, "b")]
    assert cluster.scaling.due() is None
    cluster.says[3] = None
    assert cluster.scaling.due() is None
    cluster.says[2] = None
    change = cluster.scaling.due()
    assert isinstance(change, Change)
    assert (change.request, change.wanted) == ("r", 4)
    assert [actor.name for actor in change.joining] == ["optimizer 2", "optimizer 3"]
    assert cluster.ended == []


def test_fewer_are_due_at_once_and_say_why():
    cluster = Cluster(present=4)
    assert cluster.scaling.ask("r", 2, reason="idle") is None
    change = cluster.scaling.due()
    assert isinstance(change, Change)
    assert change.reason == "idle"
    assert (change.wanted, change.joining) == (2, ())


def test_a_second_request_waits_until_the_first_is_settled():
    cluster = Cluster()
    assert cluster.scaling.ask("r", 3) is None
    assert cluster.scaling.ask("s", 4) == "a change to 3 optimizer actors is under way; wait"
    cluster.says[2] = None
    assert cluster.scaling.due() is not None
    cluster.scaling.settle()
    assert cluster.scaling.ask("s", 2) is None


def test_an_actor_that_dies_while_it_starts_undoes_the_request():
    cluster = Cluster()
    assert cluster.scaling.ask("r", 4) is None
    cluster.says |= {2: None, 3: ActorDiedError()}
    refused = cluster.scaling.due()
    assert isinstance(refused, Refused)
    assert refused.request == "r"
    assert refused.reason.startswith("starting optimizer 3: optimizer 3 died")
    assert cluster.ended == [2, 3]
    assert cluster.scaling.due() is None
    assert cluster.scaling.ask("s", 3) is None


def test_an_actor_that_does_not_start_in_time_undoes_the_request():
    cluster = Cluster(timeout_s=-1.0)
    assert cluster.scaling.ask("r", 4) is None
    cluster.says[2] = None
    refused = cluster.scaling.due()
    assert isinstance(refused, Refused)
    assert "optimizer 3 did not start within cluster.start_timeout_s = -1 s; free" in refused.reason
    assert cluster.ended == [2, 3]


def test_while_actors_of_before_still_end_more_are_refused():
    cluster = Cluster()
    cluster.names_taken = True
    assert "still ending; ask again" in (cluster.scaling.ask("r", 4) or "")
    assert cluster.ended == [2]
    assert cluster.scaling.due() is None


def test_before_and_after_the_training_nothing_is_heard_and_what_was_starting_ends():
    cluster = Cluster()
    assert cluster.scaling.ask("r", 4) is None
    assert cluster.scaling.close("the run ended first") == Refused("r", "the run ended first", 4)
    assert cluster.ended == [2, 3]
    assert cluster.scaling.close("again") is None
    assert cluster.scaling.ask("s", 3) == "again"
    fresh = Scaling(
        cluster.actors, capacity=capacity, start=cluster.start, timeout_s=1.0, answers=cluster
    )
    assert "still starting" in (fresh.ask("r", 3) or "")
