"""What a run goes on from when its controller, a process at the start, or a node is lost."""

import errno
import fcntl
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from ray.exceptions import RpcError

from flatpeak.controller.leftovers import HeldArenas, remove_arenas
from flatpeak.controller.lives import ControllerLost, Left, Life, Lives
from flatpeak.controller.optimizer_team import Update
from flatpeak.controller.placement import NodeWatch
from flatpeak.controller.runs import RunEvent, StepRecord, event
from flatpeak.controller.takeover import update_under_way
from flatpeak.controller.waiting import DEATHS_IN_A_STEP
from flatpeak.workers.arena import sweep_stale
from flatpeak.workers.errors import (
    ClusterError,
    DoesNotFit,
    FlatpeakError,
    ProcessLost,
    RunFailed,
    StateLost,
    UpdateLost,
)
from flatpeak.workers.snapshot import Latest
from local_run import tiny_spec
from tiny_models import tiny_content

LOST = ControllerLost("the controller died")
STARTED = event(
    "started",
    worker_nodes=["n0", "n1"],
    arena_nodes=["n1", "n0", "n1"],
    optimizers=1,
    mirrored=False,
    step=0,
)
ARENAS = Left("token-0", ("n0", "n1"), ("n1", "n0", "n1"))


def lives_of(
    latest: Latest = Latest(None, ()),  # noqa: B008
    alive: set[str] = set(),  # noqa: B006
    **cluster: object,
) -> Lives:
    spec = tiny_spec(
        tiny_content("qwen3_moe"),
        cluster={"workers": 2, "address": "auto", **cluster},
        memory={"optimizer": {"mirrors": 1 if alive else 0}},
    )
    tokens = (f"token-{n}" for n in count())
    return Lives(
        spec,
        Path("run"),
        Path("run/snapshots/step-3"),
        find=lambda _: latest,
        alive=lambda: alive,
        new_token=tokens.__next__,
    )


def step(number: int, *, grad_norm: float = 2.0, skipped: bool = False) -> StepRecord:
    return StepRecord(
        step=number,
        loss=1.0,
        grad_norm=grad_norm,
        lr=0.25,
        tokens=1,
        tokens_per_s=1.0,
        step_seconds=1.0,
        skipped=skipped,
        first_sample=0,
        last_sample=0,
    )


def after(lives: Lives, error: FlatpeakError) -> tuple[RunEvent, Life]:
    [told] = lives.go_on(error)
    return told, lives.life


def test_a_controller_that_dies_before_there_are_arenas_begins_from_the_same_snapshot():
    told, life = after(lives_of(), LOST)
    assert (told.kind, told.detail["step"]) == ("controller_lost", 0)
    assert (life.number, life.generation, life.token) == (1, 1, "token-1")
    assert (life.left, life.snapshot) == (None, Path("run/snapshots/step-3"))


def test_a_controller_that_dies_leaves_arenas_in_the_names_of_the_life_that_made_them():
    lives = lives_of()
    assert lives.arenas is None
    lives.observe(STARTED)
    lives.observe(event("workers_replaced", generation=3))
    assert lives.settled
    _, life = after(lives, LOST)
    assert (life.left, life.generation) == (ARENAS, 4)
    assert not lives.settled
    lives.observe(event("controller_replaced", generation=4, step=0))
    assert lives.settled
    _, life = after(lives, LOST)  # it has made none of its own
    assert (life.left, life.token) == (ARENAS, "token-2")
    assert (lives.arenas, lives.tokens) == ("token-0", ["token-0", "token-1", "token-2"])


def test_the_next_life_has_as_many_optimizer_actors_as_the_last_one_had():
    lives = lives_of(optimizers=1, max_optimizers=3)
    lives.observe(STARTED)
    lives.observe(event("optimizers_scaled", after=3))
    _, life = after(lives, LOST)
    assert (life.spec.cluster.optimizers, life.spec.cluster.arenas) == (3, 3)
    lives.observe(event("optimizers_scaled", after=2))
    _, life = after(lives, LOST)
    assert (life.spec.cluster.optimizers, life.spec.cluster.arenas) == (2, 3)


def test_a_lost_node_takes_the_run_back_to_the_newest_snapshot_and_says_how_far():
    lives = lives_of(Latest(Path("run/snapshots/step-4"), ("step-5 is left out: torn",)))
    lives.observe(STARTED)
    lives.observe(step(7))
    told, life = after(lives, StateLost("node n1 is gone"))
    assert told.kind == "state_lost"
    assert told.detail == {
        "step": 7,
        "reason": "node n1 is gone",
        "snapshot": "run/snapshots/step-4",
        "skipped": ["step-5 is left out: torn"],
        "redone_steps": 3,
        "workers": 2,
    }
    assert (life.left, life.snapshot) == (None, Path("run/snapshots/step-4"))
    assert lives.arenas is None


def test_a_lost_node_without_a_snapshot_takes_the_run_back_to_its_start():
    lives = lives_of()
    lives.observe(STARTED)
    lives.observe(step(2))
    told, life = after(lives, StateLost("node n1 is gone"))
    assert told.detail["redone_steps"] == 2
    assert (life.left, life.snapshot) == (None, None)


MIRRORED = Left("one", ("n0", "n1", "n2"), ("n0", "n1", "n2"), mirrored=True)


@pytest.mark.parametrize(
    ("left", "alive", "files"),
    [
        (MIRRORED, {"n0", "n1", "n2"}, ["n0 0", "n1 1", "n2 2"]),
        (MIRRORED, {"n0", "n2"}, ["n0 0", "n2 1-mirror", "n2 2"]),
        (MIRRORED, {"n1", "n0"}, ["n0 0", "n1 1", "n0 2-mirror"]),
        (MIRRORED, {"n1"}, None),
        (replace(MIRRORED, mirrored=False), {"n0", "n2"}, None),
    ],
)
def test_of_every_arena_the_file_or_its_mirror_survives_the_loss_of_one_node(left, alive, files):
    found = left.survivors("tiny", alive)
    if files is None:
        assert found is None
    else:
        assert [
            f"{file.node} {file.name.removeprefix('flatpeak-tiny-one-').removesuffix('.arena')}"
            for file in found
        ] == files


def test_a_lost_node_whose_state_is_on_another_costs_no_step():
    lives = lives_of(alive={"n1"})
    lives.observe(replace(STARTED, detail=STARTED.detail | {"mirrored": True}))
    lives.observe(step(7))
    told, life = after(lives, StateLost("node n0 is gone"))
    assert (told.kind, told.detail["step"]) == ("node_lost", 7)
    assert [file.node for file in life.moved] == ["n1", "n1", "n1"]
    assert [file.name.count("mirror") for file in life.moved] == [0, 1, 0]
    told, life = after(lives, ControllerLost("it died, too"))
    assert len(life.moved) == 3
    lives.observe(step(8))
    told, life = after(lives, ClusterError("no node in time"))
    assert (told.kind, len(life.moved)) == ("start_failed", 3)
    lives.observe(step(9))
    # And where the memory does not do for both, there are snapshots.
    told, life = after(lives, DoesNotFit("no room"))
    assert (told.kind, life.moved, life.left) == ("state_lost", (), None)


@pytest.mark.parametrize("mirrored", [False, True])
def test_fewer_workers_go_on_where_a_lost_node_leaves_room_for_fewer(mirrored):
    lives = lives_of(Latest(Path("run/snapshots/step-4"), ()), alive={"n1"}, optimizers=3)
    lives.observe(replace(STARTED, detail={**STARTED.detail, "mirrored": mirrored}))
    lives.observe(event("optimizers_scaled", after=3))
    present = lives.life.spec
    one = present.model_copy(update={"cluster": present.cluster.model_copy(update={"workers": 1})})
    (told,) = lives.go_on(StateLost("node n0 is gone"), fitting=lambda: one)
    assert (told.kind, told.detail["workers"]) == ("node_lost" if mirrored else "state_lost", 1)
    cluster = lives.life.spec.cluster
    assert (cluster.workers, cluster.optimizers, cluster.arenas) == (1, 3, 3)
    assert bool(lives.life.moved) == mirrored


def test_arenas_that_were_moved_are_left_as_others_are():
    lives = lives_of(alive={"n1"})
    lives.observe(replace(STARTED, detail=STARTED.detail | {"mirrored": True}))
    _, life = after(lives, StateLost("node n0 is gone"))
    assert (life.stale, life.spec.memory.optimizer.mirrors) == ((), 1)
    # On one node it has no mirrors, and neither has who takes over.
    lives.observe(event("workers_placed", device="cuda"))
    lives.observe(replace(STARTED, detail=STARTED.detail | {"step": 4}))
    _, life = after(lives, LOST)
    assert (life.moved, life.left, life.stale) == (
        (),
        replace(ARENAS, token="token-1"),
        ("token-0",),
    )
    assert (life.spec.memory.optimizer.mirrors, life.device) == (0, "cuda")
    # Who begins from a snapshot has those that the job asks for.
    told, life = after(lives, UpdateLost("steps.jsonl does not say with what"))
    assert (told.kind, told.detail["redone_steps"]) == ("state_lost", 4)
    assert (life.left, life.moved, life.spec.memory.optimizer.mirrors) == (None, (), 1)
    assert life.stale == ("token-0", "token-1", "token-2")


def test_deaths_end_the_run_only_when_it_does_not_come_on():
    lives = lives_of()
    for number in range(2 * DEATHS_IN_A_STEP):
        lives.observe(step(number))
        after(lives, ProcessLost("worker 0 died"))
    for _ in range(DEATHS_IN_A_STEP - 2):
        after(lives, LOST)
    with pytest.raises(RunFailed, match="3 times after step 5, last since the controller died"):
        after(lives, LOST)


@pytest.mark.parametrize("settled", [False, True], ids=["at its start", "with arenas"])
def test_what_another_life_would_not_mend_is_raised(settled):
    lives = lives_of()
    if settled:
        lives.observe(STARTED)
    error = RunFailed("step 3: worker 0 raised")
    with pytest.raises(RunFailed) as caught:
        after(lives, error)
    assert caught.value is error


def test_of_a_run_that_ends_the_arenas_that_its_controller_left_are_to_be_kept():
    lives = lives_of(alive={"n0", "n1"})
    assert lives.orphans(LOST) == ()
    lives.observe(STARTED)
    assert lives.orphans(LOST) == ARENAS.files("tiny")
    assert lives.orphans(RunFailed("worker 0 raised")) == ()  # who has said so has kept them
    after(lives, LOST)
    assert lives.orphans(ClusterError("no room")) == ARENAS.files("tiny")
    after(lives, StateLost("node n0 was out of reach"))
    assert lives.orphans(ClusterError("no room")) == lives.life.moved == ARENAS.files("tiny")


def test_arenas_that_wait_to_be_taken_over_are_not_given_up_at_once():
    lives = lives_of()
    lives.observe(STARTED)
    after(lives, LOST)
    told, life = after(lives, ClusterError("2 workers were not placed within 60 s"))
    assert (told.kind, life.left, lives.arenas) == ("start_failed", ARENAS, "token-0")
    with pytest.raises(RunFailed, match="had to begin anew 3 times after step 0, last since 2 w"):
        after(lives, ClusterError("2 workers were not placed within 60 s"))
    # Once they are, the run is as any other.
    lives.observe(event("controller_replaced", generation=3, step=0))
    with pytest.raises(ClusterError):
        after(lives, ClusterError("the network is down"))


@pytest.mark.parametrize(
    ("versions", "last", "update"),
    [
        ({4}, None, Update(4, 0.0, None)),
        ({4}, step(5), Update(4, 0.0, None)),
        ({4, 5}, step(5), Update(5, 0.25, 0.5 / (2.0 + 1e-6))),
        ({4, 5}, step(5, skipped=True), Update(5, 0.25, None)),
    ],
    ids=["done, of old", "not begun", "begun", "begun to skip"],
)
def test_an_update_under_way_is_that_of_the_last_record(versions, last, update):
    assert update_under_way(versions, last, 0.5) == update


@pytest.mark.parametrize("last", [None, step(4)])
def test_an_update_without_its_record_cannot_be_finished(last):
    with pytest.raises(UpdateLost, match=r"in the update of step 5, and steps.jsonl does not"):
        update_under_way({4, 5}, last, 0.5)


def test_a_lost_node_is_looked_for_every_while():
    alive, now, looks = {"n0", "n1"}, [10.0], []

    def look() -> set[str]:
        looks.append(now[0])
        return alive

    watch = NodeWatch(alive=look, every_s=2.0, clock=lambda: now[0])
    watch.check([])
    watch.check(["n0", "n1"])
    alive.remove("n1")
    now[0] = 11.9
    watch.check(["n0", "n1"])
    assert looks == [10.0]
    with pytest.raises(StateLost, match="node n1 is gone"):
        watch.check(["n0", "n1"], now=True)
    now[0] = 14.0
    watch.check(["n0"])
    with pytest.raises(StateLost):
        watch.check(["n1"], now=True)


def test_a_node_that_is_to_go_is_noticed_if_it_is_of_the_run():
    now, draining = [10.0], {"n2"}
    watch = NodeWatch(draining=lambda: draining, every_s=2.0, clock=lambda: now[0])
    assert watch.notices(["n0", "n1"]) == set()
    draining.add("n1")
    assert watch.notices(["n0", "n1"]) == set()
    now[0] = 12.0
    assert watch.notices(["n0", "n1"]) == {"n1"}
    assert watch.notices(["n0", "n1"]) == {"n1"}


def test_a_cluster_that_does_not_say_which_nodes_are_to_go_ends_no_run(caplog):
    answers = [RpcError("deadline exceeded"), {"n1"}]

    def draining() -> set[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    now = [10.0]
    watch = NodeWatch(draining=draining, every_s=2.0, clock=lambda: now[0])
    assert watch.notices(["n1"]) == set()
    assert "deadline exceeded" in caplog.text
    now[0] = 12.0
    assert watch.notices(["n1"]) == {"n1"}


def test_arenas_that_are_held_outlive_all_their_processes(tmp_path):
    path = tmp_path / "flatpeak-tiny-one-0.arena"
    path.write_bytes(b"FLATPEAK".ljust(4096, b"\0"))
    with HeldArenas(str(tmp_path), "tiny") as held:
        held.hold("one")
        assert sweep_stale(tmp_path) == []
        with path.open("rb") as file, pytest.raises(BlockingIOError) as caught:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert caught.value.errno == errno.EAGAIN
        held.hold("two")
        assert remove_arenas(str(tmp_path), "tiny", "one")
    assert list(tmp_path.iterdir()) == []
