"""The gradient of a head tied to the embedding, on its way to the ranks that hold the embedding.

Autograd would add it to the embedding's in the dtype of the weight, on every rank before ranks are
summed. It stays fp32 here, and no rank makes more of it than its rows of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from flatpeak.workers.parallel import Layout
from flatpeak.workers.partition import part
from flatpeak.workers.progress import waiting

Rows = tuple[int, int]


def fsdp_rows(rows: int, world: int, rank: int) -> Rows:
    """The rows of a parameter that FSDP2 leaves with `rank`.

    It cuts as torch.chunk does: equal parts, the last ones short or empty.
    """
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)


class TiedGradient:
    """Sums over all ranks what the vocabulary loss found for its rows of a tied weight [V, H]."""

    def __init__(self, *, vocab_size: int, layout: Layout, rank: int) -> None:
        world, degree = layout.world, layout.vocabulary
        found = [part(vocab_size, degree, other % degree) for other in range(world)]
        held = [fsdp_rows(vocab_size, world, other) for other in range(world)]
        # Both cuts ascend, so what goes to one rank lies together, and in the order of ranks.
        self._sent = [_common(found[rank], rows) for rows in held]
        self._received = [_common(rows, held[rank]) for rows in found]
        self._held = held[rank]
        self._total: Tensor | None = None

    def take(self, grad: Tensor) -> None:
        """Hands the fp32 `grad` of this rank's rows to their holders. Collective over the world."""
        received = [stop - start for start, stop in self._received]
        arrived = grad.new_empty((sum(received), *grad.shape[1:]))
        with waiting():
            dist.all_to_all_single(arrived, grad, received, [b - a for a, b in self._sent])
        first, stop = self._held
        total = grad.new_zeros((stop - first, *grad.shape[1:]))
        for (a, b), rows in zip(self._received, arrived.split(received), strict=True):
            total[a - first : b - first] += rows
        self._total = total

    @torch.no_grad()
    def add_to(self, shard: Tensor) -> None:
        """Adds to the fp32 `shard` of the embedding's gradient what was taken since the last."""
        assert self._total is not None, "no loss has run backward"
        shard.add_(self._total)
        self._total = None


def _common(one: Rows, other: Rows) -> Rows:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (other[0], other[0])
