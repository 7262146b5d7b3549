"""The scopes of the plain trainer: each byte goes to its own component, and none is left open."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatpeak.workers.checkpoint import moe_layers
from flatpeak.workers.data import sample_ids
from flatpeak.workers.plain import PlainTrainer
from flatpeak.workers.scopes import OTHER, current_scope
from flatpeak.workers.settings import samples_of
from local_run import documents_alone, flat_gradients, furthest, job

# The shared experts of DeepSeek-V3 follow the routed ones, which are the last in the other layers.
FAMILIES = ("qwen3_moe", "deepseek_v3")


def make_plain(family: str = "qwen3_moe") -> PlainTrainer:
    spec = job(family)
    return PlainTrainer(spec, samples_of(spec))


def evaluate(plain: PlainTrainer) -> Tensor:
    tokens = torch.arange(16).view(1, -1)
    return plain.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def experts_of(plain: PlainTrainer) -> nn.Module:
    return moe_layers(plain.model)[0][1]


def in_forward(plain: PlainTrainer, fail: Callable[..., None]) -> None:
    experts_of(plain).act_fn = nn.SiLU()
    experts_of(plain).act_fn.register_forward_hook(fail)


def in_backward(plain: PlainTrainer, fail: Callable[..., None]) -> None:
    experts_of(plain).down_proj.register_hook(fail)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_leaves_no_scope_open(family: str):
    plain = make_plain(family)
    plain.step(1, 1e-3)
    assert current_scope() == OTHER


@pytest.mark.parametrize("autograd", [True, False])
def test_a_forward_without_a_backward_leaves_no_scope_open(autograd: bool):
    plain = make_plain()
    with torch.set_grad_enabled(autograd):
        assert evaluate(plain).isfinite()
    assert current_scope() == OTHER


@pytest.mark.parametrize("where", [in_forward, in_backward])
def test_an_error_leaves_no_scope_open(where: Callable[..., None]):
    def fail(*_: object) -> None:
        seen.append(current_scope())
        raise ArithmeticError

    plain, seen = make_plain(), []
    where(plain, fail)
    with pytest.raises(ArithmeticError):
        plain.backward(1)
    assert seen == ["dispatch"]
    assert current_scope() == OTHER


@pytest.mark.parametrize("family", FAMILIES)
def test_z_loss_and_label_smoothing_are_part_of_the_loss(family: str):
    rest = {"router_aux_loss_coef": 0.0}
    asked = job(family, train=rest | {"z_loss": 0.05, "label_smoothing": 0.2})
    source, losses = samples_of(asked), {}
    first = sample_ids(0, asked.train.sequences_per_step)
    samples = [source.sample(index) for index in first]
    for spec in (asked, job(family, train=rest)):
        plain = PlainTrainer(spec, samples_of(spec))
        losses[spec.train.z_loss] = plain.backward(1)
        wanted = documents_alone(spec, samples)
        assert losses[spec.train.z_loss] == pytest.approx(wanted.losses[0], abs=1e-6)
        assert furthest(flat_gradients(plain.model), wanted.gradients) < 1e-5
    assert abs(losses[0.05] - losses[0.0]) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recomputed_layer_is_not_charged_to_the_backward_that_asks_for_it(family: str):
    plain, seen = make_plain(family), []
    for _, experts in moe_layers(plain.model):
        experts.register_forward_pre_hook(lambda *_: seen.append(current_scope()))
    plain.backward(1)
    assert seen == [OTHER] * 2 * len(moe_layers(plain.model))
