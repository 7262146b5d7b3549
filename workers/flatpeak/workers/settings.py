"""What the parts of a worker take as arguments, read from the job's spec in one place."""

from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

from flatpeak.workers.checkpoint import moe_layers
from flatpeak.workers.data import Samples, open_samples
from flatpeak.workers.dispatch import DispatchOptions
from flatpeak.workers.dispatch.experts import read_layout
from flatpeak.workers.dispatch.footprint import layer_sizes, smallest_budget
from flatpeak.workers.errors import DoesNotFit, SpecError
from flatpeak.workers.optimizer import AdamW
from flatpeak.workers.support import ROUTER_BIAS

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


def check_dispatch_budget(spec: "Spec", model: PreTrainedModel) -> None:
    """Raises SpecError when the job's dispatch budget cannot hold for any routing, DoesNotFit when
    that is because of the device budget. `spec` is resolved.

    `model` is whole, on any device.
    """
    budget, ranks = dispatch_budget_of(spec), spec.parallel.expert
    assert isinstance(ranks, int), "degrees are resolved first"
    if budget is None:
        return
    _, experts = next(iter(moe_layers(model)))
    layout = read_layout(experts)
    config, dtype = model.config.get_text_config(), getattr(torch, spec.train.dtype)
    sizes = layer_sizes(
        layout,
        [getattr(experts, name).to(dtype) for name in layout.names],
        torch.empty(0, config.hidden_size, dtype=dtype, device="meta"),
        torch.empty(0, config.num_experts_per_tok, device="meta"),
        device=_likely_device(spec),
    )
    section = spec.memory.dispatch
    least = smallest_budget(
        sizes,
        experts=cast(Any, experts).num_experts,
        ranks=ranks,
        tokens=tokens_of(spec),
        max_foreign=section.max_foreign_experts,
    )
    if budget >= least:
        return
    foreign = section.max_foreign_experts
    needs = f"one token at a time and {foreign} foreign experts take {least:,} bytes"
    fewer = "lower memory.dispatch.max_foreign_experts" if foreign else "use more microbatches"
    if section.budget_bytes == "auto":
        raise DoesNotFit(
            f"an {DISPATCH_SHARE}th of memory.device_budget_bytes is {budget:,}, too little for "
            f"the dispatch, where {needs}. Set memory.device_budget_bytes to at least "
            f"{least * DISPATCH_SHARE:,}, or memory.dispatch.budget_bytes to {least:,}, or {fewer}"
        )
    raise SpecError(
        f"memory.dispatch.budget_bytes = {budget:,} is too little: {needs}. Set it to at least "
        f"{least:,}, or {fewer}"
    )


def check_router_biases(spec: "Spec", model: PreTrainedModel) -> None:
    """Raises SpecError when the job moves router biases that `model` does not have."""
    rate = spec.train.router_bias_update_rate
    if rate and not any(name.endswith(ROUTER_BIAS) for name, _ in model.named_buffers()):
        raise SpecError(
            f"train.router_bias_update_rate = {rate:g}, but the routers of {type(model).__name__} "
            "have no selection bias, as those of deepseek_v3 do; set it to 0, and balance the "
            "experts by train.router_aux_loss_coef"
        )


def _likely_device(spec: "Spec") -> torch.device:
    """Where the workers will run; CUDA, which takes more, where only the cluster knows."""
    cluster = spec.cluster
    here = cluster.address == "local" and not torch.cuda.is_available()
    return torch.device("cpu" if cluster.device == "cpu" or here else "cuda")


def tokens_of(spec: "Spec") -> int:
    """Tokens of one worker in a microbatch, for a resolved `spec`."""
    train, degree = spec.train, spec.parallel.sequence
    assert isinstance(degree, int), "degrees are resolved first"
    sequences = train.sequences_per_step // (spec.cluster.workers // degree * train.microbatches)
    return sequences * train.sequence_length // degree
