"""Which tensors of a checkpoint make which canonical tensor, by the mapping of `transformers`.

Each conversion runs once on shapes alone, so that what does not fit is known before data is read.
"""

import copy
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass(kw_only=True)
class Source:
    """Where one canonical tensor comes from, and the meta tensor that its conversion yields."""

    pattern: str
    keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    converter: WeightConverter | None = None
    first_target: str = ""
    head: Tensor = field(default_factory=lambda: torch.empty(0, device="meta"))
    row_by_row: bool = False
    problem: str = ""

    def describe(self) -> str:
        if self.problem:
            return self.problem
        parts = sum(len(keys) for keys in self.keys.values())
        return f"{list(self.head.shape)}{f' from {parts} tensors' if self.converter else ''}"


def find_sources(
    heads: dict[str, Tensor], model: PreTrainedModel
) -> tuple[dict[str, Source], list[str]]:
    """({canonical name: source}, checkpoint names nothing in the model is made of)."""
    collected, unexpected = _collect(list(heads), model)
    sources: dict[str, Source] = {}
    for target, source in collected.items():
        source.first_target = target
        if source.converter is None:
            (key,) = source.keys[source.pattern]
            source.head = heads[key]
            sources[target] = source
        else:
            sources |= _through_converter(source, heads, model)
    return sources, unexpected


def published_tensors(name: str, shape: torch.Size, model: PreTrainedModel) -> dict[str, Tensor]:
    """Name and meta tensor of what the family publishes for one canonical tensor."""
    return revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})


def _collect(keys: list[str], model: PreTrainedModel) -> tuple[dict[str, Source], list[str]]:
    """Checkpoint names grouped by the canonical name they lead to, as `from_pretrained` groups.

    Natural order makes the n-th tensor of a pattern the n-th expert.
    """
    expected = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    sources: dict[str, Source] = {}
    unexpected = []
    for key in sorted(keys, key=dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = key, None
        if name not in expected:
            if not any(p.search(key) for p in ignored):
                unexpected.append(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        source = sources.setdefault(name, Source(pattern=pattern or key, converter=converter))
        source.keys[pattern or key].append(key)
    return sources, unexpected


def _through_converter(
    source: Source, heads: dict[str, Tensor], model: PreTrainedModel
) -> dict[str, Source]:
    """Every tensor that a converter yields, checked by running it on shapes alone."""
    assert source.converter is not None
    tensors = {pattern: [heads[key] for key in keys] for pattern, keys in source.keys.items()}
    missing = [p for p in source.converter.source_patterns if p not in tensors]
    try:
        if missing:
            raise ValueError(f"no tensor like {', '.join(missing)}")
        outputs = convert(source.converter, source.first_target, tensors, model)
        source.row_by_row = _keeps_rows_apart(source, heads, outputs, model)
    except (ValueError, RuntimeError, IndexError) as reason:
        source.problem = f"tensors that do not combine ({str(reason).splitlines()[0]})"
        return {source.first_target: source}
    sources = {}
    for name, head in outputs.items():
        sources[name] = copy.copy(source)
        sources[name].head = head
    return sources


def _keeps_rows_apart(
    source: Source, heads: dict[str, Tensor], outputs: dict[str, Tensor], model: PreTrainedModel
) -> bool:
    """Whether row i of the result is the conversion of the i-th tensor of each pattern alone."""
    assert source.converter is not None
    first = source.converter.operations[0]
    if not (isinstance(first, MergeModulelist) and first.dim == 0):
        return False
    counts = {len(keys) for keys in source.keys.values()}
    if len(counts) > 1:
        raise ValueError(f"one pattern has {min(counts)} tensors, another {max(counts)}")
    for keys in source.keys.values():
        if not _numbered_in_order(keys):
            raise ValueError(f"{keys[0]} to {keys[-1]} are not numbered from 0 without a gap")
    one = {pattern: [heads[keys[0]]] for pattern, keys in source.keys.items()}
    row = convert(source.converter, source.first_target, one, model)
    (rows,) = counts
    return all(
        head.shape[0] == rows and row[name].shape == (1, *head.shape[1:])
        for name, head in outputs.items()
    )


def _numbered_in_order(keys: list[str]) -> bool:
    """Whether one of the numbers in a name counts 0, 1, 2, ... through `keys`."""
    numbers = [[int(part) for part in key.split(".") if part.isdigit()] for key in keys]
    columns = zip(*numbers, strict=False)
    return any(column == tuple(range(len(keys))) for column in columns)


def convert(
    converter: WeightConverter,
    first_target: str,
    tensors: dict[str, list[Any]],
    model: PreTrainedModel,
) -> dict[str, Tensor]:
    """{canonical name: tensor} of one conversion; the converter itself collects, so a copy runs."""
    running = copy.deepcopy(converter)
    for pattern, parts in tensors.items():
        for part in parts:
            running.add_tensor(first_target, first_target, pattern, part)
    outputs = running.convert(first_target, model=model, config=model.config)
    return {name: t[0] if isinstance(t, list) else t for name, t in outputs.items()}
