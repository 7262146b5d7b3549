"""The expert weights one rank computes with in one pass, and their gradients.

Native weights are read where they are. Foreign ones travel once a pass, before the first chunk, and
their gradients travel back once, after the last, to be added in fp32 by the native rank.
"""

from collections.abc import Sequence

import torch

from flatpeak.workers.dispatch.exchange import exchange
from flatpeak.workers.dispatch.experts import Tensors
from flatpeak.workers.dispatch.routing import Group, Routing


class HeldExperts:
    """Weights, or gradients, of the instances of one rank: natives first, then foreigners."""

    def __init__(self, native: Sequence[torch.Tensor], foreign: Sequence[torch.Tensor]) -> None:
        self.native = native
        self.foreign = foreign

    def of(self, instance: int) -> Tensors:
        natives = len(self.native[0])
        if instance < natives:
            return tuple(tensor[instance] for tensor in self.native)
        return tuple(tensor[instance - natives] for tensor in self.foreign)


class Migration:
    """Who sends which experts to whom, from the plan alone."""

    def __init__(self, routing: Routing, group: Group) -> None:
        plan, rank = routing.plan, routing.rank
        self._needed = plan.moves_weights
        self._group = group
        natives = plan.natives[rank]
        leaving = [[e for e in foreign if e in natives] for foreign in plan.foreign]
        self._local = [expert - natives.start for experts in leaving for expert in experts]
        self._send = [len(experts) for experts in leaving]
        # Foreign experts are listed by rising number, hence by owner: the order of arrival.
        self._receive = [sum(e in owned for e in plan.foreign[rank]) for owned in plan.natives]

    def bring_weights(self, native: Sequence[torch.Tensor], dtype: torch.dtype) -> HeldExperts:
        """The weights to compute with. Collective when the plan moves any."""
        if not self._needed:
            return HeldExperts(native, ())
        arriving = [
            exchange(
                weight[self._local].flatten(1).to(dtype), self._send, self._receive, self._group
            )
            for weight in native
        ]
        foreign = [
            rows.wait().unflatten(1, weight.shape[1:])
            for rows, weight in zip(arriving, native, strict=True)
        ]
        return HeldExperts(native, foreign)

    def zero_gradients(self, native: Sequence[torch.Tensor]) -> HeldExperts:
        """fp32 (or wider) accumulators: zero, so that experts without a token end as zero."""
        arrivals = sum(self._receive)
        mine, foreign = [], []
        for weight in native:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            mine.append(torch.zeros_like(weight, dtype=dtype))
            foreign.append(weight.new_zeros((arrivals, *weight.shape[1:]), dtype=dtype))
        return HeldExperts(mine, foreign if self._needed else ())

    def return_gradients(self, gradients: HeldExperts) -> None:
        """Add the foreign gradients to the native ones of their owners, in rank order."""
        if not self._needed:
            return
        for mine, foreign in zip(gradients.native, gradients.foreign, strict=True):
            arriving = exchange(foreign.flatten(1), self._receive, self._send, self._group)
            for local, gradient in zip(self._local, arriving.wait(), strict=True):
                mine[local] += gradient.view(mine.shape[1:])
