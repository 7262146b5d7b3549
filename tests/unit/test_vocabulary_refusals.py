"""Bad input to the vocabulary loss is refused by all ranks alike, before anything travels."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from flatpeak.workers.errors import DataError, FlatpeakError, InputError
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy, ring_log_probs
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


def fractional_targets(arguments: Arguments) -> None:
    arguments["targets"] = torch.arange(5).float()


def no_gradient(arguments: Arguments) -> None:
    arguments["hidden"] = arguments["hidden"].detach()


def no_vocabulary(arguments: Arguments) -> None:
    arguments["vocab_size"] = 0


def with_option(name: str, value: object) -> Callable[[Arguments], None]:
    def spoil(arguments: Arguments) -> None:
        arguments[name] = value

    return spoil


NAN, INF = float("nan"), float("inf")
OPTION_REFUSALS: list[tuple[str, object, type, str]] = [
    ("logit_scale", 0.0, InputError, "logit_scale is 0.0; it must be a finite number other than 0"),
    ("logit_scale", NAN, InputError, "logit_scale is nan"),
    ("logit_scale", -INF, InputError, "logit_scale is -inf; .* 0.0625, or 1.0 for none"),
    ("logit_scale", None, InputError, "logit_scale is None"),
    ("logit_scale", 2, InputError, r"logit_scale differs between the ranks .* \[1.0, 2.0, 1.0\]"),
    ("soft_cap", 0.0, InputError, "rank 1 of 3: soft_cap is 0.0; it must be a finite number above"),
    ("soft_cap", -30.0, InputError, "soft_cap is -30.0; .* for instance 30.0, or None for no cap"),
    ("soft_cap", NAN, InputError, "soft_cap is nan"),
    ("soft_cap", INF, InputError, "soft_cap is inf"),
    ("soft_cap", "thirty", InputError, "soft_cap is nan"),
    ("soft_cap", 30, InputError, r"soft_cap differs between the ranks .* \[None, 30.0, None\]"),
    ("z_loss", -1e-4, InputError, "z_loss is -0.0001; .* for instance 1e-4, or 0.0 for none"),
    ("z_loss", NAN, InputError, "z_loss is nan"),
    ("z_loss", INF, InputError, "z_loss is inf"),
    ("z_loss", None, InputError, "z_loss is None"),
    ("z_loss", 1e-4, InputError, r"z_loss differs between the ranks .* \[0.0, 0.0001, 0.0\]"),
    ("label_smoothing", 1.5, InputError, "label_smoothing is 1.5; it must be from 0 to 1"),
    ("label_smoothing", -0.1, InputError, "label_smoothing is -0.1"),
    ("label_smoothing", NAN, InputError, "label_smoothing is nan"),
    ("label_smoothing", 0.1, InputError, r"label_smoothing differs .* \[0.0, 0.1, 0.0\]"),
    ("token_weights", torch.ones(4), InputError, r"token_weights must be float32 of shape \[5\]"),
    ("token_weights", torch.ones(5, 1), InputError, "token_weights must be float32 of shape"),
    ("token_weights", torch.ones(5).double(), InputError, "token_weights must be float32"),
    (
        "token_weights",
        torch.tensor([1, 1, NAN, 1, INF]),
        DataError,
        r"token weight nan at position 2 on rank 1 of 3 is not finite \(2 such weights",
    ),
    ("token_weights", torch.tensor([-INF, 1, 1, 1, 1]), DataError, "weight -inf at position 0"),
]


def calls(rank: int, spoils: list[Callable[[Arguments], None]]) -> list[tuple[type, str] | None]:
    return [call(rank, WORLD, spoil, 1) for spoil in spoils]


def test_an_option_that_one_rank_has_wrong_is_refused_by_all_in_the_same_words():
    spoils = [with_option(name, value) for name, value, _, _ in OPTION_REFUSALS]
    found = zip(*run_ranks(WORLD, calls, spoils), strict=True)
    for (name, value, kind, message), errors in zip(OPTION_REFUSALS, found, strict=True):
        assert errors[0] is not None, (name, value)
        assert errors[0] == errors[1] == errors[2]
        assert errors[0][0] is kind
        assert re.search(message, errors[0][1]), errors[0][1]


def test_token_weights_of_one_rank_alone_are_no_difference():
    assert run_ranks(WORLD, calls, [with_option("token_weights", torch.ones(5))]) == [[None]] * 3


def log_probs_error(rank: int) -> str:
    arguments = good_arguments(rank, WORLD)
    if rank == 2:
        arguments["targets"][3] = VOCAB
    try:
        ring_log_probs(**arguments, group=dist.group.WORLD)
    except DataError as error:
        return str(error)
    return ""


def test_log_probabilities_refuse_alike():
    errors = run_ranks(WORLD, log_probs_error)
    assert errors[0].startswith("target 11 at position 3 on rank 2 of 3 is outside the vocabulary")
    assert errors == [errors[0]] * WORLD


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
    (fractional_targets, InputError, r"targets must be int64 of shape \[5\]"),
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
