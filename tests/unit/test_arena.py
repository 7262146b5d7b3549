"""Arenas: atomic versions, refusals, and contents that outlive the processes that wrote them."""

import shutil
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flatpeak.workers.arena import Arena, arena_bytes, sweep_stale
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.errors import ClusterError, DoesNotFit, InputError, WaitTimeout


def bucket(index, size, dtype="bfloat16"):
    return Bucket(index, 0, 4, (Range(f"p{index}", 0, size),), dtype, True, "adamw")


BUCKETS = (bucket(3, 100), bucket(5, 77, "float32"), bucket(6, 10))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "4.arena"


@pytest.fixture
def arena(path):
    with Arena.create(path, run="r", buckets=BUCKETS, spare_frames=2, slab_bytes=500) as arena:
        yield arena


def fill(frame, value):
    for part in (*frame.state, frame.weights):
        part.fill_(value)


def test_a_fresh_arena_is_zero_not_loaded_and_as_large_as_planned(arena, path):
    assert path.stat().st_size == arena.nbytes == arena_bytes(BUCKETS, 2, 500)
    for b in BUCKETS:
        assert arena.version(b.index) == -1
        assert arena.updates(b.index) == 0
        for view in (*arena.frame(b.index).state, arena.gradient(b.index)):
            assert view.shape == (b.size,)
            assert view.dtype == torch.float32
            assert not view.any()
    assert [arena.weights(b.index).dtype for b in BUCKETS] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]
    assert arena.slab().shape == (500,)


def test_no_two_views_share_a_byte(arena):
    frames = [arena.frame(b.index) for b in BUCKETS] + [
        arena.begin_update(b.index) for b in BUCKETS
    ]
    views = [arena.slab(), *(arena.gradient(b.index) for b in BUCKETS)]
    for frame in frames:
        views += frame.state
        if frame.weights is not frame.master:
            views.append(frame.weights)
    spans = sorted((v.data_ptr(), v.data_ptr() + v.numel() * v.itemsize) for v in views)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] - arena._bytes.data_ptr() <= arena.nbytes


def test_small_buckets_do_not_take_large_frames():
    large = [bucket(n, 100_000) for n in range(4)]
    small = [bucket(n, 10) for n in range(4, 8)]
    per_bucket = 18 * 100_000
    assert arena_bytes(large + small, 1) < 4 * per_bucket + 14 * 100_000 + 65536


def test_an_update_shows_when_it_is_whole(arena):
    old = arena.begin_update(3)
    fill(old, 1.0)
    arena.commit_update(3, 0)
    new = arena.begin_update(3)
    fill(new, 2.0)
    assert arena.version(3) == 0
    assert (arena.master(3) == 1.0).all()
    arena.commit_update(3, 1)
    assert (arena.version(3), arena.updates(3)) == (1, 2)
    assert all((view == 2.0).all() for view in (*arena.frame(3).state, arena.weights(3)))


def test_a_skipped_step_moves_the_version_alone(arena):
    fill(arena.begin_update(5), 1.5)
    arena.commit_update(5, 0)
    before = [view.clone() for view in arena.frame(5).state]
    arena.advance(5, 1)
    assert (arena.version(5), arena.updates(5)) == (1, 1)
    assert all(map(torch.equal, before, arena.frame(5).state))


def test_a_version_never_goes_back(arena):
    arena.advance(3, 4)
    with pytest.raises(AssertionError, match="bucket 3 holds version 4"):
        arena.advance(3, 3)


def test_frames_rotate_without_touching_other_buckets(arena):
    for step in range(6):
        for b in BUCKETS:
            fill(arena.begin_update(b.index), 10 * b.index + step)
            arena.commit_update(b.index, step)
        for b in BUCKETS:
            assert (arena.master(b.index) == 10 * b.index + step).all()


def test_as_many_updates_as_spare_frames_may_be_open(path):
    buckets = [bucket(n, 8) for n in range(3)]
    with Arena.create(path, run="r", buckets=buckets, spare_frames=2) as arena:
        assert arena.begin_update(0).master.data_ptr() != arena.begin_update(1).master.data_ptr()
        with pytest.raises(AssertionError, match="no free frame for bucket 2"):
            arena.begin_update(2)
        arena.commit_update(0, 0)
        arena.begin_update(2)


def test_no_two_updaters_of_an_arena_ever_ask_for_the_same_frame(path):
    sides = ["host", "device"]
    buckets = [
        Bucket(n, n % 2, 4, (Range(f"p{n}", 0, 9),), "bfloat16", True, "adamw", sides[n // 2 % 2])
        for n in range(12)
    ]
    updaters = {b.updater for b in buckets}
    assert updaters == {None, 0, 1}
    with Arena.create(path, run="r", buckets=buckets, spare_frames=2) as arena:
        mapped = {who: Arena.attach(path, run="r") for who in updaters}
        for step in range(5):
            # All begin before anyone commits, as processes do that know nothing of each other.
            for who, own in mapped.items():
                begun = [b for b in buckets if b.updater == who][step % 2 : step % 2 + 2]
                for b in begun:
                    fill(own.begin_update(b.index), 100 * step + b.index)
            for own in mapped.values():
                for index in list(own._pending):
                    own.commit_update(index, step)
            held = {b.index: arena.master(b.index) for b in buckets}
            assert len({view.data_ptr() for view in held.values()}) == len(buckets)
            for index, view in held.items():
                version = arena.version(index)
                assert (view == (0 if version < 0 else 100 * version + index)).all()
        for own in mapped.values():
            own.close()


def test_the_division_of_frames_costs_spare_frames_alone():
    def nbytes(*sides):
        buckets = [
            Bucket(n, 0, 4, (Range(f"p{n}", 0, 2**20),), "bfloat16", True, "adamw", side)
            for n, side in enumerate(sides)
        ]
        return arena_bytes(buckets, 2)

    frame = 14 * 2**20
    assert nbytes(*["host"] * 4) == nbytes(*["device"] * 4)
    assert nbytes(*["host", "device"] * 2) - nbytes(*["host"] * 4) == 2 * frame


def test_a_wait_ends_when_the_updater_fails(arena):
    arena.fail(RuntimeError("the device is lost"))
    with pytest.raises(RuntimeError, match="the device is lost"):
        arena.wait_version(6, 7, timeout_s=10)
    arena.advance(6, 7)
    arena.wait_version(6, 7, timeout_s=0)


def test_a_wait_in_vain_for_a_worker_names_it(path):
    buckets = [Bucket(0, 3, 4, (Range("p", 0, 9),), "bfloat16", True, "adamw", "device")]
    with (
        Arena.create(path, run="r", buckets=buckets, spare_frames=2) as arena,
        pytest.raises(WaitTimeout, match=r"if worker 3, which updates it, lives"),
    ):
        arena.wait_version(0, 1, timeout_s=0.0)


def test_waiting_ends_with_the_version(arena, path):
    def update():
        time.sleep(0.05)
        with Arena.attach(path, run="r") as other:
            other.advance(6, 7)

    thread = threading.Thread(target=update)
    thread.start()
    arena.wait_version(6, 7, timeout_s=10)
    thread.join()
    assert arena.version(6) == 7


def test_a_wait_in_vain_names_bucket_arena_path_and_versions(arena, path):
    arena.advance(6, 2)
    with pytest.raises(WaitTimeout) as caught:
        arena.wait_version(6, 3, timeout_s=0.01)
    for part in ("bucket 6", "arena 4", "version 3", "holds 2", str(path)):
        assert part in str(caught.value)


def test_weights_of_another_version_are_refused(arena):
    fill(arena.begin_update(3), 3.0)
    arena.commit_update(3, 1)
    outs = [torch.empty(5), torch.empty(30, dtype=torch.bfloat16)]
    arena.read_places(3, 1, [(20, outs[0]), (70, outs[1])])
    assert all((out == 3.0).all() for out in outs)
    with pytest.raises(ClusterError, match=r"version 0 .* holds version 1"):
        arena.read_places(3, 0, [(0, outs[0])])


def test_a_cpu_with_weak_memory_order_gets_no_arena(arena, path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for call in (
        lambda: Arena.attach(path, run="r"),
        lambda: Arena.create(path.with_name("b.arena"), run="r", buckets=BUCKETS, spare_frames=1),
    ):
        with pytest.raises(InputError, match=r"is aarch64: .*use x86-64 nodes"):
            call()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_second_process_mapping_sees_the_same_memory(arena, path):
    with Arena.attach(path, run="r") as other:
        arena.slab()[7] = 9
        arena.gradient(5)[3] = 2.5
        assert other.slab()[7] == 9
        assert other.gradient(5)[3] == 2.5
        assert other.buckets == BUCKETS


def test_an_existing_arena_is_not_made_again(arena, path):
    arena.gradient(3).fill_(1.0)
    with pytest.raises(ClusterError, match="exists already"):
        Arena.create(path, run="r", buckets=BUCKETS, spare_frames=1)
    assert (arena.gradient(3) == 1.0).all()
    assert list(path.parent.iterdir()) == [path]


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: overwrite(path, 0, b"X"), "is no Flatpeak arena"),
        (lambda path: overwrite(path, 8, b"\x63"), "arena format 99"),
        (lambda path: overwrite(path, 300, b"!"), "header of .* is damaged"),
        (lambda path: overwrite(path, 16, b"\xff" * 7), "header of .* is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "its header says"),
        (lambda path: path.write_bytes(b"FLAT"), "is no Flatpeak arena"),
        (lambda path: path.unlink(), "there is no arena"),
    ],
    ids=["magic", "format", "layout", "length", "truncated", "stump", "missing"],
)
def test_a_damaged_arena_is_refused_and_left_as_it_is(path, damage, message):
    Arena.create(path, run="r", buckets=BUCKETS, spare_frames=1).close()
    damage(path)
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(ClusterError, match=message):
        Arena.attach(path, run="r")
    assert (path.read_bytes() if path.exists() else None) == before


def test_an_arena_of_another_run_is_refused(path):
    Arena.create(path, run="theirs", buckets=BUCKETS, spare_frames=1).close()
    with pytest.raises(ClusterError, match="belongs to run theirs, not to run ours"):
        Arena.attach(path, run="ours")


def test_a_pointer_to_a_foreign_frame_is_refused(path):
    with Arena.create(path, run="r", buckets=BUCKETS, spare_frames=1) as arena:
        arena._words[0] = arena._words[1]
    with pytest.raises(ClusterError, match=r"bucket \d+ in .* points at frame"):
        Arena.attach(path, run="r")


def test_a_folder_without_room_is_refused_with_numbers_and_setting(path):
    free = shutil.disk_usage(path.parent).free
    with pytest.raises(DoesNotFit, match=r"takes [\d,]{10,} bytes .* has [\d,]+ free.*shm_dir"):
        Arena.create(path, run="r", buckets=BUCKETS, spare_frames=1, slab_bytes=2 * free)
    assert not list(path.parent.iterdir())


def test_bad_arguments_name_their_setting(path):
    with pytest.raises(InputError, match="slots"):
        Arena.create(path, run="r", buckets=BUCKETS, spare_frames=0)
    with pytest.raises(InputError, match="shm_dir"):
        Arena.create(path.parent / "no" / path.name, run="r", buckets=BUCKETS, spare_frames=1)
    with pytest.raises(InputError, match="129 bytes"):
        Arena.create(path, run="r" * 129, buckets=BUCKETS, spare_frames=1)


def test_an_actor_without_buckets_has_an_arena_for_its_slab(path):
    with Arena.create(path, run="r", buckets=(), spare_frames=2, slab_bytes=64) as arena:
        assert arena.slab().numel() == 64


def child(code, *arguments):
    """A process that runs `code` and prints a line when it is ready to be killed."""
    script = f"import sys; sys.path[:0] = {sys.path!r}\n{textwrap.dedent(code)}"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_contents_survive_kill_9_also_in_the_middle_of_an_update(path):
    process = child(
        """
        import time
        from flatpeak.workers.arena import Arena
        from flatpeak.workers.buckets import Bucket, Range
        bucket = Bucket(0, 0, 0, (Range("p", 0, 1000),), "bfloat16", True, "adamw")
        arena = Arena.create(sys.argv[1], run="r", buckets=[bucket], spare_frames=1)
        for part in (*arena.begin_update(0).state, arena.gradient(0)):
            part.fill_(0.5)
        arena.commit_update(0, 3)
        arena.begin_update(0).master[:500].fill_(77.0)
        print("ready", flush=True)
        time.sleep(60)
        """,
        path,
    )
    assert sweep_stale(path.parent) == []
    kill(process)
    with Arena.attach(path, run="r") as arena:
        assert (arena.version(0), arena.updates(0)) == (3, 1)
        assert all((part == 0.5).all() for part in (*arena.frame(0).state, arena.gradient(0)))
        arena.begin_update(0).master.fill_(1.0)
        arena.commit_update(0, 4)
        assert (arena.master(0) == 1.0).all()
        assert sweep_stale(path.parent) == []
    assert sweep_stale(path.parent, keep_runs=["r"]) == []
    assert sweep_stale(path.parent) == [path]
    assert not path.exists()


def test_an_arena_has_one_actor_at_a_time_and_the_next_waits_for_its_end(path):
    process = child(
        """
        import time
        from flatpeak.workers.arena import Arena
        from flatpeak.workers.buckets import Bucket, Range
        bucket = Bucket(0, 0, 0, (Range("p", 0, 10),), "bfloat16", True, "adamw")
        arena = Arena.create(sys.argv[1], run="r", buckets=[bucket], spare_frames=1)
        arena.own()
        print("ready", flush=True)
        time.sleep(60)
        """,
        path,
    )
    with Arena.attach(path, run="r") as successor, Arena.attach(path, run="r") as worker:
        worker.wait_version(0, -1, timeout_s=0.0)  # who only looks need not own it
        with pytest.raises(
            WaitTimeout, match=r"another process still writes to .* after 0 s, as its actor does"
        ):
            successor.own()
        killer = threading.Timer(0.1, process.kill)
        killer.start()
        successor.own(timeout_s=10)
        killer.join()
        with pytest.raises(WaitTimeout):
            worker.own()
        worker.own(rank=0)  # each has a place of its own
        with pytest.raises(WaitTimeout, match="after 0 s, as worker 0 does"):
            successor.own(rank=0)
        successor.own(rank=1)
    kill(process)
    with Arena.attach(path, run="r") as last:
        last.own()


def test_workers_keep_the_arena_of_a_dead_actor_from_the_sweep(arena, path):
    with Arena.attach(path, run="r"):
        arena.close()
        assert sweep_stale(path.parent) == []
    assert sweep_stale(path.parent) == [path]


def test_the_sweep_takes_what_a_dead_maker_left_and_nothing_foreign(tmp_path):
    stump = tmp_path / "a.arena.123.making"
    foreign = [tmp_path / "b.arena", tmp_path / "c.bin", tmp_path / "d.making"]
    for file in (stump, *foreign):
        file.write_bytes(b"something else")
    assert sweep_stale(tmp_path) == [stump]
    assert all(Path(file).exists() for file in foreign)


def test_an_arena_that_is_dropped_gives_up_its_lock(path):
    Arena.create(path, run="r", buckets=BUCKETS, spare_frames=1)
    assert sweep_stale(path.parent) == [path]
