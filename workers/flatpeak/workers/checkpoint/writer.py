"""Canonical tensors out to a Hugging Face directory, one at a time.

Names and layout on disk are what `save_pretrained` writes: its own reverse conversion runs on one
canonical tensor after the other. Memory is that of one shard, plus the tensor being added.
"""

import copy
import json
import os
import shutil
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    apply_converters,
    revert_weight_conversion,
)

from flatpeak.workers.checkpoint.model import build_meta_model, tied_names
from flatpeak.workers.errors import CheckpointError

MAX_SHARD_BYTES = 4 * 2**30
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def export_checkpoint(
    directory: str | Path,
    config: PreTrainedConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    original_layout: bool = True,
    beside: Callable[[Path], None] = lambda partial: None,
) -> None:
    """Write a directory that `from_pretrained` loads to the very same bits.

    The directory appears whole or not at all: it is written beside itself and renamed at the end.

    Args:
        directory: Must not exist, or be empty.
        tensors: (canonical name, whole tensor) of every parameter and persistent buffer, each once,
            in any order; written in the dtype it has. Of tied ones the alias may be left out.
        tokenizer_dir: Its tokenizer files and generation config are copied along.
        max_shard_bytes: A shard closes before it would exceed this (one larger tensor is alone).
        original_layout: Names and per-expert tensors as the family publishes them; False keeps
            the fused tensors.
        beside: Writes more files into the directory, before it gets its name.

    Raises:
        CheckpointError: The directory is not empty, or the tensors are not those of the model.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; export to a new directory")
    tokenizer_files = [] if tokenizer_dir is None else _tokenizer_files(Path(tokenizer_dir))
    model = build_meta_model(_without_hooks(config))
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    partial.mkdir(parents=True)
    try:
        shards = _Shards(partial, max_shard_bytes=max_shard_bytes)
        for group in _convertible_groups(_checked(tensors, model), model, original_layout):
            converted = revert_weight_conversion(model, group) if original_layout else group
            for name, tensor in converted.items():
                shards.add(name, tensor)
        shards.close()
        _write_config(partial, model, shards.bytes_by_dtype)
        beside(partial)
        for file in tokenizer_files:
            shutil.copy(file, partial / file.name)
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial)
        raise


def write_safetensors(directory: Path, stem: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """`stem`.safetensors, or shards of it with their index like those of a model."""
    shards = _Shards(directory, stem=stem)
    for name, tensor in tensors:
        shards.add(name, tensor)
    shards.close()


def _without_hooks(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that asks for no implementation a training process registered for itself."""
    plain = copy.deepcopy(config)
    plain._attn_implementation = None
    plain._experts_implementation = None
    return plain


def _checked(
    tensors: Iterable[tuple[str, Tensor]], model: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """The tensors without tied aliases, each of them known, whole and there once."""
    aliases = tied_names(model)
    expected = {name: t.shape for name, t in model.state_dict().items() if name not in aliases}
    missing = set(expected)
    for name, tensor in tensors:
        if name in aliases:
            continue
        if name not in missing:
            kind = "came twice" if name in expected else f"is not in {type(model).__name__}"
            raise CheckpointError(f"cannot export: {name} {kind}")
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"cannot export: {name} is {list(tensor.shape)}, should be {list(expected[name])}"
            )
        missing.discard(name)
        yield name, tensor.detach()
    if missing:
        listed = ", ".join(sorted(missing)[:8])
        raise CheckpointError(f"cannot export: {len(missing)} tensors never came: {listed}")


def _convertible_groups(
    tensors: Iterable[tuple[str, Tensor]], model: PreTrainedModel, original_layout: bool
) -> Iterator[dict[str, Tensor]]:
    """Tensors in the groups that convert together: mostly alone, a few families merge some."""
    group_of = _groups(model) if original_layout else {}
    sizes = Counter(group_of.values())
    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        group = group_of.get(name, name)
        waiting[group][name] = tensor
        if len(waiting[group]) == sizes.get(group, 1):
            yield waiting.pop(group)


def _groups(model: PreTrainedModel) -> dict[str, str]:
    """{canonical name: what its group leads to}, for names that a reverse converter takes."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [c.reverse_transform() for c in mapping[::-1] if isinstance(c, WeightConverter)]
    converters = [c for c in reverse if isinstance(c, WeightConverter)]
    aliases = tied_names(model)
    groups = {}
    for name in model.state_dict().keys() - aliases.keys():
        group, pattern = apply_converters(name, converters)
        if pattern is not None:
            groups[name] = group
    return groups


class _Shards:
    """Fills one shard after the other; their final names carry the count, known at the end."""

    def __init__(
        self, directory: Path, *, stem: str = "model", max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self.bytes_by_dtype: Counter = Counter()
        self._directory, self._stem = directory, stem
        self._max_shard_bytes = max_shard_bytes
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._keys: list[list[str]] = []
        self._elements = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._open and self._open_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        # A copy: a source may reuse its buffer, and a piece of a fused tensor would keep all of it.
        self._open[name] = tensor.to("cpu", copy=True).contiguous()
        self._open_bytes += tensor.nbytes
        self._elements += tensor.numel()
        self.bytes_by_dtype[tensor.dtype] += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._keys)
        if count == 1:
            os.replace(self._file(0), self._directory / f"{self._stem}.safetensors")
            return
        weight_map = {}
        for index, keys in enumerate(self._keys):
            name = f"{self._stem}-{index + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._file(index), self._directory / name)
            weight_map |= dict.fromkeys(keys, name)
        total = {
            "total_parameters": self._elements,
            "total_size": sum(self.bytes_by_dtype.values()),
        }
        content = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        file = self._directory / f"{self._stem}.safetensors.index.json"
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        file = self._file(len(self._keys))
        file.touch()
        mode = file.stat().st_mode
        save_file(self._open, file, metadata={"format": "pt"})
        file.chmod(mode)  # safetensors lets nobody else read it, whatever the umask says
        self._keys.append(list(self._open))
        self._open, self._open_bytes = {}, 0

    def _file(self, index: int) -> Path:
        return self._directory / f"shard-{index}.safetensors"


def _write_config(directory: Path, model: PreTrainedModel, bytes_by_dtype: Counter) -> None:
    """The dtype on record is the one most of the weights have: a few may be kept in fp32."""
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = bytes_by_dtype.most_common(1)[0][0]
    config.save_pretrained(directory)


def _tokenizer_files(directory: Path) -> list[Path]:
    files = sorted({file for glob in _TOKENIZER_FILES for file in directory.glob(glob)})
    if not files:
        raise CheckpointError(f"cannot export: {directory} holds no tokenizer files")
    return files
