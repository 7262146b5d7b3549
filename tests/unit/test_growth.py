"""When a driver asks for more workers by itself."""

from pathlib import Path
from typing import Any

import pytest

from flatpeak.controller.growth import Growth
from flatpeak.controller.lives import Lives
from flatpeak.controller.runs import event
from flatpeak.controller.spec import Spec
from local_run import tiny_spec
from tiny_models import tiny_content


class Cluster:
    """Two nodes with free resources, and a clock."""

    def __init__(
        self, *, device: str = "cpu", present: int = 2, placement: str = "beside", **autoscale: Any
    ) -> None:
        self.free: dict[str, dict[str, float]] = {"n0": {}, "n1": {}}
        self.now = 100.0
        cluster = {
            "workers": present,
            "optimizer_placement": placement,
            "address": "auto",
            "autoscale": {"workers_free_s": 10.0, **autoscale},
        }
        spec = tiny_spec(tiny_content("qwen3_moe"), cluster=cluster)
        self.lives = Lives(spec, Path("run"), None)
        self.lives.observe(event("workers_placed", device=device))
        self.lives.observe(
            event(
                "started",
                worker_nodes=["n0", "n0"],
                arena_nodes=["n0"],
                optimizers=1,
                mirrored=False,
                step=0,
            )
        )
        self.growth = Growth(
            spec,
            suits=self.suits,
            free=lambda: self.free,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.comes_free: dict[float, dict[str, dict[str, float]]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for time in [time for time in self.comes_free if time <= self.now]:
            self.free |= self.comes_free.pop(time)

    @staticmethod
    def suits(spec: Spec) -> bool:
        return 4 % spec.cluster.workers == 0  # sequences of a step

    def wanted_after(self, seconds: float) -> list[int | None]:
        """What is asked for, looking every second."""
        found = []
        for _ in range(int(seconds)):
            self.now += 1
            if (request := self.growth.look(self.lives)) is not None:
                found.append(request.workers)
        return found


def test_nothing_is_asked_for_where_the_job_does_not_say_so():
    cluster = Cluster()
    cluster.free["n1"] = {"CPU": 64.0}
    assert cluster.wanted_after(60) == []


@pytest.mark.parametrize(
    ("free", "device"),
    [
        ({"n0": {"CPU": 1.0}, "n1": {"CPU": 2.0}}, "cpu"),
        ({"n0": {"CPU": 9.0, "GPU": 2.0}, "n1": {"CPU": 1.0, "GPU": 4.0}}, "cuda"),
    ],
    ids=["a node without an actor needs one", "GPUs"],
)
def test_room_that_lasts_is_used_as_far_as_the_batch_allows(free, device):
    cluster = Cluster(device=device, workers=[1, 8])
    assert cluster.wanted_after(30) == []
    cluster.free = free
    assert cluster.wanted_after(9) == []
    assert cluster.wanted_after(6) == [4]
    assert cluster.wanted_after(5) == []  # it is under way, or was refused


@pytest.mark.parametrize("workers", [[1, 3], [2, 2]])
def test_a_run_grows_to_its_most_workers_only(workers):
    cluster = Cluster(workers=workers)
    cluster.free["n0"] = {"CPU": 64.0}
    assert cluster.wanted_after(60) == []


def test_a_number_that_was_refused_is_not_asked_for_again():
    cluster = Cluster(workers=[1, 8])
    cluster.free["n1"] = {"CPU": 64.0}
    requests = []
    for _ in range(60):
        cluster.now += 1
        if (request := cluster.growth.look(cluster.lives)) is not None:
            requests.append(request)
            cluster.growth.refused("of somebody else")
            cluster.growth.refused(request.id)
    assert [request.workers for request in requests] == [4]


def test_room_that_comes_and_goes_is_left_alone():
    cluster = Cluster(workers=[1, 8])
    for _ in range(6):
        cluster.free["n0"] = {"CPU": 2.0}
        assert cluster.wanted_after(8) == []
        cluster.free["n0"] = {"CPU": 1.0}
        assert cluster.wanted_after(4) == []


@pytest.mark.parametrize(
    ("cores", "workers"),
    [
        ({"n0": 9.0}, 4),  # as before
        ({"n0": 4.0}, 2),  # of which one is the optimizer actor's, and 3 does not suit the batch
        ({"n0": 2.0, "n1": 2.0}, 2),
        ({"n0": 1.0}, 4),  # none fits, so the run waits for as many as it had
    ],
)
def test_a_lost_node_leaves_as_many_workers_as_there_is_room_for(cores, workers):
    cluster = Cluster(present=4, workers=[1, 8])
    cluster.free = {}
    # What dead processes had comes free one after the other.
    cluster.comes_free = {
        100.5 + 2 * n: {node: {"CPU": count}} for n, (node, count) in enumerate(cores.items())
    }
    assert cluster.growth.left(cluster.lives) == workers
    assert cluster.now - 100.0 < (1 if workers == 4 and cores["n0"] > 4 else 11)


def test_as_many_workers_go_on_where_the_job_does_not_say_otherwise():
    cluster = Cluster(present=4)
    cluster.free = {}
    assert (cluster.growth.left(cluster.lives), cluster.now) == (4, 100.0)


@pytest.mark.parametrize(
    ("cores", "workers"),
    [
        ({"n0": 1.0, "n1": 1.0}, 1),  # and the actor on the other
        ({"n0": 2.0, "n1": 1.0}, 2),
        ({"n0": 0.5, "n1": 2.0}, 1),
        ({"n0": 0.5, "n1": 0.5}, 4),  # not even the actor fits
    ],
)
def test_an_actor_anywhere_takes_the_place_of_one_worker_at_most(cores, workers):
    cluster = Cluster(present=4, placement="anywhere", workers=[1, 8])
    cluster.free = {node: {"CPU": count} for node, count in cores.items()}
    assert cluster.growth.left(cluster.lives) == workers


def test_workers_that_come_to_actors_anywhere_need_none_beside_them():
    cluster = Cluster(placement="anywhere", workers=[1, 8])
    cluster.free["n1"] = {"CPU": 2.0}
    assert cluster.wanted_after(15) == [4]
