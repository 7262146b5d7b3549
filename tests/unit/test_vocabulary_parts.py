"""The pieces of the vocabulary loss on their own: strips against formulas, tiles, the tour."""

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.vocabulary_strip import accumulate_, merge_, strip_residual, strip_state
from flatpeak.workers.vocabulary.ring import Carry, Ring, tour
from flatpeak.workers.vocabulary.tiles import choose_tiles, spans, weights_move


def strip_input() -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 4, generator=make), torch.randn(7, 4, generator=make)
    return x, w, torch.tensor([0, 6, 7, -1, 3])  # the third and fourth belong to other tiles


def test_states_of_two_strips_merge_into_the_state_of_both():
    x, w, columns = strip_input()
    state = torch.tensor([float("-inf"), -1.0, 0.0]).repeat(5, 1)
    merge_(state, strip_state(x, w[:3], columns))
    merge_(state, strip_state(x, w[3:], columns - 3))
    m, r, y = state.unbind(1)
    logits = x @ w.T
    torch.testing.assert_close(m + r.log1p(), logits.logsumexp(1))
    inside = [0, 1, 4]
    torch.testing.assert_close(y[inside], logits[inside, columns[inside]])
    assert not y[[2, 3]].any()


def test_merging_does_not_overflow_with_large_logits():
    state = torch.tensor([[float("-inf"), -1.0, 0.0]])
    for m in (300.0, 1000.0, -1000.0):
        merge_(state, torch.tensor([[m, 0.0, 0.0]]))
    assert state.tolist() == [[1000.0, 0.0, 0.0]]


def test_the_residual_is_the_gradient_of_the_loss_by_the_logits():
    x, w, columns = strip_input()
    inside = [0, 1, 4]
    logits = (x @ w.T)[inside].requires_grad_()
    upstream = torch.tensor([0.5, -2.0, 3.0])
    loss = torch.nn.functional.cross_entropy(logits, columns[inside], reduction="none")
    loss.backward(upstream)
    top = logits.detach().amax(1)
    z = (logits.detach() - top.unsqueeze(1)).exp().sum(1)
    actual = strip_residual(x[inside], w, columns[inside], top, upstream / z, upstream)
    torch.testing.assert_close(actual, logits.grad)


def test_products_of_bf16_accumulate_in_fp32():
    a, b = torch.ones(1, 4096).bfloat16(), torch.full((4096, 1), 1 / 128).bfloat16()
    total = torch.full((1, 1), 4096.0)
    accumulate_(total, a, b)
    assert total.item() == 4096.0 + 32.0  # in bf16, 1/128 vanishes beside 4096


@pytest.mark.parametrize(
    ("tokens", "shard_rows", "width", "token_tile", "expected"),
    [
        pytest.param(16_384, 25_000, 7168, None, (4096, 4096), id="full-scale"),
        pytest.param(1024, 1563, 448, None, (704, 704), id="sixteenth"),
        pytest.param(100, 50_000, 64, None, (100, 2816), id="few-tokens-wide-strip"),
        pytest.param(16_384, 25_000, 7168, 64, (64, 64), id="asked-for"),
        pytest.param(0, 0, 8, None, (1, 1), id="nothing"),
    ],
)
def test_tiles_are_square_and_bounded_by_bytes(tokens, shard_rows, width, token_tile, expected):
    tiles = choose_tiles(tokens=tokens, shard_rows=shard_rows, width=width, token_tile=token_tile)
    assert (tiles.tokens, tiles.vocabulary) == expected


@pytest.mark.parametrize(
    ("tokens", "moves"), [(25_000, False), (25_001, True)], ids=["as-many-tokens", "more-tokens"]
)
def test_the_smaller_tensor_moves(tokens: int, moves: bool):
    assert weights_move("auto", tokens=tokens, vocab_size=200_000, ranks=8) is moves
    assert not weights_move("auto", tokens=tokens * 8, vocab_size=200_000, ranks=1)
    assert weights_move("weights", tokens=tokens, vocab_size=200_000, ranks=8)
    assert not weights_move("activations", tokens=tokens, vocab_size=200_000, ranks=8)


def test_spans_cover_every_row_once():
    assert list(spans(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(spans(0, 3)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_ring_of_one_visits_its_own_pieces_and_keeps_what_they_carry(dtype: torch.dtype):
    rows = torch.arange(5.0).view(5, 1)
    home = torch.ones(5, 1, dtype=dtype)
    carry = Carry(ring := Ring(None), home, 2)
    bounds = []
    for visit in tour(ring, [5], 2, (rows,), carry):
        bounds.append((visit.owner, visit.start, visit.stop))
        carry.here().add_(visit.payload[0])
    assert bounds == [(0, 0, 2), (0, 2, 4), (0, 4, 5)]
    assert home.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (5, 8), (24, 1), (64, 8)], ids=str)
def test_a_long_sum_of_little_loses_no_digits_of_a_large_total(shape: tuple[int, int]):
    make = torch.Generator().manual_seed(0)
    rows, columns = shape
    total = torch.randn(shape, generator=make)
    exact, terms = total.double(), total.double().abs()
    for _ in range(10):  # probabilities, and rows of a head
        a = torch.rand(rows, 2000, generator=make) / 20_000
        b = torch.randn(2000, columns, generator=make)
        accumulate_(total, a, b)
        exact += a.double() @ b.double()
        terms += a.double() @ b.double().abs()
    assert (total.double() - exact).norm() <= 3e-7 * terms.norm()
