"""The safetensors files of one checkpoint, opened and checked, read by slices.

Opening reads headers alone: a missing, truncated or foreign file is found before anything loads.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatpeak.workers.errors import CheckpointError

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_LISTED = 8
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class SafetensorsFiles:
    """Every tensor of a checkpoint: its head (shape and dtype, a meta tensor) and its rows."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.bytes_read = 0
        self.heads: dict[str, Tensor] = {}
        self._file_of: dict[str, Any] = {}
        for file, keys in _files_and_keys(directory).items():
            self._open(directory / file, keys)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of `key`; raises CheckpointError where one of them is not finite in fp32."""
        view = self._file_of[key].get_slice(key)
        # A whole tensor is asked for as such: the slice of a scalar is an error.
        tensor = view[...] if start == 0 and stop is None else view[start:stop]
        self.bytes_read += tensor.nbytes
        # NaN is the least and the largest of all, so nothing the size of the rows is made.
        if tensor.numel() and not torch.stack(tensor.aminmax()).float().isfinite().all():
            count = tensor.numel() - int(tensor.float().isfinite().sum())
            raise CheckpointError(
                f"{key} in {self._directory}: {count} of the {tensor.numel()} numbers read first "
                "are NaN or beyond float32; repair it, or copy it again from where it came"
            )
        return tensor

    def _open(self, file: Path, keys: list[str] | None) -> None:
        if not file.is_file():
            raise CheckpointError(
                f"{file.parent} lacks the shard {file.name} that {_INDEX_FILE} names; "
                f"copy it there: {len(keys or ())} tensors are in it"
            )
        try:
            opened: Any = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as reason:
            size = file.stat().st_size
            raise CheckpointError(
                f"{file} ({size:,} bytes) is not a whole safetensors file ({reason}); "
                "copy it again from where it came"
            ) from reason
        held = set(opened.keys())
        if absent := sorted(set(keys or ()) - held):
            raise CheckpointError(
                f"{_INDEX_FILE} promises tensors that {file.name} lacks: {some(absent)}"
            )
        for key in held if keys is None else keys:
            self.heads[key] = _head(opened.get_slice(key), key, file)
            self._file_of[key] = opened


def _files_and_keys(directory: Path) -> dict[str, list[str] | None]:
    """{file name: its tensors}; None for all of a checkpoint in one file."""
    if (directory / _INDEX_FILE).is_file():
        return _read_index(directory / _INDEX_FILE)
    if (directory / _SINGLE_FILE).is_file():
        return {_SINGLE_FILE: None}
    found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    raise CheckpointError(
        f"{directory} holds neither {_SINGLE_FILE} nor {_INDEX_FILE} (found: "
        f"{some(found) if found else 'nothing'}); set `model.path` to a Hugging Face model "
        "directory in the safetensors format"
    )


def _read_index(index: Path) -> dict[str, list[str] | None]:
    files = defaultdict(list)
    try:
        for key, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            files[file].append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        raise CheckpointError(
            f"{index} is not an index with a `weight_map`: {reason!r}"
        ) from reason
    return dict(files)


def _head(view: Any, key: str, file: Path) -> Tensor:
    dtype = _DTYPES.get(view.get_dtype())
    if dtype is None:
        raise CheckpointError(
            f"{key} in {file.name} has dtype {view.get_dtype()}; Flatpeak trains from bfloat16, "
            "float16 or float32 weights: dequantise the checkpoint first"
        )
    return torch.empty(view.get_shape(), dtype=dtype, device="meta")


def some(items: list[str]) -> str:
    rest = len(items) - _LISTED
    return "; ".join(items[:_LISTED]) + (f"; and {rest} more" if rest > 0 else "")
