"""Expert weights that move to other ranks for a layer, and their gradients that move back.

Native weights are read, and sent, where they are. Foreign ones travel while native experts compute.
Inside a checkpoint they travel in the forward pass and in the backward pass; outside they stay in
between. Their gradients travel back once, after the last chunk, and the native rank adds them in
fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flatpeak.workers.dispatch.assignment import DispatchPlan
from flatpeak.workers.dispatch.exchange import Letter, trade
from flatpeak.workers.dispatch.experts import ExpertLayout, Gradients, HeldExperts, accurate
from flatpeak.workers.dispatch.routing import Group, Routing
from flatpeak.workers.progress import waiting


@dataclass
class ForeignWeights:
    """Weights under way or here, [foreign experts, ...] of each parameter."""

    weights: Sequence[torch.Tensor]
    sent: Sequence[Letter] = ()
    works: Sequence[dist.Work] = ()

    def wait(self) -> Sequence[torch.Tensor]:
        with waiting():
            for work in self.works:
                work.wait()
        self.works = self.sent = ()
        return self.weights


@dataclass(frozen=True)
class _Move:
    """One expert that a helper computes for its owner."""

    owner: int
    helper: int
    native: int
    """Its number among the owner's natives."""
    foreign: int
    """Its number among the helper's foreigners."""
    turn: int
    """When its gradients return."""


class Migration:
    """Who sends which experts to whom, from the plan alone."""

    def __init__(self, routing: Routing, group: Group) -> None:
        self._group = group
        # Both sides of a pair go through its moves in this order, so their letters match.
        moves = list(_moves(routing.plan))
        self._leaving = [move for move in moves if move.owner == routing.rank]
        self._coming = [move for move in moves if move.helper == routing.rank]
        self._turns = max((move.turn + 1 for move in moves), default=0)

    def send_weights(self, native: Sequence[torch.Tensor], dtype: torch.dtype) -> ForeignWeights:
        """Start the foreign weights on their way."""
        foreign = [self._foreign_like(weight, dtype) for weight in native]
        sent = [letter for weight in native for letter in self._letters(weight, dtype)]
        coming = [
            Letter(weight[move.foreign], move.owner) for weight in foreign for move in self._coming
        ]
        return ForeignWeights(foreign, sent, trade(sent, coming, self._group))

    def _letters(self, weight: torch.Tensor, dtype: torch.dtype) -> list[Letter]:
        # However many helpers an expert has, it is converted once.
        experts = {move.native: weight[move.native].to(dtype) for move in self._leaving}
        return [Letter(experts[move.native], move.helper) for move in self._leaving]

    def gradients(self, layout: ExpertLayout, native: Sequence[torch.Tensor]) -> Gradients:
        """Accumulators for the weight gradients, not yet written."""
        mine = [torch.empty_like(weight, dtype=accurate(weight.dtype)) for weight in native]
        foreign = [self._foreign_like(weight, accurate(weight.dtype)) for weight in native]
        return Gradients(layout, HeldExperts(mine, foreign if self._coming else ()))

    def return_gradients(self, gradients: HeldExperts) -> None:
        """Add the foreign gradients to the native ones of their owners, in rank order.

        An owner takes as many experts a turn as a rank may hold foreign ones, so that no more
        gradients are on their way to it. All ranks count the turns alike.
        """
        for turn in range(self._turns):
            self._return_turn(turn, gradients)

    def _return_turn(self, turn: int, gradients: HeldExperts) -> None:
        # A call of its own: what landed in a turn is freed before the next one lands.
        sent = [
            Letter(foreign[move.foreign], move.owner)
            for foreign in gradients.foreign
            for move in self._coming
            if move.turn == turn
        ]
        taken = [move for move in self._leaving if move.turn == turn]
        landing = [
            Letter(torch.empty_like(mine[move.native]), move.helper)
            for mine in gradients.natives
            for move in taken
        ]
        with waiting():
            for work in trade(sent, landing, self._group):
                work.wait()
        arrived = iter(landing)
        for mine in gradients.natives:
            for move in taken:
                mine[move.native] += next(arrived).tensor

    def _foreign_like(self, native: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return native.new_empty((len(self._coming), *native.shape[1:]), dtype=dtype)


def _moves(plan: DispatchPlan) -> Iterator[_Move]:
    given = [0] * plan.ranks
    at_once = max(map(len, plan.foreign))
    for helper, experts in enumerate(plan.foreign):
        for foreign, expert in enumerate(experts):
            owner = plan.owner(expert)
            native = expert - plan.natives[owner].start
            yield _Move(owner, helper, native, foreign, turn=given[owner] // at_once)
            given[owner] += 1
