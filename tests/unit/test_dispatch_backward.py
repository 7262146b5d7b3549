"""Properties of the backward pass: precision, determinism, sinks, recomputation, simulation."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.dispatch import DispatchOptions, assumed_routing, moe_forward
from flatpeak.workers.errors import InputError
from flatpeak.workers.recompute import checkpoint_contexts
from flatpeak.workers.scopes import current_scope
from moe_families import (
    HIDDEN,
    PlainExperts,
    Results,
    Tokens,
    assert_close,
    assert_equals_dense,
    dense_results,
    join,
    make_experts,
    make_tokens,
    profile,
    random_ids,
    results_of,
    slice_of,
)
from ranks import run_ranks

MOVING = DispatchOptions(tokens_per_chunk=5, min_chunk=1, balance_above=1.0, max_foreign_experts=3)


def dispatch(module: nn.Module, tokens: Tokens) -> torch.Tensor:
    return moe_forward(
        module,
        tokens.hidden,
        tokens.ids,
        tokens.weights,
        group=dist.group.WORLD,
        options=MOVING,
    )


def skewed(ranks: int) -> list[Tokens]:
    return [make_tokens(profile(12, 8, 3, 60, 3), seed=rank) for rank in range(ranks)]


def _poisoned(rank: int, tokens: list[Tokens]) -> Results:
    torch.use_deterministic_algorithms(True)
    # torch then fills what it leaves uninitialised with NaN.
    assert torch.empty(3).isnan().all()
    try:
        return results_of(slice_of(make_experts("plain", 8), rank, 2), tokens[rank], dispatch)
    finally:
        torch.use_deterministic_algorithms(False)


def test_uninitialised_memory_reaches_no_result():
    ids = [random_ids(9, 5, 2, seed=0), random_ids(4, 5, 2, seed=1)]
    tokens = [make_tokens(each) for each in ids]
    results = run_ranks(2, _poisoned, tokens)
    assert_equals_dense(make_experts("plain", 8), tokens, results)
    # Experts 5 to 7, the last of rank 1, get no token.
    for gradient in results[1].parameters.values():
        assert torch.equal(gradient[1:], torch.zeros_like(gradient[1:]))


def _with_and_without_poison(
    rank: int, tokens: list[Tokens], hidden: torch.dtype, held: torch.dtype
) -> tuple[Results, Results]:
    plain = _in_dtypes(rank, tokens, hidden, held)
    torch.use_deterministic_algorithms(True)
    try:
        return plain, _in_dtypes(rank, tokens, hidden, held)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("hidden", "held"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_uninitialised_memory_reaches_no_result_of_many_chunks_with_foreign_experts(
    hidden: torch.dtype, held: torch.dtype
):
    ids = [profile(tokens, 7, 2, 80, 2) for tokens in (23, 17)]
    routing = assumed_routing(ids, rank=1, experts=8, options=MOVING)
    assert len(routing.chunks) > 3
    assert routing.plan.moves_weights
    tokens = [make_tokens(each) for each in ids]
    for plain, poisoned in run_ranks(2, _with_and_without_poison, tokens, hidden, held):
        assert_same_bits(plain, poisoned)
        assert poisoned.output.isfinite().all()


def _repeat(rank: int, tokens: list[Tokens]) -> tuple[Results, Results]:
    module = make_experts("plain", 8)
    first, second = (
        results_of(slice_of(module, rank, 4), tokens[rank], dispatch) for _ in range(2)
    )
    return first, second


def assert_same_bits(first: Results, second: Results) -> None:
    for field in ("output", "hidden", "weights"):
        assert torch.equal(getattr(first, field), getattr(second, field)), field
    for name, gradient in first.parameters.items():
        assert torch.equal(gradient, second.parameters[name]), name


def test_two_runs_give_the_same_bits():
    for first, second in run_ranks(4, _repeat, skewed(4)):
        assert_same_bits(first, second)


@pytest.mark.parametrize("family", ["plain", "gpt-oss"])
def test_gradients_are_the_derivatives_of_the_output(family: str):
    module = make_experts(family, 4).double()
    tokens = make_tokens(random_ids(5, 4, 2))
    names = [name for name, _ in module.named_parameters()]

    def forward(hidden: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor):
        for name, value in zip(names, parameters, strict=True):
            delattr(module, name)
            setattr(module, name, value)
        options = replace(MOVING, tokens_per_chunk=2)
        return moe_forward(module, hidden, tokens.ids, weights, group=None, options=options)

    inputs = [tokens.hidden.double(), tokens.weights.double(), *module.parameters()]
    inputs = [value.detach().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(forward, inputs, fast_mode=True)


def _in_dtypes(rank: int, tokens: list[Tokens], hidden: torch.dtype, held: torch.dtype) -> Results:
    module = slice_of(make_experts("plain", 8), rank, 2).to(held)
    t = tokens[rank]
    cast = Tokens(t.hidden.to(hidden), t.ids, t.weights, t.upstream.to(hidden))
    return results_of(module, cast, dispatch)


def rms_error(value: torch.Tensor, want: torch.Tensor) -> float:
    return (value.float() - want).square().mean().sqrt().item()


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_is_no_less_accurate_than_the_eager_module(held: torch.dtype):
    half = torch.bfloat16
    tokens = [make_tokens(profile(150, 8, 3, 60, 3), seed=rank) for rank in range(2)]
    results = run_ranks(2, _in_dtypes, tokens, half, held)
    exact_module = make_experts("plain", 8).to(half).float()
    rounded = join(tokens)
    rounded = replace(rounded, hidden=rounded.hidden.to(half), upstream=rounded.upstream.to(half))
    exact = dense_results(
        exact_module,
        replace(rounded, hidden=rounded.hidden.float(), upstream=rounded.upstream.float()),
    )
    eager = dense_results(exact_module.to(half), replace(rounded, weights=rounded.weights.to(half)))

    for field in ("output", "hidden", "weights"):
        ours = torch.cat([getattr(result, field) for result in results])
        want = getattr(exact, field)
        assert rms_error(ours, want) <= rms_error(getattr(eager, field), want), field
    for name, want in exact.parameters.items():
        ours = torch.cat([result.parameters[name] for result in results])
        assert ours.dtype == held
        assert rms_error(ours, want) <= rms_error(eager.parameters[name], want), name


PROFILES = [(0, 1), (30, 16), (50, 16), (80, 16), (95, 16), (30, 4), (50, 4)]


def _each_in_half(rank: int, cases: list[list[Tokens]]) -> list[Results]:
    return [_half(rank, tokens) for tokens in cases]


def _half(rank: int, tokens: list[Tokens]) -> Results:
    half, t = torch.bfloat16, tokens[rank]
    module = slice_of(make_experts("plain", 32), rank, 2).to(half)
    cast = Tokens(t.hidden.to(half), t.ids, t.weights, t.upstream.to(half))
    return results_of(module, cast, dispatch)


def test_half_precision_is_no_less_accurate_than_the_eager_module_on_any_profile():
    half = torch.bfloat16
    cases = [
        [make_tokens(profile(60, 32, 8, *hot), seed=rank) for rank in range(2)] for hot in PROFILES
    ]
    by_rank = run_ranks(2, _each_in_half, cases)
    module = make_experts("plain", 32).to(half)
    for tokens, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        whole = join(tokens)
        rounded = replace(whole, hidden=whole.hidden.to(half), upstream=whole.upstream.to(half))
        eager = dense_results(module, replace(rounded, weights=whole.weights.to(half)))
        exact = dense_results(
            make_experts("plain", 32).to(half).float(),
            replace(rounded, hidden=rounded.hidden.float(), upstream=rounded.upstream.float()),
        )
        for name in ("output", "hidden", "weights"):
            ours, want = torch.cat([getattr(r, name) for r in results]), getattr(exact, name)
            assert rms_error(ours, want) <= rms_error(getattr(eager, name), want), name
        for name, want in exact.parameters.items():
            ours = torch.cat([result.parameters[name] for result in results])
            assert rms_error(ours, want) <= rms_error(eager.parameters[name], want), name


def _with_sink(rank: int, tokens: list[Tokens]) -> tuple[dict[str, torch.Tensor], bool, int]:
    module = slice_of(make_experts("plain", 8), rank, 2).bfloat16()
    names = {parameter: name for name, parameter in module.named_parameters()}
    received: list[tuple[str, torch.Tensor]] = []
    t = tokens[rank].leaves()
    moe_forward(
        module,
        t.hidden,
        t.ids,
        t.weights,
        group=dist.group.WORLD,
        options=MOVING,
        grad_sink=lambda parameter, gradient: received.append((names[parameter], gradient)),
    ).backward(t.upstream)
    without = all(parameter.grad is None for parameter in module.parameters())
    return dict(received), without, len(received)


def test_a_sink_receives_each_finished_gradient_once_in_fp32_and_autograd_none():
    tokens = skewed(2)
    results = run_ranks(2, _with_sink, tokens)
    dense = dense_results(make_experts("plain", 8).bfloat16().float(), join(tokens))
    for received, without, calls in results:
        assert without
        assert calls == 2
        assert all(gradient.dtype == torch.float32 for gradient in received.values())
    for name, want in dense.parameters.items():
        # bf16 weights are exact in fp32: only the order of sums differs.
        assert_close(torch.cat([received[name] for received, *_ in results]), want, name)


def test_frozen_experts_get_no_gradient_and_the_tokens_do():
    module, tokens = make_experts("plain", 8), make_tokens(random_ids(11, 8, 3))
    want = dense_results(module, tokens)
    module.requires_grad_(False)
    got = results_of(
        module,
        tokens,
        lambda m, t: moe_forward(m, t.hidden, t.ids, t.weights, group=None, options=MOVING),
    )
    assert got.parameters == {}
    assert_close(got.hidden, want.hidden, "hidden")
    assert_close(got.weights, want.weights, "weights")


class Layer(nn.Module):
    """A router, experts and a residual, as in a decoder layer; counts the routes it computes."""

    def __init__(self, rank: int, ranks: int, *, normed: bool, value_needed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 8, bias=False)
        nn.init.normal_(self.router.weight, generator=torch.Generator().manual_seed(3))
        self.experts: PlainExperts = slice_of(make_experts("plain", 8), rank, ranks)  # type: ignore[assignment]
        self.normed = normed
        self.value_needed = value_needed
        self.routes = 0
        self.counts: list[list[int]] = []
        gate = self.experts._apply_gate

        def counting_gate(up: torch.Tensor) -> torch.Tensor:
            self.routes += len(up)
            return gate(up)

        self.experts._apply_gate = counting_gate  # type: ignore[method-assign]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(hidden).softmax(-1).topk(3)
        self.counts.append(ids.flatten().bincount(minlength=8).tolist())
        output = moe_forward(
            self.experts,
            nn.functional.rms_norm(hidden, (HIDDEN,)),
            ids,
            weights,
            group=dist.group.WORLD,
            options=MOVING,
            value_needed_in_recompute=self.value_needed,
        )
        return hidden + (nn.functional.rms_norm(output, (HIDDEN,)) if self.normed else output)


@torch.enable_grad()
def _layer_run(rank: int, tokens: list[Tokens], checkpointed: bool, normed: bool, needed: bool):
    layer = Layer(rank, len(tokens), normed=normed, value_needed=needed)
    hidden = tokens[rank].hidden.clone().requires_grad_()
    if checkpointed:
        output = checkpoint(layer, hidden, use_reentrant=False, context_fn=checkpoint_contexts)
    else:
        output = layer(hidden)
    assert isinstance(output, torch.Tensor)
    output.backward(tokens[rank].upstream)
    gradients = [hidden.grad, *(parameter.grad for parameter in layer.parameters())]
    return output.detach(), gradients, layer.routes, layer.counts


def test_a_skipped_recomputation_gives_the_same_bits_with_less_work():
    tokens = skewed(2)
    plain = run_ranks(2, _layer_run, tokens, False, False, True)
    full = run_ranks(2, _layer_run, tokens, True, False, True)
    skipped = run_ranks(2, _layer_run, tokens, True, False, False)
    for without, ran, skip in zip(plain, full, skipped, strict=True):
        assert torch.equal(without[0], ran[0])
        assert torch.equal(ran[0], skip[0])
        for a, b, c in zip(without[1], ran[1], skip[1], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(b, c)
        # The gate runs in forward, in a full recomputation, and in backward.
        assert (without[2] * 3, ran[2] * 2) == (ran[2] * 2, skip[2] * 3)
        assert ran[3] == skip[3] == without[3] * 2


def test_a_skip_where_the_value_is_needed_shows_in_the_gradient():
    tokens = skewed(2)
    plain = run_ranks(2, _layer_run, tokens, False, True, True)
    full = run_ranks(2, _layer_run, tokens, True, True, True)
    for without, ran in zip(plain, full, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(without[1], ran[1], strict=True))
    wrong = run_ranks(2, _layer_run, tokens, True, True, False)
    assert all(result[1][0].isnan().any() for result in wrong)


def test_a_simulated_rank_runs_on_fake_tensors_with_assumed_routing():
    ranks, experts = 64, 128
    ids = [profile(40, experts, 8, 80, 16)] * ranks
    options = replace(MOVING, tokens_per_chunk=16, max_foreign_experts=2)
    routing = assumed_routing(ids, rank=1, experts=experts, options=options)
    assert routing.plan.moves_weights
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        with FakeTensorMode():
            module = PlainExperts(experts)
            for parameter in module.parameters():
                parameter.data = parameter.data[:2]
            hidden = torch.empty(40, HIDDEN, requires_grad=True)
            weights = torch.empty(40, 8, requires_grad=True)
            output = moe_forward(
                module,
                hidden,
                torch.empty(40, 8, dtype=torch.long),
                weights,
                group=dist.group.WORLD,
                options=options,
                routing=routing,
            )
            output.sum().backward()
            assert output.shape == (40, HIDDEN)
            assert hidden.grad is not None
            assert module.down_proj.grad is not None
            assert module.down_proj.grad.shape == module.down_proj.shape
    finally:
        dist.destroy_process_group()


def test_experts_work_inside_the_dispatch_scope():
    seen: list[str] = []
    module, tokens = make_experts("plain", 4), make_tokens(random_ids(6, 4, 2)).leaves()
    gate = module._apply_gate

    def watching_gate(up: torch.Tensor) -> torch.Tensor:
        seen.append(current_scope())
        return gate(up)

    module._apply_gate = watching_gate
    output = moe_forward(
        module, tokens.hidden, tokens.ids, tokens.weights, group=None, options=MOVING
    )
    output.backward(tokens.upstream)
    assert set(seen) == {"dispatch"}
    assert current_scope() == "other"


def test_experts_with_a_norm_of_their_own_are_refused():
    module, tokens = make_experts("plain", 4), make_tokens(random_ids(6, 4, 2))
    module.has_post_expert_norm = True
    with pytest.raises(InputError, match="PlainExperts normalises the output of each expert"):
        moe_forward(module, tokens.hidden, tokens.ids, tokens.weights, group=None, options=MOVING)


def test_parameters_that_are_not_the_local_slice_are_refused():
    module, tokens = slice_of(make_experts("plain", 4), 0, 2), make_tokens(random_ids(6, 4, 2))
    with pytest.raises(InputError, match="holds 2 experts, but rank 0 of 1 owns experts 0 to 3"):
        moe_forward(module, tokens.hidden, tokens.ids, tokens.weights, group=None, options=MOVING)


@pytest.mark.parametrize("family", ["plain", "gpt-oss"])
def test_autocast_around_a_layer_takes_no_digits(family: str):
    module, tokens = make_experts(family, 6), make_tokens(random_ids(9, 6, 2))
    wanted = results_of(module, tokens, _alone)
    module.zero_grad()

    def under_autocast(module: nn.Module, tokens: Tokens) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _alone(module, tokens)

    # The backward pass too, as where a trainer wraps its whole step.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results_of(module, tokens, under_autocast)
    assert torch.equal(found.output, wanted.output)
    assert torch.equal(found.hidden, wanted.hidden)
    for name, gradient in wanted.parameters.items():
        assert torch.equal(found.parameters[name], gradient)


def _alone(module: nn.Module, tokens: Tokens) -> torch.Tensor:
    return moe_forward(
        module, tokens.hidden, tokens.ids, tokens.weights, group=None, options=DispatchOptions()
    )


def test_a_parameter_that_cannot_be_sent_is_refused_before_any_weight_moves():
    module, tokens = make_experts("plain", 6), make_tokens(random_ids(9, 6, 2))
    module.down_proj = nn.Parameter(module.down_proj.detach().mT.contiguous().mT)
    with pytest.raises(InputError, match="down_proj has the strides"):
        _alone(module, tokens)
