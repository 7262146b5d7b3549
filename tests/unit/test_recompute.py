"""What a checkpointed call decides once, its recomputations replay."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.recompute import checkpoint_contexts, decide_once, is_recomputing


class Decider:
    """A layer that takes a fresh number at each decision, and logs what each of its runs got."""

    def __init__(self, decisions: int) -> None:
        self.decisions = decisions
        self.taken = 0
        self.first: list[list[int]] = []
        self.again: list[list[int]] = []

    def _take(self) -> int:
        self.taken += 1
        return self.taken

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        got = [decide_once(self._take) for _ in range(self.decisions)]
        (self.again if is_recomputing() else self.first).append(got)
        for factor in got:
            x = (x * factor).sin()
        return x


def checkpointed(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    output = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    assert isinstance(output, torch.Tensor)
    return output


def leaf() -> torch.Tensor:
    return torch.linspace(0.1, 1, 5, requires_grad=True)


def gradient(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("decisions", [1, 3])
def test_a_recomputation_gets_the_decisions_of_the_first_run_in_their_order(decisions: int):
    layer, x = Decider(decisions), leaf()
    checkpointed(layer, x).sum().backward()
    assert layer.first == layer.again == [list(range(1, decisions + 1))]
    assert layer.taken == decisions


def test_without_a_checkpoint_every_call_decides():
    layer = Decider(2)
    for _ in range(2):
        layer(leaf()).sum().backward()
    assert layer.first == [[1, 2], [3, 4]]
    assert layer.again == []


def test_a_graph_that_is_kept_replays_from_the_start_in_each_backward_pass():
    layer, x = Decider(3), leaf()
    output = checkpointed(layer, x).sum()
    output.backward(retain_graph=True)
    once = gradient(x).clone()
    output.backward()
    assert layer.again == [[1, 2, 3]] * 2
    assert layer.taken == 3
    assert torch.equal(gradient(x), 2 * once)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_microbatches_in_flight_keep_their_own_decisions(order: tuple[int, int]):
    layer, inputs = Decider(2), [leaf(), leaf()]
    outputs = [checkpointed(layer, x).sum() for x in inputs]
    for number in order:
        outputs[number].backward()
    assert layer.first == [[1, 2], [3, 4]]
    assert layer.again == [layer.first[number] for number in order]


def test_layers_one_after_the_other_keep_their_own_decisions():
    layers, x = [Decider(1), Decider(2), Decider(1)], leaf()
    value = x
    for layer in layers:
        value = checkpointed(layer, value)
    value.sum().backward()
    assert [layer.taken for layer in layers] == [1, 2, 1]
    assert all(layer.again == layer.first for layer in layers)


@pytest.mark.parametrize("backward_passes", [1, 2])
def test_a_checkpoint_within_a_checkpoint_decides_once_for_both(backward_passes: int):
    before, inner, after = Decider(1), Decider(2), Decider(1)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return after(checkpointed(inner, before(x)))

    x = leaf()
    output = checkpointed(outer, x).sum()
    for left in reversed(range(backward_passes)):
        output.backward(retain_graph=left > 0)
    for layer in (before, inner, after):
        assert layer.taken == layer.decisions
        assert len(layer.first) == 1
        assert len(layer.again) >= backward_passes
        assert all(got == layer.first[0] for got in layer.again)


def test_nested_checkpoints_have_the_gradient_of_the_plain_layers():
    layers = [Decider(1), Decider(2), Decider(1)]
    plain, nested = leaf(), leaf()
    layers[2](layers[1](layers[0](plain))).sum().backward()
    for layer in layers:
        layer.taken = 0
    checkpointed(
        lambda x: layers[2](checkpointed(layers[1], layers[0](x))), nested
    ).sum().backward()
    assert torch.equal(gradient(plain), gradient(nested))


def test_a_run_without_gradients_decides_and_leaves_nothing_behind():
    layer, x = Decider(1), leaf()
    with torch.no_grad():
        checkpointed(layer, x)
    checkpointed(layer, x).sum().backward()
    assert layer.first == [[1], [2]]
    assert layer.again == [[2]]
    assert not is_recomputing()


def test_a_recomputation_that_fails_ends_the_replay():
    broken = False

    def layer(x: torch.Tensor) -> torch.Tensor:
        decide_once(lambda: 1)
        if broken:
            raise RuntimeError("no memory")
        return x.sin()

    output = checkpointed(layer, leaf()).sum()
    broken = True
    with pytest.raises(RuntimeError, match="no memory"):
        output.backward()
    assert not is_recomputing()
    assert decide_once(lambda: 2) == 2
