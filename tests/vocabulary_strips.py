"""The vocabulary loss of one device, by our strips and by others, and how each is measured.

A method makes the mean loss of a batch and both gradients, at once. Nothing here uses ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels import vocabulary_strip
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.vocabulary import ring_cross_entropy
from flatpeak.workers.vocabulary.tiles import spans
from vocabulary_methods import Loss, torch_chunked

# How many rows of each gradient are compared: a whole fp64 gradient takes gigabytes.
SAMPLE = 128


@dataclass(frozen=True)
class Batch:
    hidden: Tensor  # [N, H]
    targets: Tensor  # [N]
    weight: Tensor  # [V, H]


Results = tuple[Tensor, Tensor, Tensor]
"""Mean loss, d hidden and d weight."""
Method = Callable[[Batch], Results]


def methods_for(hidden: Tensor) -> dict[str, Method]:
    """By name, those that there are for the device and dtype; our best is the first."""
    found: dict[str, Method] = {"reference": reference, "dense": by_autograd(dense_logits)}
    if vocabulary_strip._kernels(hidden) is not vocabulary_strip.reference:
        found = {"fused": ours} | found
    if (chunked := torch_chunked()) is not None:
        found["torch_chunked"] = by_autograd(chunked)
    if hidden.is_cuda and find_spec("liger_kernel") is not None:
        found["liger"] = by_autograd(liger)
    return found


def ours(batch: Batch) -> Results:
    received: list[Tensor] = []
    hidden = batch.hidden.detach().requires_grad_()
    loss = ring_cross_entropy(
        hidden,
        batch.targets,
        batch.weight,
        group=None,
        vocab_size=len(batch.weight),
        grad_sink=received.append,
    ).mean()
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad, received.pop()


def reference(batch: Batch) -> Results:
    """Ours with the plain strips, whatever the device."""
    plain = vocabulary_strip.reference
    with mock.patch.object(vocabulary_strip, "_kernels", return_value=plain):
        return ours(batch)


def by_autograd(loss: Loss) -> Method:
    def method(batch: Batch) -> Results:
        hidden, weight = (t.detach().requires_grad_() for t in (batch.hidden, batch.weight))
        value = loss(hidden, batch.targets, weight)
        return value.detach(), *torch.autograd.grad(value, (hidden, weight))

    return method


def dense_logits(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), t)


def liger(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(w, x, t)


@dataclass(frozen=True)
class Figures:
    """What a method took above its inputs, and its errors against fp64; NaN and None where the
    device has too little memory for it."""

    peak_bytes: int | None = None
    increment_bytes: int | None = None
    """The peak less the gradients."""
    loss_error: float = math.nan
    error: float = math.nan

    @property
    def fits(self) -> bool:
        return self.peak_bytes is not None


def metered(method: Method, batch: Batch, right: Results) -> Figures:
    """`right` is what `expected` gives for `batch`."""
    try:
        if batch.hidden.is_cuda:
            method(batch)  # what libraries allocate for good is no part of a peak
        with PeakMeter(device=batch.hidden.device) as memory:
            before = memory.live().get(TOTAL, 0)
            memory.reset_peaks()
            loss, *grads = method(batch)
            peak = memory.peaks()[TOTAL] - before
    except torch.OutOfMemoryError:
        return Figures()
    loss_error = ((loss.double() - right[0]) / right[0]).abs().item()
    errors = [
        (actual[: len(rows)].double() - rows).norm() / rows.norm()
        for actual, rows in zip(grads, right[1:], strict=True)
    ]
    return Figures(
        peak_bytes=peak,
        increment_bytes=peak - sum(grad.nbytes for grad in grads),
        loss_error=loss_error,
        error=torch.stack(errors).max().item(),
    )


def expected(batch: Batch) -> Results:
    """In fp64, tile by tile; of the gradients the first `SAMPLE` rows."""
    x, t, w = batch.hidden, batch.targets, batch.weight
    sample = w[:SAMPLE].double()
    lse, y, d_weight = [], [], torch.zeros_like(sample)
    for a, b in spans(len(x), 2048):
        rows = x[a:b].double()
        parts = [(rows @ w[c:d].double().t()).logsumexp(1) for c, d in spans(len(w), 16_384)]
        lse.append(torch.stack(parts).logsumexp(0))
        y.append((rows * w[t[a:b]].double()).sum(1))
        p = (rows @ sample.t() - lse[-1].unsqueeze(1)).exp()
        d_weight += (p - _onehot(t[a:b], 0, len(sample))).t() @ rows
    rows, top = x[:SAMPLE].double(), lse[0][:SAMPLE].unsqueeze(1)
    d_hidden = torch.zeros_like(rows)
    for c, d in spans(len(w), 16_384):
        part_of_w = w[c:d].double()
        p = (rows @ part_of_w.t() - top).exp()
        d_hidden += (p - _onehot(t[:SAMPLE], c, d)) @ part_of_w
    loss = (torch.cat(lse) - torch.cat(y)).mean()
    return loss, d_hidden / len(x), d_weight / len(x)


def _onehot(targets: Tensor, start: int, stop: int) -> Tensor:
    return (targets.unsqueeze(1) == torch.arange(start, stop, device=targets.device)).double()
