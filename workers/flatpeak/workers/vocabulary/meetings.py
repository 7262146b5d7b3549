"""Every meeting of a token tile with a vocabulary tile, whichever of the two moves.

Shapes: N own tokens, V_r own vocabulary rows, t and v those of a tile, H hidden width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatpeak.kernels.vocabulary_strip import accumulate_, merge_, strip_residual, strip_state
from flatpeak.workers.vocabulary.objective import Objective
from flatpeak.workers.vocabulary.ring import Carry, Ring, tour
from flatpeak.workers.vocabulary.tiles import Tiles, spans


@dataclass(frozen=True)
class Plan:
    """What all ranks of a call agree on: whose rows are where, how they are cut, what moves."""

    ring: Ring
    tokens: list[int]
    shards: list[tuple[int, int]]
    tiles: Tiles
    weights_move: bool
    objective: Objective


@dataclass(frozen=True)
class Meeting:
    """A token tile and a vocabulary tile that are both on this rank now.

    `token_sums` and `row_sums` give what is accumulated for the two tiles. That of the moving one
    may still be in flight, so ask for it last.
    """

    tokens: Sequence[Tensor]
    """Hidden states [t, H], targets [t] int64, and what else goes with the tokens."""
    w: Tensor
    first_row: int
    token_sums: Callable[[], Tensor] | None
    row_sums: Callable[[], Tensor] | None

    @property
    def x(self) -> Tensor:
        return self.tokens[0]

    @property
    def columns(self) -> Tensor:
        """The targets, counted from the vocabulary tile's first row."""
        return self.tokens[1] - self.first_row


def _meetings(
    plan: Plan,
    tokens: Sequence[Tensor],
    shard: Tensor,
    token_sums: Tensor | None,
    row_sums: Tensor | None,
) -> Iterator[Meeting]:
    """All meetings on this rank, in order; collective over the ring.

    After the last, `token_sums` [N, ...] holds what was added for this rank's tokens on any rank,
    and `row_sums` [V_r, H] what was added for its vocabulary rows.
    """
    meet = _weights_visit if plan.weights_move else _tokens_visit
    return meet(plan, tokens, shard, token_sums, row_sums)


def _tokens_visit(
    plan: Plan,
    tokens: Sequence[Tensor],
    shard: Tensor,
    token_sums: Tensor | None,
    row_sums: Tensor | None,
) -> Iterator[Meeting]:
    carry = None if token_sums is None else Carry(plan.ring, token_sums, plan.tiles.tokens)
    first_row = plan.shards[plan.ring.rank][0]
    for visit in tour(plan.ring, plan.tokens, plan.tiles.tokens, tokens, carry):
        if visit.start == visit.stop:
            continue
        for a, b in spans(shard.shape[0], plan.tiles.vocabulary):
            yield Meeting(
                tokens=visit.payload,
                w=shard[a:b],
                first_row=first_row + a,
                token_sums=None if carry is None else carry.here,
                row_sums=_rows_of(row_sums, a, b),
            )


def _weights_visit(
    plan: Plan,
    tokens: Sequence[Tensor],
    shard: Tensor,
    token_sums: Tensor | None,
    row_sums: Tensor | None,
) -> Iterator[Meeting]:
    carry = None if row_sums is None else Carry(plan.ring, row_sums, plan.tiles.vocabulary)
    rows = [stop - start for start, stop in plan.shards]
    for visit in tour(plan.ring, rows, plan.tiles.vocabulary, (shard,), carry):
        if visit.start == visit.stop:
            continue
        for a, b in spans(tokens[0].shape[0], plan.tiles.tokens):
            yield Meeting(
                tokens=[x[a:b] for x in tokens],
                w=visit.payload[0],
                first_row=plan.shards[visit.owner][0] + visit.start,
                token_sums=_rows_of(token_sums, a, b),
                row_sums=None if carry is None else carry.here,
            )


def _rows_of(sums: Tensor | None, a: int, b: int) -> Callable[[], Tensor] | None:
    return None if sums is None else lambda: sums[a:b]


def states_of(
    plan: Plan, hidden: Tensor, targets: Tensor, shard: Tensor, *, moments: bool
) -> Tensor:
    """The state [N, 3], or [N, 5] with moments, of each own token over the whole vocabulary."""
    # fp64, since with small tiles many thousand strips are merged into one state.
    states = hidden.new_zeros((hidden.shape[0], 5 if moments else 3), dtype=torch.float64)
    states[:, :2] = states.new_tensor((float("-inf"), -1.0))
    for meeting in _meetings(plan, (hidden, targets), shard, states, None):
        assert meeting.token_sums is not None
        state = strip_state(
            meeting.x,
            meeting.w,
            meeting.columns,
            scale=plan.objective.logit_scale,
            soft_cap=plan.objective.soft_cap,
            moments=moments,
        )
        merge_(meeting.token_sums(), state)
    return states


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What a backward pass reads, and which gradients it makes."""

    plan: Plan
    hidden: Tensor
    targets: Tensor
    shard: Tensor
    tops: Tensor
    """Each token's maximum logit, and (`shares`) what exp(logit - maximum) counts: fp32 [N]."""
    shares: Tensor
    upstream: Tensor
    needs_hidden: bool
    needs_shard: bool

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """d hidden [N, H] (fp32 where weights move, else in its dtype), d shard [V_r, H] (fp32)."""
        plan, d_hidden, d_shard = self.plan, None, None
        if self.needs_hidden:
            # Where every piece of the weights adds to it, it must not be rounded each time.
            dtype = torch.float32 if plan.weights_move else self.hidden.dtype
            d_hidden = self.hidden.new_zeros(self.hidden.shape, dtype=dtype)
        if self.needs_shard:
            d_shard = self.shard.new_zeros(self.shard.shape, dtype=torch.float32)
        tokens = (self.hidden, self.targets, self.tops, self.shares, self.upstream)
        for meeting in _meetings(plan, tokens, self.shard, d_hidden, d_shard):
            # A function, so that the strip is freed before the next one is made.
            self._add(meeting)
        return d_hidden, d_shard

    def _add(self, meeting: Meeting) -> None:
        objective, (tops, shares, upstream) = self.plan.objective, meeting.tokens[2:]
        residual = strip_residual(
            meeting.x,
            meeting.w,
            meeting.columns,
            tops,
            *objective.scales(shares, upstream),
            scale=objective.logit_scale,
            soft_cap=objective.soft_cap,
        )
        to_tokens = (meeting.token_sums, residual, meeting.w)
        to_rows = (meeting.row_sums, residual.t(), meeting.x)
        # What moves is last: its sums may still be in flight.
        for sums, a, b in (to_tokens, to_rows) if self.plan.weights_move else (to_rows, to_tokens):
            if sums is not None:
                accumulate_(sums(), a, b)
