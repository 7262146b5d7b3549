"""Models that cannot be trained exactly are refused with the reason, before anything starts."""

import pytest
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flatpeak.workers.checkpoint import build_meta_model
from flatpeak.workers.errors import InputError, SpecError
from flatpeak.workers.routers import check_router_logits
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_of_the_tests_are_supported(family: str):
    check_supported(build_meta_model(tiny_config(family)))


@pytest.mark.parametrize(
    ("family", "own", "reason"),
    [
        ("qwen3_next", {"num_experts": 4}, "mixes tokens in linear_attn"),
        ("minimax", {"num_local_experts": 4}, "mixes tokens in self_attn"),
        ("jamba", {"num_experts": 4}, "is not a decoder with"),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_intermediate_size": 16}, "freezes"),
    ],
)
def test_a_family_that_would_train_wrongly_is_refused(family: str, own: dict, reason: str):
    model = build_meta_model(CONFIG_MAPPING[family].from_dict(TINY | own))
    with pytest.raises(SpecError, match=reason):
        check_supported(model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be from 1 to the model's 4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must divide num_attention_heads"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
    ],
)
def test_sizes_that_cannot_run_are_refused(changes: dict, reason: str):
    with pytest.raises(SpecError, match=reason):
        check_supported(build_meta_model(tiny_config("qwen3_moe", **changes)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_where_its_router_logits_are(family: str):
    check_router_logits(build_meta_model(tiny_config(family)))


def test_a_model_that_does_not_say_where_its_router_logits_are_has_no_auxiliary_loss():
    with pytest.raises(InputError, match=r"Linear does not say .* train.router_aux_loss_coef to 0"):
        check_router_logits(nn.Linear(1, 1))
