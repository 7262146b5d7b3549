"""The vocabulary loss as one autograd function: forward and backward tours of the ring.

Shape suffixes in comments: N own tokens, H hidden width, V_r own vocabulary rows. The derivation
is in README.md beside this file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flatpeak.kernels.vocabulary_strip import accumulate_, merge_, strip_residual, strip_state
from flatpeak.workers.partition import parts
from flatpeak.workers.scopes import scope
from flatpeak.workers.vocabulary.agreement import check_facts, gather_facts
from flatpeak.workers.vocabulary.ring import Carry, Ring, tour
from flatpeak.workers.vocabulary.tiles import Tiles, choose_tiles, spans, weights_move

GradSink = Callable[[Tensor], None]


def ring_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    weight_shard: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    ignore_index: int = -100,
    token_tile: int | None = None,
    schedule: str = "auto",
    grad_sink: GradSink | None = None,
) -> Tensor:
    """Negative log likelihood of each own token under the whole sharded vocabulary.

    Every rank of `group` calls this with its own tokens (their number may differ and may be 0) and
    then runs backward, both as one collective. No tensor of tokens x vocabulary elements is made.

    Args:
        hidden: [N, H], float32, bfloat16 or float16.
        targets: [N] int64, ids in [0, vocab_size) or `ignore_index`.
        weight_shard: [V_r, H] in the dtype of `hidden`, rows `part(vocab_size, P, rank)` of the
            head weight; may be empty.
        group: the P ranks that share the head weight, or None for one rank and no collectives.
        ignore_index: such tokens have zero loss and zero gradient.
        token_tile: side of a strip of logits, and rows of a piece on tour: scales the memory this
            takes beside its inputs and gradients. None chooses by bytes.
        schedule: which tensor tours the ring: "weights", "activations", or "auto" for the smaller.
        grad_sink: receives the finished fp32 weight gradient [V_r, H] once, in backward; autograd
            then gets none. Without it autograd gets the gradient in the weight's dtype.

    Returns:
        [N] fp32, 0 where ignored.

    Raises:
        InputError: shapes, dtypes or options do not fit, on all ranks alike.
        DataError: a target outside the vocabulary, on all ranks alike, before any ring traffic.

    Source: Ring-DTP, arXiv 2609.14306, with token tiles that tour the ring one by one.
    """
    ring = Ring(group)
    with scope("vocabulary"):
        facts = gather_facts(
            ring,
            hidden,
            targets,
            weight_shard,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            token_tile=token_tile,
            schedule=schedule,
            wants_shard_grad=weight_shard.requires_grad or grad_sink is not None,
        )
    check_facts(facts)
    tokens = [own.tokens for own in facts]
    shards = parts(vocab_size, ring.size)
    plan = _Plan(
        ring=ring,
        tokens=tokens,
        shards=shards,
        tiles=choose_tiles(
            tokens=max(tokens),
            shard_rows=max(stop - start for start, stop in shards),
            width=hidden.shape[1],
            token_tile=token_tile,
        ),
        # Decided from the largest token count, which all ranks know, so that they decide alike.
        weights_move=weights_move(
            schedule, tokens=max(tokens), vocab_size=vocab_size, ranks=ring.size
        ),
        ignore_index=ignore_index,
        grad_sink=grad_sink,
    )
    return _RingCrossEntropy.apply(hidden, targets, weight_shard, plan)


@dataclass(frozen=True)
class _Plan:
    ring: Ring
    tokens: list[int]
    shards: list[tuple[int, int]]
    tiles: Tiles
    weights_move: bool
    ignore_index: int
    grad_sink: GradSink | None

    @property
    def shard_rows(self) -> list[int]:
        return [stop - start for start, stop in self.shards]


class _RingCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, shard: Tensor, plan: _Plan) -> Tensor:
        with scope("vocabulary"), torch.autocast(hidden.device.type, enabled=False):
            states = _states_weights if plan.weights_move else _states_activations
            m, z, y = states(plan, hidden, targets, shard).unbind(1)
            lse = z.log().add_(m)
            nll = (lse - y).masked_fill_(targets == plan.ignore_index, 0.0).float()
        ctx.save_for_backward(hidden, targets, shard, lse.float())
        ctx.plan = plan
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        hidden, targets, shard, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needs_hidden, _, needs_shard, _ = ctx.needs_input_grad
        needs_shard = needs_shard or plan.grad_sink is not None
        with scope("vocabulary"), torch.autocast(hidden.device.type, enabled=False):
            upstream = grad_nll.float().masked_fill(targets == plan.ignore_index, 0.0)
            grads = _grads_weights if plan.weights_move else _grads_activations
            d_hidden, d_shard = grads(
                plan, hidden, targets, shard, lse, upstream, needs_hidden, needs_shard
            )
            if d_shard is not None and plan.grad_sink is not None:
                plan.grad_sink(d_shard)
                d_shard = None
            return (
                d_hidden if d_hidden is None else d_hidden.to(hidden.dtype),
                None,
                d_shard if d_shard is None else d_shard.to(shard.dtype),
                None,
            )


def _empty_states(hidden: Tensor) -> Tensor:
    # fp64, since with small tiles many thousand strips are merged into one state.
    states = hidden.new_zeros((hidden.shape[0], 3), dtype=torch.float64)
    states[:, 0] = float("-inf")
    return states


def _states_activations(plan: _Plan, hidden: Tensor, targets: Tensor, shard: Tensor) -> Tensor:
    states = _empty_states(hidden)
    carry = Carry(plan.ring, states, plan.tiles.tokens)
    first_row = plan.shards[plan.ring.rank][0]
    for visit in tour(plan.ring, plan.tokens, plan.tiles.tokens, (hidden, targets), carry):
        x, t = visit.payload
        if visit.start == visit.stop:
            continue
        for a, b in spans(shard.shape[0], plan.tiles.vocabulary):
            state = strip_state(x, shard[a:b], t - (first_row + a))
            merge_(carry.here(), state)
    return states


def _states_weights(plan: _Plan, hidden: Tensor, targets: Tensor, shard: Tensor) -> Tensor:
    states = _empty_states(hidden)
    for visit in tour(plan.ring, plan.shard_rows, plan.tiles.vocabulary, (shard,)):
        (w,) = visit.payload
        if visit.start == visit.stop:
            continue
        first_row = plan.shards[visit.owner][0] + visit.start
        for a, b in spans(hidden.shape[0], plan.tiles.tokens):
            merge_(states[a:b], strip_state(hidden[a:b], w, targets[a:b] - first_row))
    return states


def _grads_activations(
    plan: _Plan,
    hidden: Tensor,
    targets: Tensor,
    shard: Tensor,
    lse: Tensor,
    upstream: Tensor,
    needs_hidden: bool,
    needs_shard: bool,
) -> tuple[Tensor | None, Tensor | None]:
    d_hidden = hidden.new_zeros(hidden.shape) if needs_hidden else None
    d_shard = shard.new_zeros(shard.shape, dtype=torch.float32) if needs_shard else None
    carry = None if d_hidden is None else Carry(plan.ring, d_hidden, plan.tiles.tokens)
    first_row = plan.shards[plan.ring.rank][0]
    own = (hidden, targets, lse, upstream)
    for visit in tour(plan.ring, plan.tokens, plan.tiles.tokens, own, carry):
        x, t, lse_x, g = visit.payload
        if visit.start == visit.stop:
            continue
        for a, b in spans(shard.shape[0], plan.tiles.vocabulary):
            residual = strip_residual(x, shard[a:b], t - (first_row + a), lse_x, g, g)
            if d_shard is not None:
                accumulate_(d_shard[a:b], residual.t(), x)
            if carry is not None:  # last, since the carry may still be in flight
                accumulate_(carry.here(), residual, shard[a:b])
            del residual  # before the next strip is made
    return d_hidden, d_shard


def _grads_weights(
    plan: _Plan,
    hidden: Tensor,
    targets: Tensor,
    shard: Tensor,
    lse: Tensor,
    upstream: Tensor,
    needs_hidden: bool,
    needs_shard: bool,
) -> tuple[Tensor | None, Tensor | None]:
    d_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if needs_hidden else None
    d_shard = shard.new_zeros(shard.shape, dtype=torch.float32) if needs_shard else None
    carry = None if d_shard is None else Carry(plan.ring, d_shard, plan.tiles.vocabulary)
    for visit in tour(plan.ring, plan.shard_rows, plan.tiles.vocabulary, (shard,), carry):
        (w,) = visit.payload
        if visit.start == visit.stop:
            continue
        first_row = plan.shards[visit.owner][0] + visit.start
        for a, b in spans(hidden.shape[0], plan.tiles.tokens):
            x, g = hidden[a:b], upstream[a:b]
            residual = strip_residual(x, w, targets[a:b] - first_row, lse[a:b], g, g)
            if d_hidden is not None:
                accumulate_(d_hidden[a:b], residual, w)
            if carry is not None:  # last, since the carry may still be in flight
                accumulate_(carry.here(), residual.t(), x)
            del residual  # before the next strip is made
    return d_hidden, d_shard
