"""The ways to a vocabulary loss that the bench compares, each from hidden states to a mean loss."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatpeak.workers.vocabulary import ring_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states [N, H], targets [N] and head weight (or this rank's rows of it)."""


def ring(vocab: int, *, ranks: int, schedule: str, token_tile: int | None) -> Loss:
    group = dist.group.WORLD if ranks > 1 else None

    def loss(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        nll = ring_cross_entropy(
            x, t, w, group=group, vocab_size=vocab, schedule=schedule, token_tile=token_tile
        )
        return nll.sum() / (len(t) * ranks)

    return loss


def dense(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t(), t)


def torch_chunked() -> Loss | None:
    """torch's own, with its default options; None before torch 2.13."""
    if not hasattr(F, "linear_cross_entropy"):
        return None
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, t, w: F.linear_cross_entropy(x, w, t, options=options)


def vocabulary_parallel(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    """This rank's share of the mean loss over all ranks, which hold equally many tokens."""
    return _VocabularyParallel.apply(x, t, w).sum() / (len(t) * dist.get_world_size())


class _VocabularyParallel(torch.autograd.Function):
    """The tokens of all P ranks against own rows: probabilities [N P, V / P] live until backward.

    Ranks exchange maxima, sums and target logits. As good as it gets without tiles: works in place,
    and gathers hidden states again for backward rather than keep them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        rank, targets = dist.get_rank(), _gathered(t)
        # Ranks need not hold equally many rows.
        ends = torch.zeros(dist.get_world_size(), dtype=torch.long)
        ends[rank] = len(w)
        dist.all_reduce(ends)
        columns = targets - ends[:rank].sum()
        inside = (columns >= 0) & (columns < len(w))
        columns = columns.clamp(0, len(w) - 1).unsqueeze(1)
        logits = _gathered(x) @ w.t()
        y = logits.gather(1, columns).squeeze(1) * inside
        m = logits.amax(1)
        dist.all_reduce(m, op=dist.ReduceOp.MAX)
        p = logits.sub_(m.unsqueeze(1)).exp_()
        z = p.sum(1)
        dist.all_reduce(z)
        dist.all_reduce(y)
        p.div_(z.unsqueeze(1))
        ctx.save_for_backward(x, w, p, columns, inside)
        return (z.log_().add_(m).sub_(y))[rank * len(t) : (rank + 1) * len(t)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        x, w, p, columns, inside = ctx.saved_tensors
        upstream = _gathered(grad.contiguous())
        p.scatter_add_(1, columns, -inside.to(p.dtype).unsqueeze(1)).mul_(upstream.unsqueeze(1))
        d_weight = p.t() @ _gathered(x)
        d_hidden = torch.empty_like(x)
        dist.reduce_scatter(d_hidden, list((p @ w).chunk(dist.get_world_size())))
        return d_hidden, None, d_weight


def _gathered(x: Tensor) -> Tensor:
    whole = x.new_empty((len(x) * dist.get_world_size(), *x.shape[1:]))
    dist.all_gather(list(whole.chunk(dist.get_world_size())), x.detach())
    return whole
