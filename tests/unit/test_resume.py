"""A resumed run goes on with its own model and samples, or says why it does not."""

from pathlib import Path

import pytest

from flatpeak.controller.resume import (
    check_parameters,
    parameter_sizes,
    snapshot_meta,
    snapshot_to_resume,
)
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.errors import CheckpointError, SpecError
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.snapshot import (
    SnapshotReader,
    commit_manifest,
    keep_last,
    snapshot_folder,
    write_snapshot_part,
)

SIZES = {"a": 12, "b": 5}


def job(tmp_path: Path, **train: object) -> Spec:
    return parse_spec(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "resume": True,
            "model": {"config": {"model_type": "qwen3_moe"}},
            "train": {"steps": 20, **train},
        }
    )


def write_snapshot(tmp_path: Path, step: int) -> Path:
    shards = [Shard(Range(name, 0, size), 0, "float32", True) for name, size in SIZES.items()]
    buckets = cut_buckets(shards, bucket_parameters=8, arenas_of_rank=lambda rank: [0])
    path = tmp_path / f"{step}.arena"
    with Arena.create(path, run="r", buckets=buckets, spare_frames=1) as arena:
        OptimizerCore([arena], AdamW()).commit_load(step)
        folder = snapshot_folder(tmp_path / "r", step)
        part = write_snapshot_part(folder, arena, number=0, step=step)
        meta = snapshot_meta(job(tmp_path), SIZES)
        commit_manifest(folder, step=step, parts=[part], meta=meta)
        arena.unlink()
    return folder


def resumed(tmp_path: Path) -> Path:
    found = snapshot_to_resume(job(tmp_path), tmp_path / "r")
    assert found is not None
    return found.snapshot


def damage(folder: Path) -> None:
    for part in folder.glob("*.arrow"):
        part.write_bytes(part.read_bytes()[:-1])


def test_the_newest_whole_snapshot_is_gone_on_from(tmp_path):
    good = write_snapshot(tmp_path, 6)
    damage(write_snapshot(tmp_path, 9))
    found = snapshot_to_resume(job(tmp_path), tmp_path / "r")
    assert found is not None
    assert found.snapshot == good
    (warning,) = found.warnings
    assert warning.startswith("step-9 is left out: ")


def test_a_run_without_snapshots_starts_afresh(tmp_path):
    assert snapshot_to_resume(job(tmp_path), tmp_path / "r") is None


def test_only_damaged_snapshots_do_not_mean_to_start_afresh(tmp_path):
    damage(write_snapshot(tmp_path, 6))
    with pytest.raises(CheckpointError, match=r"every snapshot in .* is damaged \(step-6\)"):
        snapshot_to_resume(job(tmp_path), tmp_path / "r")


def test_damaged_snapshots_do_not_push_out_a_whole_one(tmp_path):
    good = write_snapshot(tmp_path, 6)
    for step in (9, 12):
        damage(write_snapshot(tmp_path, step))
    keep_last(tmp_path / "r", 2)
    assert resumed(tmp_path) == good


def test_a_run_that_would_read_other_samples_is_refused(tmp_path):
    write_snapshot(tmp_path, 6)
    with pytest.raises(SpecError, match=r"train\.sequences_per_step = 16, but the run was at 8"):
        snapshot_to_resume(job(tmp_path, sequences_per_step=16), tmp_path / "r")


def test_a_run_with_nothing_left_to_do_is_refused(tmp_path):
    write_snapshot(tmp_path, 6)
    with pytest.raises(SpecError, match=r"has done 6 steps and train.steps = 6.*=12"):
        snapshot_to_resume(job(tmp_path, steps=6), tmp_path / "r")


@pytest.mark.parametrize(
    "sizes", [{"a": 12, "b": 4}, {"a": 12}, {**SIZES, "c": 1}], ids=["smaller", "fewer", "more"]
)
def test_a_snapshot_of_another_model_is_refused(tmp_path, sizes):
    with SnapshotReader(write_snapshot(tmp_path, 6)) as reader:
        assert parameter_sizes(reader.ranges()) == SIZES
        check_parameters(reader, SIZES)
        with pytest.raises(CheckpointError, match="is a snapshot of another model: 1 parameters"):
            check_parameters(reader, sizes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"schedule": {"decay": "cosine", "decay_steps": 20}, "steps": 40}, []),
        (
            {"steps": 40},
            [
                "the learning rate of step 7 is 0.0002",
                "step-6 had 0.0002",
                "--set train.schedule.decay_steps=20 keeps the end of before",
            ],
        ),
        ({"lr": 1e-3}, ["the learning rate of step 7 is 0.0007", "train.lr"]),
    ],
    ids=["the same", "more steps, the same decay", "more steps", "another rate"],
)
def test_another_learning_rate_after_a_resume_is_said(tmp_path, changes, says):
    write_snapshot(tmp_path, 6)
    found = snapshot_to_resume(job(tmp_path, **changes), tmp_path / "r")
    assert found is not None
    assert len(found.warnings) == bool(says)
    for part in says:
        assert part in found.warnings[0]
