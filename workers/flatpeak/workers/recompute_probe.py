"""Whether a family's recomputed layers need the value of what their experts return.

Recomputation serves the tensors that a layer's operations save for backward. Where the experts'
output goes straight into the residual sum, none of them depends on it and the experts need not run
again; where it is normalised first, for one, that operation saves it. The probe follows the output
through one forward pass on the meta device, at the model's true sizes and without any memory, and
looks whether a saved tensor depends on it.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_NAME = "flatpeak-probe"
_TOKENS = 4

_log = logging.getLogger(__name__)


class _Followed(TorchDispatchMode):
    """The storages that depend on an experts' output, within the layer that runs.

    A storage is marked when an operation reads a marked one and writes it; views share the mark.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved = False
        self.outputs = 0
        # Storages by address; held, so that no address is used again.
        self._marked: dict[int, torch.UntypedStorage] = {}

    def mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._marked[storage._cdata] = storage

    def forget(self) -> None:
        self._marked.clear()

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._marked

    def note_saved(self, tensor: Tensor) -> Tensor:
        self.saved |= self.has(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(self.has(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            for written in tree_leaves(out):
                if isinstance(written, Tensor):
                    self.mark(written)
        return out


class _Experts(torch.autograd.Function):
    """Stands for the experts: an output that nothing is known of, with a graph behind it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor) -> Tensor:
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("the probe has no backward pass")


def value_needed_in_recompute(model: PreTrainedModel, layers: Iterable[nn.Module]) -> bool:
    """Whether a recomputation of one of `layers` must run its experts.

    `model` is whole and on the meta device, without checkpointing; its experts implementation is
    replaced. True in doubt. A function of the model alone: every rank finds the same.
    """
    followed = _Followed()

    def experts(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        output = _Experts.apply(hidden, weights)
        assert isinstance(output, Tensor)
        followed.mark(output)
        followed.outputs += 1
        return output

    # What follows a layer is not part of its recomputation.
    hooks = [layer.register_forward_hook(lambda *_: followed.forget()) for layer in layers]
    ALL_EXPERTS_FUNCTIONS.register(_NAME, experts)
    model.set_experts_implementation(_NAME)
    model.train()
    try:
        with followed, saved_tensors_hooks(followed.note_saved, lambda tensor: tensor):
            _run(model)
    except (RuntimeError, TypeError, ValueError) as reason:
        # A model that looks at its numbers cannot run without any.
        _log.warning(
            "%s cannot be probed (%s): its experts run again in every recomputation",
            type(model).__name__,
            reason,
        )
        return True
    finally:
        for hook in hooks:
            hook.remove()
    return followed.saved or not followed.outputs


def _run(model: PreTrainedModel) -> None:
    # A mask of four dimensions is taken as it is; one to be made would be looked at.
    mask = torch.zeros(1, 1, _TOKENS, _TOKENS, dtype=model.dtype, device="meta")
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    model(
        input_ids=ids,
        position_ids=ids,
        attention_mask=mask,
        use_cache=False,
        output_router_logits=False,
    )
