"""The learning rate over the steps."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import ScheduleSpec, TrainSpec


def train(**schedule) -> TrainSpec:
    return TrainSpec(steps=100, lr=1.0, schedule=ScheduleSpec(**schedule))


def test_the_rate_rises_linearly_and_is_whole_at_the_end_of_the_warmup():
    rates = [lr(step, train=train(warmup_steps=4)) for step in range(1, 5)]
    assert rates == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_rate_falls_to_its_least_at_the_end_and_stays_there(decay):
    job = train(warmup_steps=10, decay=decay, min_lr_ratio=0.1)
    rates = [lr(step, train=job) for step in range(10, 121)]
    assert rates[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(rates[:91]))
    assert rates[90:] == [pytest.approx(0.1)] * 21


@pytest.mark.parametrize(("decay", "halfway"), [("cosine", 0.55), ("linear", 0.55)])
def test_half_of_the_fall_is_done_halfway(decay, halfway):
    assert lr(50, train=train(decay=decay, min_lr_ratio=0.1)) == pytest.approx(halfway)


def test_cosine_falls_slower_than_linear_at_first():
    cosine = lr(25, train=train(decay="cosine", min_lr_ratio=0.0))
    assert cosine == pytest.approx(0.8535533905932737)
    assert lr(25, train=train(decay="linear", min_lr_ratio=0.0)) == pytest.approx(0.75)


def test_a_constant_rate_stays():
    assert {lr(step, train=train(decay="constant")) for step in range(1, 200)} == {1.0}


def test_decay_steps_end_the_decay_before_the_run():
    assert lr(40, train=train(decay_steps=40, min_lr_ratio=0.5)) == 0.5


def test_a_warmup_as_long_as_the_decay_drops_after_its_last_step():
    job = train(warmup_steps=100, min_lr_ratio=0.5)
    assert (lr(100, train=job), lr(101, train=job)) == (1.0, 0.5)


def test_the_step_before_the_first_is_refused():
    with pytest.raises(AssertionError, match="count from 1"):
        lr(0, train=train())


@given(
    step=st.integers(1, 300),
    warmup=st.integers(0, 100),
    decay=st.sampled_from(["cosine", "linear", "constant"]),
    least=st.just(0.0) | st.floats(1e-30, 1),
)
def test_the_rate_is_positive_until_the_end_and_never_above_its_peak(step, warmup, decay, least):
    job = train(warmup_steps=warmup, decay=decay, min_lr_ratio=least)
    assert min(1.0, least) * min(1.0, step / max(1, warmup)) <= lr(step, train=job) + 1e-12
    assert lr(step, train=job) <= 1.0
    if step < 100:
        assert lr(step, train=job) > 0


def test_a_resumed_run_has_the_same_rates_as_one_that_never_stopped():
    # The rate has no state: a spec read again, as a resumed run does, gives the same numbers.
    job = train(warmup_steps=7)
    again = TrainSpec.model_validate(job.model_dump())
    assert [lr(step, train=job) for step in range(50, 101)] == [
        lr(step, train=again) for step in range(50, 101)
    ]
