"""The model configuration: from a Hugging Face directory or from the job itself, checked at once.

The readers below give the sizes that the launch needs under one name for every family.
"""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from flatpeak.workers.checkpoint.config_keys import unknown_keys
from flatpeak.workers.checkpoint.config_values import bad_dtypes, bad_values
from flatpeak.workers.errors import CheckpointError, InputError, SpecError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def load_config(*, path: str | None, config: dict[str, Any] | None) -> PreTrainedConfig:
    """The configuration of a causal MoE model, from exactly one of the two sources.

    Args:
        path: A local Hugging Face model directory (one with `config.json`). Nothing is downloaded.
        config: The content of such a file, with its `model_type`.

    Raises:
        CheckpointError: `path` or the file in it is missing, broken or not of a causal MoE model.
        SpecError: The same of `config`, or it has a key that nothing reads, or not exactly one of
            the two was given.
    """
    if (path is None) == (config is None):
        raise SpecError(
            "the model needs exactly one of `path` (a Hugging Face model directory) and `config` "
            f"(a mapping with `model_type`); {'neither' if path is None else 'both'} were given"
        )
    if path is not None:
        return _parse(_read_json(Path(path)), source=f"{path}/config.json", error=CheckpointError)
    assert config is not None
    parsed = _parse(config, source="model.config", error=SpecError)
    _refuse_unknown_keys(config, parsed)
    return parsed


def num_experts(config: PreTrainedConfig) -> int:
    """Routed experts a layer (E); 0 for a dense model."""
    text = config.get_text_config()
    return next((count for name in _EXPERT_COUNTS if (count := getattr(text, name, None))), 0)


def attention_heads(config: PreTrainedConfig) -> int:
    return config.get_text_config().num_attention_heads


def kv_heads(config: PreTrainedConfig) -> int:
    """Key and value heads; as many as attention heads where the family does not group them."""
    text = config.get_text_config()
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def vocab_size(config: PreTrainedConfig) -> int:
    return config.get_text_config().vocab_size


def hidden_size(config: PreTrainedConfig) -> int:
    return config.get_text_config().hidden_size


def _read_json(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        found = "an empty or other directory" if directory.is_dir() else "no such directory"
        raise CheckpointError(
            f"{directory} holds no config.json ({found}); set `model.path` to a local Hugging Face "
            "model directory, with config.json and *.safetensors in it"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _parse(content: dict[str, Any], *, source: str, error: type[InputError]) -> PreTrainedConfig:
    kind = str(content.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise error(f"{source}: {_unknown_model_type(content)}")
    for problem in bad_dtypes(content):
        raise error(f"{source}: {problem}")
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(content))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as reason:
        raise error(f"{source} is not a valid {kind} configuration: {reason}") from reason
    found = f"{source} is a {type(config).__name__} (model_type {kind})"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise error(f"{found}, which has no causal language model; use an MoE one like qwen3_moe")
    if quantisation := content.get("quantization_config"):
        raise error(
            f"{found} quantised by {quantisation.get('quant_method')}; Flatpeak trains bfloat16, "
            "float16 or float32 weights: dequantise the checkpoint, or drop `quantization_config`"
        )
    if num_experts(config) <= 0:
        raise error(
            f"{found}, which is not a Mixture-of-Experts model: none of "
            f"{', '.join(_EXPERT_COUNTS)} is set; use an MoE family such as qwen3_moe or mixtral"
        )
    for problem in bad_values(config):
        raise error(f"{source}: {problem}")
    return config


def _unknown_model_type(content: dict[str, Any]) -> str:
    if "model_type" not in content:
        return "`model_type` is missing; set it to a family of transformers, e.g. qwen3_moe"
    kind = str(content["model_type"])
    near = get_close_matches(kind, CONFIG_MAPPING.keys(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "use a family of transformers, e.g. qwen3_moe"
    return f"unknown model_type {kind!r}; {hint}"


def _refuse_unknown_keys(content: dict[str, Any], parsed: PreTrainedConfig) -> None:
    """Only of inline configurations: published files carry keys that nothing reads."""
    unknown = list(unknown_keys(content, parsed))
    if unknown:
        problems = (f"no setting {key!r}, the nearest is {near!r}" for key, near in unknown)
        raise SpecError(
            f"model.config: {parsed.model_type} has {'; '.join(problems)}. Correct it, or leave it "
            "out if it is meant for other software"
        )
