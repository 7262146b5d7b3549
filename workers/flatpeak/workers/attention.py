"""Ulysses attention: sequence shards become head shards for attention and back.

Registered with transformers under one name, with a mask function of the same name, so that any
model with the attention interface runs it unmodified. Documents packed into a row are kept apart by
attending to each on its own; no token x token mask is ever made for plain causal attention.

Shapes: B rows, h heads of this rank's projection, s = T / D tokens of this rank, T tokens of the
row, d head width.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from flatpeak.workers.errors import InputError
from flatpeak.workers.progress import waiting
from flatpeak.workers.scopes import scope

ATTENTION_NAME = "flatpeak"


@dataclass
class SequenceContext:
    """What attention must know of the microbatch: who shares a row, and where documents start.

    `boundaries[b]` are the offsets in row b where documents start, first 0, last T. Python ints,
    the same on all ranks of the sequence group, so that they cut the rows alike.
    """

    group: dist.ProcessGroup | None
    degree: int
    boundaries: list[tuple[int, ...]] = field(default_factory=list)


def check_degree(config: Any, degree: int) -> None:
    heads = config.num_attention_heads
    if heads % degree:
        legal = [d for d in range(1, heads + 1) if heads % d == 0]
        raise InputError(
            f"parallel.sequence = {degree} must divide the model's {heads} attention heads; "
            f"legal values: {legal}"
        )


@dataclass(frozen=True)
class Window:
    """What our mask function gives for a sliding window: most keys a query sees, no tensor."""

    keys: int


def bind(model: nn.Module, context: SequenceContext) -> None:
    """Gives every attention module of `model` the context that its calls will read."""
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx"):
            cast(Any, module).flatpeak_sequence = context


class _AllToAll(torch.autograd.Function):
    """Swaps dim 0 between the ranks of a group: chunk j goes to rank j."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(chunks, memory_format=torch.contiguous_format)
        with waiting():
            dist.all_to_all_single(received, chunks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def sequence_to_heads(x: Tensor, context: SequenceContext) -> Tensor:
    """[B, h, s, d] of this rank's tokens to [B, h/D, T, d] of this rank's heads."""
    if context.group is None:
        return x
    B, h, s, d = x.shape
    D = context.degree
    chunks = x.reshape(B, D, h // D, s, d).movedim(1, 0)
    received = _AllToAll.apply(chunks, context.group)  # [D, B, h/D, s, d], dim 0 in token order
    return received.movedim(0, 2).reshape(B, h // D, D * s, d)


def heads_to_sequence(x: Tensor, context: SequenceContext) -> Tensor:
    """[B, h/D, T, d] of this rank's heads to [B, h, s, d] of this rank's tokens."""
    if context.group is None:
        return x
    B, h_local, T, d = x.shape
    D = context.degree
    chunks = x.reshape(B, h_local, D, T // D, d).movedim(2, 0)
    received = _AllToAll.apply(chunks, context.group)  # [D, B, h/D, s, d], dim 0 in head order
    return received.movedim(0, 1).reshape(B, D * h_local, T // D, d)


def repeats_of_kv_heads(heads: int, kv_heads: int, degree: int) -> int:
    """Times each key-value head is repeated so that D divides them and they divide the heads."""
    groups = heads // kv_heads
    for repeats in range(1, groups + 1):
        if groups % repeats == 0 and (kv_heads * repeats) % degree == 0:
            return repeats
    raise InputError(f"{heads} heads with {kv_heads} key-value heads cannot be cut into {degree}")


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of one document, [B, h, n, d]; a query sees at most `window` keys."""
    n, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or window >= n:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    tiles = []
    for start in range(0, n, window):
        stop, first = min(start + window, n), max(0, start - window + 1)
        query = torch.arange(start, stop, device=q.device)[:, None]
        key = torch.arange(first, stop, device=q.device)[None, :]
        seen = (key <= query) & (key > query - window)  # [tile, < 2 window]
        tiles.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, first:stop],
                v[:, :, first:stop],
                attn_mask=seen,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(tiles, dim=2)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    boundaries: list[tuple[int, ...]],
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention that does not cross documents. [B, h, T, d], v may have another width."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        # The memory-flat kernels ask for equal widths (MLA has narrower values).
        v = F.pad(v, (0, q.shape[-1] - width))
    T = q.shape[2]
    if all(row == (0, T) for row in boundaries):
        return _causal(q, k, v, scale, window)[..., :width]
    rows = []
    for row, offsets in enumerate(boundaries):
        documents = [
            _causal(
                q[row : row + 1, :, a:b],
                k[row : row + 1, :, a:b],
                v[row : row + 1, :, a:b],
                scale,
                window,
            )
            for a, b in pairwise(offsets)
        ]
        rows.append(torch.cat(documents, dim=2))
    return torch.cat(rows)[..., :width]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Window | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, h, s, d] to ([B, s, h, d_v], no weights)."""
    if isinstance(attention_mask, Window):
        # Some families say it here alone, others to the attention function too.
        sliding_window = sliding_window or attention_mask.keys
    elif attention_mask is not None or dropout:
        raise InputError(
            "attention takes neither a padding mask nor dropout: pack documents instead"
        )
    for name in ("s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise InputError(f"{type(module).__name__} asks for {name}, which attention lacks")
    context: SequenceContext = cast(Any, module).flatpeak_sequence
    with scope("attention"):
        repeats = repeats_of_kv_heads(query.shape[1], key.shape[1], context.degree)
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        out = packed_attention(
            sequence_to_heads(query, context),
            sequence_to_heads(key, context),
            sequence_to_heads(value, context),
            boundaries=context.boundaries,
            scale=scaling if scaling is not None else 1 / math.sqrt(query.shape[-1]),
            window=sliding_window,
        )
        return heads_to_sequence(out, context).transpose(1, 2).contiguous(), None


def _mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> Tensor | Window | None:
    # Without a mask function of the same name transformers would drop a padding mask silently;
    # handed through, `attention_forward` refuses it.
    if attention_mask is None and local_size is not None:
        return Window(local_size)
    return attention_mask


def register() -> None:
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
