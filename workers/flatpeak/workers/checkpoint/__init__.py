"""Hugging Face models in and out: configuration, streamed import and export, random weights.

A *canonical* name or tensor is one of `model.state_dict()` of the unmodified `transformers` model,
where the experts of a layer are fused into one tensor with the expert as dimension 0. `read(name,
start, stop)` of `CheckpointReader` and of `RandomInit` gives rows of a canonical tensor, so a
worker loads its own slice and nothing else.
"""

from flatpeak.workers.checkpoint.config import (
    attention_heads,
    hidden_size,
    kv_heads,
    load_config,
    num_experts,
    vocab_size,
)
from flatpeak.workers.checkpoint.initialise import RandomInit
from flatpeak.workers.checkpoint.model import (
    build_meta_model,
    kept_in_fp32,
    moe_layers,
    router_modules,
)
from flatpeak.workers.checkpoint.reader import CheckpointReader
from flatpeak.workers.checkpoint.writer import export_checkpoint, write_safetensors

__all__ = [
    "CheckpointReader",
    "RandomInit",
    "attention_heads",
    "build_meta_model",
    "export_checkpoint",
    "hidden_size",
    "kept_in_fp32",
    "kv_heads",
    "load_config",
    "moe_layers",
    "num_experts",
    "router_modules",
    "vocab_size",
    "write_safetensors",
]
