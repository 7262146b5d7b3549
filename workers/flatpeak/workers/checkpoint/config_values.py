"""Values of a model configuration that no model can be built from, or only one that cannot work.

`transformers` checks types where a family declares them, but hardly any value.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

# A count of experts has a message of its own, where it is 0.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LARGEST_SIZE = 2**31 - 1
# A model of more takes minutes to be built even without storage.
_MOST = {"num_hidden_layers": 10_000}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def bad_dtypes(content: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the dtypes of a configuration that is not parsed yet, nested ones too."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from (f"{key}.{problem}" for problem in bad_dtypes(value))
        elif key in ("dtype", "torch_dtype") and not _is_dtype(value):
            yield f"{key} = {value!r} is no dtype to train; use one of {', '.join(_DTYPES)}"


def _is_dtype(value: Any) -> bool:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.") in _DTYPES
    return value is None or value == "auto" or value in _DTYPES


def bad_values(parsed: PreTrainedConfig) -> Iterator[str]:
    """What is wrong with the sizes and rotary frequencies of a parsed configuration."""
    text = parsed.get_text_config()
    for name in _SIZES:
        value, most = getattr(text, name, None), _MOST.get(name, _LARGEST_SIZE)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            yield f"{name} = {value!r} should be an integer from 1 to {most}"
    for rope in _rope_parameters(getattr(text, "rope_parameters", None)):
        theta = rope.get("rope_theta")
        if theta is not None and not (type(theta) in (int, float) and 1 <= theta <= 1e30):
            yield f"rope_theta = {theta!r} should be a number of at least 1, for example 10000.0"


def _rope_parameters(given: Any) -> Iterator[dict[str, Any]]:
    """All that there are: one for the model, or one for each type of its layers."""
    if isinstance(given, dict):
        yield given
        for inner in given.values():
            yield from _rope_parameters(inner)
