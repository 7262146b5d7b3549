"""Every option of the vocabulary loss equals what dense fp64 logits give, on any ring.

A process group is started once a size, and all cases run inside it.
"""

from dataclasses import dataclass
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flatpeak.workers.memory import PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy, ring_log_probs
from ranks import run_ranks
from vocabulary_rounding import TOLERANCE, scale_of, terms_of

IGNORED = -100
SCHEDULES = ("weights", "activations")


@dataclass(frozen=True)
class Case:
    """A batch for every rank, and how its loss is made; drawn from `seed` where it is used."""

    seed: int
    tokens: list[int]
    vocab: int
    width: int
    schedule: str = "auto"
    token_tile: int | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    weighted: bool = False
    tied: bool = False
    offset: float | None = None
    """A number that all logits have in common; they are all exact in fp32 then."""
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> dict:
        names = ("logit_scale", "soft_cap", "schedule", "token_tile")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Data:
    """fp64 values that the case's dtype can represent, one entry a rank, one weight for all."""

    hidden: list[Tensor]
    targets: list[Tensor]
    upstream: list[Tensor]
    token_weights: list[Tensor | None]
    weight: Tensor


def data_of(case: Case) -> Data:
    make = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=make)
        return (values if case.offset is None else (4 * values).round() / 4).to(case.dtype).double()

    weight = normal(case.vocab, case.width)
    if case.offset is None:
        weight = (weight * 0.7).to(case.dtype).double()
    else:
        weight[:, 0] = case.offset
    hidden, targets, upstream, token_weights = [], [], [], []
    for n in case.tokens:
        ids = torch.randint(case.vocab, (n,), generator=make)
        # Tied: what goes in are rows of the head weight, by token id.
        inputs = torch.randint(case.vocab, (n,), generator=make) if case.tied else None
        hidden.append(normal(n, case.width) if inputs is None else inputs)
        if case.offset is not None:
            hidden[-1][:, 0] = 1.0
        ids[::5] = IGNORED
        targets.append(ids)
        upstream.append(torch.randn(n, generator=make).double())
        weights = torch.rand(n, generator=make) * 2
        weights[1::4] = 0.0
        token_weights.append(weights if case.weighted else None)
    return Data(hidden, targets, upstream, token_weights, weight)


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True).requires_grad_()


@dataclass(frozen=True)
class Exact:
    """What is to be found, by NAMES, and by name what is added up without its signs in some."""

    results: list[list[Tensor]]
    terms: dict[str, Tensor]


NAMES = ("loss", "d hidden", "d weight", "log probability", "entropy")


def dense(case: Case, data: Data, dtype: torch.dtype = torch.float64) -> Exact:
    """Losses, gradients of hidden states and weight, log-probabilities and entropies."""
    weight = leaf(data.weight, dtype)
    hidden = [F.embedding(x, weight) if case.tied else leaf(x, dtype) for x in data.hidden]
    losses, log_probs, entropies, products = [], [], [], []
    for x, t, w in zip(hidden, data.targets, data.token_weights, strict=True):
        products.append(x @ weight.T)
        products[-1].retain_grad()
        logits = products[-1] * case.logit_scale
        if case.soft_cap is not None:
            logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
        loss = F.cross_entropy(
            logits, t, reduction="none", ignore_index=IGNORED, label_smoothing=case.label_smoothing
        )
        kept = t != IGNORED
        loss = loss + kept * case.z_loss * logits.logsumexp(1).square()
        losses.append(loss if w is None else loss * w)
        spread = logits.detach().log_softmax(1)
        log_probs.append(spread.gather(1, t.clamp(min=0).unsqueeze(1)).squeeze(1) * kept)
        entropies.append(-(spread.exp() * spread).sum(1) * kept)
    torch.autograd.backward(losses, [g.to(dtype) for g in data.upstream])
    d_hidden = [] if case.tied else [_grad(x) for x in hidden]
    of_hidden, of_weight = terms_of([_grad(x) for x in products], hidden, weight)
    if case.tied:
        of_weight.index_add_(0, torch.cat(data.hidden), torch.cat(of_hidden))
    terms = {"d hidden": torch.cat(of_hidden), "d weight": of_weight}
    losses = [x.detach() for x in losses]
    return Exact([losses, d_hidden, [_grad(weight)], log_probs, entropies], terms)


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def ring_cases(rank: int, world: int, cases: list[Case]) -> list[tuple[Tensor, ...]]:
    return [ring_case(rank, world, case) for case in cases]


def ring_case(rank: int, world: int, case: Case) -> tuple[Tensor, ...]:
    """As `dense`, of this rank; tied, the gradient is of the whole weight, to be summed."""
    data, group = data_of(case), dist.group.WORLD if world > 1 else None
    rows = slice(*part(case.vocab, world, rank))
    weight = leaf(data.weight, case.dtype)
    x = data.hidden[rank]
    hidden = F.embedding(x, weight) if case.tied else leaf(x, case.dtype)
    shard, targets = weight[rows], data.targets[rank]
    loss = ring_cross_entropy(
        hidden,
        targets,
        shard,
        group=group,
        vocab_size=case.vocab,
        z_loss=case.z_loss,
        label_smoothing=case.label_smoothing,
        token_weights=data.token_weights[rank],
        **case.options,
    )
    loss.backward(data.upstream[rank].float())
    evaluated = ring_log_probs(
        hidden, targets, shard, group=group, vocab_size=case.vocab, **case.options
    )
    assert not any(x.requires_grad for x in evaluated)
    assert weight.grad is not None
    d_weight = weight.grad if case.tied else weight.grad[rows]
    return loss.detach(), _grad(hidden) if hidden.is_leaf else hidden[:0], d_weight, *evaluated


def joined(case: Case, results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    losses, d_hidden, d_weight, *evaluated = (list(x) for x in zip(*results, strict=True))
    whole = sum(x.double() for x in d_weight) if case.tied else torch.cat(d_weight)
    assert isinstance(whole, Tensor)
    return [torch.cat(losses), torch.cat(d_hidden), whole, *map(torch.cat, evaluated)]


def errors(results: list[Tensor], exact: Exact) -> dict[str, float]:
    """Relative, of each result that has any elements."""
    found = {}
    for name, actual, parts in zip(NAMES, results, exact.results, strict=True):
        if actual.numel():
            expected = torch.cat(parts).double()
            scale = max(scale_of(expected, exact.terms.get(name, expected)), 1e-30)
            found[name] = (actual.double() - expected).norm().item() / scale
    return found


def run_cases(world: int, cases: list[Case]) -> list[list[Tensor]]:
    if world == 1:
        results = [ring_cases(0, 1, cases)]
    else:
        results = run_ranks(world, ring_cases, world, cases)
    by_case = zip(*results, strict=True)
    return [joined(case, list(parts)) for case, parts in zip(cases, by_case, strict=True)]


def random_case(random: Random, world: int) -> Case:
    vocab = random.choice([5, 257, random.randint(1, 60)])
    scale = random.choice([1.0, 1.0, 0.0625, 1 / 6, -2.0])
    # Much smoothing and little spread leave the difference of two nearly equal shares, in any fp32.
    smoothings = [0.0, 0.1, 0.95 if abs(scale) >= 1 else 0.3]
    return Case(
        seed=random.randrange(10**6),
        tokens=[random.choice([0, 1, random.randint(2, 12)]) for _ in range(world)],
        vocab=vocab,
        width=random.randint(2, 16),
        schedule=random.choice(SCHEDULES),
        token_tile=random.choice([None, 3, 8]),
        logit_scale=scale,
        soft_cap=random.choice([None, 3.0, 30.0]),
        z_loss=random.choice([0.0, 1e-4, 0.1]),
        label_smoothing=random.choice(smoothings),
        weighted=random.random() < 0.5,
        tied=random.random() < 0.3,
    )


CASES = {1: 60, 2: 40, 3: 30, 4: 20, 8: 6}


@pytest.mark.parametrize("world", CASES)
def test_any_case_with_any_options_equals_dense(world: int):
    random = Random(world)
    cases = [random_case(random, world) for _ in range(CASES[world])]
    for case, results in zip(cases, run_cases(world, cases), strict=True):
        found = errors(results, dense(case, data_of(case)))
        assert max(found.values(), default=0.0) <= TOLERANCE, (case, found)


@pytest.mark.parametrize("world", [1, 2])
def test_logits_lose_no_digits_of_theirs_to_what_they_have_in_common(world: int):
    plain = {"tokens": [12, 7][:world], "vocab": 61, "width": 8, "token_tile": 8}
    cases = [
        Case(seed=3, offset=offset, z_loss=z_loss, schedule=schedule, weighted=True, **plain)
        for offset in (0.0, 1e4, -1e4, 1e6)
        for z_loss in (0.0, 1e-4)
        for schedule in SCHEDULES
    ]
    for case, results in zip(cases, run_cases(world, cases), strict=True):
        found = errors(results, dense(case, data_of(case)))
        assert max(found.values()) <= TOLERANCE, (case, found)


ALL = {
    "logit_scale": 0.7,
    "soft_cap": 5.0,
    "z_loss": 1e-2,
    "label_smoothing": 0.1,
    "weighted": True,
}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_real_vocabulary_with_every_option_equals_dense(world: int):
    tokens = [max(0, 5 - 2 * rank) for rank in range(world)]
    plain = Case(seed=world, tokens=tokens, vocab=50_257, width=8)
    cases = [Case(**{**vars(plain), "schedule": schedule, **ALL}) for schedule in SCHEDULES]
    if world == 2:
        cases += [Case(**{**vars(case), "tied": True}) for case in cases]
    for case, results in zip(cases, run_cases(world, cases), strict=True):
        found = errors(results, dense(case, data_of(case)))
        assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_bf16_is_no_worse_than_dense_logits_in_bf16(world: int):
    tokens = [9, 4, 7, 0, 1, 2, 3, 5][:world]
    cases = [
        Case(
            seed=5,
            tokens=tokens,
            vocab=257,
            width=16,
            schedule=schedule,
            token_tile=4,
            dtype=torch.bfloat16,
            **options,
        )
        for schedule in SCHEDULES
        for options in ({}, ALL)
    ]
    for case, results in zip(cases, run_cases(world, cases), strict=True):
        data = data_of(case)
        wanted = dense(case, data)
        narrow = [torch.cat(parts) for parts in dense(case, data, torch.bfloat16).results]
        found, allowed = errors(results, wanted), errors(narrow, wanted)
        assert all(found[name] <= allowed[name] for name in NAMES), (case, found, allowed)
        assert found["loss"] < 1e-6


GAPS = (0.5, 3.0, 10.0, 25.0, 80.0)


def confident_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Each token has one logit that is far above all others, by more from token to token."""
    make = torch.Generator().manual_seed(3)
    targets = torch.randperm(257, generator=make)[: len(GAPS)]
    # One column a token: its logits are exact, whatever the order of sums.
    weight = torch.randn(257, len(GAPS), generator=make)
    for token, (target, gap) in enumerate(zip(targets, GAPS, strict=True)):
        weight[target, token] = weight[:, token].max() + gap
    return torch.eye(len(GAPS)), targets, weight


def evaluated_and_lost(rank: int, world: int, schedule: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden, targets, weight = confident_tokens()
    own = slice(*part(len(hidden), world, rank))
    args = (hidden[own], targets[own], weight[slice(*part(257, world, rank))])
    options = {
        "group": dist.group.WORLD if world > 1 else None,
        "vocab_size": 257,
        "schedule": schedule,
        "token_tile": 3,
    }
    return *ring_log_probs(*args, **options), ring_cross_entropy(*args, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2])
def test_an_entropy_near_zero_keeps_its_digits_and_so_does_a_log_probability(
    world: int, schedule: str
):
    if world == 1:
        results = [evaluated_and_lost(0, 1, schedule)]
    else:
        results = run_ranks(world, evaluated_and_lost, world, schedule)
    log_probs, entropy, loss = map(torch.cat, zip(*results, strict=True))
    hidden, targets, weight = confident_tokens()
    logits = (hidden @ weight.T).double()
    y = logits.gather(1, targets.unsqueeze(1))
    below = logits.scatter(1, targets.unsqueeze(1), float("-inf")) - y
    others = below.exp().sum(1)  # beside 1, the target's own
    exact = others.log1p()
    shares = below.exp() / (1 + others).unsqueeze(1)
    spread = exact - (shares * below.masked_fill(below == float("-inf"), 0.0)).sum(1)
    assert exact[-1] < 1e-32
    torch.testing.assert_close(log_probs.double(), -exact, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(entropy.double(), spread, rtol=1e-6, atol=0.0)
    # Without moments a strip adds the others to the maximum, in fp32.
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)


def test_the_mean_loss_of_an_untrained_head_is_log_v_for_every_group():
    cases = {world: Case(seed=1, tokens=[6] * world, vocab=257, width=4) for world in (1, 2, 3, 4)}
    for world, case in cases.items():
        losses = run_ranks(world, loss_of_a_zero_head, world, case)
        assert torch.allclose(torch.cat(losses), torch.tensor(257.0).log())


def loss_of_a_zero_head(rank: int, world: int, case: Case) -> Tensor:
    start, stop = part(case.vocab, world, rank)
    targets = torch.arange(case.tokens[rank])
    return ring_cross_entropy(
        torch.ones(len(targets), case.width),
        targets,
        torch.zeros(stop - start, case.width),
        group=dist.group.WORLD,
        vocab_size=case.vocab,
    )


def test_a_weight_of_zero_is_an_ignored_token():
    case = Case(seed=2, tokens=[12], vocab=31, width=6, z_loss=0.1, label_smoothing=0.2)
    data = data_of(case)
    (kept,) = (t != IGNORED for t in data.targets)
    weights = kept.float()
    unmasked = data.targets[0].clamp(min=0)

    def run(targets: Tensor, token_weights: Tensor | None, upstream: Tensor) -> tuple[Tensor, ...]:
        x, w = (z.float().requires_grad_() for z in (data.hidden[0], data.weight))
        loss = ring_cross_entropy(
            x,
            targets,
            w,
            group=None,
            vocab_size=31,
            z_loss=case.z_loss,
            label_smoothing=case.label_smoothing,
            token_weights=token_weights,
        )
        loss.backward(upstream)
        return loss.detach(), _grad(x), _grad(w)

    upstream = data.upstream[0].float()
    ignored = run(data.targets[0], None, upstream)
    # What is left out is never read, whatever comes from above.
    weighted = run(unmasked, weights, upstream.masked_fill(~kept, float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(ignored, weighted, strict=True))


def test_log_probabilities_need_two_strips_and_keep_nothing():
    tokens, vocab, width, tile = 300, 500, 4, 16
    hidden = torch.ones(tokens, width, requires_grad=True)
    weight = torch.ones(vocab, width, requires_grad=True)
    with PeakMeter() as meter:
        log_probs, entropy = ring_log_probs(
            hidden, torch.arange(tokens), weight, group=None, vocab_size=vocab, token_tile=tile
        )
        peak = meter.peaks()["vocabulary"]
        kept = meter.live()["vocabulary"]
    assert kept == log_probs.nbytes + entropy.nbytes
    # Per token: a state of five fp64 numbers, and a few vectors at the end.
    assert peak <= tokens * 100 + 2 * 4 * tile * tile + 200 * tile
    assert peak < tokens * vocab * 4 / 10
    assert torch.allclose(entropy, torch.tensor(float(vocab)).log())


def nll_and_losses(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor]:
    """What the sink of this rank gets, and its losses without an option."""
    data, received = data_of(case), []
    rows = slice(*part(case.vocab, world, rank))
    args = (data.hidden[rank].float(), data.targets[rank], data.weight[rows].float())
    ring = {"group": dist.group.WORLD if world > 1 else None, "vocab_size": case.vocab}
    weights = data.token_weights[rank]
    ring_cross_entropy(
        *args,
        **ring,
        z_loss=case.z_loss,
        label_smoothing=case.label_smoothing,
        token_weights=weights,
        nll_sink=received.append,
    )
    (nll,) = received
    without = ring_cross_entropy(*args, **ring)
    return nll, without if weights is None else without.masked_fill(weights == 0, 0.0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_sink_gets_the_likelihoods_beside_any_loss(world: int):
    case = Case(seed=4, tokens=[9, 5][:world], vocab=31, width=6, z_loss=0.1, label_smoothing=0.2)
    for asked in (case, Case(**{**vars(case), "weighted": True})):
        results = (
            run_ranks(world, nll_and_losses, world, asked)
            if world > 1
            else [nll_and_losses(0, 1, asked)]
        )
        for nll, losses in results:
            assert nll.dtype == torch.float32
            assert not nll.requires_grad
            torch.testing.assert_close(nll, losses, rtol=1e-6, atol=1e-6)
