"""How a family makes logits of its head's products is read from its config and held against it."""

from types import MethodType
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flatpeak.workers.checkpoint import build_meta_model
from flatpeak.workers.errors import SpecError
from flatpeak.workers.logits import Logits, logits_of
from flatpeak.workers.support import check_supported
from tiny_models import FAMILIES, tiny_config

TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
BEAM = {"num_experts": 4, "moe_intermediate_size": 16, "mlp_layer_types": ["sparse"] * 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_most_families_take_the_products_as_they_are(family: str):
    assert logits_of(build_meta_model(tiny_config(family))) == Logits()


@pytest.mark.parametrize(
    ("family", "own", "logits"),
    [
        ("cohere2_moe", {"num_experts": 4, "logit_scale": 0.3}, Logits(scale=0.3)),
        ("granitemoe", {"num_local_experts": 4, "logits_scaling": 6.0}, Logits(scale=1 / 6)),
        ("beam", BEAM | {"final_logit_softcapping": 20.0}, Logits(soft_cap=20.0)),
    ],
)
def test_a_scale_and_a_soft_cap_are_read_from_the_config(family: str, own: dict, logits: Logits):
    model = build_meta_model(CONFIG_MAPPING[family].from_dict(TINY | own))
    before = model.lm_head, model.model
    assert logits_of(model) == logits
    assert (model.lm_head, model.model) == before


def changed(change: Any, **config: Any) -> Any:
    """A tiny model whose forward pass ends in `change` of its logits."""
    model = build_meta_model(tiny_config("qwen3_moe", **config))
    forward = type(model).forward

    def changing(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = MethodType(changing, model)
    return model


@pytest.mark.parametrize(
    "change",
    [lambda x: x / 2, torch.tanh, lambda x: x[..., :-1], lambda x: x + 1],
    ids=["scaled", "capped", "cut", "moved"],
)
def test_logits_that_are_made_in_another_way_are_refused_with_what_the_config_says(change: Any):
    model = changed(change, final_logit_width=7)
    with pytest.raises(SpecError, match=r"Qwen3MoeForCausalLM .* vocab_size = 50, final_logit_w"):
        check_supported(model)


def test_a_key_that_the_family_does_not_read_is_refused():
    model = build_meta_model(tiny_config("qwen3_moe", logit_scale=0.5))
    with pytest.raises(SpecError, match=r"logit_scale = 0\.5"):
        check_supported(model)
