"""Dividing buckets between device and host, and the rates that decide it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatpeak.controller.placement import Placed
from flatpeak.controller.update_division import divide_updates
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.update_rates import measure_device_rates, measure_host_rate
from flatpeak.workers.update_split import DeviceRates, Stages, assign_updates, split_updates
from local_run import tiny_spec

MILLION = 10**6


def buckets(count, size=100 * MILLION, dtype="bfloat16", rule="adamw"):
    return [
        Bucket(n, 0, 0, (Range("p", n * size, (n + 1) * size),), dtype, True, rule)
        for n in range(count)
    ]


# 16 bytes in at 50 GB/s, 14 out at 50: 32 and 28 ms a bucket; the update 1 ms.
LINK = DeviceRates(50e9, 50e9, 1e11)


@pytest.mark.parametrize(
    ("slots", "milliseconds"), [(1, 61), (2, 32), (3, 32)], ids=["one", "two", "three"]
)
def test_the_period_is_that_of_a_pipeline_with_slots(slots, milliseconds):
    stages = Stages.of(buckets(1)[0], LINK)
    assert (stages.h, stages.u, stages.d) == pytest.approx((0.032, 0.001, 0.028))
    assert stages.period(slots) == pytest.approx(milliseconds / 1e3)


def test_fp32_weights_go_back_with_their_masters():
    assert Stages.of(buckets(1, dtype="float32")[0], LINK).d == pytest.approx(0.024)


def ends(own, on_device, rates, host, slots):
    """When both sides are done, by the formula, with equal buckets."""
    count, stages = len(on_device), Stages.of(own[0], rates)
    fetched = (len(own) - count) * own[0].size * 2 / rates.in_bytes_per_s
    device = (count - 1) * stages.period(slots) + stages.through + fetched if count else 0.0
    return device, (len(own) - count) * own[0].size / host


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 60),
    into=st.floats(1e9, 1e12),
    out=st.floats(1e9, 1e12),
    update=st.floats(1e8, 1e12),
    host=st.floats(1e7, 1e11),
    slots=st.integers(1, 4),
)
def test_no_other_number_of_buckets_ends_more_than_one_bucket_earlier(
    count, into, out, update, host, slots
):
    own, rates = buckets(count), DeviceRates(into, out, update)
    split = split_updates(own, rates, host_parameters_per_s=host, slots=slots)
    stages = Stages.of(own[0], rates)
    best = min(max(ends(own, range(n), rates, host, slots)) for n in range(count + 1))
    fetch = count * own[0].size * 2 / into
    assert max(split.device_s, split.host_s) <= best + stages.through + fetch
    assert split.host_s == pytest.approx((count - len(split.on_device)) * own[0].size / host)


def test_both_sides_finish_together_and_early_buckets_come_from_both():
    own = buckets(40)
    split = split_updates(own, LINK, host_parameters_per_s=1e9, slots=2)  # 100 ms on the host
    assert split.device_s == pytest.approx(split.host_s, abs=0.1)
    assert len(split.on_device) == 30
    for half in (own[:20], own[20:]):
        there = sum(bucket.index in split.on_device for bucket in half)
        assert 14 <= there <= 17


def test_a_side_that_is_much_slower_gets_nothing():
    own = buckets(10)
    assert not split_updates(own, LINK, host_parameters_per_s=1e12, slots=2).on_device
    all_there = split_updates(own, LINK, host_parameters_per_s=1e7, slots=2)
    assert all_there.on_device == frozenset(range(10))
    assert all_there.host_s == 0.0
    assert all_there.device_s == pytest.approx(9 * 0.032 + 0.061)


def test_the_split_is_that_of_the_slowest_rank_and_one_line_says_it():
    rates = DeviceRates.slowest([LINK, DeviceRates(40e9, 60e9, 2e11)])
    assert rates == DeviceRates(40e9, 50e9, 1e11)
    own = buckets(40)
    split = split_updates(own, LINK, host_parameters_per_s=1e9, slots=2)
    line = split.described(own, LINK, 2)
    assert line.startswith("30 of 40 buckets are updated on the device: ")
    assert "32.00 ms in 2 slots (in 32.00, update 1.00, out 28.00) at 50.0 GB/s in" in line
    assert "\n" not in line


def test_balancing_biases_stay_on_the_host():
    own = [*buckets(2), *buckets(1, size=8, rule="bias")]
    assert split_updates(own, LINK, host_parameters_per_s=1.0, slots=2).on_device == {0, 1}
    assert [b.update_on for b in assign_updates(own, range(3))] == ["device", "device", "host"]
    assert [b.update_on for b in assign_updates(own, {1})] == ["host", "device", "host"]


def divided(update_on, device):
    spec = tiny_spec({"model_type": "qwen3_moe"}, memory={"optimizer": {"update_on": update_on}})
    # Ranks 0 and 1 are on one node with two actors, 2 is on another.
    workers, optimizers = (
        [Placed(f"{name} {n}", None, node) for n, node in enumerate("aab")]
        for name in ("worker", "optimizer")
    )
    asked, events = [], []

    def ask(actors, what, method, *args):
        asked.append(method)
        links = [LINK, DeviceRates(25e9, 50e9, 1e11), LINK]
        found = {"update_rates": links, "update_rate": [1e9, 2e9, 1e7]}[method]
        return {actor.name: rate for actor, rate in zip(actors, found, strict=True)}

    of_ranks = [
        replace(bucket, index=10 * rank + bucket.index, rank=rank)
        for rank in range(3)
        for bucket in buckets(10)
    ]
    deciding = divide_updates(
        spec, tuple(of_ranks), device, workers=workers, optimizers=optimizers, ask=ask
    )
    while True:
        try:
            events.append(next(deciding))
        except StopIteration as end:
            return asked, events, end.value


def test_the_controller_decides_for_all_ranks_from_the_slowest_link():
    asked, events, found = divided("auto", "cuda")
    assert asked == ["update_rates", "update_rate"]
    there = [sum(b.updater == rank for b in found) for rank in range(3)]
    slowest = DeviceRates(25e9, 50e9, 1e11)
    # Two actors serve two ranks with 1.5e9 each, the third has one of 1e7.
    wanted = split_updates(buckets(10), slowest, host_parameters_per_s=1.5e9, slots=2).on_device
    assert there == [len(wanted), len(wanted), 10]
    assert 0 < len(wanted) < 10
    assert [event.detail["worker"] for event in events] == ["worker 0", "worker 1", "worker 2"]
    assert events[2].detail["text"].startswith("10 of 10 buckets are updated on the device")


@pytest.mark.parametrize(
    ("update_on", "device", "side"),
    [("host", "cuda", "host"), ("auto", "cpu", "host"), ("device", "cpu", "device")],
)
def test_without_a_choice_nothing_is_measured(update_on, device, side):
    asked, events, found = divided(update_on, device)
    assert (asked, events, {b.update_on for b in found}) == ([], [], {side})


def test_measured_rates_are_those_of_this_machine():
    rates = measure_device_rates(torch.device("cpu"), elements=10_000)
    found = (rates.in_bytes_per_s, rates.out_bytes_per_s, rates.parameters_per_s)
    assert all(math.isfinite(rate) and rate > 1e5 for rate in found)
    assert measure_host_rate(elements=10_000) > 1e5
