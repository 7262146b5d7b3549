"""Snapshots of real training: another layout, or a pause, changes no bit of the state."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from flatpeak.controller.cli import run_command
from flatpeak.controller.runs import RunFolder
from flatpeak.controller.spec import Spec
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Shard, cut_buckets
from flatpeak.workers.checkpoint import moe_layers
from flatpeak.workers.optimizer import OptimizerCore
from flatpeak.workers.plain import plain_model
from flatpeak.workers.settings import adamw_of
from flatpeak.workers.snapshot import (
    SnapshotReader,
    commit_manifest,
    restore,
    snapshot_folder,
    write_snapshot_part,
)
from flatpeak.workers.trainer import Trainer
from local_run import LocalRun, Outcome, holds_state_of, job, train_locally
from ranks import run_ranks
from saved_run import meta_model

BATCH = {"steps": 2, "sequences_per_step": 24, "sequence_length": 32, "lr": 3e-3}
FOUR_WORKERS = (4, 2, 2, 4)
LAYOUTS = {
    "W 1": (1, 1, 1, 1),
    "W 2, E_p 2, D 2": (2, 2, 2, 2),
    "W 3, E_p 1": (3, 1, 1, 3),
    "W 6, E_p 2": (6, 2, 2, 3),
    "W 8, E_p 4": (8, 1, 4, 8),
}


def job_at(layout: tuple[int, ...], folder: Path, **train: object) -> Spec:
    train = BATCH | {"dtype": "float32", "max_grad_norm": 0.5} | train
    return job("qwen3_moe", layout, train=train, runs_dir=str(folder / "runs"))


def train_and_save(rank: int, spec: Spec, folder: str, run_folder: str) -> Outcome:
    run = LocalRun(rank, spec, folder)
    while run.step < spec.train.steps:
        run.train_step()
    run.save(Path(run_folder))
    return run.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Outcome]:
    """The folder of a run of four workers with its snapshot, and what they had in the end."""
    folder = tmp_path_factory.mktemp("four")
    spec = job_at(FOUR_WORKERS, folder)
    outcome = run_ranks(4, train_and_save, spec, str(folder), str(folder / "run"))[0]
    return folder / "run", outcome


def shards_of(spec: Spec) -> list[Shard]:
    """What each rank of the job alone updates, as it says itself when it has built its model.

    One rank after the other, in a process group that connects nobody.
    """
    found: list[Shard] = []
    world = spec.cluster.workers
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            found += Trainer(spec, rank=rank, device=torch.device("cpu")).build()
        finally:
            dist.destroy_process_group()
    return found


def restored(spec: Spec, snapshot: Path, folder: Path, *, actors: int) -> list[OptimizerCore]:
    """The arenas of the job's optimizer actors, filled from the snapshot."""
    buckets = cut_buckets(
        shards_of(spec),
        bucket_parameters=spec.memory.optimizer.bucket_parameters,
        arenas_of_rank=lambda rank: range(actors),
    )
    cores = []
    with SnapshotReader(snapshot, verify=True) as reader:
        for actor in range(actors):
            own = [bucket for bucket in buckets if bucket.arena == actor]
            path = folder / f"{actor}.arena"
            arena = Arena.create(path, run=spec.run, buckets=own, spare_frames=1)
            cores.append(OptimizerCore([arena], adamw_of(spec)))
            restore(cores[-1], reader)
    return cores


def save_again(cores: list[OptimizerCore], run_folder: Path, snapshot: Path) -> Path:
    with SnapshotReader(snapshot) as reader:
        step, meta = reader.step, reader.meta
    folder = snapshot_folder(run_folder, step)
    parts = [
        write_snapshot_part(folder, core.arenas[0], actor, step) for actor, core in enumerate(cores)
    ]
    commit_manifest(folder, step=step, parts=parts, meta=meta)
    return folder


def test_a_snapshot_at_expert_degree_2_has_all_experts(saved):
    run_folder, outcome = saved
    model = meta_model(job_at(FOUR_WORKERS, run_folder.parent))
    with SnapshotReader(snapshot_folder(run_folder, 2)) as reader:
        sizes: dict[str, int] = {}
        for held in reader.ranges():
            sizes[held.name] = sizes.get(held.name, 0) + held.size
    assert sizes == {name: master.numel() for name, master in outcome.parameters.items()}
    for prefix, experts in moe_layers(model):
        for name, weights in experts.named_parameters():
            assert weights.shape[0] == 4
            assert sizes[f"{prefix}.{name}"] == weights.numel()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_four_workers_state_loads_in_any_layout_and_exports_to_the_same_logits(
    tmp_path, saved, layout
):
    run_folder, outcome = saved
    spec = job_at(layout, tmp_path)
    with RunFolder.create(spec) as run:
        pass
    snapshot = snapshot_folder(run_folder, 2)
    cores = restored(spec, snapshot, tmp_path, actors=1 + layout[0] % 3)
    assert {core.step for core in cores} == {2}
    assert {core.updates for core in cores} == {2}
    again = save_again(cores, run.path, snapshot)
    assert holds_state_of(again, outcome)

    out = tmp_path / "exported"
    assert run_command(["export", "tiny", "--to", str(out), "--runs-dir", spec.runs_dir]) == 0
    ours, theirs = plain_model(spec).eval(), AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(outcome.parameters[name].view_as(parameter))
        ids = torch.arange(40).view(2, 20)
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_experts_and_their_moments_follow_the_degree_from_2_to_1_to_4_and_back(tmp_path, saved):
    run_folder, outcome = saved
    snapshot = snapshot_folder(run_folder, 2)
    for number, layout in enumerate([(1, 1, 1, 1), (4, 1, 4, 1), (4, 2, 2, 4)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        cores = restored(job_at(layout, folder), snapshot, folder, actors=2)
        snapshot = save_again(cores, folder, snapshot)
        assert holds_state_of(snapshot, outcome)


def test_four_steps_are_two_steps_a_snapshot_and_two_steps(tmp_path):
    """Parameters and moments to the bit, and with them the rates and the bias correction."""
    changes = {"schedule": {"warmup_steps": 1, "decay_steps": 4}, "sequences_per_step": 4}
    layout = (2, 2, 2, 2)
    straight = train_locally(job_at(layout, tmp_path, **changes | {"steps": 4}), tmp_path)
    half = job_at(layout, tmp_path, **changes)
    run_ranks(2, train_and_save, half, str(tmp_path), str(tmp_path / "run"))
    rest = train_locally(
        job_at(layout, tmp_path, **changes | {"steps": 4}),
        tmp_path,
        after=snapshot_folder(tmp_path / "run", 2),
    )
    assert rest.losses == straight.losses[2:]
    assert rest.norms == straight.norms[2:]
    for found, wanted in [
        (rest.parameters, straight.parameters),
        *zip(rest.moments, straight.moments, strict=True),
    ]:
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
