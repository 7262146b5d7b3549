"""The host bytes of a job of `deploy/`, planned as its run would plan them, without a process."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from flatpeak.controller.host_plan import plan_arenas, planned_host_bytes
from flatpeak.controller.placement import Placed, arena_homes, arenas_for, slab_regions
from flatpeak.controller.spec import Spec, resolve_parallel
from flatpeak.controller.spec_file import load_spec
from flatpeak.workers import checkpoint
from flatpeak.workers.boundaries import slab_bytes
from flatpeak.workers.buckets import Bucket, Range, Shard, cut_buckets
from flatpeak.workers.settings import tokens_of


@cache
def job_of(path: Path) -> tuple[Spec, PreTrainedModel]:
    """The resolved spec in `path`, and its model on the meta device."""
    spec = load_spec(path)
    config = checkpoint.load_config(path=spec.model.path, config=spec.model.config)
    experts, heads = checkpoint.num_experts(config), checkpoint.attention_heads(config)
    resolved = resolve_parallel(spec, experts=experts, heads=heads)
    return resolved, checkpoint.build_meta_model(config)


def host_bytes(
    spec: Spec, model: PreTrainedModel, *, workers: Sequence[str], optimizers: Sequence[str]
) -> dict[str, int]:
    """Bytes by node, where `workers` and `optimizers` name the node of each process."""
    ranks = [Placed(f"worker {rank}", None, node) for rank, node in enumerate(workers)]
    actors = [Placed(f"optimizer {index}", None, node) for index, node in enumerate(optimizers)]
    homes = arena_homes(spec, ranks, actors)
    buckets = _buckets(spec, model, ranks, homes)
    config = model.config.get_text_config()
    dtype = getattr(torch, spec.train.dtype)
    slab = slab_bytes(tokens_of(spec), config.hidden_size, dtype, config.num_hidden_layers)
    regions = slab_regions([slab] * len(ranks), ranks, homes)
    slots = spec.memory.optimizer.slots
    arenas = plan_arenas(buckets, regions, arenas=len(homes), spare_frames=slots)
    return planned_host_bytes(arenas, homes, regions, ranks)


def _buckets(
    spec: Spec, model: PreTrainedModel, ranks: list[Placed], homes: list[str]
) -> tuple[Bucket, ...]:
    """As if every parameter were cut evenly over all ranks: so many elements each has to hold."""
    shards = []
    for name, weight in model.named_parameters():
        ends = [weight.numel() * rank // len(ranks) for rank in range(len(ranks) + 1)]
        shards += [
            Shard(Range(name, ends[rank], ends[rank + 1]), rank, spec.train.dtype, weight.ndim > 1)
            for rank in range(len(ranks))
        ]
    return cut_buckets(
        shards,
        bucket_parameters=spec.memory.optimizer.bucket_parameters,
        arenas_of_rank=lambda rank: arenas_for(spec, ranks[rank], homes),
    )
