"""Loss and batches: what is ignored, packed, cut into microbatches, tied, or never made at all."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from flatpeak.controller.spec import Spec
from flatpeak.workers.checkpoint import export_checkpoint, load_config
from flatpeak.workers.memory import PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.plain import PlainTrainer
from flatpeak.workers.settings import samples_of
from flatpeak.workers.vocabulary import ring_cross_entropy, ring_log_probs
from local_run import (
    VOCABULARY,
    LocalRun,
    Rows,
    documents_alone,
    furthest,
    job,
    make_sample,
    tiny_spec,
    train_locally,
    train_plainly,
)
from ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

QUIET = {"peaks": False}
ONE_STEP = {"steps": 1, "sequences_per_step": 2, "sequence_length": 16}
ONE_LAYER = {"num_hidden_layers": 1, "output_router_logits": False}


# A chunk and a tile are 16 tokens and a rank holds 128 (or all 256) of them; the vocabulary and the
# experts are wide, so that what grows with all of its tokens stands out.
WIDE_VOCABULARY, WIDE_EXPERTS, LONG = 1000, 64, 256


def long_job(layout: tuple[int, ...]) -> Spec:
    return job(
        "qwen3_moe",
        layout,
        model={"vocab_size": WIDE_VOCABULARY, "moe_intermediate_size": WIDE_EXPERTS},
        train={"steps": 1, "sequences_per_step": 1, "sequence_length": LONG},
        memory={
            "dispatch": {"tokens_per_chunk": 16, "min_chunk": 1},
            "vocabulary": {"token_tile": 16},
        },
    )


def elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 2, 2, 2)], ids=["one rank", "two ranks"])
def test_no_tensor_of_all_logits_and_no_expert_buffer_of_the_sequence_is_made(
    layout: tuple[int, ...], tmp_path: Path
):
    local_tokens = LONG // layout[0]
    logits, routes = local_tokens * WIDE_VOCABULARY // layout[3], local_tokens * 2 * WIDE_EXPERTS
    largest = train_locally(long_job(layout), tmp_path).results[0].largest
    assert max(elements(shape) for shape in largest.values()) < logits / 2
    assert elements(largest["dispatch"]) < routes / 2
    assert elements(largest["vocabulary"]) < logits / 2


def test_a_plain_trainer_makes_both_which_the_measure_sees():
    spec = long_job((1, 1, 1, 1))
    plain = PlainTrainer(spec, samples_of(spec))
    with PeakMeter(device=torch.device("cpu")) as meter:
        plain.backward(1)
        largest = meter.largest_tensors()
    assert elements(largest["vocabulary"]) >= LONG * WIDE_VOCABULARY


def largest_of_log_probs(rank: int, world: int) -> tuple[int, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(LONG, 16, generator=generator)
    weight = torch.randn(WIDE_VOCABULARY, 16, generator=generator)
    own = slice(*part(LONG, world, rank))
    with PeakMeter(device=torch.device("cpu")) as meter:
        log_probs, entropy = ring_log_probs(
            hidden[own],
            torch.arange(LONG)[own],
            weight[slice(*part(WIDE_VOCABULARY, world, rank))],
            group=dist.group.WORLD,
            vocab_size=WIDE_VOCABULARY,
            token_tile=16,
        )
        largest = max(elements(shape) for shape in meter.largest_tensors().values())
    spread = (hidden.double()[own] @ weight.double().T).log_softmax(1)
    exact = spread[torch.arange(len(spread)), torch.arange(LONG)[own]]
    entropy_error = entropy + (spread.exp() * spread).sum(1)
    return largest, (log_probs - exact).abs().max(), entropy_error.abs().max()


def test_nor_where_log_probabilities_are_evaluated():
    for largest, log_probs_error, entropy_error in run_ranks(2, largest_of_log_probs, 2):
        assert largest < LONG * WIDE_VOCABULARY / 4 / 2
        assert max(log_probs_error, entropy_error) < 1e-4


def test_the_loss_of_bf16_hidden_states_is_computed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=generator).bfloat16()
    weight = torch.randn(WIDE_VOCABULARY, 16, generator=generator).bfloat16()
    targets = torch.arange(64)
    nll = ring_cross_entropy(hidden, targets, weight, group=None, vocab_size=WIDE_VOCABULARY)
    exact = F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="none")
    assert nll.dtype == torch.float32
    assert (nll - exact).abs().max() < 1e-4  # in bf16 logits alone are off by a tenth


def graph_nodes_alive_at_each_forward(rank: int, spec: Spec, folder: str) -> list[int]:
    run, alive = LocalRun(rank, spec, folder), []

    def look(*_: object) -> None:
        backward = torch.autograd.function.BackwardCFunction
        alive.append(sum(issubclass(type(thing), backward) for thing in gc.get_objects()))

    run.trainer.sharded.model.register_forward_pre_hook(look)
    gc.collect()
    gc.disable()  # what only the collector would free counts as alive
    try:
        run.train()
        look()
    finally:
        gc.enable()
    return alive


def test_nothing_of_a_loss_graph_is_alive_when_the_next_forward_starts(tmp_path: Path):
    spec = job(
        "qwen3_moe",
        (2, 1, 2, 2),
        train={"steps": 2, "microbatches": 2, "sequence_length": 16},
        metrics=QUIET,
    )
    for alive in run_ranks(2, graph_nodes_alive_at_each_forward, spec, str(tmp_path)):
        # Two steps of two microbatches, each preceded by a pass that counts routes; and the end.
        assert alive == [0] * 9


def test_a_rank_with_ignored_labels_alone_changes_nothing(tmp_path: Path):
    rows = Rows([make_sample(0, [16]), make_sample(1, [16], ignored=True)])
    spec = job("qwen3_moe", (2, 1, 2, 2), model=ONE_LAYER, train=ONE_STEP, metrics=QUIET)
    outcome = train_locally(spec, tmp_path, source=rows)
    alone = documents_alone(spec, [rows.sample(0)])
    assert outcome.losses == pytest.approx(alone.losses, abs=1e-6)
    assert furthest(outcome.gradients, alone.gradients) < 1e-5
    assert outcome.results[0].targets == 15


def test_a_step_with_ignored_labels_alone_is_skipped_and_the_next_one_goes_on(tmp_path: Path):
    rows = Rows([make_sample(n, [16], ignored=n < 2) for n in range(4)])
    train = ONE_STEP | {"steps": 2, "router_aux_loss_coef": 0.0}
    spec = job("qwen3_moe", (2, 1, 2, 2), model=ONE_LAYER, train=train, metrics=QUIET)
    outcome = train_locally(spec, tmp_path, source=rows)
    first, second = outcome.results
    assert (first.loss, first.grad_norm, first.targets, first.usable) == (0.0, 0.0, 0, False)
    assert outcome.skipped_steps == 1
    assert second.usable
    # The second step starts from the weights that the first one left as they were.
    alone = documents_alone(spec, [rows.sample(2), rows.sample(3)])
    assert second.loss == pytest.approx(alone.losses[0], abs=1e-6)
    assert furthest(outcome.last_gradients, alone.gradients) < 1e-5


LENGTHS = list(range(3, 18))


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (3, 1, 1, 3)], ids=["one rank", "three ranks"])
def test_rows_of_any_length_are_the_same_as_one_batch_and_accumulated(
    layout: tuple[int, ...], tmp_path: Path
):
    rows = [make_sample(n, [n]) for n in LENGTHS]
    train = {
        "steps": 1,
        "sequences_per_step": len(LENGTHS),
        "sequence_length": max(LENGTHS),
        "microbatches": len(LENGTHS) // layout[0],
    }
    spec = job("qwen3_moe", layout, model=ONE_LAYER, train=train, metrics=QUIET)
    accumulated = train_locally(spec, tmp_path, source=Rows(rows))
    alone = documents_alone(spec, rows)
    assert accumulated.losses == pytest.approx(alone.losses, abs=1e-6)
    assert furthest(accumulated.gradients, alone.gradients) < 1e-5


def test_rows_of_any_length_packed_into_one_are_the_same_batch(tmp_path: Path):
    row = make_sample(0, LENGTHS)
    train = {"steps": 1, "sequences_per_step": 1, "sequence_length": sum(LENGTHS)}
    spec = job("qwen3_moe", (2, 2, 2, 2), model=ONE_LAYER, train=train, metrics=QUIET)
    packed = train_locally(spec, tmp_path, source=Rows([row]))
    alone = documents_alone(spec, [row])
    assert packed.losses == pytest.approx(alone.losses, abs=1e-6)
    assert furthest(packed.gradients, alone.gradients) < 1e-5


def ring_loss_and_gradients(
    rank: int, world: int, hidden: Tensor, targets: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Every rank has some of the tokens, and its rows of the head."""
    tokens = slice(*part(len(hidden), world, rank))
    x = hidden[tokens].clone().requires_grad_()
    shard = weight[slice(*part(len(weight), world, rank))].clone().requires_grad_()
    nll = ring_cross_entropy(
        x, targets[tokens], shard, group=dist.group.WORLD, vocab_size=len(weight)
    )
    nll.sum().backward()
    assert x.grad is not None
    assert shard.grad is not None
    return nll.detach(), x.grad, shard.grad


DENSE = (torch.float32, torch.float64)


def dense_loss_and_gradients(
    hidden: Tensor, targets: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    nll = F.cross_entropy(x @ w.T, targets, reduction="none", ignore_index=-100)
    nll.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return nll.detach(), x.grad, w.grad


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_real_vocabulary_that_no_group_divides_is_as_exact_as_dense(world: int):
    generator = torch.Generator().manual_seed(world)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(50_257, 8, generator=generator)
    targets = torch.randint(50_257, (11,), generator=generator)
    targets[:3] = torch.tensor([0, 50_256, -100])
    ours = run_ranks(world, ring_loss_and_gradients, world, hidden, targets, weight)
    single, exact = (dense_loss_and_gradients(hidden.to(d), targets, weight.to(d)) for d in DENSE)
    for found, rounded, wanted in zip(zip(*ours, strict=True), single, exact, strict=True):
        error, allowed = ((x - wanted).norm() for x in (torch.cat(found), rounded))
        assert error <= max(1.5 * allowed, 1e-6 * wanted.norm())


def test_an_export_has_the_true_rows_of_a_vocabulary_that_does_not_divide(tmp_path: Path):
    model, train = ONE_LAYER | {"vocab_size": 50}, {"steps": 1, "sequences_per_step": 3}
    spec = job("qwen3_moe", (3, 1, 3, 3), model=model, train=train, metrics=QUIET)
    samples = Rows([make_sample(n, [32], vocab=50) for n in range(6)])
    outcome = train_locally(spec, tmp_path, source=samples)
    config = load_config(path=None, config=spec.model.config)
    shapes = {
        name: parameter.shape
        for name, parameter in PlainTrainer(spec, samples).model.named_parameters()
    }
    tensors = {name: outcome.parameters[name].view(shape) for name, shape in shapes.items()}
    export_checkpoint(tmp_path / "export", config, tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert loaded.get_input_embeddings().weight.shape == (50, 16)
    assert loaded.lm_head.weight.shape == (50, 16)
    assert all(torch.equal(loaded.get_parameter(n), t) for n, t in tensors.items())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ranks_beyond_the_vocabulary_hold_none_of_it(tied: bool, tmp_path: Path):
    rows = [make_sample(n, [8], vocab=3) for n in range(4)]
    model = ONE_LAYER | {"vocab_size": 3, "tie_word_embeddings": tied}
    train = {"steps": 1, "sequences_per_step": 4, "sequence_length": 8}
    spec = job("qwen3_moe", (4, 1, 2, 4), model=model, train=train, metrics=QUIET)
    outcome = train_locally(spec, tmp_path, source=Rows(rows))
    alone = documents_alone(spec, rows)
    assert outcome.losses == pytest.approx(alone.losses, abs=1e-6)
    assert furthest(outcome.gradients, alone.gradients) < 1e-5


GRID = [(4, D, E_p, P) for D in (1, 2, 4) for E_p in (1, 2, 4) for P in (1, 2, 4)]


def losses_of(rank: int, specs: list[Spec], folder: str, source: Rows) -> list[float]:
    """One process group for the whole grid: to start ranks costs more than to train a step."""
    found = []
    for spec in specs:
        found += LocalRun(rank, spec, folder, source=source).train().losses
    return found


def test_the_loss_is_the_same_for_every_layout_of_a_grid(tmp_path: Path):
    rows = Rows([make_sample(n, [5, 3]) for n in range(4)])
    train = {"steps": 1, "sequences_per_step": 4, "sequence_length": 8}
    specs = [job("qwen3_moe", x, model=ONE_LAYER, train=train, metrics=QUIET) for x in GRID]
    wanted = documents_alone(specs[0], rows.rows).losses[0]
    losses = run_ranks(4, losses_of, specs, str(tmp_path), rows)[0]
    assert losses == pytest.approx([wanted] * len(GRID), abs=1e-6)


@pytest.mark.parametrize(
    "layout", [(1, 1, 1, 1), (2, 1, 2, 2), (4, 2, 2, 4)], ids=lambda x: "W{} D{} E{} P{}".format(*x)
)
def test_tied_embeddings_get_the_gradient_of_both_their_uses(
    layout: tuple[int, ...], tmp_path: Path
):
    spec = job(
        "qwen3_moe",
        layout,
        model={"tie_word_embeddings": True},
        train={"steps": 3, "sequence_length": 16},
        metrics=QUIET,
    )
    outcome, plain = train_locally(spec, tmp_path), train_plainly(spec)
    assert "lm_head.weight" not in outcome.parameters
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.gradients, plain.gradients) < 1e-5
    assert furthest(outcome.parameters, plain.parameters) < 1e-4


@pytest.mark.parametrize(
    "options",
    [{"z_loss": 0.05}, {"label_smoothing": 0.2}, {"z_loss": 0.05, "label_smoothing": 0.2}],
    ids=["z loss", "smoothing", "both"],
)
def test_the_loss_that_is_asked_for_is_trained_and_reported(options: dict, tmp_path: Path):
    rows = Rows([make_sample(0, [11, 5]), make_sample(1, [16])])
    plain, spec = (
        job("qwen3_moe", (2, 1, 2, 2), model=ONE_LAYER, train=ONE_STEP | train, metrics=QUIET)
        for train in ({}, options)
    )
    outcome = train_locally(spec, tmp_path, source=rows)
    alone, without = (documents_alone(asked, rows.rows) for asked in (spec, plain))
    assert outcome.losses == pytest.approx(alone.losses, abs=1e-6)
    assert furthest(outcome.gradients, alone.gradients) < 1e-5
    assert abs(alone.losses[0] - without.losses[0]) > 1e-4
    # At the same weights, the loss of the job without them.
    assert [result.nll for result in outcome.results] == pytest.approx(without.losses, abs=1e-6)


LOGITS = {
    "cohere2_moe": {"num_experts": 4, "logit_scale": 0.3},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 6.0, "output_router_logits": True},
    "beam": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "mlp_layer_types": ["sparse"] * 2,
        "layer_types": ["full_attention"] * 2,
        "head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "final_logit_softcapping": 0.5,
    },
}


@pytest.mark.parametrize("family", LOGITS)
def test_a_family_that_scales_or_caps_its_logits_trains_as_it_does_alone(
    family: str, tmp_path: Path
):
    sizes = {
        "model_type": family,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.3,  # logits that a cap of 0.5 bends
    }
    spec = tiny_spec(
        sizes | LOGITS[family],
        cluster={"workers": 2},
        parallel={"sequence": 1, "expert": 2, "vocabulary": 2},
        train={"steps": 2, "sequence_length": 16},
        metrics=QUIET,
    )
    outcome, plain = train_locally(spec, tmp_path), train_plainly(spec)
    assert outcome.losses == pytest.approx(plain.losses, abs=1e-5)
    assert furthest(outcome.gradients, plain.gradients) < 1e-5


def gradient_beside_what_it_is_made_of(
    rank: int, spec: Spec, folder: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The embedding's gradient as the optimizer got it, and this rank's tensors that it is of."""
    run = LocalRun(rank, spec, folder)
    head, seen = run.trainer.sharded.head, []

    def embedded(_: object, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.register_hook(lambda grad: seen.extend((args[0].flatten(), grad.flatten(0, -2))))

    def projected(_: object, args: tuple[Tensor, ...]) -> None:
        assert head.targets is not None
        seen.extend(x.detach().clone() for x in (args[0].flatten(0, -2), head.targets.flatten()))
        seen.append(head.weight.detach().clone())

    run.trainer.sharded.model.get_input_embeddings().register_forward_hook(embedded)
    head.register_forward_pre_hook(projected)
    run.train()
    gradient = run.outcome.gradients.get("model.embed_tokens.weight", torch.empty(0))
    return gradient, tuple(seen)


@pytest.mark.parametrize("layout", [(2, 1, 2, 2), (2, 1, 2, 1)], ids=["P2", "P1"])
def test_the_gradient_of_tied_bf16_embeddings_is_summed_in_fp32(
    layout: tuple[int, ...], tmp_path: Path
):
    train = {"steps": 1, "sequence_length": 16, "dtype": "bfloat16", "router_aux_loss_coef": 0.0}
    model = {"tie_word_embeddings": True, "output_router_logits": False}
    spec = job("qwen3_moe", layout, model=model, train=train, metrics=QUIET)
    found = run_ranks(2, gradient_beside_what_it_is_made_of, spec, str(tmp_path))
    gradient = found[0][0].view(VOCABULARY, 16)
    of_head = torch.zeros_like(gradient, dtype=torch.float64)
    of_embedding, sizes = torch.zeros_like(of_head), torch.zeros_like(of_head)
    targets = sum(int((wanted != -100).sum()) for _, (_, wanted, *_) in found)
    for _, (hidden, wanted, weight, ids, grad) in found:
        assert hidden.dtype == weight.dtype == grad.dtype == torch.bfloat16
        head = weight.double().requires_grad_()
        loss = F.cross_entropy(hidden.double() @ head.T, wanted, reduction="sum") / targets
        loss.backward()
        assert head.grad is not None
        of_head += head.grad
        of_embedding.index_add_(0, ids, grad.double())
        sizes.index_add_(0, ids, grad.double().abs())
    error = (gradient - of_head - of_embedding).abs()
    unread = sizes.sum(1) == 0
    assert 0 < unread.sum() < VOCABULARY
    assert error[unread].norm() <= 1e-6 * of_head[unread].norm()
    # The embedding's own part is a sum in bf16, rounded as often as a token occurs on a rank.
    times = max(int(ids.bincount().max()) for _, (*_, ids, _) in found)
    assert (error <= times * 2**-8 * sizes + 1e-6 * of_head.abs().max()).all()


def test_untied_embeddings_stay_apart(tmp_path: Path):
    outcome = train_locally(
        job("qwen3_moe", (2, 1, 2, 2), train={"steps": 1}, metrics=QUIET), tmp_path
    )
    embedding, head = (
        outcome.gradients[name] for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    assert len(embedding) == len(head) == VOCABULARY * 16
    assert not torch.equal(embedding, head)
