"""Rows of canonical tensors, read from a Hugging Face directory without loading the rest of it.

What a file calls its tensors, and whether it holds experts one by one or fused, is told by the
conversion mapping of `transformers` itself, run on the few tensors that the asked rows need.
"""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flatpeak.workers.checkpoint.files import SafetensorsFiles, some
from flatpeak.workers.checkpoint.model import tied_names
from flatpeak.workers.checkpoint.sources import Source, convert, find_sources, published_tensors
from flatpeak.workers.errors import CheckpointError


class CheckpointReader:
    """A Hugging Face directory, seen as the canonical tensors of a model.

    Files are memory-mapped: what is not asked for is not read. `bytes_read` counts what was.

    Args:
        path: Directory with `model.safetensors`, or with `model.safetensors.index.json` and shards.
        model_on_meta: The model the checkpoint is for; only its names and shapes matter, and what
            happens to it later (slicing, sharding) does not.

    Raises:
        CheckpointError: A file is missing or broken, or the tensors are not those of the model;
            all that are missing, misshapen or of whole numbers in one message. Unexpected ones are
            a warning.
    """

    def __init__(self, path: str | Path, model_on_meta: PreTrainedModel) -> None:
        self._path = Path(path)
        self._model = copy.deepcopy(model_on_meta)
        self._expected = self._model.state_dict()
        self._tied = tied_names(self._model)
        self._files = SafetensorsFiles(self._path)
        self._sources, unexpected = find_sources(self._files.heads, self._model)
        self._refuse_a_misfit(unexpected)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def names(self) -> list[str]:
        """Canonical names of all parameters and persistent buffers, tied ones included."""
        return list(self._expected)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in the checkpoint, which is what `read` returns."""
        return self._source(name).head.dtype

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of dimension 0 of `name`, on the CPU, the caller's to keep.

        Takes the memory of these rows plus, where the file holds experts one by one, of one expert.

        Raises:
            CheckpointError: A number among them is NaN or infinite.
        """
        assert 0 <= start <= stop <= self._expected[name].shape[0], (name, start, stop)
        source = self._source(name)
        if source.converter is None:
            (key,) = source.keys[source.pattern]
            # A copy: what the files give is the mapping itself, which later reads see too.
            return self._files.read(key, start, stop).clone()
        if not source.row_by_row:
            return self._convert(source, source.keys)[name][start:stop].clone()
        rows = torch.empty(stop - start, *self._expected[name].shape[1:], dtype=source.head.dtype)
        for row, index in zip(rows, range(start, stop), strict=True):
            one = {pattern: [keys[index]] for pattern, keys in source.keys.items()}
            row.copy_(self._convert(source, one)[name][0])
        return rows

    def _source(self, name: str) -> Source:
        return next(self._sources[n] for n in self._names_of(name) if n in self._sources)

    def _names_of(self, name: str) -> list[str]:
        """The name to look for first, then those tied to it: a checkpoint may hold any of them."""
        kept = self._tied.get(name, name)
        return [kept, *(alias for alias, source in self._tied.items() if source == kept)]

    def _convert(self, source: Source, keys: Mapping[str, list[str]]) -> dict[str, Tensor]:
        tensors = {p: [self._files.read(key) for key in ks] for p, ks in keys.items()}
        assert source.converter is not None
        return convert(source.converter, source.first_target, tensors, self._model)

    def _refuse_a_misfit(self, unexpected: list[str]) -> None:
        complaints = [line for name in self._expected for line in self._complaints(name)]
        complaints = list(dict.fromkeys(complaints))  # one tensor may be a part of several
        extra = f"unexpected: {some(unexpected)}" if unexpected else ""
        kind = type(self._model).__name__
        if complaints:
            raise CheckpointError(
                f"{self._path} does not fit {kind}: {some(complaints)}{extra and '; ' + extra}. "
                "Check that `model.path` holds the weights that belong to its config.json"
            )
        if extra:
            warnings.warn(f"{self._path} does not fit {kind}; {extra}", stacklevel=3)

    def _complaints(self, name: str) -> list[str]:
        shape = self._expected[name].shape
        if not any(n in self._sources for n in self._names_of(name)):
            return [f"{name} {list(shape)} is missing"]
        source, found = self._sources.get(name), self._files.heads
        if source is None:
            return []
        if self._expected[name].is_floating_point() and (whole := _whole_numbers(source, found)):
            return whole
        if source.head.shape == shape:
            return []
        # Blame single experts where the file holds them singly.
        wanted = published_tensors(name, shape, self._model)
        blamed = [
            f"{key} should be {list(head.shape)}, found "
            f"{list(found[key].shape) if key in found else 'nothing'}"
            for key, head in wanted.items()
            if key not in found or found[key].shape != head.shape
        ]
        partly = source.converter is not None and 0 < len(blamed) < len(wanted)
        return blamed if partly else [f"{name} should be {list(shape)}, found {source.describe()}"]


def _whole_numbers(source: Source, found: Mapping[str, Tensor]) -> list[str]:
    dtypes = {key: found[key].dtype for keys in source.keys.values() for key in keys}
    return [
        f"{key} should be floating point, found {str(dtype).removeprefix('torch.')}"
        for key, dtype in dtypes.items()
        if not dtype.is_floating_point
    ]
