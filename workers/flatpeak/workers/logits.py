"""What a family makes of the products of its head before they are logits: a scale, a soft cap.

Both are read from the config, under the keys that transformers' families use, and then held against
the model's own forward pass: a family that does anything else is refused, not trained on a loss
that is not its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from flatpeak.workers.errors import SpecError

LARGEST_PRODUCT = 100.0
MOST_PRODUCTS = 2**22


@dataclass(frozen=True)
class Logits:
    """They are `soft_cap * tanh(scale * products / soft_cap)`, without a cap `scale * products`."""

    scale: float = 1.0
    soft_cap: float | None = None

    def of(self, products: Tensor) -> Tensor:
        logits = products * self.scale
        return logits if self.soft_cap is None else (logits / self.soft_cap).tanh() * self.soft_cap


def logits_of(model: PreTrainedModel) -> Logits:
    """How `model`, whole and on any device, makes its logits.

    Raises SpecError when it makes them in a way that the vocabulary loss does not know.
    """
    config: Any = model.config.get_text_config()
    logits = Logits(
        scale=(getattr(config, "logit_scale", None) or 1.0)
        / (getattr(config, "logits_scaling", None) or 1.0),
        soft_cap=getattr(config, "final_logit_softcapping", None),
    )
    # As many as the head makes, within reason: a family may cut some off.
    count = min(config.vocab_size, MOST_PRODUCTS)
    products = torch.linspace(-LARGEST_PRODUCT, LARGEST_PRODUCT, count).view(1, 1, -1)
    found, wanted = _forward(model, products), logits.of(products)
    if found.shape != wanted.shape or not torch.allclose(found.float(), wanted, rtol=1e-4):
        raise SpecError(
            f"{type(model).__name__} makes its logits in a way that the vocabulary loss does not "
            f"know, so it cannot be trained; what its config says of them: {_settings(config)}"
        )
    return logits


class _Given(nn.Module):
    """A decoder whose last hidden states are given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)  # pyright: ignore[reportArgumentType]


def _forward(model: Any, products: Tensor) -> Tensor:
    """The logits of `model` where its head finds `products`."""
    with _replaced(model, model.base_model_prefix, _Given(products)):  # noqa: SIM117
        with _replaced(model, "lm_head", nn.Identity()), torch.no_grad():
            return model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits


@contextmanager
def _replaced(model: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    original = getattr(model, name)
    setattr(model, name, module)
    try:
        yield
    finally:
        setattr(model, name, original)


def _settings(config: Any) -> str:
    said = {
        key: value
        for key, value in config.to_dict().items()
        if value is not None
        and (("logit" in key and key != "output_router_logits") or "vocab_size" in key)
    }
    return ", ".join(f"{key} = {value}" for key, value in said.items())
