"""The model on the meta device, and where in it the parts are that the worker treats apart."""

import re

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from flatpeak.workers.errors import SpecError


def build_meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal language model of `config` without storage, tied weights being one parameter.

    Parameters have the dtype of the configuration. Buffers that no checkpoint holds (rotary
    frequencies) are on the meta device too: whoever materialises the model computes them again.

    Raises:
        SpecError: The model cannot be built from these sizes, or has no layer with experts.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (
        ArithmeticError,
        AttributeError,
        TypeError,
        ValueError,
        LookupError,
        RuntimeError,
        AssertionError,
        ImportError,
    ) as reason:
        raise SpecError(
            f"a {config.model_type} of this configuration cannot be built: "
            f"{type(reason).__name__}: {reason}"
        ) from reason
    if not moe_layers(model):
        raise SpecError(
            f"{type(model).__name__} has {config.get_text_config().num_hidden_layers} layers and "
            "none of them has routed experts; check the settings that say which layers are dense"
        )
    return model


def moe_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, experts module) of each layer that has routed experts, in layer order.

    An experts module is one that goes through the experts interface of `transformers`: it holds
    every expert of its layer, with the expert as dimension 0 of each parameter.
    """
    return [(name, module) for name, module in model.named_modules() if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def router_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, router) of each layer in `moe_layers`: the sibling that scores every expert."""
    routers = []
    for name, experts in moe_layers(model):
        block_name = name.rpartition(".")[0]
        block = model.get_submodule(block_name)
        rows = next(experts.parameters()).shape[0]
        routers += [
            (f"{block_name}.{child_name}", child)
            for child_name, child in block.named_modules()
            if child is not experts and _scores(child, rows)
        ]
    return routers


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Names of the parameters and persistent buffers that stay fp32 when the model runs in `dtype`.

    Read from the family's `_keep_in_fp32_modules_strict` and, for fp16, `_keep_in_fp32_modules`,
    matched the way `from_pretrained` matches them.
    """
    patterns = [re.compile(glob.replace("*", ".*")) for glob in model._get_dtype_plan(dtype)]
    return {name for name in model.state_dict() if any(p.search(name) for p in patterns)}


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """{alias: name of the tensor it shares}; empty when the configuration ties nothing."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _scores(module: nn.Module, experts: int) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[0] == experts
