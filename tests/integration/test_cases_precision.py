"""Runs in bfloat16: what stays in fp32, and how far the rest may be from an fp32 run."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.controller.spec import Spec
from local_run import (
    LocalRun,
    Reference,
    furthest,
    job,
    relative,
    train_locally,
    train_plainly,
)
from ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

QUIET = {"peaks": False}
FAMILIES = ("qwen3_moe", "deepseek_v3")
LAYOUTS = [(1, 1, 1, 1), (2, 2, 2, 2)]


def named(layout: tuple[int, ...]) -> str:
    return "W{} D{} E{} P{}".format(*layout)


def half_job(family: str, layout: tuple[int, ...], **train: Any) -> Spec:
    base = {"steps": 3, "sequences_per_step": 2, "sequence_length": 16, "dtype": "bfloat16"}
    return job(family, layout, train=base | train, metrics=QUIET)


@cache
def reference(family: str) -> Reference:
    return train_plainly(half_job(family, (1, 1, 1, 1)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_follows_the_fp32_run(family: str, layout: tuple[int, ...], tmp_path: Path):
    wanted = reference(family)
    outcome = train_locally(half_job(family, layout), tmp_path)
    assert outcome.losses == pytest.approx(wanted.losses, abs=2e-2)
    assert outcome.norms == pytest.approx(wanted.norms, rel=5e-2)
    assert all(value.isfinite().all() for value in outcome.parameters.values())
    errors = relative(outcome.gradients, wanted.gradients)
    # One route that flips its expert moves a tiny router's gradient; all others stay near.
    assert sorted(errors.values())[len(errors) // 2] < 5e-2
    assert furthest(outcome.parameters, wanted.parameters) < 5e-2


def dtypes_and_head(
    rank: int, spec: Spec, folder: str
) -> tuple[dict[str, torch.dtype], tuple[Tensor, ...], float]:
    """Dtype by parameter; hidden states, targets and head weight as the head saw them; the loss."""
    run = LocalRun(rank, spec, folder)
    head, seen = run.trainer.sharded.head, []

    def look(_: object, args: tuple[Tensor, ...]) -> None:
        assert head.targets is not None
        seen.extend(x.detach().clone() for x in (args[0], head.targets, head.weight))

    head.register_forward_pre_hook(look)
    result = run.train_step()
    run.close()
    dtypes = {p.name: p.tensor.dtype for p in run.trainer.sharded.parameters}
    return dtypes, tuple(seen), result.loss


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_computed_in_fp32_and_deepseeks_router_stays_there(family: str, tmp_path: Path):
    spec = half_job(family, (2, 1, 2, 1), router_aux_loss_coef=0.0)
    found = run_ranks(2, dtypes_and_head, spec, str(tmp_path))
    dtypes, loss = found[0][0], found[0][2]
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    routers = {name for name in dtypes if "mlp.gate." in name}
    assert kept == (routers if family == "deepseek_v3" else set())
    total, targets = 0.0, 0
    for _, (hidden, wanted, weight), _ in found:
        assert hidden.dtype == weight.dtype == torch.bfloat16
        logits = hidden.flatten(0, 1).double() @ weight.double().T
        total += F.cross_entropy(logits, wanted.flatten(), reduction="sum").item()
        targets += int((wanted != -100).sum())
    assert loss == pytest.approx(total / targets, abs=1e-5)


def test_dense_gradients_reach_the_optimizer_as_the_fp32_sums_of_the_ranks(tmp_path: Path):
    outcome = train_locally(half_job("qwen3_moe", (2, 1, 2, 1)), tmp_path)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        gradient = outcome.gradients[name]
        # A sum of two bf16 numbers needs more bits than one has.
        assert not torch.equal(gradient, gradient.bfloat16().float()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_weights_of_one_move_by_steps_that_bf16_cannot_hold(dtype: str, tmp_path: Path):
    steps, rate = 20, 1e-4
    train = {
        "steps": steps,
        "lr": rate,
        "dtype": dtype,
        "max_grad_norm": None,
        "schedule": {"decay": "constant"},
        "sequences_per_step": 1,
        "sequence_length": 8,
    }
    model = {"num_hidden_layers": 1, "output_router_logits": False}
    spec = job("qwen3_moe", (1, 1, 1, 1), model=model, train=train, metrics=QUIET)
    outcome = train_locally(spec, tmp_path)
    moved = (outcome.parameters["model.norm.weight"] - 1).abs()
    # The first update of AdamW is the rate itself; 1 + 1e-4 is 1 in bf16.
    assert moved.max() > 3 * rate
    assert moved.max() <= 1.01 * steps * rate
    assert (moved > 0).all()
