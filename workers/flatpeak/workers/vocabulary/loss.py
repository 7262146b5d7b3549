"""The vocabulary loss as one autograd function, and its evaluation without gradients.

The derivation is in README.md beside this file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flatpeak.workers.partition import parts
from flatpeak.workers.scopes import operator_scope, scope
from flatpeak.workers.vocabulary.agreement import agree
from flatpeak.workers.vocabulary.arguments import Inputs
from flatpeak.workers.vocabulary.meetings import Backward, Plan, states_of
from flatpeak.workers.vocabulary.objective import Objective
from flatpeak.workers.vocabulary.ring import Ring
from flatpeak.workers.vocabulary.tiles import choose_tiles, weights_move

Sink = Callable[[Tensor], None]


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
    grad_sink: Sink | None = None,
    nll_sink: Sink | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Negative log likelihood of each own token under the whole sharded vocabulary.

    Every rank of `group` calls this with its own tokens (their number may differ and may be 0) and
    then runs backward, both as one collective. No tensor of tokens x vocabulary elements is made,
    unless it fits one tile: those chosen by bytes have a least size (2 MiB of fp32 logits).
    Options must be the same on all ranks; tokens and their weights are each rank's own.

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
        nll_sink: receives, in forward, each token's negative log likelihood [N] fp32, 0 where it is
            left out: the loss without z-loss, label smoothing and weights. No gradient reaches it.
        logit_scale: logits are this times the products of hidden states and weight. Its size is
            from 1e-18 to 1e18.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` next. None leaves them. From
            1e-18 to 1e18.
        z_loss: this times the square of the log-sum-exp of a token's logits is added to its loss.
            From 0 to 1e18.
        label_smoothing: the share, from 0 to below 1, of the target's probability that is spread
            evenly over the vocabulary, as in `torch.nn.functional.cross_entropy`.
        token_weights: [N] float32, finite: multiply the loss and the gradient of each token. One of
            weight 0 is left out like an ignored one. They are constants, without a gradient.

    Returns:
        [N] fp32, 0 where ignored.

    Raises:
        InputError: an argument of any rank has the wrong type, shape, dtype, device or value, on
            all ranks alike; a `group` that is none, on its rank alone.
        DataError: a target outside the vocabulary or a weight that is not finite, on all ranks
            alike, before any ring traffic.

    Source: Ring-DTP, arXiv 2609.14306, with token tiles that tour the ring one by one.
    """
    plan = _plan(
        Inputs(
            hidden=hidden,
            targets=targets,
            shard=weight_shard,
            token_weights=token_weights,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            token_tile=token_tile,
            schedule=schedule,
            logit_scale=logit_scale,
            soft_cap=soft_cap,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            grad_sink=grad_sink,
            nll_sink=nll_sink,
            backward=torch.is_grad_enabled(),
        ),
        group,
    )
    call = _Call(plan, ignore_index, grad_sink, nll_sink)
    return _RingCrossEntropy.apply(hidden, targets, weight_shard, token_weights, call)


def ring_log_probs(
    hidden: Tensor,
    targets: Tensor,
    weight_shard: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    ignore_index: int = -100,
    token_tile: int | None = None,
    schedule: str = "auto",
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each own token's target, and the entropy of what was predicted there.

    For evaluation: nothing is kept for a backward pass, and the results require no gradient.
    Collective over `group`. Arguments and errors are those of `ring_cross_entropy`, and so is the
    memory it takes, but for a second strip of logits.

    Returns:
        log_probs [N] and entropy [N], in nats, fp32. Both are 0 where the target is ignored, and
        keep their digits where they are near 0.
    """
    plan = _plan(
        Inputs(
            hidden=hidden,
            targets=targets,
            shard=weight_shard,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            token_tile=token_tile,
            schedule=schedule,
            logit_scale=logit_scale,
            soft_cap=soft_cap,
        ),
        group,
    )
    with torch.no_grad(), operator_scope("vocabulary", hidden.device):
        states = states_of(plan, hidden, targets, weight_shard, moments=True)
        m, r, y, _, e = states.unbind(1)
        log_z, out = r.log1p(), targets == ignore_index
        log_probs = (y - m - log_z).masked_fill_(out, 0.0)
        entropy = (log_z - e / (r + 1.0)).masked_fill_(out, 0.0)
        return log_probs.float(), entropy.float()


def _plan(inputs: Inputs, group: ProcessGroup | None) -> Plan:
    """What the ranks do, from facts that all of them know, so that they decide alike."""
    ring = Ring(group)
    with scope("vocabulary"):
        facts = agree(ring, inputs)
    own, tokens = facts[ring.rank], [other.tokens for other in facts]
    shards = parts(own.vocab_size, ring.size)
    return Plan(
        ring=ring,
        tokens=tokens,
        shards=shards,
        tiles=choose_tiles(
            tokens=max(tokens),
            shard_rows=max(stop - start for start, stop in shards),
            width=own.width,
            token_tile=own.token_tile,
        ),
        weights_move=weights_move(
            inputs.schedule, tokens=max(tokens), vocab_size=own.vocab_size, ranks=ring.size
        ),
        objective=Objective(
            vocab_size=own.vocab_size,
            logit_scale=own.logit_scale,
            soft_cap=own.soft_cap,
            z_loss=own.z_loss,
            label_smoothing=own.label_smoothing,
        ),
    )


@dataclass(frozen=True)
class _Call:
    plan: Plan
    ignore_index: int
    grad_sink: Sink | None
    nll_sink: Sink | None

    def weighted(self, values: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """`values` [N] times the token weights, 0 for whatever token is left out."""
        if weights is None:
            return self.kept(values, targets, weights)
        return self.kept(values * weights, targets, weights)

    def kept(self, values: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """`values` [N], 0 for whatever token is left out."""
        out = targets == self.ignore_index
        if weights is not None:
            out |= weights == 0
        return values.masked_fill(out, 0.0)


class _RingCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        shard: Tensor,
        token_weights: Tensor | None,
        call: _Call,
    ) -> Tensor:
        objective = call.plan.objective
        with operator_scope("vocabulary", hidden.device):
            states = states_of(call.plan, hidden, targets, shard, moments=objective.needs_moments)
            if call.nll_sink is not None:
                plain = Objective(vocab_size=objective.vocab_size).losses(states)
                call.nll_sink(call.kept(plain, targets, token_weights).float())
            losses = call.weighted(objective.losses(states), targets, token_weights).float()
            tops, shares = states[:, 0].float(), objective.shares(states).float()
            ctx.save_for_backward(hidden, targets, shard, token_weights, tops, shares)
        ctx.call = call
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, shard, token_weights, tops, shares = ctx.saved_tensors
        call: _Call = ctx.call
        with operator_scope("vocabulary", hidden.device):
            d_hidden, d_shard = Backward(
                plan=call.plan,
                hidden=hidden,
                targets=targets,
                shard=shard,
                tops=tops,
                shares=shares,
                upstream=call.weighted(grad.float(), targets, token_weights),
                needs_hidden=ctx.needs_input_grad[0],
                needs_shard=ctx.needs_input_grad[2] or call.grad_sink is not None,
            ).gradients()
            if d_shard is not None and call.grad_sink is not None:
                call.grad_sink(d_shard)
                d_shard = None
            return (
                None if d_hidden is None else d_hidden.to(hidden.dtype),
                None,
                None if d_shard is None else d_shard.to(shard.dtype),
                None,
                None,
            )
