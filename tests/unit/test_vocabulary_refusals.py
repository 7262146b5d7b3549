"""Bad input to the vocabulary loss is refused by all ranks alike, before anything travels.

One rank of three has what is bad, in a list of calls that one process group makes.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatpeak.workers.errors import DataError, FlatpeakError, InputError
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy, ring_log_probs
from ranks import run_ranks

VOCAB, WIDTH, WORLD, CULPRIT = 11, 4, 3, 1
NAN, INF = float("nan"), float("inf")
Arguments = dict[str, Any]
Spoil = Callable[[Arguments], None]
Refusal = tuple[str, Any, str]
"""An argument, what becomes of it (of the good one, where a function), and a message's pattern."""


def good_arguments(rank: int, world: int) -> Arguments:
    start, stop = part(VOCAB, world, rank)
    return {
        "hidden": torch.ones(5, WIDTH, requires_grad=True),
        "targets": torch.arange(5),
        "weight_shard": torch.ones(stop - start, WIDTH, requires_grad=True),
        "vocab_size": VOCAB,
    }


def call(rank: int, world: int, name: str, value: Any, operator: Callable[..., Any]):
    """The error of this rank, if it gets one."""
    arguments = good_arguments(rank, world)
    if rank == min(CULPRIT, world - 1):
        arguments[name] = value(arguments[name]) if callable(value) else value
    try:
        operator(**arguments, group=dist.group.WORLD if world > 1 else None)
    except FlatpeakError as error:
        # All ranks are here, or this hangs: none has entered the ring.
        if world > 1:
            dist.barrier()
        return type(error), str(error)
    return None


def calls(rank: int, changes: list[tuple[str, Any]], operator: Callable[..., Any]) -> list[Any]:
    return [call(rank, WORLD, name, value, operator) for name, value in changes]


def refused(
    refusals: list[Refusal], kind: type, operator: Callable[..., Any] = ring_cross_entropy
) -> None:
    changes = [(name, value) for name, value, _ in refusals]
    found = zip(*run_ranks(WORLD, calls, changes, operator), strict=True)
    for (name, value, message), errors in zip(refusals, found, strict=True):
        assert errors[0] is not None, (name, value)
        assert errors[0] == errors[1] == errors[2]
        assert errors[0][0] is kind
        assert re.search(message, errors[0][1]), (message, errors[0][1])


def distributed(x: torch.Tensor) -> DTensor:
    # Made by one rank alone, so without the groups that all would have to make.
    return DTensor.from_local(x.detach(), DeviceMesh("cpu", [CULPRIT], _init_backend=False))


def sparse(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to_sparse()


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([x.detach()], layout=torch.jagged)


def valueless(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta")


NO_TENSORS: list[Refusal] = [
    (name, value, f"^rank 1 of 3: {name} is {what}; it must be a tensor")
    for name in ("hidden", "targets", "weight_shard", "token_weights")
    for value, what in (
        ("thirty", "'thirty'"),
        (1.0, r"1\.0"),
        ([1.0] * 5, "of type list"),
        (np.ones((5, WIDTH), np.float32), "of type ndarray"),
    )
] + [(name, None, f"{name} is None") for name in ("hidden", "targets", "weight_shard")]

ODD_TENSORS: list[Refusal] = [
    (name, change, pattern)
    for name in ("hidden", "targets", "weight_shard")
    for change, pattern in (
        (
            sparse,
            rf"{name} has the layout torch.sparse_coo; it must be strided, as {name}.to_dense",
        ),
        (nested, f"{name} is a nested tensor"),
        (distributed, rf"{name} is a DTensor; pass .* {name}.to_local\(\)"),
        (valueless, f"{name} is on (the )?meta"),
    )
    if not (name == "targets" and change is nested)
]

TENSORS: list[Refusal] = [
    ("hidden", torch.ones(5, WIDTH).double(), "hidden is torch.float64; .* torch.float32"),
    ("hidden", torch.ones(5, WIDTH, dtype=torch.long), "hidden is torch.int64"),
    ("hidden", torch.ones(5, WIDTH, dtype=torch.complex64), "hidden is torch.complex64"),
    ("hidden", torch.ones(1, 5, WIDTH), r"hidden must have two dimensions, .* not \[1, 5, 4\]"),
    ("hidden", torch.ones(5), r"two dimensions, .* not \[5\]"),
    ("hidden", torch.tensor(1.0), r"two dimensions, .* not \[\]"),
    ("hidden", torch.ones(6, WIDTH, requires_grad=True), r"targets must be torch.int64 .* \[6\]"),
    ("hidden", torch.Tensor.detach, r"needs_hidden_grad differs .* \[1, 0, 1\]"),
    ("targets", torch.arange(4), r"targets must be torch.int64 of shape \[5\], .* shape \[4\]"),
    ("targets", torch.arange(5).view(5, 1), r"targets must .* not torch.int64 of shape \[5, 1\]"),
    ("targets", torch.arange(5).float(), r"targets must be torch.int64 .* not torch.float32"),
    ("targets", torch.arange(5).int(), r"targets must be torch.int64 .* not torch.int32"),
    ("weight_shard", torch.ones(VOCAB, WIDTH), r"shape \[11, 4\], but rows 4 to 8 of the head"),
    ("weight_shard", torch.ones(4, WIDTH + 1), r"weight_shard has shape \[4, 5\]"),
    ("weight_shard", torch.ones(4), r"weight_shard has shape \[4\]"),
    (
        "weight_shard",
        torch.Tensor.bfloat16,
        "weight_shard is torch.bfloat16 and hidden torch.float",
    ),
    ("token_weights", torch.ones(4), r"token_weights must be torch.float32 of shape \[5\]"),
    ("token_weights", torch.ones(5, 1), "token_weights must be torch.float32 of shape"),
    ("token_weights", torch.ones(5).double(), "token_weights must be .* not torch.float64"),
    ("token_weights", torch.ones(5, dtype=torch.bool), "token_weights must be torch.float32"),
    ("token_weights", torch.ones(5, requires_grad=True), r"pass token_weights.detach\(\)"),
    ("token_weights", torch.ones(5, device="meta"), "token_weights is on the meta device"),
    ("token_weights", torch.ones(5).to_sparse(), "token_weights has the layout torch.sparse_coo"),
]

SIZES: list[Refusal] = [
    (
        "vocab_size",
        0,
        "vocab_size is 0; it must be an integer of 64 bits, at least 1, for instance",
    ),
    ("vocab_size", -1, "vocab_size is -1"),
    ("vocab_size", None, "vocab_size is None"),
    ("vocab_size", True, "vocab_size is True"),
    ("vocab_size", float(VOCAB), r"vocab_size is 11\.0"),
    ("vocab_size", "11", "vocab_size is '11'"),
    ("vocab_size", torch.tensor(VOCAB), "vocab_size is of type Tensor"),
    ("vocab_size", 2**63, f"vocab_size is {2**63}"),
    ("vocab_size", 10**5000, "vocab_size is an integer of 16610 bits"),
    ("vocab_size", 2**63 - 1, "weight_shard has shape"),
    ("vocab_size", VOCAB + 1, r"vocab_size differs between the ranks .* \[11, 12, 11\]"),
    ("ignore_index", None, "ignore_index is None; .* for instance -100"),
    ("ignore_index", -1.0, r"ignore_index is -1\.0"),
    ("ignore_index", False, "ignore_index is False"),
    ("ignore_index", -(2**63) - 1, "ignore_index is -9223372036854775809"),
    ("token_tile", 0, "token_tile is 0; .* at least 1, for instance 1024, or None to choose it"),
    ("token_tile", -3, "token_tile is -3"),
    ("token_tile", 3.0, r"token_tile is 3\.0"),
    ("token_tile", True, "token_tile is True"),
    ("token_tile", 2**64, "token_tile is an integer of 65 bits"),
    ("token_tile", 3, r"token_tile differs between the ranks .* \[None, 3, None\]"),
    (
        "schedule",
        "sideways",
        "schedule is 'sideways'; it must be one of auto, weights, activations",
    ),
    ("schedule", "side" * 20, r"schedule is 'sideside.*\.\.\.'; it"),
    ("schedule", None, "schedule is None"),
    ("schedule", 1, "schedule is 1;"),
    ("schedule", ["auto"], "schedule is of type list"),
    ("schedule", np.array(["auto", "weights"]), "schedule is of type ndarray"),
    ("schedule", "weights", r"schedule differs .* \['auto', 'weights', 'auto'\] in rank order"),
]

SHAPED: list[Refusal] = [
    ("logit_scale", 0.0, "rank 1 of 3: logit_scale is 0.0; it must be a number other than 0, from"),
    ("logit_scale", NAN, "logit_scale is nan"),
    ("logit_scale", -INF, "logit_scale is -inf; .* 0.0625, or 1.0 for none"),
    ("logit_scale", None, "logit_scale is None"),
    ("logit_scale", True, "logit_scale is True"),
    ("logit_scale", "1.0", "logit_scale is '1.0'"),
    ("logit_scale", 1j, "logit_scale is of type complex"),
    ("logit_scale", torch.tensor(1.0), "logit_scale is of type Tensor"),
    ("logit_scale", 1.1e18, r"logit_scale is 1\.1e\+18; .* from 1e-18 to 1e\+18 or the negative"),
    ("logit_scale", -0.9e-18, r"logit_scale is -9e-19"),
    ("logit_scale", 10**5000, "logit_scale is an integer of 16610 bits"),
    ("logit_scale", 2, r"logit_scale differs between the ranks .* \[1.0, 2.0, 1.0\]"),
    ("soft_cap", 0.0, "rank 1 of 3: soft_cap is 0.0; it must be a number from 1e-18 to"),
    ("soft_cap", -30.0, "soft_cap is -30.0; .* for instance 30.0, or None for no cap"),
    ("soft_cap", NAN, "soft_cap is nan"),
    ("soft_cap", INF, "soft_cap is inf"),
    ("soft_cap", False, "soft_cap is False"),
    ("soft_cap", "thirty", "soft_cap is 'thirty'"),
    ("soft_cap", np.array([30.0]), "soft_cap is of type ndarray"),
    ("soft_cap", 0.9e-18, "soft_cap is 9e-19"),
    ("soft_cap", 2e18, r"soft_cap is 2e\+18"),
    ("soft_cap", 30, r"soft_cap differs between the ranks .* \[None, 30.0, None\]"),
]

LOSSES: list[Refusal] = [
    ("z_loss", -1e-4, "z_loss is -0.0001; .* for instance 1e-4, or 0.0 for none"),
    ("z_loss", NAN, "z_loss is nan"),
    ("z_loss", INF, "z_loss is inf"),
    ("z_loss", None, "z_loss is None"),
    ("z_loss", False, "z_loss is False"),
    ("z_loss", 2e18, r"z_loss is 2e\+18; it must be a number from 0 to 1e\+18"),
    ("z_loss", [0.0], "z_loss is of type list"),
    ("z_loss", 1e-4, r"z_loss differs between the ranks .* \[0.0, 0.0001, 0.0\]"),
    ("label_smoothing", 1, "label_smoothing is 1; it must be at least 0 and below 1"),
    ("label_smoothing", -0.1, "label_smoothing is -0.1"),
    ("label_smoothing", NAN, "label_smoothing is nan"),
    ("label_smoothing", None, "label_smoothing is None"),
    ("label_smoothing", True, "label_smoothing is True"),
    ("label_smoothing", 0.1, r"label_smoothing differs .* \[0.0, 0.1, 0.0\]"),
    ("grad_sink", 3, "grad_sink is 3; it must be a function"),
    ("grad_sink", "sum", "grad_sink is 'sum'"),
    ("nll_sink", 0.0, r"nll_sink is 0\.0; it must be a function of a tensor, or None"),
]


@pytest.mark.parametrize(
    "refusals",
    [NO_TENSORS + ODD_TENSORS, TENSORS, SIZES, SHAPED + LOSSES],
    ids=["no-tensors", "tensors", "sizes", "options"],
)
def test_what_one_rank_has_wrong_is_refused_by_all_in_the_same_words(refusals: list[Refusal]):
    refused(refusals, InputError)


def test_log_probabilities_refuse_alike():
    kept = [refusal for refusal in NO_TENSORS if refusal[0] != "token_weights"]
    refused(kept + ODD_TENSORS + SIZES + SHAPED, InputError, ring_log_probs)
    refused([("targets", torch.tensor([0, 1, 2, VOCAB, 4]), BAD_TARGET)], DataError, ring_log_probs)


BAD_TARGET = "^target 11 at position 3 on rank 1 of 3 is outside the vocabulary of 11"


def test_values_outside_the_vocabulary_or_not_finite_are_named_with_their_place():
    values = [
        ("targets", torch.tensor([1, -100, 2, 11, 99]), BAD_TARGET + r" \(2 such targets there\)"),
        ("targets", torch.tensor([0, 1, 2, 3, -7]), "target -7 at position 4"),
        (
            "token_weights",
            torch.tensor([1, 1, NAN, 1, INF]),
            r"token weight nan at position 2 on rank 1 of 3 is not finite \(2 such weights",
        ),
        ("token_weights", torch.tensor([-INF, 1, 1, 1, 1]), "weight -inf at position 0"),
    ]
    refused(values, DataError)


def test_what_means_the_same_is_no_difference():
    alike = [
        ("token_weights", torch.ones(5)),  # each rank's own
        ("ignore_index", 3),
        ("logit_scale", 1),
        ("logit_scale", np.float32(1.0)),
        ("logit_scale", Fraction(2, 2)),
        ("vocab_size", np.int64(VOCAB)),
        ("z_loss", -0.0),
        ("label_smoothing", 0),
    ]
    results = run_ranks(WORLD, calls, alike, ring_cross_entropy)
    assert results == [[None] * len(alike)] * WORLD


def test_a_single_rank_is_not_told_its_rank():
    error = call(0, 1, "targets", torch.tensor([1, -100, 11, 2, 99]), ring_cross_entropy)
    assert error is not None
    assert error[1].startswith("target 11 at position 2 is outside the vocabulary of 11 (2 such")
    error = call(0, 1, "soft_cap", 0.0, ring_cross_entropy)
    assert error is not None
    assert error[1].startswith("soft_cap is 0.0; it must be a number from 1e-18 to 1e+18")


@pytest.mark.parametrize("group", ["world", 0, object()], ids=["text", "number", "no-member"])
def test_a_group_that_is_none_is_refused_by_the_rank_that_has_it(group: Any):
    with pytest.raises(InputError, match=r"group is of type \w+; it must be a process group that"):
        ring_cross_entropy(**good_arguments(0, 1), group=group)


def test_good_arguments_are_not_refused():
    assert call(0, 1, "vocab_size", VOCAB, ring_cross_entropy) is None


def test_token_weights_that_require_a_gradient_pass_where_there_is_none():
    weights = torch.ones(5, requires_grad=True)
    with torch.no_grad():
        assert call(0, 1, "token_weights", weights, ring_cross_entropy) is None


def test_an_ignore_index_inside_the_vocabulary_is_ignored():
    arguments = good_arguments(0, 1)
    loss = ring_cross_entropy(**arguments, group=None, ignore_index=3)
    assert loss[3] == 0
    assert (loss[:3] > 0).all()
