"""The yardstick: a plain single-process trainer of the same job.

transformers' own model and loss (ours where the job has z-loss or label smoothing), gradient
checkpointing, `torch.optim.AdamW` and `clip_grad_norm_`, nothing else of ours but the same samples
and initial weights. Tests compare losses and weights with it; the demo compares its peaks,
component by component.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from flatpeak.workers.batches import SampleSource
from flatpeak.workers.buckets import Range
from flatpeak.workers.checkpoint import load_config, moe_layers
from flatpeak.workers.data import sample_ids
from flatpeak.workers.memory import attribute
from flatpeak.workers.model import decays
from flatpeak.workers.routers import auxiliary_coefficient
from flatpeak.workers.scopes import OTHER, scope
from flatpeak.workers.weights import open_weights

if TYPE_CHECKING:
    from flatpeak.controller.spec import Spec


class PlainTrainer:
    """Trains `spec` in fp32 in this process. `sequences` limits a step to its first sequences."""

    def __init__(self, spec: "Spec", source: SampleSource, *, sequences: int | None = None) -> None:
        self.spec, self.source = spec, source
        self.sequences = sequences or spec.train.sequences_per_step
        self.model: Any = plain_model(spec)
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.model._set_gradient_checkpointing(True, gradient_checkpointing_func=_checkpoint)
        train = spec.train
        if train.z_loss or train.label_smoothing:  # which transformers does not know
            self.model.loss_function = partial(
                token_loss, z_loss=train.z_loss, label_smoothing=train.label_smoothing
            )
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            groups[decays(name, parameter.dim())].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": train.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
        )
        self._backward_scopes = _open_scopes(self.model)

    def step(self, step: int, lr: float) -> tuple[float, float]:
        """One step (from 1). Returns the loss and the gradient norm before clipping."""
        loss = self.backward(step)
        limit = self.spec.train.max_grad_norm
        parameters = list(self.model.parameters())
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with scope("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def backward(self, step: int) -> float:
        """Loss of the step, its gradients in `.grad`."""
        first = sample_ids(step - 1, self.spec.train.sequences_per_step)[: self.sequences]
        samples = [self.source.sample(index) for index in first]
        inputs, targets, positions = (
            torch.from_numpy(np.stack([getattr(s, name) for s in samples]).astype(np.int64))
            for name in ("inputs", "targets", "positions")
        )
        loss = self._loss(inputs, targets, positions)
        with self._backward_scopes:
            loss.backward()
        return loss.item()

    def _loss(self, inputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        coefficient = auxiliary_coefficient(self.model.config, self.spec.train.router_aux_loss_coef)
        self.model.router_aux_loss_coef = coefficient
        return self.model(
            input_ids=inputs,
            position_ids=positions,
            labels=targets,
            shift_labels=targets,
            num_items_in_batch=(targets != _NO_TARGET).sum(),
            use_cache=False,
            output_router_logits=bool(coefficient),
        ).loss


def token_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    shift_labels: Tensor,
    num_items_in_batch: Tensor,
    z_loss: float,
    label_smoothing: float,
    **_: Any,
) -> Tensor:
    """The loss of a causal language model, called as transformers calls it, with two options more.

    Each target's loss is its cross entropy, smoothed, and `z_loss` times its squared log-sum-exp.
    """
    logits, targets = logits.float().view(-1, vocab_size), shift_labels.view(-1)
    losses = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    squares = logits.logsumexp(1).square().masked_fill(targets == _NO_TARGET, 0.0)
    return (losses + z_loss * squares.sum()) / num_items_in_batch


_NO_TARGET = -100
_ATTENTION_NAME = "flatpeak_plain"


def _attention(*args: Any, **kwargs: Any) -> Any:
    with scope("attention"):
        return sdpa_attention_forward(*args, **kwargs)


def plain_model(spec: "Spec") -> PreTrainedModel:
    """The job's model in fp32, whole, with the job's initial weights."""
    AttentionInterface.register(_ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(_ATTENTION_NAME, sdpa_mask)
    config = load_config(path=spec.model.path, config=spec.model.config)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=_ATTENTION_NAME
    )
    weights = open_weights(spec)
    with torch.no_grad():
        for name, tensor in _stateful(model):
            tensor.copy_(weights.read(Range(name, 0, tensor.numel())).view(tensor.shape))
    return model.train()


def _stateful(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _checkpoint(function: Any, *args: Any) -> Any:
    attribute(args[0], "boundaries")  # all that a checkpointed layer keeps is its input
    return torch_checkpoint(_layer, function, *args, use_reentrant=False)


def _layer(function: Any, *args: Any) -> Any:
    # The second forward runs in the middle of the experts' backward, whose work it is not.
    with scope(OTHER):
        return function(*args)


class _BackwardScopes(AbstractContextManager[None]):
    """Scopes that hooks open and close in a backward pass. At its end none is left open."""

    def __init__(self) -> None:
        self._open: list[ExitStack] = []

    def opens(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            opened = ExitStack()
            opened.enter_context(scope(name))
            self._open.append(opened)

        return enter

    def close(self, *_: Any) -> None:
        self._open.pop().close()

    def __exit__(self, *error: object) -> None:
        while self._open:  # the pass has failed
            self.close()


def _open_scopes(model: PreTrainedModel) -> _BackwardScopes:
    """Opens scopes in every forward; those of a backward inside the `with` block of the result."""
    backward = _BackwardScopes()
    for _, experts in moe_layers(model):
        experts.forward = _within("dispatch", experts.forward)
        experts.register_full_backward_pre_hook(backward.opens("dispatch"))
        experts.register_full_backward_hook(backward.close)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: attribute(p.grad, "gradients"))
    # The backward of the loss comes before that of the head: one scope spans both.
    head, plain_loss = model.lm_head, _within("vocabulary", model.loss_function)
    head.forward = _within("vocabulary", head.forward)
    head.register_full_backward_hook(backward.close)

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        loss = plain_loss(*args, **kwargs)
        if loss.requires_grad:
            loss.register_hook(backward.opens("vocabulary"))
        return loss

    model.loss_function = loss_function
    return backward


def _within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in a scope. A forward hook would not close it when a recomputation, which has what
    it needs, or an error leaves the module early."""

    @wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with scope(name):
            return function(*args, **kwargs)

    return scoped
