"""The order of samples is a bijection an epoch, and a pure function of its arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.workers.data import sample_ids, share_of
from flatpeak.workers.data.order import permute


def order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return [permute(position, size, seed=seed, epoch=epoch) for position in range(size)]


@given(size=st.integers(1, 300), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_the_order_of_an_epoch_names_every_window_once(size, seed, epoch):
    assert sorted(order(size, seed=seed, epoch=epoch)) == list(range(size))


@pytest.mark.parametrize("size", [255, 256, 257, 1023, 1024, 1025, 4096, 4097])
def test_the_order_is_a_bijection_around_powers_of_two(size):
    assert sorted(order(size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order(50, seed=seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(each) for each in orders}) == 25
    assert list(range(50)) not in orders


def test_the_order_does_not_change_between_versions_of_python_or_of_flatpeak():
    assert order(12, seed=7, epoch=3) == [5, 6, 8, 4, 9, 1, 3, 2, 0, 10, 7, 11]


@pytest.mark.parametrize("size", [2, 3, 5, 10, 33])
def test_over_many_epochs_every_window_comes_first_about_as_often(size):
    epochs = 200 * size
    first = [permute(0, size, seed=1, epoch=epoch) for epoch in range(epochs)]
    counts = [first.count(window) for window in range(size)]
    assert min(counts) > 130, counts  # 200 expected, standard deviation at most 14
    assert max(counts) < 270, counts


def test_a_huge_corpus_needs_no_table():
    size = 10**15 + 37
    images = {permute(position, size, seed=0, epoch=0) for position in range(100)}
    assert len(images) == 100
    assert max(images) < size
    assert max(images) > size // 2


def test_ids_of_ten_and_ten_steps_are_those_of_twenty():
    unbroken = [i for step in range(20) for i in sample_ids(step, 6)]
    before = [i for step in range(10) for i in sample_ids(step, 6)]
    resumed = [i for step in range(10, 20) for i in sample_ids(step, 6)]
    assert before + resumed == unbroken == list(range(120))


@pytest.mark.parametrize("sequences", [1, 2, 6, 7], ids=lambda n: f"{n}-sequences")
def test_a_resize_from_two_to_three_workers_repeats_and_loses_nothing(sequences):
    seen = []
    for step in range(20):
        ids = sample_ids(step, sequences)
        workers = 2 if step < 10 else 3
        for worker in range(workers):
            seen += share_of(ids, count=workers, index=worker)
    assert seen == list(range(20 * sequences))


@given(sequences=st.integers(1, 40), count=st.integers(1, 9), step=st.integers(0, 5))
def test_shares_cover_a_step_and_differ_by_at_most_one(sequences, count, step):
    ids = sample_ids(step, sequences)
    shares = [share_of(ids, count=count, index=index) for index in range(count)]
    assert [i for share in shares for i in share] == list(ids)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
