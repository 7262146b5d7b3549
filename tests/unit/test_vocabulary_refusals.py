"""Bad input to the vocabulary loss is refused by all ranks alike, before anything travels."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from flatpeak.workers.errors import DataError, FlatpeakError, InputError
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy
from ranks import run_ranks

VOCAB, WIDTH, WORLD = 11, 4, 3
Arguments = dict


def good_arguments(rank: int, world: int) -> Arguments:
    start, stop = part(VOCAB, world, rank)
    return {
        "hidden": torch.ones(5, WIDTH, requires_grad=True),
        "targets": torch.arange(5),
        "weight_shard": torch.ones(stop - start, WIDTH, requires_grad=True),
        "vocab_size": VOCAB,
    }


def call(rank: int, world: int, spoil: Callable[[Arguments], None], culprit: int):
    """The error of this rank, and the collectives it took part in until then."""
    arguments = good_arguments(rank, world)
    if rank == culprit:
        spoil(arguments)
    group = dist.group.WORLD if world > 1 else None
    try:
        ring_cross_entropy(**arguments, group=group)
    except FlatpeakError as error:
        # All ranks are here, or this hangs: none has entered the ring.
        if world > 1:
            dist.barrier()
        return type(error), str(error)
    return None


def bad_target(arguments: Arguments) -> None:
    arguments["targets"] = torch.tensor([1, -100, 11, 2, 99])


def negative_target(arguments: Arguments) -> None:
    arguments["targets"] = torch.tensor([0, 1, 2, 3, -7])


def no_tile(arguments: Arguments) -> None:
    arguments["token_tile"] = 0


def other_tile(arguments: Arguments) -> None:
    arguments["token_tile"] = 3


def unknown_schedule(arguments: Arguments) -> None:
    arguments["schedule"] = "sideways"


def whole_weight(arguments: Arguments) -> None:
    arguments["weight_shard"] = torch.ones(VOCAB, WIDTH)


def mixed_dtypes(arguments: Arguments) -> None:
    arguments["weight_shard"] = arguments["weight_shard"].bfloat16()


def double_precision(arguments: Arguments) -> None:
    arguments["hidden"] = arguments["hidden"].double()


def batched_hidden(arguments: Arguments) -> None:
    arguments["hidden"] = torch.ones(1, 5, WIDTH)


def one_target_missing(arguments: Arguments) -> None:
    arguments["targets"] = torch.arange(4)


def no_gradient(arguments: Arguments) -> None:
    arguments["hidden"] = arguments["hidden"].detach()


def no_vocabulary(arguments: Arguments) -> None:
    arguments["vocab_size"] = 0


REFUSALS = [
    (bad_target, DataError, "target 11 at position 2"),
    (negative_target, DataError, "target -7 at position 4"),
    (no_tile, InputError, "token_tile must be at least 1, for instance 1024"),
    (other_tile, InputError, "token_tile differs between the ranks"),
    (unknown_schedule, InputError, "schedule must be one of auto, weights, activations"),
    (whole_weight, InputError, r"weight_shard has shape \[11, 4\], but rows 4 to 8 of the head"),
    (mixed_dtypes, InputError, "weight_shard and hidden differ in dtype"),
    (double_precision, InputError, "hidden must have one of the dtypes torch.float32"),
    (batched_hidden, InputError, "hidden must have two dimensions"),
    (one_target_missing, InputError, r"targets must be int64 of shape \[5\]"),
    (no_gradient, InputError, r"needs_hidden_grad differs .* \[1, 0, 1\]"),
    (no_vocabulary, InputError, "vocab_size is 0"),
]


@pytest.mark.parametrize(
    ("spoil", "kind", "message"), REFUSALS, ids=[spoil.__name__ for spoil, _, _ in REFUSALS]
)
def test_one_ranks_mistake_is_refused_by_all_in_the_same_words(spoil, kind, message: str):
    errors = run_ranks(WORLD, call, WORLD, spoil, 1)
    assert errors[0] is not None
    assert errors[0] == errors[1] == errors[2]
    raised, text = errors[0]
    with pytest.raises(kind, match=message):
        raise raised(text)
    assert raised is kind


def test_a_single_rank_is_not_told_its_rank():
    error = call(0, 1, bad_target, 0)
    assert error is not None
    assert error[1].startswith("target 11 at position 2 is outside the vocabulary of 11 (2 such")


def test_good_arguments_are_not_refused():
    assert call(0, 1, lambda arguments: None, 0) is None


def test_an_ignore_index_inside_the_vocabulary_is_ignored():
    arguments = good_arguments(0, 1)
    loss = ring_cross_entropy(**arguments, group=None, ignore_index=3)
    assert loss[3] == 0
    assert (loss[:3] > 0).all()
