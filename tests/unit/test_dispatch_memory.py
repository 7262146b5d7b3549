"""What dispatch needs above its inputs and results is bounded by the chunk, not by the layer."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatpeak.workers.dispatch import DispatchOptions, assumed_routing, moe_forward
from moe_families import PlainExperts, profile, random_ids

HIDDEN, EXPERTS, K = 256, 32, 4


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def increment(ids: torch.Tensor, options: DispatchOptions, *, ranks: int = 4) -> int:
    """Peak bytes of rank 0 above inputs, output and gradients, forward and backward."""
    tokens = len(ids)
    routing = assumed_routing([ids] * ranks, rank=0, experts=EXPERTS, options=options)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with FakeTensorMode(), LiveBytes() as tracked:
            module = PlainExperts(EXPERTS // ranks, hidden=HIDDEN)
            module.num_experts = EXPERTS
            hidden = torch.empty(tokens, HIDDEN, requires_grad=True)
            weights = torch.empty(tokens, K, requires_grad=True)
            upstream = torch.empty(tokens, HIDDEN)
            expert_ids = torch.empty(tokens, K, dtype=torch.long)
            before, tracked.peak = tracked.live, 0
            output = moe_forward(
                module,
                hidden,
                expert_ids,
                weights,
                group=dist.group.WORLD,
                options=options,
                routing=routing,
                grad_sink=lambda parameter, gradient: None,
            )
            output.backward(upstream)
            gradients = (hidden, weights, *module.parameters())
            results = output.nbytes + sum(value.nbytes for value in gradients)
            return tracked.peak - before - results
    finally:
        dist.destroy_process_group()


ROUTINGS = {
    # The published balanced profile repeats with the experts, and resonates with the stride.
    "balanced": lambda tokens: random_ids(tokens, EXPERTS, K),
    "80/16": lambda tokens: profile(tokens, EXPERTS, K, 80, 16),
    "all to one expert": lambda tokens: profile(tokens, EXPERTS, K, 100, 1),
}


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_twice_the_tokens_need_no_more_memory(ids: Callable[[int], torch.Tensor]):
    # The fullest of more random chunks is a little fuller: less so, the larger they are.
    options = DispatchOptions(tokens_per_chunk=1024, min_chunk=1, max_foreign_experts=2)
    assert increment(ids(6144), options) <= 1.02 * increment(ids(3072), options)


def test_under_a_receive_cap_twice_the_ranks_need_no_more_memory():
    # Every route goes to rank 0, which without a cap receives the rows of all others at once.
    ids = profile(256, EXPERTS, K, 100, 1)
    free = DispatchOptions(tokens_per_chunk=128, max_foreign_experts=0)
    capped = replace(free, receive_rows=128)
    four, eight = (increment(ids, capped, ranks=ranks) for ranks in (4, 8))
    assert eight <= 1.05 * four
    assert increment(ids, free, ranks=8) > 2 * eight
