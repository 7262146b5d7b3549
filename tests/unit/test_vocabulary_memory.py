"""What the vocabulary loss holds at any time, and when its hops are posted."""

import gc
import weakref
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatpeak.kernels.vocabulary_strip import simulated_gpu
from flatpeak.kernels.vocabulary_strip.reference import THIN
from flatpeak.workers.memory import PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy, ring_log_probs
from flatpeak.workers.vocabulary.agreement import Facts
from ranks import run_ranks

SCHEDULES = ["weights", "activations"]
WIDTH, TILE, VOCAB = 8, 16, 192


class Trace(TorchDispatchMode):
    """Names of the operations in order, and the most elements any of their results has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() // 4 for x in tensors)])
        return result


def loss_and_backward(
    rank: int,
    world: int,
    tokens: int,
    schedule: str,
    *,
    vocab: int = VOCAB,
    width: int = WIDTH,
    tile: int = TILE,
) -> None:
    start, stop = part(vocab, world, rank)
    loss = ring_cross_entropy(
        torch.ones(tokens, width, requires_grad=True),
        torch.arange(tokens) % vocab,
        torch.ones(stop - start, width, requires_grad=True),
        group=dist.group.WORLD if world > 1 else None,
        vocab_size=vocab,
        token_tile=tile,
        schedule=schedule,
    )
    loss.sum().backward()


def largest_tensor(rank: int, world: int, tokens: int, schedule: str) -> int:
    with Trace() as trace:
        loss_and_backward(rank, world, tokens, schedule)
    return trace.largest


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_larger_than_the_resident_tensors_is_ever_made(world: int, schedule: str):
    tokens = 150
    resident = max(tokens, VOCAB) * WIDTH  # hidden states, head weight and their gradients
    assert resident < tokens * VOCAB // world // 8
    args = (world, tokens, schedule)
    largest = run_ranks(2, largest_tensor, *args) if world > 1 else [largest_tensor(0, *args)]
    assert max(largest) <= resident


def peak_bytes(rank: int, world: int, tokens: int, schedule: str) -> int:
    with PeakMeter() as meter:
        loss_and_backward(rank, world, tokens, schedule)
    return meter.peaks()["vocabulary"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_increment_is_a_strip_and_four_pieces_at_any_number_of_tokens(
    world: int, schedule: str
):
    piece, strip = 4 * TILE * WIDTH, 4 * TILE * TILE
    for tokens in (70, 140):
        # Gradients, and scalars a token: its state, maximum, share, nll, masks and upstream.
        resident = tokens * (4 * WIDTH + 48) + 4 * -(-VOCAB // world) * WIDTH
        args = (world, tokens, schedule)
        peaks = run_ranks(world, peak_bytes, *args) if world > 1 else [peak_bytes(0, *args)]
        # Two pieces and two carries, their targets and scalars, and vectors beside the strip.
        assert max(peaks) <= resident + strip + 4 * piece + 150 * TILE


def alive_after_backward(rank: int, schedule: str) -> int:
    gc.disable()  # freed by reference counts alone, at once
    try:
        with PeakMeter() as meter:
            loss_and_backward(rank, 2, 100, schedule)
            return meter.live().get("vocabulary", 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_of_the_graph_is_alive_after_backward(schedule: str):
    assert run_ranks(2, alive_after_backward, schedule) == [0, 0]


def test_a_loss_that_is_dropped_frees_what_it_saved():
    hidden = torch.ones(6, WIDTH, requires_grad=True)
    saved = weakref.ref(hidden)
    loss = ring_cross_entropy(
        hidden, torch.arange(6), torch.ones(9, WIDTH), group=None, vocab_size=9
    )
    del hidden
    assert saved() is not None
    del loss
    assert saved() is None


def sends_between_strips(rank: int, schedule: str) -> list[int]:
    """How many tensors were sent before the first visit's strips, then between visits, and last."""
    side = THIN + 1  # not thin, so that no product but that of a strip is an `mm`
    with Trace() as trace:
        loss_and_backward(rank, 3, side, schedule, vocab=3 * side, width=side, tile=side)
    sends = [0]
    for name in trace.names:
        if name == "c10d::send":
            sends[-1] += 1
        elif name == "aten::mm":
            sends.append(0)
    return sends


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Forward: the shard moves twice. Backward: the same, then its gradient, the home hop last.
        ("weights", [1, 1, 0, 1, 1 + 1, 1, 1]),
        # Forward: hidden states and targets move twice, their states three times. Backward: hidden
        # states, targets, maxima, shares and upstream move twice, d hidden three times.
        ("activations", [2, 1 + 2, 1, 1 + 5, 1 + 5, 1, 1]),
    ],
    ids=SCHEDULES,
)
def test_the_next_hop_is_posted_before_the_strip_is_computed(schedule: str, expected: list[int]):
    # One piece a rank and one strip a visit, so every strip is a visit.
    assert run_ranks(3, sends_between_strips, schedule) == [expected] * 3


@pytest.mark.parametrize(
    ("dtype", "strip"), [(torch.bfloat16, 2), (torch.float32, 4)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("soft_cap", [None, 5.0], ids=["uncapped", "capped"])
def test_a_simulated_gpu_counts_the_fused_strip(
    dtype: torch.dtype, strip: int, soft_cap: float | None
):
    tokens, vocab, tile, width = 256, 640, 128, 32
    with FakeTensorMode(), simulated_gpu("sm_90", 132), PeakMeter() as meter:
        hidden = torch.ones(tokens, width, dtype=dtype, requires_grad=True)
        ring_cross_entropy(
            hidden,
            torch.zeros(tokens, dtype=torch.long),
            torch.ones(vocab, width, dtype=dtype),
            group=None,
            vocab_size=vocab,
            token_tile=tile,
            schedule="activations",
            grad_sink=lambda grad: None,
            soft_cap=soft_cap,
        ).sum().backward()
    gradients = tokens * width * dtype.itemsize + 4 * vocab * width
    # Where hidden states are narrow, what is added to their gradient lands in two fp32 pieces.
    pieces = 2 * 4 * tile * width if dtype == torch.bfloat16 else 0
    least = gradients + pieces + strip * tile * tile
    assert least <= meter.peaks()["vocabulary"] <= least + 50 * tokens + 100 * tile


def test_a_simulated_gpu_counts_partial_states_in_log_probabilities():
    tokens, vocab = 512, 4096
    with FakeTensorMode(), simulated_gpu("sm_90", 132), PeakMeter() as meter:
        ring_log_probs(
            torch.ones(tokens, 32, dtype=torch.bfloat16),
            torch.zeros(tokens, dtype=torch.long),
            torch.ones(vocab, 32, dtype=torch.bfloat16),
            group=None,
            vocab_size=vocab,
            token_tile=tokens,
        )
    splits = 512 // 128  # of a tile of 512 rows: each program has one block of 128
    partial = splits * tokens * 5 * 4
    assert partial <= meter.peaks()["vocabulary"] <= 3 * partial + 150 * tokens


def simulated_peaks(world: int, tokens: int, schedule: str) -> dict[str, int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with FakeTensorMode(), PeakMeter() as meter:
            loss_and_backward(0, world, tokens, schedule)
        return meter.peaks()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulated_peak_is_the_real_one(schedule: str):
    simulated = simulated_peaks(3, 100, schedule)["vocabulary"]
    real = run_ranks(3, peak_bytes, 3, 100, schedule)[0]
    agreement = 3 * len(fields(Facts)) * 8 * 4  # what is exchanged, which a simulation assumes
    assert abs(simulated - real) <= agreement
