"""Whether recomputation must run the experts: the supported families, and blocks that read them."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatpeak.workers.checkpoint import build_meta_model
from flatpeak.workers.recompute_probe import value_needed_in_recompute
from tiny_models import FAMILIES, tiny_config


class Around(nn.Module):
    """A family that does something to the output of its MoE block before the residual sum."""

    def __init__(self, block: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.change = block, change

    def forward(self, hidden: Tensor) -> Tensor:
        return self.change(self.block(hidden))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def read_the_numbers(x: Tensor) -> Tensor:
    return x if x.abs().max() < 1 else x / 2


def in_place(x: Tensor) -> Tensor:
    return torch.zeros_like(x).add_(x).square()


def layers_of(model: PreTrainedModel) -> Any:
    return model.base_model.layers


def toy(change: Callable[[Tensor], Tensor], *, layer: int = 1) -> PreTrainedModel:
    model = build_meta_model(tiny_config("qwen3_moe"))
    chosen = layers_of(model)[layer]
    chosen.mlp = Around(chosen.mlp, change)
    return model


def needed(model: PreTrainedModel) -> bool:
    return value_needed_in_recompute(model, layers_of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_add_their_experts_straight_to_the_residual(family: str):
    assert not needed(build_meta_model(tiny_config(family, output_router_logits=True)))


NEEDED = {
    "a norm": nn.RMSNorm(16, device="meta"),
    "a learnt scale": Gate(),
    "a square through a sum in place": in_place,
    "a view of it that is squared": lambda x: x.view(-1).square().view(x.shape),
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", NEEDED.values(), ids=NEEDED)
def test_a_block_that_saves_what_depends_on_its_experts_needs_them(
    change: Callable[[Tensor], Tensor], layer: int
):
    assert needed(toy(change, layer=layer))


def test_a_constant_factor_needs_nothing():
    assert not needed(toy(lambda x: 0.5 * x))


def test_a_model_that_looks_at_its_numbers_is_taken_to_need_them_and_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert needed(toy(read_the_numbers))
    assert "cannot be probed" in caplog.text


def test_a_model_whose_layers_ran_no_experts_is_taken_to_need_them():
    model = build_meta_model(tiny_config("qwen3_moe"))
    for layer in layers_of(model):
        layer.mlp = nn.Identity()
    assert needed(model)


def test_the_probe_leaves_no_hook_behind():
    model = build_meta_model(tiny_config("qwen3_moe"))
    before = [len(layer._forward_hooks) for layer in layers_of(model)]
    needed(model)
    assert [len(layer._forward_hooks) for layer in layers_of(model)] == before
