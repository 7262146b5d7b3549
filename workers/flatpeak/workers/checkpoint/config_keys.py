"""The keys of an inline model configuration that nothing reads.

A configuration class of `transformers` keeps any key it is given, so a misspelt size would be
ignored. Known are the fields of the class and its other names for them, what it takes out of its
arguments while it is made, and what the family's model code reads: `head_dim` of Qwen3-MoE, say, is
no field.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

_READ = re.compile(r'\bconfig\.(\w+)|getattr\(\s*(?:self\.)?config,\s*"(\w+)"')
# What the trainer reads of every family.
_READ_HERE = {"output_router_logits", "router_aux_loss_coef"}
_ROPE_KEYS = {*RopeParameters.__annotations__, "type"}
_COMMON = {field.name for field in fields(PreTrainedConfig)}


def unknown_keys(content: dict[str, Any], parsed: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """(dotted key of `content`, nearest known key) of each that has no effect on `parsed`."""
    yield from _unknown_in(content, parsed, _read_by_model(type(parsed)))


def _unknown_in(
    content: dict[str, Any], parsed: PreTrainedConfig, read: frozenset[str]
) -> Iterator[tuple[str, str]]:
    own = {*type(parsed)().to_dict(), *parsed.attribute_map, *read}
    # The keys of the family rather than those of every family.
    likely = [key for key in own if key not in _COMMON and not key.startswith("_")]
    for key, value in content.items():
        inner = vars(parsed).get(key)
        if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
            below = _unknown_in(value, inner, read)
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            special = getattr(parsed, "ignore_keys_at_rope_validation", None) or ()
            below = _unknown_in_rope(value, _ROPE_KEYS.union(special))
        else:
            # A key that was taken out while the configuration was made is no attribute.
            if key in vars(parsed) and key not in own | _COMMON:
                yield key, _nearest(key, likely)
            continue
        yield from ((f"{key}.{name}", f"{key}.{nearest}") for name, nearest in below)


def _unknown_in_rope(rope: dict[str, Any], known: set[str]) -> Iterator[tuple[str, str]]:
    for key, value in rope.items():
        if isinstance(value, dict):  # of one type of layers
            below = _unknown_in_rope(value, known)
            yield from ((f"{key}.{name}", f"{key}.{nearest}") for name, nearest in below)
        elif value is not None and key not in known:
            yield key, _nearest(key, known)


@cache
def _read_by_model(family: type[PreTrainedConfig]) -> frozenset[str]:
    models = MODEL_FOR_CAUSAL_LM_MAPPING[family]
    model = models[0] if isinstance(models, tuple) else models
    source = inspect.getsource(sys.modules[model.__module__])
    return frozenset(_READ_HERE.union(*_READ.findall(source)) - {""})


def _nearest(key: str, known: Iterable[str]) -> str:
    return get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
