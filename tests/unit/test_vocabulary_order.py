"""When hops are posted and waited for: a fake ring logs both, between the strips computed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatpeak.kernels.vocabulary_strip.reference import THIN
from flatpeak.workers.vocabulary.meetings import Backward, Plan, states_of
from flatpeak.workers.vocabulary.objective import Objective
from flatpeak.workers.vocabulary.ring import Hop, Ring
from flatpeak.workers.vocabulary.tiles import Tiles

# Not thin, so that no product but that of a strip is an `mm`.
TILE = WIDTH = THIN + 1
PIECES = 2
Event = tuple[str, int]


class LoggedHop(Hop):
    def __init__(self, log: list[Event], number: int) -> None:
        super().__init__()
        self._log, self._number, self._waited = log, number, False

    def wait(self) -> None:
        if not self._waited:
            self._log.append(("wait", self._number))
        self._waited = True


class FakeRing(Ring):
    """A rank whose neighbour always sends what this one sends: `size` ranks that are all alike."""

    def __init__(self, size: int, log: list[Event]) -> None:
        self.group, self.size, self.rank, self._log, self._hops = None, size, 0, log, 0

    def hop(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Hop:
        for sent, received in zip(outgoing, incoming, strict=True):
            received.copy_(sent)
        self._hops += 1
        self._log.append(("post", self._hops))
        return LoggedHop(self._log, self._hops)


class LoggedStrips(TorchDispatchMode):
    """Logs the product that begins every strip of logits."""

    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self._log, self._strips = log, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._strips += 1
            self._log.append(("strip", self._strips))
        return func(*args, **(kwargs or {}))


def trace(passes: str, *, ranks: int, strips: int, weights_move: bool) -> list[Event]:
    """The log of one pass in which each rank has two pieces that move, and `strips` tiles not."""
    log: list[Event] = []
    moving, staying = PIECES * TILE, strips * TILE
    tokens, rows = (staying, moving) if weights_move else (moving, staying)
    plan = Plan(
        ring=FakeRing(ranks, log),
        tokens=[tokens] * ranks,
        shards=[(rank * rows, (rank + 1) * rows) for rank in range(ranks)],
        tiles=Tiles(TILE, TILE),
        weights_move=weights_move,
        objective=Objective(vocab_size=ranks * rows),
    )
    hidden, shard = torch.ones(tokens, WIDTH), torch.ones(rows, WIDTH)
    targets = torch.zeros(tokens, dtype=torch.long)
    with LoggedStrips(log):
        if passes == "forward":
            states_of(plan, hidden, targets, shard, moments=False)
        else:
            Backward(
                plan=plan,
                hidden=hidden,
                targets=targets,
                shard=shard,
                tops=torch.zeros(tokens),
                shares=torch.ones(tokens),
                upstream=torch.ones(tokens),
                needs_hidden=True,
                needs_shard=True,
            ).gradients()
    return log


PASSES = [(p, w) for p in ("forward", "backward") for w in (True, False)]
IDS = [f"{p}-{'weights' if w else 'activations'}" for p, w in PASSES]


@pytest.mark.parametrize("strips", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("passes", "weights_move"), PASSES, ids=IDS)
def test_no_hop_is_waited_for_without_a_strip_since_it_was_posted(
    passes: str, weights_move: bool, ranks: int, strips: int
):
    log = trace(passes, ranks=ranks, strips=strips, weights_move=weights_move)
    at = {event: index for index, event in enumerate(log)}
    strip_at = [index for event, index in at.items() if event[0] == "strip"]
    hops = [number for kind, number in log if kind == "post"]
    exposed = [
        number
        for number in hops
        if not any(at["post", number] < index < at["wait", number] for index in strip_at)
    ]
    # Only what the last piece carries home has nothing left to hide behind.
    carries = passes == "backward" or not weights_move
    assert exposed == ([hops[-1]] if carries else [])


@pytest.mark.parametrize("strips", [1, 3])
@pytest.mark.parametrize(("passes", "weights_move"), PASSES, ids=IDS)
def test_the_next_piece_is_in_flight_while_any_strip_is_computed(
    passes: str, weights_move: bool, strips: int
):
    ranks = 3
    log = trace(passes, ranks=ranks, strips=strips, weights_move=weights_move)
    in_flight: set[int] = set()
    flying = []
    for kind, number in log:
        if kind == "post":
            in_flight.add(number)
        elif kind == "wait":
            in_flight.remove(number)
        else:
            flying.append(len(in_flight))
    visits = [flying[i : i + strips] for i in range(0, len(flying), strips)]
    assert len(visits) == PIECES * ranks
    carries = passes == "backward" or not weights_move
    for index, counts in enumerate(visits):
        step = index % ranks
        next_piece = step < ranks - 1
        going_home = carries and step == 0 and index > 0
        # The carry of this visit's own piece is waited for when the first strip is added to it.
        own_carry = carries and step > 0
        assert counts == [next_piece + going_home + own_carry] + [next_piece + going_home] * (
            strips - 1
        )


@pytest.mark.parametrize(("passes", "weights_move"), PASSES, ids=IDS)
def test_every_hop_is_waited_for(passes: str, weights_move: bool):
    log = trace(passes, ranks=4, strips=2, weights_move=weights_move)
    posted = [number for kind, number in log if kind == "post"]
    assert sorted(number for kind, number in log if kind == "wait") == posted
