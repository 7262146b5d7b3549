"""Snapshots: any layout reads any other's, and what is damaged is named and skipped."""

import json
import os
import resource
import shutil
import subprocess

import pyarrow as pa
import pytest
import torch

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.errors import CheckpointError, RunFailed, SnapshotFailed, UnknownFormat
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.partition import parts
from flatpeak.workers.snapshot import (
    SnapshotReader,
    commit_manifest,
    discard_parts,
    find_latest,
    keep_last,
    restore,
    saved_steps,
    snapshot_folder,
    write_snapshot_part,
)
from flatpeak.workers.snapshot_files import SYNC_BYTES, read_manifest, write_manifest

SETTINGS = AdamW()
EXPERTS, EXPERT_SIZE = 4, 30
DENSE = {"embedding": 101, "norm": 7}


def layout(workers, expert_ranks):
    """Dense parameters cut over `workers` ranks, whole experts over `expert_ranks` of them."""
    shards = [
        Shard(Range(name, start, stop), rank, "bfloat16", name != "norm")
        for name, size in DENSE.items()
        for rank, (start, stop) in enumerate(parts(size, workers))
    ]
    shards += [
        Shard(Range("experts", start * EXPERT_SIZE, stop * EXPERT_SIZE), rank, "bfloat16", True)
        for rank, (start, stop) in enumerate(parts(EXPERTS, expert_ranks))
    ]
    return shards


SIZES = {**DENSE, "experts": EXPERTS * EXPERT_SIZE}


def values(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


class Cluster:
    """All actors of a run in one process."""

    def __init__(self, folder, *, workers=2, expert_ranks=2, actors=2, bucket_parameters=16):
        folder.mkdir(parents=True)
        buckets = cut_buckets(
            layout(workers, expert_ranks),
            bucket_parameters=bucket_parameters,
            arenas_of_rank=lambda rank: range(actors),
        )
        self.arenas = [
            Arena.create(
                folder / f"{actor}.arena",
                run="r",
                buckets=[b for b in buckets if b.arena == actor],
                spare_frames=1,
            )
            for actor in range(actors)
        ]
        self.cores = [OptimizerCore([arena], SETTINGS) for arena in self.arenas]

    def start(self):
        for core in self.cores:
            for b in core.buckets:
                for held in b.ranges:
                    core.load(held, values(0)[held.name][held.start : held.stop])
            core.commit_load(0)
        return self

    def train(self, steps):
        for step in steps:
            gradients = values(step)
            for core in self.cores:
                for b in core.buckets:
                    core.arenas[0].gradient(b.index).copy_(
                        torch.cat([gradients[r.name][r.start : r.stop] for r in b.ranges])
                    )
                # Step 3 is skipped, so that steps and updates differ from there on.
                core.update(step, lr=1e-2, clip_factor=None if step == 3 else 0.5)
        return self

    def save(self, run, step, meta=None):
        folder = snapshot_folder(run, step)
        written = [
            write_snapshot_part(folder, arena, actor, step)
            for actor, arena in enumerate(self.arenas)
        ]
        commit_manifest(folder, step=step, parts=written, meta=meta or {})
        return folder

    def restore(self, folder):
        with SnapshotReader(folder) as reader:
            for core in self.cores:
                restore(core, reader)
        return self

    def state(self):
        """Every parameter's master, moments and weights, put together from all actors."""
        found = {name: torch.full((4, size), torch.nan) for name, size in SIZES.items()}
        for arena in self.arenas:
            for b in arena.buckets:
                offset, frame = 0, arena.frame(b.index)
                for r in b.ranges:
                    for row, part in zip(found[r.name], (*frame.state, frame.weights), strict=True):
                        row[r.start : r.stop] = part[offset : offset + r.size]
                    offset += r.size
        return found


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in SIZES)


OTHER_LAYOUTS = [
    pytest.param({"workers": w, "expert_ranks": e, "actors": m, "bucket_parameters": b}, id=name)
    for name, w, e, m, b in [
        ("W 1", 1, 1, 1, 1000),
        ("W 2, one element a bucket", 2, 2, 2, 1),
        ("W 3, experts do not divide", 3, 3, 3, 11),
        ("W 6, more actors than ranks", 6, 2, 7, 16),
        ("W 8, some shards empty", 8, 8, 5, 5),
    ]
]


@pytest.mark.parametrize("other", OTHER_LAYOUTS)
def test_ten_steps_equal_five_and_five_in_another_layout(tmp_path, other):
    straight = Cluster(tmp_path / "a").start().train(range(1, 11))
    half = Cluster(tmp_path / "b", workers=4, expert_ranks=2).start().train(range(1, 6))
    folder = half.save(tmp_path / "run", 5)
    resumed = Cluster(tmp_path / "c", **other).restore(folder)
    assert same(half.state(), resumed.state())
    assert {core.step for core in resumed.cores} == {5}
    assert same(straight.state(), resumed.train(range(6, 11)).state())


def test_experts_follow_every_change_of_the_expert_degree(tmp_path):
    first = Cluster(tmp_path / "2", expert_ranks=2).start().train([1, 2])
    current = first
    for number, degree in enumerate((1, 4, 2)):
        folder = current.save(tmp_path / f"run{number}", 2)
        with SnapshotReader(folder) as reader:
            held = sorted((r.start, r.stop) for r in reader.ranges() if r.name == "experts")
            assert sum(stop - start for start, stop in held) == EXPERTS * EXPERT_SIZE
        current = Cluster(tmp_path / f"{number}-{degree}", expert_ranks=degree, workers=4)
        current.restore(folder)
        assert same(first.state(), current.state())


def test_any_range_can_be_read(tmp_path):
    cluster = Cluster(tmp_path / "a").start().train([1])
    folder = cluster.save(tmp_path / "run", 1, meta={"tokens": 12})
    state = cluster.state()
    with SnapshotReader(folder) as reader:
        assert (reader.step, reader.updates, reader.meta) == (1, 1, {"tokens": 12})
        for name, start, stop in [("experts", 29, 61), ("embedding", 0, 101), ("norm", 3, 3)]:
            for part, expected in zip(
                reader.read(Range(name, start, stop)), state[name], strict=False
            ):
                assert torch.equal(part, expected[start:stop])
        with pytest.raises(CheckpointError, match="no bucket holds element 101 of embedding"):
            reader.read(Range("embedding", 90, 102))
        with pytest.raises(CheckpointError, match=r"not of this model.*head"):
            reader.read(Range("head", 0, 1))


def test_a_snapshot_is_written_from_the_arena_without_staging(tmp_path):
    shards = [Shard(Range("p", 0, 400_000), 0, "bfloat16", True)]
    buckets = cut_buckets(shards, bucket_parameters=50_000, arenas_of_rank=lambda rank: [0])
    with Arena.create(tmp_path / "0.arena", run="r", buckets=buckets, spare_frames=1) as arena:
        for b in buckets:
            arena.advance(b.index, 1)
        usual = pa.default_memory_pool()
        counting = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(counting)
        try:
            part = write_snapshot_part(tmp_path / "s", arena, 0, 1)
        finally:
            pa.set_memory_pool(usual)
        assert counting.bytes_allocated() == 0
        assert 0 < counting.max_memory() < 65536
        assert 12 * 400_000 <= part.nbytes <= 12 * 400_000 + 65536


def test_a_snapshot_refuses_an_arena_at_another_step(tmp_path):
    cluster = Cluster(tmp_path / "a").start().train([1, 2])
    with pytest.raises(RunFailed, match=r"snapshot of step 1 .* at version 2"):
        write_snapshot_part(tmp_path / "s", cluster.arenas[0], 0, 1)
    with pytest.raises(CheckpointError, match="belong to step 1 alone"):
        commit_manifest(
            tmp_path / "s",
            step=1,
            parts=[write_snapshot_part(tmp_path / "s", cluster.arenas[0], 0, 2)],
            meta={},
        )
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_writing_a_step_again_keeps_the_old_snapshot_until_the_new_one_is_whole(tmp_path):
    first = Cluster(tmp_path / "a").start().train([1])
    folder = first.save(tmp_path / "run", 1)
    again = Cluster(tmp_path / "b", actors=3, bucket_parameters=9).start().train([1])
    written = [write_snapshot_part(folder, a, n, 1) for n, a in enumerate(again.arenas)]
    old = Cluster(tmp_path / "c").restore(folder)
    assert same(old.state(), first.state())
    commit_manifest(folder, step=1, parts=written, meta={})
    assert sorted(p.name for p in folder.glob("*.arrow")) == sorted(part.file for part in written)
    assert same(Cluster(tmp_path / "d").restore(folder).state(), first.state())


def an_arrow_file(folder):
    return sorted(folder.glob("*.arrow"))[0]


def truncate(folder):
    os.truncate(an_arrow_file(folder), an_arrow_file(folder).stat().st_size - 9)


def edit_the_manifest(folder):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "updates": 9}))


DAMAGES = [
    pytest.param(truncate, r"arena-0.*bytes instead of", id="truncated"),
    pytest.param(lambda f: an_arrow_file(f).unlink(), r"arena-0.*it is missing", id="no part"),
    pytest.param(edit_the_manifest, r"manifest.json.*checksum", id="edited manifest"),
    pytest.param(
        lambda f: (f / "manifest.json").write_text('{"crc'), r"manifest.json", id="cut manifest"
    ),
    pytest.param(
        lambda f: (f / "manifest.json").unlink(), r"manifest.json.*not finished", id="no manifest"
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_named_and_the_snapshot_before_it_is_used(tmp_path, damage, message):
    cluster = Cluster(tmp_path / "a").start().train([1])
    run = tmp_path / "run"
    good = cluster.save(run, 1)
    bad = cluster.train([2]).save(run, 2)
    assert find_latest(run, verify=True) == (bad, ())
    damage(bad)
    with pytest.raises(CheckpointError, match=message):
        SnapshotReader(bad)
    found, (skipped,) = find_latest(run)
    assert found == good
    assert skipped.startswith(f"step-2 is left out: {bad}")
    assert saved_steps(run) == [1]


def test_a_byte_that_is_another_anywhere_in_a_snapshot_is_found(tmp_path):
    """Nothing is left out: not Arrow's own structure, nor the spaces of the manifest."""
    cluster = Cluster(tmp_path / "a", actors=3).start().train([1])
    folder = cluster.save(tmp_path / "run", 1)
    files = sorted(folder.iterdir())
    assert len(files) == 4
    for path in files:
        content = path.read_bytes()
        for place in {*range(0, len(content), 61), *range(8), *range(-8, 0)}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=str(folder)):
                SnapshotReader(folder, verify=True)
        path.write_bytes(content)
    SnapshotReader(folder, verify=True).close()


def test_state_that_is_read_is_checked_without_verifying_all_of_it(tmp_path):
    folder = Cluster(tmp_path / "a").start().train([1]).save(tmp_path / "run", 1)
    path = an_arrow_file(folder)
    content = bytearray(path.read_bytes())
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
        names, needle = batch.column("name"), batch.column("exp_avg").buffers()[2].to_pybytes()
        held = Range(names[0].as_py(), batch.column("start")[0].as_py(), 1)
        del batch, names
    content[content.find(needle) + 1] ^= 1
    path.write_bytes(content)
    with (
        SnapshotReader(folder) as reader,
        pytest.raises(CheckpointError, match=r"bytes 0 to [\d,]+ do not have their checksum"),
    ):
        reader.read(held)


def test_a_snapshot_of_another_version_is_refused_and_neither_skipped_nor_removed(tmp_path):
    cluster = Cluster(tmp_path / "a").start().train([1])
    run = tmp_path / "run"
    cluster.save(run, 1)
    newer = cluster.train([2]).save(run, 2)
    content = read_manifest(newer)
    write_manifest(newer, content | {"format": 3})
    with pytest.raises(UnknownFormat, match="has format 3, and this version of Flatpeak reads 2"):
        find_latest(run)
    keep_last(run, 1)
    assert saved_steps(run) == [2]


def limited(nbytes):
    """No file of this process grows beyond that; 0 takes the limit away."""
    limit = nbytes or resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_file_that_does_not_fit_leaves_nothing_and_says_why(tmp_path):
    cluster = Cluster(tmp_path / "a").start().train([1])
    folder = snapshot_folder(tmp_path / "run", 1)
    whole = write_snapshot_part(folder, cluster.arenas[1], 1, 1)
    limited(2000)
    try:
        with pytest.raises(SnapshotFailed, match=r"arena-0-\w+.arrow could not .*: File too large"):
            write_snapshot_part(folder, cluster.arenas[0], 0, 1)
    finally:
        limited(0)
    assert [path.name for path in folder.iterdir()] == [whole.file]
    discard_parts(folder, [whole])
    assert not folder.exists()


def test_memory_while_saving_is_bounded_and_the_same_after_every_snapshot(tmp_path):
    """A process's own memory, what Arrow holds, and the page cache of the files."""
    elements = 12_000_000
    shards = [Shard(Range("p", 0, elements), 0, "bfloat16", True)]
    buckets = cut_buckets(shards, bucket_parameters=250_000, arenas_of_rank=lambda rank: [0])
    with Arena.create(tmp_path / "0.arena", run="r", buckets=buckets, spare_frames=1) as arena:
        for b in buckets:
            arena.advance(b.index, 1)
            for values in arena.frame(b.index).state:
                values.fill_(1.0)  # mapped from here on
        private = []
        for _ in range(6):
            part = write_snapshot_part(tmp_path / "s", arena, 0, 1)
            assert part.nbytes > 12 * elements > 2 * SYNC_BYTES
            assert cached(tmp_path / "s" / part.file) < SYNC_BYTES / 1000
            (tmp_path / "s" / part.file).unlink()
            private.append(anonymous_bytes())
        assert max(private[2:]) <= private[1] + 1_000_000, private
        assert pa.total_allocated_bytes() == 0


def cached(path):
    """Bytes of a file in the page cache."""
    counted = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(counted.stdout)


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def test_a_run_without_snapshots_has_no_latest(tmp_path):
    assert find_latest(tmp_path / "nowhere") == (None, ())
    snapshot_folder(tmp_path, 3).mkdir(parents=True)
    assert find_latest(tmp_path).folder is None


def test_the_latest_is_the_highest_step_not_the_last_name(tmp_path):
    cluster = Cluster(tmp_path / "a").start()
    run = tmp_path / "run"
    for step in range(1, 12):
        cluster.train([step])
        if step in (2, 9, 11):
            cluster.save(run, step)
    assert find_latest(run) == (snapshot_folder(run, 11), ())


def test_a_snapshot_under_the_name_of_another_step_is_not_the_latest(tmp_path):
    cluster = Cluster(tmp_path / "a").start()
    run = tmp_path / "run"
    for step in (1, 2):
        cluster.train([step])
        cluster.save(run, step)
    shutil.copytree(snapshot_folder(run, 1), snapshot_folder(run, 20))
    found = find_latest(run)
    assert found.folder == snapshot_folder(run, 2)
    assert "it is of step 1, and its folder is step-20" in found.skipped[0]
    keep_last(run, 1)
    assert find_latest(run).folder == snapshot_folder(run, 2)


def test_only_the_last_complete_snapshots_and_what_is_in_the_making_stay(tmp_path):
    cluster = Cluster(tmp_path / "a").start()
    run = tmp_path / "run"
    for step in range(1, 6):
        cluster.train([step])
        folder = cluster.save(run, step)
        if step in (2, 5):  # 2 was given up, 5 is in the making
            (folder / "manifest.json").unlink()
    removed = keep_last(run, 2)
    assert {folder.name for folder in removed} == {"step-1", "step-2"}
    assert {folder.name for folder in (run / "snapshots").iterdir()} == {
        "step-3",
        "step-4",
        "step-5",
    }
    assert keep_last(run, 2) == []


def test_snapshots_of_every_so_many_steps_stay_beside_the_newest(tmp_path):
    cluster = Cluster(tmp_path / "a").start()
    run = tmp_path / "run"
    for step in range(1, 11):
        cluster.train([step]).save(run, step)
        keep_last(run, 2, every=4)
    assert saved_steps(run) == [4, 8, 9, 10]
