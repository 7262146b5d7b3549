"""What the ranks agreed on for one layer: every counted size, as Python ints."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.assignment import DispatchPlan
from flatpeak.workers.dispatch.cutting import Extent
from flatpeak.workers.dispatch.shares import Share

Group = dist.ProcessGroup | None

# Labels are kept for the layer and travel with every row: two bytes hold any sensible layer.
LABEL = torch.int16


@dataclass(frozen=True)
class Chunk:
    """The part of the layer that is on its way at once, as one rank sees it."""

    share: Share
    """This rank's tokens."""
    send: tuple[int, ...]
    """Rows to each rank; none to itself, they are read in place."""
    receive: tuple[int, ...]
    own_routes: tuple[int, ...]
    """Routes of own tokens to each local instance."""
    landed_routes: tuple[int, ...]
    """Routes of received rows to each local instance."""


@dataclass(frozen=True)
class Routing:
    rank: int
    plan: DispatchPlan
    splits: tuple[tuple[int, int], ...]
    """(instance, routes) of this rank's routes, ordered by expert, then by token position."""
    chunks: tuple[Chunk, ...]
    planned_bytes: int = 0
    """What dispatch takes on this rank above its inputs and results; 0 without a footprint."""

    @property
    def first_instance(self) -> int:
        return self.plan.first_instance[self.rank]

    @property
    def instances(self) -> int:
        return self.plan.first_instance[self.rank + 1] - self.first_instance

    def extent(self, tokens: int) -> Extent:
        """The sizes of this rank, which has `tokens` tokens in the layer."""
        chunks = self.chunks
        computed = [list(map(sum, zip(c.own_routes, c.landed_routes, strict=True))) for c in chunks]
        return Extent(
            tokens=max(chunk.share.size(tokens) for chunk in chunks),
            sent=max(sum(chunk.send) for chunk in chunks),
            sent_to_one=max(max(chunk.send) for chunk in chunks),
            received=max(sum(chunk.receive) for chunk in chunks),
            computed=max(map(sum, computed)),
            computed_by_one=max(max(routes, default=0) for routes in computed),
            chunks=len(chunks),
            layer_tokens=tokens,
            foreign=len(self.plan.foreign[self.rank]),
            most_foreign=max(map(len, self.plan.foreign)),
            leaving=self.plan.leaving(self.rank),
            ranks=self.plan.ranks,
            instances=self.plan.first_instance[-1],
            held=self.instances,
        )

    def label(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The instance that computes each route, [N, k] of `LABEL`."""
        experts = expert_ids.to(LABEL)
        if not self.plan.moves_weights:
            return experts  # the only instances are the experts in their order
        flat = experts.flatten()
        instances, routes = zip(*self.splits, strict=True) if self.splits else ((), ())
        by_expert = torch.repeat_interleave(
            _on(flat.device, np.array(instances, dtype=np.int16)),
            _on(flat.device, np.array(routes, dtype=np.int64)),
            output_size=flat.numel(),
        )
        # Stable: routes of one expert keep the order of their tokens, on which the splits count.
        order = torch.argsort(flat, stable=True)
        return torch.empty_like(by_expert).scatter_(0, order, by_expert).view(expert_ids.shape)

    def owners(self, device: torch.device) -> torch.Tensor:
        """The rank that holds each instance, [instances] int64."""
        return owners_of(np.diff(self.plan.first_instance), device)


def visits(ranks_of: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """[n, ranks] bool: whether a token of `rank` travels to each other rank, from [n, k] ranks."""
    travels = torch.zeros(len(ranks_of), ranks, dtype=torch.bool, device=ranks_of.device)
    travels.scatter_(1, ranks_of, True)
    travels[:, rank] = False
    return travels


def owners_of(held: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """The rank of each instance, when rank r holds the next `held[r]` ones."""
    return _on(device, np.repeat(np.arange(len(held)), held))


def _on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    # Pageable memory is staged before the call returns; waiting for the copy would stall the host.
    return torch.from_numpy(values).to(device, non_blocking=True)
