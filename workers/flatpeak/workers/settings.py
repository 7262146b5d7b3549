"""What the parts of a worker take as arguments, read from the job's spec in one place."""

from typing import TYPE_CHECKING

from flatpeak.workers.data import Samples, open_samples
from flatpeak.workers.dispatch import DispatchOptions
from flatpeak.workers.optimizer import AdamW

if TYPE_CHECKING:
    from flatpeak.controller.spec import Spec

# Dispatch takes one part in so many of the device budget where the job does not say.
DISPATCH_SHARE = 8


def samples_of(spec: "Spec", *, vocab_size: int | None = None) -> Samples:
    """The job's samples; with `vocab_size` a token outside the vocabulary is refused."""
    data, train = spec.data, spec.train
    return open_samples(
        source=data.source,
        tokenizer=data.tokenizer,
        sequence_length=train.sequence_length,
        seed=train.seed,
        text_column=data.text_column,
        tokens_column=data.tokens_column,
        vocab_size=vocab_size,
        cache_dir=data.cache_dir,
    )


def adamw_of(spec: "Spec") -> AdamW:
    train = spec.train
    return AdamW(
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        lr_bias=train.router_bias_update_rate,
    )


def dispatch_of(spec: "Spec") -> DispatchOptions:
    section = spec.memory.dispatch
    return DispatchOptions(
        budget_bytes=dispatch_budget_of(spec),
        tokens_per_chunk=None if section.tokens_per_chunk == "auto" else section.tokens_per_chunk,
        max_chunks=section.max_chunks,
        receive_rows=None if section.receive_rows == "auto" else section.receive_rows,
        capacity_factor=section.capacity_factor,
        min_chunk=section.min_chunk,
        balance_above=section.balance_above,
        max_foreign_experts=section.max_foreign_experts,
    )


def dispatch_budget_of(spec: "Spec") -> int | None:
    given, device = spec.memory.dispatch.budget_bytes, spec.memory.device_budget_bytes
    if given != "auto":
        return given
    return None if device is None else device // DISPATCH_SHARE
