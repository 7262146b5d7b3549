"""What is made of a token's logits: the loss, its gradient by them, and which options it takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """Loss of a token with logits Y [V], target t and lse = log sum exp Y.

    `lse - (1 - label_smoothing) Y_t - label_smoothing mean(Y) + z_loss lse^2`, where a soft cap
    has already been applied to Y.
    """

    vocab_size: int
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    @property
    def needs_moments(self) -> bool:
        """Whether the loss reads the sum of a token's logits."""
        return self.label_smoothing > 0

    def losses(self, states: Tensor, lse: Tensor) -> Tensor:
        """Loss [N] of tokens whose state over the whole vocabulary is `states` [N, 3 or 5]."""
        losses = lse - (1.0 - self.label_smoothing) * states[:, 2]
        if self.label_smoothing:
            losses.sub_(states[:, 3], alpha=self.label_smoothing / self.vocab_size)
        if self.z_loss:
            losses.addcmul_(lse, lse, value=self.z_loss)
        return losses

    def scales(self, lse: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What an upstream gradient [t] makes of a probability, the target's logit, every logit."""
        p_scale = y_scale = upstream
        flat = None
        if self.z_loss:
            p_scale = upstream * lse.mul(2.0 * self.z_loss).add_(1.0)
        if self.label_smoothing:
            y_scale = upstream * (1.0 - self.label_smoothing)
            flat = upstream * (self.label_smoothing / self.vocab_size)
        return p_scale, y_scale, flat
