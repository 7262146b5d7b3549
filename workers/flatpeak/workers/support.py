"""Which transformers models can be trained exactly; all others are refused before anything starts.

A model passes when every place that mixes tokens goes through the attention interface, when all of
its state is parameters and router biases, and when its parts are where the worker cuts them.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from flatpeak.workers.checkpoint import attention_heads, kv_heads, moe_layers, num_experts
from flatpeak.workers.errors import SpecError
from flatpeak.workers.logits import logits_of

ROUTER_BIAS = "e_score_correction_bias"


def decoder_of(model: PreTrainedModel) -> Any:
    """The module with `layers` and `norm`, below `lm_head`; raises SpecError when there is none."""
    decoder: Any = model.base_model
    layers = getattr(decoder, "layers", None)
    norm, head = getattr(decoder, "norm", None), getattr(model, "lm_head", None)
    if not isinstance(layers, nn.ModuleList) or norm is None or head is None:
        raise SpecError(
            f"{type(model).__name__} is not a decoder with `layers`, `norm` and `lm_head`, so its "
            "weights cannot be cut; use a family like qwen3_moe, mixtral, olmoe or deepseek_v3"
        )
    return decoder


def check_supported(model: PreTrainedModel) -> None:
    """Raises SpecError with the first reason why `model` (whole, any device) cannot be trained."""
    name, config = type(model).__name__, model.config.get_text_config()
    decoder = decoder_of(model)
    _check_sizes(config)
    for index, layer in enumerate(decoder.layers):
        if (mixer := _foreign_mixer(layer)) is not None:
            raise SpecError(
                f"layer {index} of {name} mixes tokens in {mixer}, outside the attention "
                "interface: it could neither be split over ranks nor keep packed documents apart"
            )
    if getattr(config, "attention_chunk_size", None) is not None:
        raise SpecError(f"{name} attends in chunks, which this attention cannot do")
    if getattr(config, "attention_dropout", 0.0):
        raise SpecError(
            f"attention_dropout = {config.attention_dropout} is not supported: recomputation must "
            "repeat the forward pass; set model.config.attention_dropout to 0"
        )
    if getattr(model.lm_head, "bias", None) is not None:
        raise SpecError(f"{name} has a head with a bias, which the vocabulary loss lacks")
    kept = model.state_dict().keys()
    for buffer, _ in model.named_buffers():
        if buffer in kept and not buffer.endswith(ROUTER_BIAS):
            raise SpecError(f"{name} keeps state in the buffer {buffer}, which is not trained here")
    for parameter, value in model.named_parameters():
        if not value.requires_grad:
            raise SpecError(f"{name} freezes {parameter}; frozen parameters are not supported")
    for prefix, experts in moe_layers(model):
        total = next(experts.parameters()).shape[0]
        for parameter, value in experts.named_parameters(recurse=False):
            if value.shape[0] != total:
                raise SpecError(
                    f"{prefix}.{parameter} has no expert dimension: {tuple(value.shape)}"
                )
    logits_of(model)


def trained_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Elements of all that is trained of a `model` that is supported, by canonical name."""
    buffers = ((n, value) for n, value in model.named_buffers() if n.endswith(ROUTER_BIAS))
    return {name: value.numel() for name, value in [*model.named_parameters(), *buffers]}


def _check_sizes(config: Any) -> None:
    heads, groups = attention_heads(config), kv_heads(config)
    if heads % groups:
        raise SpecError(f"num_key_value_heads = {groups} must divide num_attention_heads = {heads}")
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise SpecError(
            f"hidden_size = {config.hidden_size} is no multiple of num_attention_heads = {heads}"
        )
    chosen, experts = getattr(config, "num_experts_per_tok", 1), num_experts(config)
    if not 1 <= chosen <= experts:
        raise SpecError(
            f"num_experts_per_tok = {chosen} must be from 1 to the model's {experts} experts"
        )


def _foreign_mixer(layer: nn.Module) -> str | None:
    """The name of a module of `layer` that mixes tokens by itself, if there is one."""
    attends = False
    for name, module in layer.named_modules():
        if isinstance(module, nn.Conv1d):
            return name
        if hasattr(module, "layer_idx") and name:
            if not hasattr(module, "is_causal"):
                return name
            attends = True
    return None if attends else "no attention module at all"
