"""What is made of a token's logits: the loss, its gradient by them, and which options it takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """Loss of a token with logits Y [V], target t and lse = log sum exp Y.

    `lse - (1 - label_smoothing) Y_t - label_smoothing mean(Y) + z_loss lse^2`, where Y has already
    been scaled and capped.
    """

    vocab_size: int
    logit_scale: float = 1.0
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    @property
    def needs_moments(self) -> bool:
        """Whether the loss reads the sum of a token's logits."""
        return self.label_smoothing > 0

    def losses(self, states: Tensor) -> Tensor:
        """Loss [N] of tokens with `states` [N, 3 or 5] over the whole vocabulary."""
        m, log_z = states[:, 0], states[:, 1].log1p()
        # In this order, so that a small loss keeps its digits where the target has the maximum.
        losses = m - (1.0 - self.label_smoothing) * states[:, 2] + log_z
        if self.label_smoothing:
            losses.sub_(states[:, 3], alpha=self.label_smoothing / self.vocab_size)
        if self.z_loss:
            lse = log_z.add_(m)
            losses.addcmul_(lse, lse, value=self.z_loss)
        return losses

    def shares(self, states: Tensor) -> Tensor:
        """What exp(logit - m) counts in the gradient [N] of each token's loss by that logit.

        This and the maximum m are all that backward needs of a state. A probability as
        exp(logit - lse) would have the error of lse, which in fp32 grows with the logits.
        """
        z = states[:, 1] + 1.0
        if not self.z_loss:
            return z.reciprocal_()
        lse = states[:, 1].log1p().add_(states[:, 0])
        return lse.mul_(2.0 * self.z_loss).add_(1.0).div_(z)

    def scales(self, shares: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What an upstream gradient [t] makes of exp(logit - m), the target's and every logit."""
        if self.logit_scale != 1.0:
            upstream = upstream * self.logit_scale
        p_scale, y_scale, flat = upstream * shares, upstream, None
        if self.label_smoothing:
            y_scale = upstream * (1.0 - self.label_smoothing)
            flat = upstream * (self.label_smoothing / self.vocab_size)
        return p_scale, y_scale, flat
