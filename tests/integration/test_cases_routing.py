"""Routing and router losses: counts, the auxiliary loss, bias balancing, experts without tokens."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.controller.spec import Spec
from flatpeak.workers.checkpoint import moe_layers
from flatpeak.workers.plain import PlainTrainer, plain_model
from flatpeak.workers.recompute import is_recomputing
from local_run import (
    LocalRun,
    Reference,
    Rows,
    furthest,
    job,
    make_sample,
    packed,
    train_locally,
    train_plainly,
)
from ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

QUIET = {"peaks": False}
LAYOUTS = [(1, 1, 1, 1), (2, 2, 2, 1), (4, 2, 2, 2), (4, 1, 4, 1)]


def named(layout: tuple[int, ...]) -> str:
    return "W{} D{} E{} P{}".format(*layout)


@pytest.fixture(scope="module")
def shared_experts_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_locally(two_steps(1), tmp_path_factory.mktemp("run"))


def two_steps(expert_degree: int) -> Spec:
    train = {"steps": 2, "sequences_per_step": 2, "sequence_length": 16}
    return job("qwen3_moe", (2, 1, expert_degree, 1), train=train, metrics=QUIET)


def test_the_second_steps_gradients_do_not_depend_on_the_expert_degree(
    shared_experts_run: Any, tmp_path: Path
):
    split = train_locally(two_steps(2), tmp_path)
    wanted = shared_experts_run.last_gradients
    assert any("embed_tokens" in name for name in wanted)
    assert any("q_proj" in name for name in wanted)
    assert any("mlp.gate." in name for name in wanted)
    assert all(value.isfinite().all() for value in split.last_gradients.values())
    assert furthest(split.last_gradients, wanted) < 1e-5


def norm_of_ones(rank: int, spec: Spec, folder: str) -> float:
    """The norm when every element of the summed gradient is 1, by the trainer's own path."""
    run = LocalRun(rank, spec, folder)
    trainer, stream = run.trainer, run.trainer._stream
    stream.begin_step(version=0, timeout_s=10)
    for parameter in trainer.sharded.parameters:
        replicas = len(parameter.axis.replica_ranks) if parameter.axis else 1
        trainer._write(parameter, torch.full_like(parameter.flat, 1 / replicas))
    norm = trainer._finish_gradients()
    run.close()
    return norm


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=named)
def test_the_norm_of_gradients_of_one_is_the_root_of_the_number_of_parameters(
    layout: tuple[int, ...], tmp_path: Path
):
    spec = job("qwen3_moe", layout, metrics=QUIET)
    norms = run_ranks(layout[0], norm_of_ones, spec, str(tmp_path))
    parameters = sum(p.numel() for p in plain_model(spec).parameters())
    assert norms == pytest.approx([math.sqrt(parameters)] * layout[0], rel=1e-6)


def counts_and_biases(
    rank: int, spec: Spec, folder: str, checkpointing: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    run = LocalRun(rank, spec, folder)
    if not checkpointing:
        run.trainer.sharded.model.gradient_checkpointing_disable()
    run.train_step()
    counts = run.trainer.sharded.load.counts
    masters = run.close().parameters
    return counts, {name: bias for name, bias in masters.items() if "correction_bias" in name}


def test_checkpointing_changes_neither_the_counts_nor_the_router_bias(tmp_path: Path):
    train = {"router_bias_update_rate": 0.01, "sequences_per_step": 2, "sequence_length": 16}
    spec = job("deepseek_v3", (2, 1, 2, 1), train=train, metrics=QUIET)
    (with_it, biases), (without, plain_biases) = (
        run_ranks(2, counts_and_biases, spec, str(tmp_path), on)[0] for on in (True, False)
    )
    assert with_it.sum() == 2 * 16 * 2  # tokens x k of its one MoE layer
    assert torch.equal(with_it, without)
    assert biases
    assert all(torch.equal(biases[name], plain_biases[name]) for name in biases)
    assert any(bias.any() for bias in biases.values())


@cache
def balanced_by_hand() -> tuple[Reference, dict[str, Tensor]]:
    """A plain run whose biases follow `bias -= rate * sign(count - mean)`, and the last biases."""
    spec = balanced_job((1, 1, 1, 1))
    counts: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}

    def count(name: str, module: Any, args: tuple[Tensor, ...]) -> None:
        found = torch.bincount(args[1].flatten(), minlength=module.num_experts).float()
        counts[name] = counts.get(name, torch.zeros(module.num_experts)) + found

    def balance(plain: PlainTrainer) -> None:
        for name, tokens in counts.items():
            router = plain.model.get_submodule(f"{name.removesuffix('experts')}gate")
            bias = router.e_score_correction_bias
            # Recomputation counts every route twice, which changes no sign.
            bias -= spec.train.router_bias_update_rate * torch.sign(tokens - tokens.mean())
            biases[f"{name.removesuffix('experts')}gate.e_score_correction_bias"] = bias
        counts.clear()

    def watch(plain: PlainTrainer) -> None:
        for name, experts in moe_layers(plain.model):
            experts.register_forward_pre_hook(partial(count, name))

    return train_plainly(spec, prepare=watch, after_backward=balance), biases


def balanced_job(layout: tuple[int, ...]) -> Spec:
    # A rate that moves routes: the biases of a step show in the next one's loss.
    train = {"steps": 3, "sequence_length": 16, "router_bias_update_rate": 0.2}
    return job("deepseek_v3", layout, train=train, metrics=QUIET)


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_router_biases_are_balanced_as_by_hand(layout: tuple[int, ...], tmp_path: Path):
    plain, biases = balanced_by_hand()
    outcome = train_locally(balanced_job(layout), tmp_path)
    assert biases
    for name, bias in biases.items():
        torch.testing.assert_close(outcome.parameters[name], bias)
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.parameters, plain.parameters) < 1e-4


AUXILIARY = {
    "steps": 1,
    "sequences_per_step": 8,
    "sequence_length": 8,
    "router_aux_loss_coef": 0.5,  # outweighs the other gradients of a router
}
CUTS = {
    "1 x 8": ((1, 1, 1, 1), 1),
    "4 x 2": ((1, 1, 1, 1), 4),
    "4 x 2 on two ranks": ((2, 2, 2, 1), 4),
    "2 x 4 on four ranks": ((4, 1, 2, 2), 2),
}


@cache
def auxiliary_reference() -> Reference:
    return train_plainly(job("qwen3_moe", train=AUXILIARY))


@pytest.mark.parametrize("cut", CUTS)
def test_the_auxiliary_loss_does_not_depend_on_how_a_step_is_cut(cut: str, tmp_path: Path):
    layout, microbatches = CUTS[cut]
    train = AUXILIARY | {"microbatches": microbatches}
    outcome = train_locally(job("qwen3_moe", layout, train=train, metrics=QUIET), tmp_path)
    wanted = auxiliary_reference()
    assert outcome.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert furthest(outcome.gradients, wanted.gradients) < 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 2, 1)], ids=named)
def test_microbatches_of_ten_and_thirty_tokens_have_the_auxiliary_loss_of_one_of_forty(
    layout: tuple[int, ...], tmp_path: Path
):
    train = AUXILIARY | {"sequence_length": 40, "sequences_per_step": layout[0] * 2}
    rows = [make_sample(n, [10 + 20 * (n % 2)]) for n in range(layout[0] * 2)]
    spec = job("qwen3_moe", layout, train=train | {"microbatches": 2}, metrics=QUIET)
    outcome = train_locally(spec, tmp_path, source=Rows(rows))

    one = job("qwen3_moe", train=train | {"sequences_per_step": 1})
    wanted = train_plainly(one, source=Rows([packed(rows)]))
    assert outcome.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert furthest(outcome.gradients, wanted.gradients) < 1e-5


def test_an_expert_without_tokens_in_the_second_step_has_gradient_zero_there(tmp_path: Path):
    train = {"steps": 2, "sequences_per_step": 2, "sequence_length": 4, "max_grad_norm": None}
    changes = {"num_experts": 8, "output_router_logits": False}
    spec = job("qwen3_moe", (2, 1, 2, 1), model=changes, train=train, metrics=QUIET)
    rows = Rows([make_sample(n, [4]) for n in range(6)])
    outcome, plain = train_locally(spec, tmp_path, source=rows), train_plainly(spec, source=rows)
    name = "model.layers.0.mlp.experts.down_proj"
    first, second = (
        found[name].view(8, -1).abs().amax(dim=1)
        for found in (outcome.gradients, outcome.last_gradients)
    )
    assert ((first > 0) & (second == 0)).any(), "no expert lost its tokens: choose other rows"
    # The plain experts are one parameter a layer, so torch.optim.AdamW sees a zero gradient too.
    assert furthest(outcome.parameters, plain.parameters) < 1e-4


def tokens_received(rank: int, spec: Spec, folder: str, source: Rows) -> tuple[int, list[float]]:
    """Routes to this rank's experts in all layers, and the losses."""
    run = LocalRun(rank, spec, folder, source=source)
    losses = run.train().losses
    held = run.trainer.sharded.load.counts.tensor_split(run.trainer.sharded.groups.layout.world, 1)
    return int(held[rank].sum()), losses


def test_a_rank_without_tokens_in_any_layer_ends_the_step_with_the_others(tmp_path: Path):
    # Of eight equal tokens all go to the same two experts of a layer; with one expert a rank and
    # one layer two of the four ranks get none.
    changes = {"num_hidden_layers": 1, "output_router_logits": False}
    train = {"steps": 1, "sequences_per_step": 4, "sequence_length": 2}
    sample = make_sample(0, [2])
    sample.inputs[:] = 7
    memory = {
        "dispatch": {"tokens_per_chunk": 2, "min_chunk": 1, "max_foreign_experts": 0},
        "optimizer": {"bucket_parameters": 3000},
    }
    spec = job("qwen3_moe", (4, 1, 4, 1), model=changes, train=train, memory=memory, metrics=QUIET)
    rows = Rows([sample])
    found = run_ranks(4, tokens_received, spec, str(tmp_path), rows)
    assert sorted(received for received, _ in found) == [0, 0, 8, 8]
    wanted = train_plainly(spec, source=rows)
    assert found[0][1] == pytest.approx(wanted.losses, abs=1e-5)


@pytest.mark.parametrize("layout", [(4, 1, 4, 1), (4, 2, 4, 2)], ids=named)
def test_six_experts_on_four_ranks_equal_a_plain_trainer(layout: tuple[int, ...], tmp_path: Path):
    train = {"steps": 2, "sequence_length": 16}
    spec = job("qwen3_moe", layout, model={"num_experts": 6}, train=train, metrics=QUIET)
    outcome, plain = train_locally(spec, tmp_path), train_plainly(spec)
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.gradients, plain.gradients) < 1e-5
    assert furthest(outcome.parameters, plain.parameters) < 1e-4


def expert_work(rank: int, spec: Spec, folder: str) -> dict[bool, int]:
    """How often a step applied an expert: False, in forward and backward; True, in recomputation.

    A routed expert's activation counts, whichever pass it belongs to.
    """
    run, calls = LocalRun(rank, spec, folder), {False: 0, True: 0}

    def count(*_: object) -> None:
        calls[is_recomputing()] += 1

    for _, experts in moe_layers(run.trainer.sharded.model):
        experts.get_submodule("act_fn").register_forward_hook(count)
    run.train()
    return calls


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_a_recomputed_layer_does_not_run_its_experts_a_second_time(family: str, tmp_path: Path):
    train = {"steps": 1, "sequences_per_step": 1, "sequence_length": 8}
    spec = job(family, train=train, metrics=QUIET)
    (calls,) = run_ranks(1, expert_work, spec, str(tmp_path))
    assert calls[False] > 0
    assert calls[True] == 0
