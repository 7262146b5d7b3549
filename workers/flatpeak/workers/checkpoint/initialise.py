"""Random weights that do not depend on how the model is laid out over ranks.

Each module's values come from a generator of its own, seeded by (seed, module name), and each
expert's from (seed, module name, expert); so any rank can make any rows, alone, in any order.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatpeak.workers.checkpoint.model import is_experts, tied_names
from flatpeak.workers.errors import CheckpointError


class RandomInit:
    """Rows of a randomly initialised model, by the family's own law (its `_init_weights`).

    The reader's interface over no file. Values are a pure function of (`seed`, name, row). Memory
    is that of one module, or of the experts of one layer that were asked for.
    """

    def __init__(self, model_on_meta: PreTrainedModel, seed: int) -> None:
        # Its own copy: the caller's will be sliced and sharded.
        self._model = copy.deepcopy(model_on_meta)
        self._seed = seed
        self._tied = tied_names(model_on_meta)
        self._shapes = {name: t.shape for name, t in model_on_meta.state_dict().items()}
        self._module_name: str | None = None
        self._blocks: dict[int | None, dict[str, Tensor]] = {}

    def names(self) -> list[str]:
        """Canonical names of all parameters and persistent buffers."""
        return list(self._shapes)

    def dtype_of(self, name: str) -> torch.dtype:
        assert name in self._shapes, name
        return torch.float32

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of dimension 0 of `name`, fp32 on the CPU, the caller's to keep.

        Raises:
            CheckpointError: The family has no law for this parameter.
        """
        assert 0 <= start <= stop <= self._shapes[name][0], (name, start, stop)
        module_name, _, attribute = self._tied.get(name, name).rpartition(".")
        if not is_experts(self._model.get_submodule(module_name)):
            return self._block(module_name, None)[attribute][start:stop].clone()
        rows = torch.empty(stop - start, *self._shapes[name][1:])
        for row, expert in zip(rows, range(start, stop), strict=True):
            row.copy_(self._block(module_name, expert)[attribute][0])
        return rows

    def _block(self, module_name: str, expert: int | None) -> dict[str, Tensor]:
        if module_name != self._module_name:
            self._module_name, self._blocks = module_name, {}
        if expert not in self._blocks:
            self._blocks[expert] = self._draw(module_name, expert)
        return self._blocks[expert]

    @torch.no_grad()
    def _draw(self, module_name: str, expert: int | None) -> dict[str, Tensor]:
        module = _materialise(self._model.get_submodule(module_name), one_row=expert is not None)
        family = self._family_of(module_name)
        with _seeded(f"{self._seed}/{module_name}/{'' if expert is None else expert}"):
            family._init_weights(module)
            # Some families set a router's weight in the law of the block around it.
            family._init_weights(self._parent_with(module_name, module))
        tensors = _direct_tensors(module)
        for attribute, tensor in tensors.items():
            if tensor.isnan().any():
                raise CheckpointError(
                    f"{type(self._model).__name__} has no initialisation law for "
                    f"{module_name}.{attribute}; set `model.path` to start from a checkpoint"
                )
        return tensors

    def _parent_with(self, module_name: str, module: nn.Module) -> nn.Module:
        """The parent, all on meta but for this child: its law changes nothing else."""
        parent_name, _, child_name = module_name.rpartition(".")
        parent = copy.copy(self._model.get_submodule(parent_name))
        parent._modules = parent._modules | {child_name: module}
        return parent

    def _family_of(self, module_name: str) -> PreTrainedModel:
        """The innermost model around the module: in a composite, each part has its own law."""
        while module_name:
            module_name = module_name.rpartition(".")[0]
            module = self._model.get_submodule(module_name)
            if isinstance(module, PreTrainedModel):
                return module
        return self._model


def _materialise(module: nn.Module, *, one_row: bool) -> nn.Module:
    """A copy of the module whose own tensors are fp32 on the CPU; its children stay on meta.

    Filled with NaN, so that a tensor the family's law leaves alone is found out.
    """
    twin = copy.copy(module)
    twin._parameters = {
        name: tensor if tensor is None else nn.Parameter(_poisoned(tensor, one_row=one_row))
        for name, tensor in module._parameters.items()
    }
    twin._buffers = {
        name: tensor if tensor is None else _poisoned(tensor, one_row=one_row)
        for name, tensor in module._buffers.items()
    }
    return twin


def _poisoned(tensor: Tensor, *, one_row: bool) -> Tensor:
    shape = (1, *tensor.shape[1:]) if one_row else tensor.shape
    return torch.full(shape, torch.nan)


def _direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = module._parameters | module._buffers
    return {
        name: tensor.detach()
        for name, tensor in own.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


@contextmanager
def _seeded(key: str) -> Iterator[None]:
    """The CPU's generator seeded by `key`, and as it was afterwards; no device's is touched."""
    state = torch.default_generator.get_state()
    digest = hashlib.sha256(key.encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
