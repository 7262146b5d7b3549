"""The expert weights one rank computes with in one pass, and their gradients.

Native weights are read where they are. Foreign ones travel once a pass, while native experts
compute, and their gradients travel back once, after the last chunk, to be added in fp32 by the
native rank.
"""

from collections.abc import Sequence

import torch

from flatpeak.workers.dispatch.exchange import Arriving, exchange
from flatpeak.workers.dispatch.experts import ExpertLayout, Gradients, HeldExperts, accurate
from flatpeak.workers.dispatch.routing import Group, Routing


class Migration:
    """Who sends which experts to whom, from the plan alone."""

    def __init__(self, routing: Routing, group: Group) -> None:
        plan, rank = routing.plan, routing.rank
        self.needed = plan.moves_weights
        self._group = group
        natives = plan.natives[rank]
        leaving = [[e for e in foreign if e in natives] for foreign in plan.foreign]
        self._local = [expert - natives.start for experts in leaving for expert in experts]
        self._send = [len(experts) for experts in leaving]
        # Foreign experts are listed by rising number, hence by owner: the order of arrival.
        self._receive = [sum(e in owned for e in plan.foreign[rank]) for owned in plan.natives]

    def send_weights(self, native: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Arriving]:
        """Start the foreign weights on their way. Collective when the plan moves any."""
        if not self.needed:
            return []
        return [
            self._exchange(weight[self._local].to(dtype), self._send, self._receive)
            for weight in native
        ]

    def gradients(self, layout: ExpertLayout, native: Sequence[torch.Tensor]) -> Gradients:
        """Accumulators for the weight gradients, not yet written."""
        mine, foreign = [], []
        for weight in native:
            wide = accurate(weight.dtype)
            mine.append(torch.empty_like(weight, dtype=wide))
            shape = (sum(self._receive), *weight.shape[1:])
            foreign.append(weight.new_empty(shape, dtype=wide))
        return Gradients(layout, HeldExperts(mine, foreign if self.needed else ()))

    def return_gradients(self, gradients: HeldExperts) -> None:
        """Add the foreign gradients to the native ones of their owners, in rank order."""
        returning = [
            self._exchange(foreign, self._receive, self._send) for foreign in gradients.foreign
        ]
        for mine, arriving in zip(gradients.natives, returning, strict=False):
            for local, gradient in zip(self._local, arriving.wait(), strict=True):
                mine[local] += gradient

    def _exchange(
        self, experts: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Arriving:
        landing = experts.new_empty((sum(receive), *experts.shape[1:]))
        return exchange(experts, landing, send, receive, self._group)
