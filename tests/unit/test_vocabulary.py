"""Ring-DTP equals dense fp64 cross entropy in loss and gradients, whatever the ring."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy, ring_log_probs
from ranks import run_ranks
from vocabulary_rounding import TOLERANCE, scale_of, terms_of

IGNORED = -100


@dataclass
class Case:
    """A whole batch in fp64: one entry a rank for the tokens, one head weight for all."""

    hidden: list[Tensor]
    targets: list[Tensor]
    upstream: list[Tensor]
    weight: Tensor


def make_case(tokens: list[int], vocab: int, width: int = 24, seed: int = 0) -> Case:
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        # Representable in fp32, so that both sides see the same input.
        return torch.randn(shape, generator=make).double()

    targets = [torch.randint(vocab, (n,), generator=make) for n in tokens]
    for ids in targets:
        ids[::5] = IGNORED
    return Case(
        hidden=[normal(n, width) for n in tokens],
        targets=targets,
        upstream=[normal(n) for n in tokens],
        weight=normal(vocab, width) * 0.2,
    )


def dense(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor]:
    hidden = [x.clone().requires_grad_() for x in case.hidden]
    weight = case.weight.clone().requires_grad_()
    losses = [
        F.cross_entropy(x @ weight.T, t, reduction="none", ignore_index=IGNORED)
        for x, t in zip(hidden, case.targets, strict=True)
    ]
    torch.autograd.backward(losses, case.upstream)
    return (
        [loss.detach() for loss in losses],
        [x.grad if x.grad is not None else torch.zeros_like(x) for x in hidden],
        weight.grad if weight.grad is not None else torch.zeros_like(weight),
    )


def terms(case: Case) -> tuple[list[Tensor], Tensor]:
    """What is added up in each rank's dX and in dW."""
    residuals = []
    for x, t, g in zip(case.hidden, case.targets, case.upstream, strict=True):
        logits = (x @ case.weight.T).requires_grad_()
        F.cross_entropy(logits, t, reduction="none", ignore_index=IGNORED).backward(g)
        residuals.append(torch.zeros_like(logits) if logits.grad is None else logits.grad)
    return terms_of(residuals, case.hidden, case.weight)


def ring(rank: int, world: int, case: Case, options: dict, dtype: torch.dtype = torch.float32):
    """Loss, dX and dW of this rank under the sharded vocabulary."""
    start, stop = part(case.weight.shape[0], world, rank)
    hidden = case.hidden[rank].to(dtype).requires_grad_()
    shard = case.weight[start:stop].to(dtype).requires_grad_()
    loss = ring_cross_entropy(
        hidden,
        case.targets[rank],
        shard,
        group=dist.group.WORLD if world > 1 else None,
        vocab_size=case.weight.shape[0],
        **options,
    )
    loss.backward(case.upstream[rank].float())
    assert hidden.grad is not None
    assert shard.grad is not None
    return loss.detach(), hidden.grad, shard.grad


def assert_close(
    actual: list[Tensor],
    expected: list[Tensor],
    terms: list[Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Within `tolerance`, or where `terms` cancel within what rounding leaves of them."""
    assert [x.shape for x in actual] == [x.shape for x in expected]
    whole = torch.cat(expected)
    error = (torch.cat(actual).double() - whole).norm()
    assert error <= tolerance * scale_of(whole, whole if terms is None else torch.cat(terms))


def check(world: int, case: Case, **options: Any) -> None:
    loss, d_hidden, d_weight = dense(case)
    of_hidden, of_weight = terms(case)
    if world == 1:
        results = [ring(0, 1, case, options)]
    else:
        results = run_ranks(world, ring, world, case, options)
    assert_close([result[0] for result in results], loss)
    assert_close([result[1] for result in results], d_hidden, of_hidden)
    assert_close([torch.cat([result[2] for result in results])], [d_weight], [of_weight])


SCHEDULES = ["weights", "activations"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("vocab", [5, 257, 1003])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_loss_and_gradients_equal_dense(world: int, vocab: int, schedule: str):
    tokens = [(7 * rank + 11) % 20 for rank in range(world)]
    check(world, make_case(tokens, vocab), schedule=schedule, token_tile=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_real_vocabulary_that_divides_by_no_group_equals_dense(world: int, schedule: str):
    check(world, make_case([48 // world] * world, 50_257), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "tokens", [[9, 0, 4], [0, 13, 1], [0, 0, 0]], ids=["one-empty", "first-empty", "all-empty"]
)
def test_ranks_may_hold_any_number_of_tokens(tokens: list[int], schedule: str):
    check(3, make_case(tokens, 31), schedule=schedule, token_tile=3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    vocab=st.integers(1, 40),
    width=st.integers(1, 5),
    token_tile=st.none() | st.integers(1, 10),
    schedule=st.sampled_from(["auto", *SCHEDULES]),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_dense(tokens, vocab, width, token_tile, schedule, seed):
    case = make_case(tokens, vocab, width, seed)
    check(len(tokens), case, schedule=schedule, token_tile=token_tile)


def every_rank_ignored(case: Case) -> Case:
    return replace(case, targets=[torch.full_like(t, IGNORED) for t in case.targets])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_of_ignored_tokens_has_zero_loss_and_gradients(schedule: str):
    case = every_rank_ignored(make_case([6, 5], 17))
    for result in run_ranks(2, ring, 2, case, {"schedule": schedule}):
        assert all(torch.equal(x, torch.zeros_like(x)) for x in result)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_with_only_ignored_labels_changes_nothing_for_the_other(schedule: str):
    case = make_case([6, 5], 17)
    case.targets[1].fill_(IGNORED)
    alone = ring(0, 1, replace(case, hidden=case.hidden[:1]), {})
    both = run_ranks(2, ring, 2, case, {"schedule": schedule})
    assert_close([both[0][0]], [alone[0].double()])
    assert_close([both[0][1]], [alone[1].double()])
    assert_close([torch.cat([dw for _, _, dw in both])], [alone[2].double()])
    assert not both[1][0].any()
    assert not both[1][1].any()


def test_upstream_of_ignored_tokens_is_never_read():
    case = make_case([10], 17)
    loss, dx, dw = ring(0, 1, case, {})
    case.upstream[0][::5] = float("nan")
    again = ring(0, 1, case, {})
    assert all(torch.equal(a, b) for a, b in zip((loss, dx, dw), again, strict=True))


def test_one_batch_and_accumulated_rows_give_the_same_gradients():
    case = make_case([sum(range(3, 18))], 101)
    rows = list(range(3, 18))
    split = Case(
        hidden=list(case.hidden[0].split(rows)),
        targets=list(case.targets[0].split(rows)),
        upstream=list(case.upstream[0].split(rows)),
        weight=case.weight,
    )
    together = ring(0, 1, case, {})
    parts = [ring_of_row(split, row) for row in range(len(rows))]
    assert_close([torch.cat([loss for loss, _, _ in parts])], [together[0].double()])
    assert_close([torch.cat([dx for _, dx, _ in parts])], [together[1].double()])
    assert_close([torch.stack([dw for _, _, dw in parts]).sum(0)], [together[2].double()])


def ring_of_row(case: Case, row: int) -> tuple[Tensor, Tensor, Tensor]:
    alone = replace(
        case,
        hidden=[case.hidden[row]],
        targets=[case.targets[row]],
        upstream=[case.upstream[row]],
    )
    return ring(0, 1, alone, {})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_narrow_hidden_states_lose_nothing_but_their_own_rounding(dtype, schedule: str):
    case = make_case([20, 11], 1003)
    rounded = replace(
        case,
        hidden=[x.to(dtype).double() for x in case.hidden],
        weight=case.weight.to(dtype).double(),
    )
    loss, d_hidden, d_weight = dense(rounded)
    options = {"schedule": schedule, "token_tile": 4}
    results = run_ranks(2, ring, 2, rounded, options, dtype)
    for rank, (nll, dx, dw) in enumerate(results):
        assert nll.dtype == torch.float32
        assert dx.dtype == dw.dtype == dtype
        assert (nll.double() - loss[rank]).abs().max() < 1e-5
    # The gradients are summed in fp32 and rounded once, at the end.
    once = torch.finfo(dtype).eps
    assert_close([dx for _, dx, _ in results], d_hidden, tolerance=once)
    assert_close([torch.cat([dw for _, _, dw in results])], [d_weight], tolerance=once)


def sum_under_autocast(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ring_cross_entropy(
            hidden, targets, weight, group=None, vocab_size=weight.shape[0]
        ).sum()


def test_autocast_does_not_narrow_the_logits():
    case = make_case([16], 257)
    expected, d_hidden, d_weight = dense(replace(case, upstream=[torch.ones(16).double()]))
    hidden = case.hidden[0].float().requires_grad_()
    weight = case.weight.float().requires_grad_()
    loss = sum_under_autocast(hidden, case.targets[0], weight)
    loss.backward()  # of a sum: the upstream gradient is one number with stride 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert_close([loss.detach().view(1)], [expected[0].sum().view(1)])
    assert_close([hidden.grad], d_hidden)
    assert_close([weight.grad], [d_weight])


def sink_of_rank(rank: int, world: int, case: Case, options: dict) -> tuple[list[Tensor], bool]:
    start, stop = part(case.weight.shape[0], world, rank)
    shard = case.weight[start:stop].bfloat16().requires_grad_()
    received: list[Tensor] = []
    loss = ring_cross_entropy(
        case.hidden[rank].bfloat16().requires_grad_(),
        case.targets[rank],
        shard,
        group=dist.group.WORLD,
        vocab_size=case.weight.shape[0],
        grad_sink=received.append,
        **options,
    )
    loss.backward(case.upstream[rank].float())
    return received, shard.grad is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sink_receives_the_unrounded_weight_gradient_once(schedule: str):
    case = make_case([20, 11], 103)
    case = replace(
        case,
        hidden=[x.bfloat16().double() for x in case.hidden],
        weight=case.weight.bfloat16().double(),
    )
    results = run_ranks(2, sink_of_rank, 2, case, {"schedule": schedule})
    assert all(len(received) == 1 and no_grad for received, no_grad in results)
    assert_close([torch.cat([received[0] for received, _ in results])], [dense(case)[2]])


def frozen(rank: int, world: int, case: Case, options: dict, which: str):
    start, stop = part(case.weight.shape[0], world, rank)
    hidden = case.hidden[rank].float().requires_grad_(which != "hidden")
    shard = case.weight[start:stop].float().requires_grad_(which != "weight")
    loss = ring_cross_entropy(
        hidden,
        case.targets[rank],
        shard,
        group=dist.group.WORLD,
        vocab_size=case.weight.shape[0],
        **options,
    )
    loss.backward(case.upstream[rank].float())
    return hidden.grad, shard.grad


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_exact(which: str, schedule: str):
    case = make_case([7, 9], 23)
    _, d_hidden, d_weight = dense(case)
    results = run_ranks(2, frozen, 2, case, {"schedule": schedule}, which)
    if which == "hidden":
        assert all(dx is None for dx, _ in results)
        assert_close([torch.cat([dw for _, dw in results])], [d_weight])
    else:
        assert all(dw is None for _, dw in results)
        assert_close([dx for dx, _ in results], d_hidden)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_strided_inputs_are_read_as_they_are(schedule: str):
    case = make_case([12, 12], 29)
    results = run_ranks(2, ring_with_strides, case, schedule)
    _, d_hidden, d_weight = dense(case)
    assert_close([dx for dx, _ in results], d_hidden)
    assert_close([torch.cat([dw for _, dw in results])], [d_weight])


def ring_with_strides(rank: int, case: Case, schedule: str):
    start, stop = part(case.weight.shape[0], 2, rank)
    hidden = case.hidden[rank].float().t().contiguous().requires_grad_()
    shard = case.weight[start:stop].float().t().contiguous().requires_grad_()
    loss = ring_cross_entropy(
        hidden.t(),
        case.targets[rank],
        shard.t(),
        group=dist.group.WORLD,
        vocab_size=case.weight.shape[0],
        token_tile=5,
        schedule=schedule,
    )
    loss.backward(case.upstream[rank].float())
    assert hidden.grad is not None
    assert shard.grad is not None
    return hidden.grad.t(), shard.grad.t()


@pytest.mark.parametrize("token_tile", [None, 1, 2])
def test_a_logit_of_minus_infinity_counts_nothing(token_tile: int | None):
    # fp32 overflows in the first row alone; with small tiles it is a strip of its own.
    hidden = torch.tensor([[1e20, 1.0], [1e20, 2.0]], requires_grad=True)
    for rows in ([0, 1, 2], [1, 0, 2], [1, 2, 0]):
        weight = torch.tensor([[-1e20, 0.0], [0.0, 1.0], [0.0, 2.0]])[rows].requires_grad_()
        targets = torch.tensor([rows.index(2), rows.index(1)])
        loss = ring_cross_entropy(
            hidden, targets, weight, group=None, vocab_size=3, token_tile=token_tile
        )
        wanted = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        found = torch.autograd.grad(loss.sum(), (hidden, weight))
        for mine, dense in zip(
            found, torch.autograd.grad(wanted.sum(), (hidden, weight)), strict=True
        ):
            torch.testing.assert_close(mine, dense, rtol=1e-5, atol=1e-6)
        log_probs, entropy = ring_log_probs(
            hidden.detach(),
            targets,
            weight.detach(),
            group=None,
            vocab_size=3,
            token_tile=token_tile,
        )
        torch.testing.assert_close(log_probs, -wanted.detach(), rtol=1e-6, atol=0)
        seen = torch.tensor([[1.0, 2.0], [2.0, 4.0]]).log_softmax(1)
        torch.testing.assert_close(entropy, -(seen * seen.exp()).sum(1), rtol=1e-6, atol=0)
