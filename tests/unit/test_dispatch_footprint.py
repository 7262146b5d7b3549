"""What dispatch takes is what its footprint says, and stays within the budget."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from flatpeak.workers.dispatch import DispatchOptions, Routing, assumed_routing, moe_forward
from flatpeak.workers.dispatch.experts import accurate, read_layout
from flatpeak.workers.dispatch.footprint import dispatch_bytes, layer_sizes, smallest_budget
from flatpeak.workers.errors import InputError
from flatpeak.workers.memory import PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.recompute import checkpoint_contexts
from moe_families import (
    FAMILIES,
    PlainExperts,
    assert_close,
    make_experts,
    make_tokens,
    profile,
    random_ids,
)
from ranks import run_ranks

EXPERTS, K = 32, 8
FULL, HALF = torch.float32, torch.bfloat16
DTYPES = {"fp32": (FULL, FULL), "bf16": (HALF, HALF), "bf16, experts fp32": (HALF, FULL)}
MOVING = DispatchOptions(min_chunk=64, max_foreign_experts=2)


def local_experts(
    family: str, ranks: int, rank: int, held: torch.dtype, *, hidden: int, intermediate: int
) -> torch.nn.Module:
    """One rank's slice, of which only the sizes matter."""
    make = PlainExperts if family == "plain" else FAMILIES[family].make
    start, stop = part(EXPERTS, ranks, rank)
    torch.set_default_dtype(held)
    try:
        module = make(stop - start, hidden=hidden, intermediate=intermediate)
    finally:
        torch.set_default_dtype(FULL)
    module.num_experts = EXPERTS
    return module


def increment_and_footprint(
    ids: Sequence[torch.Tensor],
    options: DispatchOptions,
    *,
    rank: int = 0,
    family: str = "plain",
    dtypes: tuple[torch.dtype, torch.dtype] = (FULL, FULL),
    hidden_size: int = 512,
    intermediate: int = 192,
    checkpointed: bool = True,
) -> tuple[int, int]:
    """Peak bytes above inputs, output and gradients in forward and backward, and those foretold."""
    dtype, held = dtypes
    ranks, tokens = len(ids), len(ids[rank])
    routing = assumed_routing(ids, rank=rank, experts=EXPERTS, options=options)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with FakeTensorMode():
            module = local_experts(
                family, ranks, rank, held, hidden=hidden_size, intermediate=intermediate
            )
            hidden = torch.empty(tokens, hidden_size, dtype=dtype, requires_grad=True)
            weights = torch.empty(tokens, K, requires_grad=True)
            layout = read_layout(module)
            parameters = [module.get_parameter(name) for name in layout.names]
            first_run = checkpoint_contexts()[0] if checkpointed else nullcontext()
            with PeakMeter() as meter, first_run:
                output = moe_forward(
                    module,
                    hidden,
                    torch.empty(tokens, K, dtype=torch.long),
                    weights,
                    group=dist.group.WORLD,
                    options=options,
                    routing=routing,
                    grad_sink=lambda parameter, gradient: None,
                )
                output.backward(torch.empty_like(output))
                peak = meter.peaks()["dispatch"]
            results = output.nbytes + hidden.nbytes + weights.nbytes
            results += sum(p.numel() * accurate(p.dtype).itemsize for p in parameters)
            sizes = layer_sizes(layout, parameters, hidden, weights)
            return peak - results, dispatch_bytes(sizes, routing.extent(tokens))
    finally:
        dist.destroy_process_group()


def assert_foretold(increment: int, footprint: int) -> None:
    assert increment <= footprint <= 1.05 * increment


def spread(ranks: int, tokens: int) -> list[torch.Tensor]:
    return [random_ids(tokens, EXPERTS, K, seed=rank) for rank in range(ranks)]


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_footprint_of_every_family_is_what_it_takes(
    family: str, dtypes: tuple[torch.dtype, torch.dtype]
):
    options = replace(MOVING, tokens_per_chunk=256)
    assert_foretold(*increment_and_footprint(spread(2, 512), options, family=family, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", [(FULL, FULL), (HALF, FULL)], ids=["fp32", "mixed"])
@pytest.mark.parametrize("tokens_per_chunk", [None, 128], ids=["one chunk", "four chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_footprint_holds_for_any_ranks_and_chunks(
    ranks: int, tokens_per_chunk: int | None, dtypes: tuple[torch.dtype, torch.dtype]
):
    options = replace(MOVING, tokens_per_chunk=tokens_per_chunk, max_chunks=4)
    assert_foretold(*increment_and_footprint(spread(ranks, 512), options, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("hot", [(80, 4), (100, 1)], ids=["80/4", "all to one expert"])
@pytest.mark.parametrize("rank", [0, 3], ids=["overloaded owner", "helper"])
def test_the_footprint_counts_experts_that_move(
    rank: int, hot: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
):
    ids = [profile(512, EXPERTS, K, *hot)] * 4
    options = replace(MOVING, tokens_per_chunk=256)
    plan = assumed_routing(ids, rank=rank, experts=EXPERTS, options=options).plan
    assert plan.foreign[rank] if rank else plan.leaving(rank)
    assert_foretold(*increment_and_footprint(ids, options, rank=rank, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_an_owner_of_many_moved_experts_has_those_of_one_turn_on_their_way(
    dtypes: tuple[torch.dtype, torch.dtype],
):
    ids = [torch.arange(EXPERTS // 4).repeat(200, 1)] * 4
    options = replace(MOVING, balance_above=1.0, tokens_per_chunk=5)
    plan = assumed_routing(ids, rank=0, experts=EXPERTS, options=options).plan
    assert plan.leaving(0) > max(map(len, plan.foreign))
    assert_foretold(*increment_and_footprint(ids, options, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rank", [0, 3], ids=["overloaded owner", "helper"])
@pytest.mark.parametrize("tokens", [64, 512])
def test_weights_that_stay_for_the_backward_pass_take_no_more(
    tokens: int, rank: int, dtypes: tuple[torch.dtype, torch.dtype]
):
    ids = [profile(tokens, EXPERTS, K, 80, 4)] * 4
    increment, footprint = increment_and_footprint(
        ids, MOVING, rank=rank, dtypes=dtypes, checkpointed=False
    )
    assert increment <= footprint


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_footprint_holds_for_a_rank_that_computes_nothing(
    dtypes: tuple[torch.dtype, torch.dtype],
):
    ids = [profile(512, EXPERTS, K, 100, 1)] * 4
    options = DispatchOptions(tokens_per_chunk=256, max_foreign_experts=0)
    assert_foretold(*increment_and_footprint(ids, options, rank=3, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "tokens_per_chunk"),
    [(1024, 48, 256), (128, 512, 256), (64, 32, 256), (256, 192, 2)],
    ids=["wide rows", "wide experts", "narrow rows", "two tokens at once"],
)
def test_the_footprint_holds_for_any_shape(
    hidden: int, intermediate: int, tokens_per_chunk: int, dtypes: tuple[torch.dtype, torch.dtype]
):
    ids = spread(2, 8 if tokens_per_chunk == 2 else 768)
    options = replace(MOVING, tokens_per_chunk=tokens_per_chunk)
    assert_foretold(
        *increment_and_footprint(
            ids, options, dtypes=dtypes, hidden_size=hidden, intermediate=intermediate
        )
    )


HIDDEN, INTERMEDIATE = 64, 48
PROFILES = {"balanced": (0, 1), "80/4": (80, 4), "all to one expert": (100, 1)}


def _within_budgets(
    rank: int, ids: list[torch.Tensor], budgets: list[int], options: DispatchOptions = MOVING
) -> list[tuple[int, int]]:
    """The increment and the number of chunks under each budget."""
    module = local_experts("plain", len(ids), rank, FULL, hidden=HIDDEN, intermediate=INTERMEDIATE)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    given = (replace(options, budget_bytes=budget, min_chunk=1) for budget in budgets)
    return [_measured(module, ids[rank], each) for each in given]


def _measured(
    module: torch.nn.Module, ids: torch.Tensor, options: DispatchOptions
) -> tuple[int, int]:
    hidden = torch.randn(len(ids), HIDDEN, requires_grad=True)
    weights = torch.rand(len(ids), K, requires_grad=True)
    agreed: list[Routing] = []

    def note(routing: Routing) -> None:
        # Nothing of the results is there yet.
        assert meter.peaks()["dispatch"] <= (options.budget_bytes or 0)
        agreed.append(routing)

    with PeakMeter() as meter:
        output = moe_forward(
            module,
            hidden,
            ids,
            weights,
            group=dist.group.WORLD,
            options=options,
            grad_sink=lambda parameter, gradient: None,
            on_routing=note,
        )
        output.backward(torch.ones_like(output))
        peak = meter.peaks()["dispatch"]
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    results = output.nbytes + hidden.nbytes + weights.nbytes + parameters
    return peak - results, len(agreed[0].chunks)


@pytest.mark.parametrize("hot", PROFILES.values(), ids=PROFILES)
def test_every_rank_stays_within_its_budget_and_cuts_no_finer_than_it_asks(hot: tuple[int, int]):
    ids = [profile(tokens, EXPERTS, K, *hot) for tokens in (400, 300)]
    budgets = [int(2**20 * mib) for mib in (0.7, 1.0, 1.5, 2.5, 20)]
    by_rank = run_ranks(2, _within_budgets, ids, budgets)
    for measured in by_rank:
        for budget, (increment, _) in zip(budgets, measured, strict=True):
            assert increment <= budget
    chunks = [[count for _, count in measured] for measured in by_rank]
    assert chunks[0] == chunks[1]
    assert chunks[0] == sorted(chunks[0], reverse=True)
    assert chunks[0][0] > chunks[0][1] > chunks[0][-1] == 1
    # The tighter ones are made use of.
    fullest = [max(increments) for increments in zip(*by_rank, strict=True)]
    for budget, (increment, count) in zip(budgets, fullest, strict=True):
        assert count == 1 or increment > 0.7 * budget


def _refusal(rank: int, ids: list[torch.Tensor]) -> str:
    with pytest.raises(InputError) as refused:
        _within_budgets(rank, ids, [1000])
    return str(refused.value)


@pytest.mark.parametrize("hot", PROFILES.values(), ids=PROFILES)
def test_a_budget_below_one_token_at_a_time_is_refused_with_one_that_works(hot: tuple[int, int]):
    # So many chunks that tables of them all would exceed it.
    ids = [profile(tokens, EXPERTS, K, *hot) for tokens in (400, 90)]
    first, second = run_ranks(2, _refusal, ids)
    assert first == second
    assert "dispatch budget_bytes is 1000, but one token at a time takes" in first
    smallest = int(first.split("set it to at least ")[1].split(",")[0])
    for ((increment, chunks),) in run_ranks(2, _within_budgets, ids, [smallest]):
        assert increment <= smallest
        assert chunks >= 79
    refused = run_ranks(2, _refused_below, ids, smallest)
    assert refused == [True, True]


def _refused_below(rank: int, ids: list[torch.Tensor], smallest: int) -> bool:
    with pytest.raises(InputError, match=f"set it to at least {smallest}"):
        _within_budgets(rank, ids, [smallest - 1])
    return True


@pytest.mark.parametrize("foreign", [0, 2, 4, 6])
def test_the_budget_that_holds_for_any_routing_holds_for_one_without_foreign_experts(foreign: int):
    module = PlainExperts(2, hidden=64, intermediate=8)
    module.num_experts = 8
    layout = read_layout(module)
    parameters = [module.get_parameter(name) for name in layout.names]
    sizes = layer_sizes(layout, parameters, torch.empty(1, 64), torch.empty(1, 4))
    least = smallest_budget(sizes, experts=8, ranks=4, tokens=1000, max_foreign=foreign)
    routing = assumed_routing(
        [random_ids(1000, 8, 4, seed=rank) for rank in range(4)],
        rank=0,
        experts=8,
        options=DispatchOptions(budget_bytes=least, max_foreign_experts=foreign),
        footprint=partial(dispatch_bytes, sizes),
    )
    assert not routing.plan.moves_weights
    assert 0 < routing.planned_bytes <= least


def test_an_evaluation_without_autograd_keeps_a_budget_too():
    module, tokens = make_experts("plain", 6), make_tokens(random_ids(23, 6, 3))
    options = DispatchOptions(budget_bytes=200_000)
    with torch.inference_mode():
        output = moe_forward(
            module, tokens.hidden, tokens.ids, tokens.weights, group=None, options=options
        )
        assert_close(output, module(tokens.hidden, tokens.ids, tokens.weights), "output")


def test_bf16_on_a_device_takes_the_product_of_a_gradient_more():
    module = local_experts("plain", 2, 0, HALF, hidden=HIDDEN, intermediate=INTERMEDIATE)
    layout = read_layout(module)
    parameters = [module.get_parameter(name) for name in layout.names]
    hidden, weights = torch.empty(0, HIDDEN, dtype=HALF, device="meta"), torch.empty(0, K)
    least = {
        device: smallest_budget(
            layer_sizes(layout, parameters, hidden, weights, device=torch.device(device)),
            experts=EXPERTS,
            ranks=2,
            tokens=4,
            max_foreign=0,
        )
        for device in ("cpu", "cuda")
    }
    assert least["cuda"] > least["cpu"]
