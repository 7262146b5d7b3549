"""Tiny configurations of the five model families that tests run on: 2 layers, 4 square experts."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_COMMON = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
}
FAMILIES = list(_OWN)


def tiny_content(family: str, **changes: Any) -> dict[str, Any]:
    """What `config.json` of the tiny model holds."""
    return {"model_type": family, **_COMMON, **_OWN[family], **changes}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family].from_dict(tiny_content(family, **changes))
