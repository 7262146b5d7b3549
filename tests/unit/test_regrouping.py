"""Other workers: what is refused, how the lives follow, and how the state gets to another cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatpeak.controller.launch import regrouped
from flatpeak.controller.lives import ArenaFile, ControllerLost, Left, Lives, sized
from flatpeak.controller.regrouping import Regroup, Regrouping, refusal, too_little_room
from flatpeak.controller.runs import RunEvent, event
from flatpeak.controller.scale_requests import ScaleRequest
from flatpeak.controller.spec import ClusterSpec
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range, Shard, cut_buckets
from flatpeak.workers.errors import (
    ClusterError,
    ProcessLost,
    RunFailed,
    SpecError,
    StateLost,
    WaitTimeout,
)
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.snapshot import Latest, SnapshotReader, commit_manifest, restore
from flatpeak.workers.state_source import Held, StateReader, StateSource
from flatpeak.workers.update_split import assign_updates
from local_run import tiny_spec
from tiny_models import tiny_content

SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SIZES = {"a": 700, "b": 300, "c": 41}


def cluster(workers: int, **fields: int) -> ClusterSpec:
    return ClusterSpec(workers=workers, **fields)


@pytest.mark.parametrize(
    ("wanted", "free", "device", "reason"),
    [
        (cluster(4), {"CPU": 2.0}, "cpu", None),
        (cluster(1), {}, "cpu", None),
        (cluster(2, optimizers=2), {}, "cpu", "need 1 CPUs more than there are"),
        (cluster(4), {"CPU": 1.0}, "cpu", "need 1 CPUs more .* free in the cluster: 1 CPUs"),
        (cluster(4), {"CPU": 9.0, "GPU": 1.0}, "cuda", "need 1 GPUs more .*: 9 CPUs, 1 GPUs"),
        (cluster(4, cpus_per_worker=2), {}, "cuda", "need 6 CPUs and 2 GPUs more than there are"),
    ],
)
def test_workers_that_the_cluster_cannot_place_are_refused_with_what_is_free(
    wanted, free, device, reason
):
    found = refusal(wanted, cluster(2), free=free, device=device)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        who = "optimizer actors instead of 1 " if wanted.optimizers > 1 else "workers instead of 2 "
        assert found.partition(" ")[2].startswith(who)
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)


def test_two_sets_of_arenas_need_room_on_every_node():
    assert too_little_room({"n0": 5, "n1": 7}, {"n0": 5, "n1": 7}) is None
    found = too_little_room({"n0": 5, "n1": 7}, {"n0": 5, "n1": 6})
    assert found is not None
    assert "about 7 bytes beside the old ones on node n1, which has 6 free" in found


def test_a_second_request_waits_for_the_first():
    regrouping = Regrouping()
    spec = tiny_spec(tiny_content("qwen3_moe"), cluster={"workers": 2})
    assert regrouping.due() is None
    assert regrouping.ask(Regroup("one", spec)) is None
    assert regrouping.ask(Regroup("two", spec)) == (
        "a change to 2 workers and 1 optimizer actors is under way; wait"
    )
    assert regrouping.due() == Regroup("one", spec)


# Lives


def started(*, workers: int, arena_nodes: tuple[str, ...] = ("n0",), step: int = 3) -> RunEvent:
    """What a life tells with its workers on one node, and an actor for each arena."""
    return event(
        "started",
        worker_nodes=["n0"] * workers,
        arena_nodes=[*arena_nodes],
        optimizers=len(arena_nodes),
        mirrored=False,
        step=step,
        parameters=10,
    )


def moving_lives(*, workers: int = 4, optimizers: int = 1) -> Lives:
    """In the life that is to have so many processes in the place of two workers and one actor."""
    config = tiny_content("qwen3_moe")
    tokens = iter(f"token-{n}" for n in range(9))
    lives = Lives(
        tiny_spec(config, cluster={"workers": 2}),
        Path("run"),
        None,
        find=lambda _: Latest(None, ()),
        new_token=lambda: next(tokens),
    )
    lives.observe(started(workers=2, step=0))
    assert not lives.move()
    cluster: dict[str, object] = {"workers": workers, "optimizers": optimizers}
    if optimizers > 1:
        cluster |= {"optimizer_placement": "anywhere", "address": "auto"}
    lives.want(Regroup("request", tiny_spec(config, cluster=cluster)))
    assert not lives.move()  # the run ended before it came to that
    lives.want(Regroup("refused", tiny_spec(config, cluster={"workers": 8})))
    lives.observe(event("workers_leaving", step=3, for_request="request"))
    assert lives.move()
    return lives


FILES = (ArenaFile("n0", "flatpeak-tiny-token-0-0.arena"),)


def test_the_next_life_takes_the_state_out_of_the_arenas_of_the_one_before():
    lives = moving_lives()
    life = lives.life
    assert (life.spec.cluster.workers, life.token, life.generation) == (4, "token-1", 1)
    assert (life.left, life.moved) == (None, FILES)
    assert (life.inherits, lives.moving, lives.arenas) == (True, "request", "token-0")
    begun = started(workers=4)
    lives.observe(begun)
    [told] = lives.moved(begun)
    assert (told.kind, told.detail["before"], told.detail["after"]) == ("workers_scaled", 2, 4)
    assert (told.detail["request"], told.detail["copied_bytes"]) == ("request", 120)
    assert (lives.moving, lives.arenas) == (None, "token-1")
    assert [*lives.moved(begun)] == []
    # From now on it is like any other.
    assert not lives.move()
    [told] = lives.go_on(ControllerLost("it died"))
    assert lives.life.moved == ()
    assert lives.life.left is not None
    assert lives.life.left.token == "token-1"


def test_a_controller_that_dies_as_it_makes_way_has_not_made_way():
    lives = moving_lives()
    lives.observe(started(workers=4))
    [*_] = lives.moved(started(workers=4))
    lives.want(Regroup("again", tiny_spec(tiny_content("qwen3_moe"), cluster={"workers": 2})))
    lives.observe(event("workers_leaving", step=5, for_request="again"))
    [told] = lives.go_on(ControllerLost("it died"))
    assert told.kind == "controller_lost"
    assert not lives.move()


def test_a_death_on_the_way_begins_the_move_again():
    lives = moving_lives()
    [told] = lives.go_on(ControllerLost("it died"))
    assert told.kind == "controller_lost"
    assert (lives.life.spec.cluster.workers, lives.life.moved) == (4, FILES)
    assert lives.moving == "request"
    [told] = lives.go_on(ProcessLost("optimizer 0 died"))
    assert told.kind == "start_failed"
    # The third is the last, and the workers of before come back.
    [told] = lives.go_on(ProcessLost("optimizer 0 died"))
    assert (told.kind, told.detail["request"]) == ("scaling_refused", "request")
    assert (lives.life.spec.cluster.workers, lives.life.moved) == (2, ())
    assert lives.life.left is not None


@pytest.mark.parametrize("error", [ClusterError("no room"), StateLost("node n0 is gone")])
def test_workers_that_cannot_be_had_give_way_to_those_of_before(error):
    lives = moving_lives()
    [told] = lives.go_on(error)
    assert (told.kind, told.detail) == (
        "scaling_refused",
        {"request": "request", "reason": str(error)},
    )
    assert (lives.life.spec.cluster.workers, lives.life.moved) == (2, ())
    assert lives.life.left is not None
    assert lives.life.left.token == "token-0"
    # These have the state to take over, and are given as many tries as others who do.
    [told] = lives.go_on(ClusterError("no room"))
    assert (told.kind, lives.life.left) == ("start_failed", Left("token-0", ("n0", "n0"), ("n0",)))


def test_optimizer_actors_anywhere_change_as_workers_do_and_are_undone_as_they_are():
    lives = moving_lives(workers=2, optimizers=3)
    assert (lives.life.spec.cluster.optimizers, lives.spec.cluster.optimizers) == (3, 3)
    begun = started(workers=2, arena_nodes=("n0", "n1", "n2"))
    lives.observe(begun)
    [told] = lives.moved(begun)
    assert (told.kind, told.detail["before"], told.detail["after"]) == ("optimizers_moved", 1, 3)
    assert told.detail["copied_bytes"] == 120
    undone = moving_lives(workers=2, optimizers=3)
    [told] = undone.go_on(ClusterError("no room"))
    assert told.kind == "scaling_refused"
    assert (undone.life.spec.cluster.optimizers, undone.life.spec.cluster.workers) == (1, 2)


def test_the_job_with_other_workers_keeps_the_actors_that_there_are_whatever_it_began_with():
    asked = tiny_spec(
        tiny_content("qwen3_moe"),
        cluster={
            "workers": 2,
            "optimizers": 3,
            "max_optimizers": 4,
            "autoscale": {"optimizers": [3, 4]},
        },
    )
    # A lost node had the others, and autoscaling asks for them again when it has seen enough.
    found = regrouped(asked, sized(asked, 2), ScaleRequest(workers=4, degrees={"expert": 2}))
    assert (found.cluster.workers, found.cluster.optimizers, found.cluster.arenas) == (4, 2, 4)
    assert found.parallel.expert == 2
    with pytest.raises(SpecError, match="no multiple of 3"):
        regrouped(asked, asked, ScaleRequest(workers=3))


# State


def cut(ranks: int, arenas: int, size: int, *, on_device: bool = False) -> tuple[Bucket, ...]:
    """Each parameter divided over so many ranks."""
    shards = []
    for rank in range(ranks):
        for name, total in SIZES.items():
            held = Range(name, total * rank // ranks, total * (rank + 1) // ranks)
            shards.append(Shard(held, rank, "float32", decay=True))
    buckets = cut_buckets(shards, bucket_parameters=size, arenas_of_rank=lambda _: range(arenas))
    return assign_updates(buckets, range(0, len(buckets), 2)) if on_device else buckets


def make(folder: Path, name: str, buckets: tuple[Bucket, ...]) -> list[Path]:
    paths = []
    for number in sorted({bucket.arena for bucket in buckets}):
        own = [bucket for bucket in buckets if bucket.arena == number]
        path = folder / f"{name}-{number}.arena"
        Arena.create(path, run="r", buckets=own, spare_frames=2).close()
        paths.append(path)
    return paths


def fill(paths: list[Path]) -> None:
    """State and gradients that are functions of name and place, at step 3 after 2 updates."""
    core = OptimizerCore([Arena.attach(path, run="r") for path in paths], SETTINGS)
    for bucket in core.buckets:
        for held in bucket.ranges:
            values = torch.arange(held.start, held.stop) + 1000.0 * ord(held.name)
            core.load(held, values, values / 3, values / 7)
    core.commit_load(3, updates=2)
    for arena in core.arenas:
        for bucket in arena.buckets:
            arena.gradient(bucket.index).copy_(arena.master(bucket.index).sin())
        arena.close()


def state_of(source: StateSource) -> dict[str, np.ndarray]:
    return {name: np.stack(source.read(Range(name, 0, size))) for name, size in SIZES.items()}


@settings(max_examples=25, deadline=None)
@example(before=(2, 2, 7), after=(3, 1, 5))
@given(
    before=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(30, 400)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(30, 400)),
)
def test_state_gets_from_any_cut_into_any_other_to_the_bit(tmp_path_factory, before, after):
    folder = tmp_path_factory.mktemp("arenas")
    old = make(folder, "old", cut(*before))
    fill(old)
    # A source a node: the first has one arena, the other the rest.
    sources = [
        StateSource("r", paths, SETTINGS, timeout_s=0.0) for paths in (old[:1], old[1:]) if paths
    ]
    held = [source.finish(3, 0.0, None) for source in sources]
    new = make(folder, "new", cut(*after))
    core = OptimizerCore([Arena.attach(path, run="r") for path in new], SETTINGS)
    restore(core, StateReader(held, lambda number, part: sources[number].read(part)))
    assert (core.step, core.updates) == (3, 2)
    moved = StateSource("r", new, SETTINGS, timeout_s=None)
    whole = StateSource("r", old, SETTINGS, timeout_s=None)
    wanted = state_of(whole)
    for name, values in state_of(moved).items():
        np.testing.assert_array_equal(values, wanted[name])
    for source in (*sources, moved, whole):
        source.close()
    for arena in core.arenas:
        arena.close()


def test_an_update_that_was_cut_off_is_finished_before_the_state_moves(tmp_path):
    paths = make(tmp_path, "old", cut(2, 2, 100, on_device=True))
    whole = make(tmp_path, "whole", cut(2, 2, 100))
    for some in (paths, whole):
        fill(some)
    done = StateSource("r", whole, SETTINGS, timeout_s=0.0)
    done.finish(4, 0.1, 0.5)
    # Of the other, the owners had done their part, and the workers' devices nothing.
    core = OptimizerCore([Arena.attach(path, run="r") for path in paths], SETTINGS)
    core.update(4, lr=0.1, clip_factor=0.5)
    source = StateSource("r", paths, SETTINGS, timeout_s=0.0)
    assert source.versions() == [3, 4]
    assert source.finish(4, 0.1, 0.5).updates == 3
    wanted = state_of(done)
    for name, values in state_of(source).items():
        np.testing.assert_array_equal(values, wanted[name])
    # So it is when nobody is there to take it over, but for a snapshot.
    folder = tmp_path / "step-4"
    parts = source.snapshot(str(folder), 4)
    commit_manifest(folder, step=4, parts=parts, meta={})
    with SnapshotReader(folder) as reader:
        assert (reader.step, reader.updates) == (4, 3)
        for name, size in SIZES.items():
            saved = np.stack([values.numpy() for values in reader.read(Range(name, 0, size))])
            np.testing.assert_array_equal(saved, wanted[name])
    mirrors = make(tmp_path, "mirrors", cut(2, 2, 100))
    source.remove([*mirrors, tmp_path / "of another node.arena"])
    assert not any(path.exists() for path in (*paths, *mirrors))


def test_arenas_that_somebody_still_writes_to_are_not_a_source(tmp_path):
    paths = make(tmp_path, "old", cut(1, 1, 100))
    fill(paths)
    with Arena.attach(paths[0], run="r") as arena:
        arena.own()
        with pytest.raises(WaitTimeout):
            StateSource("r", paths, SETTINGS, timeout_s=0.1)


def test_sources_at_different_steps_are_no_state():
    ranges = ((Range("a", 0, 5),),)
    with pytest.raises(RunFailed, match=r"\[\(3, 2\), \(4, 3\)\]"):
        StateReader([Held(ranges, 3, 2), Held(ranges, 4, 3)], lambda number, held: None)  # pyright: ignore
