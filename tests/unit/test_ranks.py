"""The test harness itself: ranks are real processes, and a failing rank fails the test."""

import pytest
import torch
import torch.distributed as dist

from flatpeak.workers.errors import DataError, InputError
from ranks import run_ranks


def _sum_of_ranks(rank: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value.item()


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has enough")
    dist.barrier()


def test_ranks_reduce_over_gloo():
    assert run_ranks(3, _sum_of_ranks, 10) == [33.0, 33.0, 33.0]


def test_a_failing_rank_fails_the_call_with_its_traceback():
    with pytest.raises(AssertionError, match="rank one has enough"):
        run_ranks(2, _fail_on_rank_one)


def _refuse_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise DataError("--tokens 0: should be 1 or more")
    dist.barrier()


def test_what_a_rank_refuses_is_raised_as_it_is():
    with pytest.raises(InputError) as refused:
        run_ranks(2, _refuse_on_rank_one)
    assert type(refused.value) is DataError
    assert str(refused.value) == "--tokens 0: should be 1 or more"
