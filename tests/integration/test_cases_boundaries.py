"""Boundary offload in whole training steps: exact beside it, the slab of the size that is used."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flatpeak.controller.spec import Spec
from flatpeak.workers.boundaries import BoundaryStats
from flatpeak.workers.recompute import checkpoint_contexts
from local_run import LocalRun, Rows, job, make_sample
from ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")
LAYERS, HIDDEN = 2, 16
QUIET = {"peaks": False}


@dataclass
class Seen:
    """Of one rank."""

    slab_bytes: int
    boundaries: list[BoundaryStats]
    """Of each step."""
    routings: int
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def _train(rank: int, spec: Spec, folder: str, source: Rows | None, offloaded: bool) -> Seen:
    run = LocalRun(rank, spec, folder, source=source)
    sharded, routings = run.trainer.sharded, []
    sharded.dispatched.add = routings.append
    if not offloaded:
        plain = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)
        sharded.model._set_gradient_checkpointing(True, gradient_checkpointing_func=plain)
    outcome = run.train()
    return Seen(
        slab_bytes=run.trainer.slab_bytes(),
        boundaries=[result.boundaries for result in outcome.results],
        routings=len(routings),
        gradients=outcome.gradients,
        parameters=outcome.parameters,
    )


def train(
    spec: Spec, folder: Path, *, source: Rows | None = None, offloaded: bool = True
) -> list[Seen]:
    return run_ranks(spec.cluster.workers, _train, spec, str(folder), source, offloaded)


def sharded_job(steps: int, **boundaries: Any) -> Spec:
    """Two ranks that share sequences, experts and vocabulary."""
    memory = {
        "dispatch": {"tokens_per_chunk": 24, "min_chunk": 1},
        "optimizer": {"bucket_parameters": 3000},
        "boundaries": boundaries,
    }
    train = {"steps": steps, "sequences_per_step": 4, "sequence_length": 32}
    return job("qwen3_moe", (2, 2, 2, 2), train=train, memory=memory, metrics=QUIET)


ONE = 4 * 16 * HIDDEN * 4  # bytes of a boundary of `sharded_job`


def test_sharded_steps_are_equal_to_the_last_bit_however_much_is_offloaded(tmp_path):
    steps = 2
    (wanted, _) = train(sharded_job(steps), tmp_path, offloaded=False)
    for boundaries, taken in (
        ({}, 2),
        ({"host_budget_bytes": ONE + ONE // 2}, 1),
        ({"host_budget_bytes": 0}, 0),
        ({"offload": False}, 0),
    ):
        ranks = train(sharded_job(steps, **boundaries), tmp_path)
        for seen in ranks:
            assert seen.slab_bytes == ranks[0].slab_bytes
            # Counted where layers run first, not where they run again.
            assert seen.routings == wanted.routings == steps * LAYERS
            for stats in seen.boundaries:
                assert stats.offloaded_bytes == taken * ONE
                assert stats.kept_bytes == (LAYERS - taken) * ONE
        for what in ("gradients", "parameters"):
            found, plain = getattr(ranks[0], what), getattr(wanted, what)
            assert found.keys() == plain.keys()
            assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_slab_is_what_the_boundaries_of_a_microbatch_take(family, dtype, tmp_path):
    train_section = {
        "steps": 1,
        "sequences_per_step": 4,
        "sequence_length": 32,
        "microbatches": 2,
        "dtype": dtype,
    }
    spec = job(family, (2, 1, 2, 1), train=train_section, metrics=QUIET)
    width = 2 if dtype == "bfloat16" else 4
    for seen in train(spec, tmp_path):
        assert seen.slab_bytes == LAYERS * 32 * HIDDEN * width
        (stats,) = seen.boundaries
        assert stats == BoundaryStats(
            offloaded_bytes=2 * seen.slab_bytes,
            kept_bytes=0,
            count=2 * LAYERS,
            slab_bytes=seen.slab_bytes,
            slab_bytes_needed=seen.slab_bytes,
        )


def test_ragged_microbatches_fit_the_slab_which_is_as_large_on_every_rank(tmp_path):
    lengths = [17, 31, 5, 32]  # two ranks, two microbatches of a row
    train_section = {
        "steps": 1,
        "sequences_per_step": 4,
        "sequence_length": 32,
        "microbatches": 2,
    }
    spec = job("qwen3_moe", (2, 1, 2, 1), train=train_section, metrics=QUIET)
    rows = Rows([make_sample(n, [length]) for n, length in enumerate(lengths)])
    ranks = train(spec, tmp_path, source=rows)
    assert [seen.slab_bytes for seen in ranks] == [LAYERS * 32 * HIDDEN * 4] * 2
    for seen, own in zip(ranks, (lengths[:2], lengths[2:]), strict=True):
        (stats,) = seen.boundaries
        assert (stats.kept_bytes, stats.count) == (0, 2 * LAYERS)
        assert stats.offloaded_bytes == LAYERS * sum(own) * HIDDEN * 4
        assert stats.slab_bytes == stats.slab_bytes_needed == LAYERS * max(own) * HIDDEN * 4
