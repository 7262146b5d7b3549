"""Dispatch inside checkpointed layers: one layer's memory, nothing computed or agreed on twice."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.dispatch import DispatchOptions, moe_forward
from flatpeak.workers.memory import PeakMeter
from flatpeak.workers.recompute import checkpoint_contexts
from moe_families import PlainExperts, profile
from ranks import run_ranks

# Widths above the routes of any chunk, so that shapes tell products apart.
EXPERTS, K, HIDDEN, INTERMEDIATE = 8, 3, 272, 320
LAYERS, MICROBATCHES, TOKENS = 4, 2, 120
OPTIONS = DispatchOptions(
    tokens_per_chunk=40, min_chunk=1, balance_above=1.0, max_foreign_experts=2
)


class Layer(nn.Module):
    """A router, experts and a residual; `ids` may stand in for the router's choice."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        seed: int,
        *,
        value_needed: bool,
        ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.ids = ids
        generator = torch.Generator().manual_seed(seed)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, generator=generator)
        local = EXPERTS // ranks
        self.experts = PlainExperts(local, hidden=HIDDEN, intermediate=INTERMEDIATE)
        self.experts.num_experts = EXPERTS
        generator.manual_seed(seed + 1000 * rank)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)
        self.value_needed = value_needed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chances = self.router(hidden).softmax(-1)
        ids = chances.topk(K).indices if self.ids is None else self.ids
        output = moe_forward(
            self.experts,
            nn.functional.rms_norm(hidden, (HIDDEN,)),
            ids,
            chances.gather(1, ids),
            group=dist.group.WORLD,
            options=OPTIONS,
            value_needed_in_recompute=self.value_needed,
            grad_sink=lambda parameter, gradient: None,
        )
        return hidden + output


class Products(TorchDispatchMode):
    """Multiplications of rows with the projections, and those of their gradients, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm_"):
            left, right = args[-2:]
            self.note(left, right)
        return result

    def note(self, left: torch.Tensor, right: torch.Tensor) -> None:
        (rows, inner), columns = left.shape, right.shape[1]
        up, down = (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)
        names = {up: "up", down: "down", up[::-1]: "up^T", down[::-1]: "down^T"}
        if (inner, columns) in names:
            self.counts[names[inner, columns]] += rows
        elif (rows, columns) in (up, down):
            self.counts[f"gradient of {names[rows, columns]}"] += inner


@contextmanager
def collectives_counted(counts: Counter[str]) -> Iterator[None]:
    names = ("all_to_all_single", "all_gather", "batch_isend_irecv")
    plain = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return plain[name](*args, **kwargs)

        return call

    for name in plain:
        setattr(dist, name, counted(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def _counted_run(
    rank: int, layers: int, microbatches: int, value_needed: bool
) -> dict[str, Counter[str]]:
    """Work of the forward passes, and of the backward passes with the recomputations."""
    model = [Layer(rank, 2, seed, value_needed=value_needed) for seed in range(layers)]
    counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    outputs = []
    for microbatch in range(microbatches):
        with Products() as products, collectives_counted(products.counts):
            outputs.append(_forward(model, _input(rank, microbatch)))
        counts["forward"] += products.counts
    for output in outputs:
        with Products() as products, collectives_counted(products.counts):
            output.sum().backward()
        counts["backward"] += products.counts
    return counts


def _input(rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * microbatch + rank)
    return torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()


def _forward(model: list[Layer], hidden: torch.Tensor) -> torch.Tensor:
    for layer in model:
        output = checkpoint(layer, hidden, use_reentrant=False, context_fn=checkpoint_contexts)
        assert isinstance(output, torch.Tensor)
        hidden = output
    return hidden


@pytest.mark.parametrize("value_needed", [False, True], ids=["skipped", "needed"])
def test_experts_run_once_forward_once_again_and_twice_for_gradients(value_needed: bool):
    by_rank = run_ranks(2, _counted_run, LAYERS, MICROBATCHES, value_needed)
    routes = 2 * LAYERS * MICROBATCHES * TOKENS * K
    forward, backward = (
        sum((counts[way] for counts in by_rank), Counter()) for way in ("forward", "backward")
    )
    products = ("up", "down", "up^T", "down^T", "gradient of up", "gradient of down")
    assert [forward[name] for name in products] == [routes, routes, 0, 0, 0, 0]
    # The up projection is computed again for its gate, the down projection never; where the value
    # is needed, the recomputation is a forward pass beside that.
    again = routes if value_needed else 0
    assert [backward[name] for name in products] == [routes + again, again, *[routes] * 4]


def test_a_skipped_recomputation_sends_nothing_and_none_agrees_on_routing_again():
    skipped = run_ranks(2, _counted_run, LAYERS, MICROBATCHES, False)
    needed = run_ranks(2, _counted_run, LAYERS, MICROBATCHES, True)
    passes, chunks = LAYERS * MICROBATCHES, TOKENS // 40
    for with_skip, without in zip(skipped, needed, strict=True):
        for counts in (with_skip, without):
            # Sizes once, rows out and home; backward brings gradients of route weights home too.
            assert counts["forward"]["all_to_all_single"] == passes * (1 + chunks * 2)
            assert counts["forward"]["all_gather"] >= passes
            assert counts["backward"]["all_gather"] == 0
        assert with_skip["backward"]["all_to_all_single"] == passes * chunks * 3
        assert without["backward"]["all_to_all_single"] == passes * chunks * (3 + 2)


def _peaks(rank: int, layers: int, microbatches: int) -> tuple[list[int], list[int]]:
    """What dispatch takes at most in forward and in each microbatch's backward; and what is left of
    it afterwards."""
    # Routes by position: each layer cuts alike, whatever it is given.
    ids = profile(TOKENS, EXPERTS, K, 60, 3)
    model = [Layer(rank, 2, seed, value_needed=False, ids=ids) for seed in range(layers)]
    with PeakMeter() as meter:
        outputs = [_forward(model, _input(rank, number)) for number in range(microbatches)]
        peaks, left = [meter.peaks()["dispatch"]], [_settled(meter)]
        while outputs:
            meter.reset_peaks()
            outputs.pop().sum().backward()
            peaks.append(meter.peaks()["dispatch"])
            left.append(_settled(meter))
    return peaks, left


def _settled(meter: PeakMeter) -> int:
    """What dispatch still has once the thread of gloo has let go of what it sent."""
    deadline = time.monotonic() + 10.0
    while (live := meter.live()["dispatch"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return live


def test_many_layers_and_microbatches_take_what_one_layer_takes():
    one, many = run_ranks(2, _peaks, 1, 1), run_ranks(2, _peaks, LAYERS, MICROBATCHES)
    for ((forward, backward), left), (peaks, left_of_many) in zip(one, many, strict=True):
        assert peaks == [forward] + [backward] * MICROBATCHES
        assert not any(left + left_of_many)
        assert backward > forward > 0


def _trades(rank: int, checkpointed: bool) -> tuple[int, int, bool]:
    """Trades of weights and gradients in forward and in backward; whether a second backward pass
    through the same graph gives the same gradient."""
    ids = profile(TOKENS, EXPERTS, K, 60, 3)
    layer = Layer(rank, 2, 0, value_needed=False, ids=ids)
    hidden, counts = _input(rank, 0), Counter()
    with collectives_counted(counts):
        output = _forward([layer], hidden) if checkpointed else layer(hidden)
        forward, before = counts["batch_isend_irecv"], hidden
        output.sum().backward(retain_graph=True)
        backward = counts["batch_isend_irecv"] - forward
        first, hidden.grad = hidden.grad, None
        output.sum().backward()
    assert before.grad is not None
    assert first is not None
    return forward, backward, torch.equal(first, before.grad)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_foreign_weights_stay_for_the_backward_pass_but_in_a_checkpoint(checkpointed: bool):
    for forward, backward, equal in run_ranks(2, _trades, checkpointed):
        assert forward == 1
        assert backward == (2 if checkpointed else 1)  # gradients, and weights once more
        assert equal
