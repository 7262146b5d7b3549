"""The dispatch bench: what it reports, and that its figures are those of the methods' design."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dispatch_measures import dense_results, error, meter
from dispatch_methods import METHODS, Case, make_work, run_pass
from flatpeak.controller.bench import load_bench, run_bench
from flatpeak.workers.dispatch import DispatchOptions
from flatpeak.workers.errors import InputError
from ranks import run_ranks

CHECKOUT = Path(__file__).parents[2]
SMALL = {
    "hidden": 32,
    "intermediate": 16,
    "experts": 8,
    "top-k": 4,
    "chunk": 32,
    "repeats": 1,
}
SIZES = [f"--{key}={value}" for key, value in SMALL.items()]

COMPARED = ("ours", "llep", "llep_autograd", "plain_ep")

CASE = Case(
    ranks=2,
    profile="balanced",
    tokens=64,
    hidden=64,
    intermediate=8,
    experts=32,
    top_k=4,
    dtype=torch.float32,
    backward=True,
    options=DispatchOptions(tokens_per_chunk=16, max_foreign_experts=32, min_chunk=1),
)


def test_a_run_is_exact_and_gives_every_ratio():
    words = ["--ranks", "2", "--tokens", "96", "--profile", "80/2", "--backward"]
    report = run_bench("dispatch", [*words, *SIZES], start=CHECKOUT)
    assert report.exact
    # Nothing ran on eight ranks.
    assert report.ratios.pop("peak_vs_llep_ep8_max") is None
    assert report.ratios.pop("peak_vs_llep_autograd_ep8_max") is None
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in report.ratios.values())
    assert [(row["method"], row["tokens"]) for row in report.rows] == [
        (method, tokens) for tokens in (96, 128) for method in COMPARED
    ]
    for row in report.rows:
        assert row["peak_bytes"] >= row["increment_bytes"] >= row["bounded_bytes"] > 0
        assert row["seconds_max"] >= row["seconds"] >= row["seconds_min"] > 0
        assert sum(row["routes_after"]) == sum(row["routes_before"]) == 8 * row["tokens"]


def test_a_forward_run_has_no_gradients_resident():
    words = ["--ranks", "1", "--tokens", "128", "--profile", "50/4", "--backward", "false"]
    report = run_bench("dispatch", [*words, *SIZES], start=CHECKOUT)
    weights, token = 8 * 3 * 32 * 16 * 4, (3 * 32 * 4) + 4 * (8 + 4)
    assert report.exact
    assert {row["resident_bytes"] for row in report.rows} == {weights + 128 * token}


@pytest.mark.parametrize("profile", ["80", "80/0", "101/4", "30/8", "-1/4", "skewed"])
def test_a_profile_that_no_layer_has_is_refused(profile: str):
    with pytest.raises(InputError, match=f"--profile {profile}: should be balanced, or r/h"):
        run_bench("dispatch", [f"--profile={profile}", *SIZES], start=CHECKOUT)


@pytest.mark.parametrize(
    ("option", "legal"),
    [
        ("ranks=2,0", "--ranks 0: should be 1 or more"),
        ("tokens=0", "--tokens 0: should be 1 or more"),
        ("small=0", "--small 0: should be 1 or more"),
        ("hidden=0", "--hidden 0: should be 1 or more"),
        ("intermediate=-1", "--intermediate -1: should be 1 or more"),
        ("experts=0", "--experts 0: should be 1 or more"),
        ("top-k=9", "--top-k 9: should be from 1 to 8"),
        ("top-k=0", "--top-k 0: should be from 1 to 8"),
        ("chunk=-1", "--chunk -1: should be 0 or more"),
        ("receive-rows=-1", "--receive-rows -1: should be 0 or more"),
        ("max-foreign=-1", "--max-foreign -1: should be 0 or more"),
        ("repeats=-1", "--repeats -1: should be 0 or more"),
        ("budget-share=-0.1", "--budget-share -0.1: should be from 0 to 1"),
        ("budget-share=nan", "--budget-share nan: should be from 0 to 1"),
        ("dtype=int8", "--dtype int8: there are float32, float64, bfloat16"),
    ],
)
def test_an_option_out_of_range_is_refused(option: str, legal: str):
    with pytest.raises(InputError) as refused:
        run_bench("dispatch", ["--experts=8", "--top-k=4", f"--{option}"], start=CHECKOUT)
    assert str(refused.value) == legal


def _metered(rank: int, case: Case, method: str) -> tuple[int, int, int]:
    work = make_work(case, rank, group=dist.group.WORLD)
    metered = meter(METHODS[method], work)
    return metered.resident_bytes, metered.increment_bytes, metered.sent_bytes


ROW = CASE.hidden * 4
EXPERT = 3 * CASE.hidden * CASE.intermediate * 4


@pytest.mark.parametrize(
    ("skew", "landed", "largest"), [("balanced", 256, 16), ("100/1", 512, 512)]
)
def test_plain_expert_parallelism_peaks_at_three_sets_of_routes(
    skew: str, landed: int, largest: int
):
    case = replace(CASE, profile=skew)
    [(resident, increment, _), _] = run_ranks(2, _metered, case, "plain_ep")
    tokens, routes = case.tokens, case.tokens * case.top_k
    assert resident == 4 * tokens * ROW + routes * (8 + 4 + 4) + 16 * EXPERT * 2
    # Rows, the gradients of their outputs, and their own, before those of the tokens exist; each
    # route's token, and its way back to its source.
    rows = 3 * landed * ROW - tokens * ROW + 8 * (routes + landed)
    # One expert's projections and their gradients, of width I: at most ten.
    assert rows <= increment <= rows + 10 * largest * case.intermediate * 4


def test_autograd_peaks_at_four_sets_of_routes():
    [(_, increment, _), _] = run_ranks(2, _metered, CASE, "llep_autograd")
    routes = landed = CASE.tokens * CASE.top_k
    # The rows, and of the weighted sum the outputs, their gradients and what the gradients of the
    # weights are summed from, before the gradients of the tokens exist; the routes' ways and back.
    rows = (4 * landed - CASE.tokens) * ROW + 2 * 8 * (routes + landed)
    assert rows <= increment <= rows + routes * 4


def test_moved_experts_and_their_gradients_count_in_full():
    case = replace(CASE, profile="100/1", tokens=1)
    # Eight routes to one expert of rank 0, half of which move.
    [_, (_, increment, sent)] = run_ranks(2, _metered, case, "llep")
    assert increment > 2 * EXPERT - ROW
    assert sent == EXPERT


def test_only_bytes_for_the_other_rank_count_as_sent():
    plain, ours = (
        [sent for _, _, sent in run_ranks(2, _metered, CASE, method)]
        for method in ("plain_ep", "ours")
    )
    # Half of all routes leave; they go out and back, forward and backward.
    assert plain == [4 * 128 * ROW] * 2
    # One row a token: the four experts of most are on one rank.
    assert all(0 < sent < plain[0] / 2 for sent in ours)


def cell(method: str, ranks: int, profile: str, tokens: int, **figures: float) -> dict:
    where = {"method": method, "ranks": ranks, "profile": profile, "tokens": tokens}
    return where | {"increment_bytes": 1, "peak_bytes": 1, "seconds": 1, "growth": None} | figures


def test_ratios_are_the_largest_over_the_cases_that_they_are_about():
    ratios = load_bench(CHECKOUT, "dispatch").ratios
    rows = [
        cell(method, ranks, profile, tokens)
        for method in ("llep", "llep_autograd", "plain_ep")
        for ranks in (2, 8)
        for profile in ("balanced", "80/16")
        for tokens in (512, 128)
    ]
    rows[:] = [
        entry | {"increment_bytes": 2, "peak_bytes": 4}
        if entry["method"] == "llep_autograd"
        else entry
        for entry in rows
    ]
    rows += [
        cell("ours", 2, "balanced", 512, increment_bytes=0.5, peak_bytes=0.9, seconds=9, growth=1),
        cell("ours", 2, "80/16", 512, increment_bytes=0.2, peak_bytes=0.8, seconds=3, growth=1.5),
        cell("ours", 8, "balanced", 512, increment_bytes=0.1, peak_bytes=0.3, seconds=8),
        cell("ours", 8, "80/16", 512, increment_bytes=0.1, peak_bytes=0.4, seconds=2),
        cell("ours", 2, "80/16", 128, increment_bytes=7, seconds=6),
    ]
    assert ratios(rows, 512, (128, 64)) == {
        "increment_vs_llep_max": 0.5,
        "increment_vs_llep_autograd_max": 0.25,
        "peak_vs_llep_ep8_max": 0.4,
        "peak_vs_llep_autograd_ep8_max": 0.1,
        "increment_growth_on_doubling_n": 1.5,
        "time_vs_llep_skewed_max": 3,
        "time_vs_plain_ep_skewed_max": 3,
        "time_vs_llep_small": 6,
    }
    assert set(ratios([], 512, (128,)).values()) == {None}


def alter(value: torch.Tensor, by: float) -> torch.Tensor:
    changed = value.clone()
    changed.view(-1)[0] += by
    return changed


@pytest.mark.parametrize(
    ("by", "expected"),
    [(0.0, lambda e: e < 1e-6), (0.01, lambda e: e > 1e-4), (torch.nan, lambda e: e == torch.inf)],
    ids=["right", "wrong", "not a number"],
)
def test_one_wrong_entry_of_any_result_shows_as_error(by: float, expected: Callable[[float], bool]):
    work = make_work(replace(CASE, ranks=1), 0, group=None)
    wanted, scales = dense_results(work)
    results = run_pass(METHODS["plain_ep"], work)
    assert results.keys() == {"output", "hidden", "weights", "gate_up_proj", "down_proj"}
    for name, value in results.items():
        assert expected(error(results | {name: alter(value, by)}, wanted, scales)), name
