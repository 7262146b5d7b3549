"""Load of the routers: tokens per expert, the auxiliary loss, and bias balancing.

The auxiliary loss is the load-balancing loss of the Switch Transformer as transformers defines it,
pooled over layers and tokens: with F_e the share of routes that went to expert e and P_e its mean
router probability, `coefficient * E * sum_e F_e P_e`. F and P are means over *all* tokens of the
step, on every rank and in every microbatch, so the loss does not depend on how the step is cut.

Shapes: L MoE layers, E experts, N tokens, k experts per token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.workers.errors import InputError
from flatpeak.workers.progress import waiting
from flatpeak.workers.recompute import is_recomputing


class RouterLoad:
    """Collects what the routers decide during the forward passes of one step."""

    def __init__(self, *, layers: int, experts: int, device: torch.device) -> None:
        self.counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)  # [L, E]
        self._counting = True
        self._mask: Tensor | None = None
        self._probabilities: list[Tensor] = []  # one [E] a layer, this microbatch

    def begin_step(self) -> None:
        self.counts.zero_()
        self._counting = True

    def begin_microbatch(self, mask: Tensor | None = None) -> None:
        """`mask` [N] is 1 for real tokens and 0 for padding; None: all are real."""
        self._mask = mask
        self._probabilities = []

    def finish_counting(self) -> None:
        """Sums the counts over all ranks; later forward passes of the step do not count again.

        Collective over the world: every rank calls it at the same place of the step.
        """
        if dist.is_initialized():
            with waiting():
                dist.all_reduce(self.counts)
        self._counting = False

    def count(self, layer: int, expert_ids: Tensor) -> None:
        """Adds the routes of `expert_ids` [N, k]; recomputation repeats routes already counted."""
        if not self._counting or is_recomputing():
            return
        routes = torch.ones_like(expert_ids)
        if self._mask is not None:
            routes = routes * self._mask[:, None].to(routes.dtype)
        self.counts[layer].scatter_add_(0, expert_ids.reshape(-1), routes.reshape(-1))

    def observe(self, logits: Tensor) -> None:
        """Adds the summed router probabilities of `logits` [N, E] of one layer.

        Only [E] numbers leave the layer: inside a checkpoint the softmax is recomputed. The sums
        are made in recomputation too, because a checkpoint must save the same tensors both times.
        """
        probabilities = torch.softmax(logits.float(), dim=-1)
        if self._mask is not None:
            probabilities = probabilities * self._mask[:, None]
        total = probabilities.sum(dim=0)
        if not is_recomputing():
            self._probabilities.append(total)

    def auxiliary_loss(self, coefficient: float, *, tokens: int) -> Tensor:
        """This rank's and microbatch's additive part of the loss of the whole step.

        `tokens` counts the real tokens of the step over all ranks and microbatches. Needs
        `finish_counting` first. The parts of all ranks and microbatches sum to the loss.
        """
        assert not self._counting, "the counts of the whole step come before its auxiliary loss"
        layers, experts = self.counts.shape
        share = self.counts.sum(dim=0).float() / (layers * tokens)  # F
        mean = torch.stack(self._probabilities).sum(dim=0) / (layers * tokens)  # a part of P
        self._probabilities = []  # else they kept the graph alive after its backward pass
        return coefficient * experts * (share * mean).sum()

    def bias_gradient(self, layer: int) -> Tensor:
        """[E] sign of each expert's excess load; descending it raises the bias of idle experts.

        DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
        """
        counts = self.counts[layer].float()
        return torch.sign(counts - counts.mean())


def check_router_logits(model: nn.Module) -> None:
    """Raises InputError where `model` (whole, any device) does not say what its routers return."""
    _recorder_of(model)


def _recorder_of(model: nn.Module) -> Any:
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None:
        raise InputError(
            f"{type(model).__name__} does not say where its router logits are, so it can have no "
            "auxiliary loss; set train.router_aux_loss_coef to 0"
        )
    return recorder


def watch_routers(model: nn.Module, load: RouterLoad) -> None:
    """Sends every router's logits to `load`, wherever the family's router returns them."""
    recorder = _recorder_of(model)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        load.observe(output[recorder.index] if isinstance(output, tuple) else output)

    for module in model.modules():
        if isinstance(module, recorder.target_class):
            module.register_forward_hook(hook)


def auxiliary_coefficient(config: Any, override: float | None) -> float:
    """The job's coefficient, or else what the model's config asks for; 0 is off."""
    if override is not None:
        return override
    if getattr(config, "output_router_logits", False):
        return float(getattr(config, "router_aux_loss_coef", 0.0))
    return 0.0
