"""Expert weights that move to other ranks for one pass, and their gradients that move back.

Native weights are read, and sent, where they are. Foreign ones travel once a pass, while native
experts compute. Their gradients travel back once, after the last chunk, and the native rank adds
them in fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.exchange import Letter, trade
from flatpeak.workers.dispatch.experts import ExpertLayout, Gradients, HeldExperts, accurate
from flatpeak.workers.dispatch.routing import Group, Routing


@dataclass
class ForeignWeights:
    """Weights under way, [foreign experts, ...] of each parameter."""

    weights: Sequence[torch.Tensor]
    sent: Sequence[Letter]
    works: Sequence[dist.Work]

    def wait(self) -> Sequence[torch.Tensor]:
        for work in self.works:
            work.wait()
        self.works = self.sent = ()
        return self.weights


class Migration:
    """Who sends which experts to whom, from the plan alone."""

    def __init__(self, routing: Routing, group: Group) -> None:
        plan, rank = routing.plan, routing.rank
        natives = plan.natives[rank]
        self._group = group
        # Both sides of a pair go through the experts by rising number, so their letters match.
        self._leaving = [
            (expert - natives.start, helper)
            for helper, foreign in enumerate(plan.foreign)
            for expert in foreign
            if expert in natives
        ]
        self._owners = [plan.owner(expert) for expert in plan.foreign[rank]]

    def send_weights(self, native: Sequence[torch.Tensor], dtype: torch.dtype) -> ForeignWeights:
        """Start the foreign weights on their way."""
        foreign = [
            weight.new_empty((len(self._owners), *weight.shape[1:]), dtype=dtype)
            for weight in native
        ]
        sent = [
            Letter(weight[local].to(dtype), helper)
            for weight in native
            for local, helper in self._leaving
        ]
        return ForeignWeights(foreign, sent, trade(sent, self._inbox(foreign), self._group))

    def gradients(self, layout: ExpertLayout, native: Sequence[torch.Tensor]) -> Gradients:
        """Accumulators for the weight gradients, not yet written."""

        def sums(count: int, weight: torch.Tensor) -> torch.Tensor:
            shape = (count, *weight.shape[1:])
            return weight.new_empty(shape, dtype=accurate(weight.dtype))

        mine = [sums(len(weight), weight) for weight in native]
        foreign = [sums(len(self._owners), weight) for weight in native] if self._owners else ()
        return Gradients(layout, HeldExperts(mine, foreign))

    def return_gradients(self, gradients: HeldExperts) -> None:
        """Add the foreign gradients to the native ones of their owners, in rank order."""
        arriving = [
            [Letter(torch.empty_like(mine[local]), helper) for local, helper in self._leaving]
            for mine in gradients.natives
        ]
        inbox = [letter for letters in arriving for letter in letters]
        for work in trade(list(self._inbox(gradients.foreign)), inbox, self._group):
            work.wait()
        for mine, letters in zip(gradients.natives, arriving, strict=True):
            for (local, _), letter in zip(self._leaving, letters, strict=True):
                mine[local] += letter.tensor

    def _inbox(self, foreign: Sequence[torch.Tensor]) -> Iterator[Letter]:
        """The tensors of each foreign expert, with its owner."""
        for experts in foreign:
            for tensor, owner in zip(experts, self._owners, strict=True):
                yield Letter(tensor, owner)
