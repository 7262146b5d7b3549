"""Checkpoint boundaries in a slab: equal gradients, bounded device bytes, order kept by tickets."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.boundaries import CheckpointOffload, device_bytes, slab_bytes
from flatpeak.workers.errors import InputError
from flatpeak.workers.memory import HOST, PeakMeter, scope
from flatpeak.workers.recompute import is_recomputing
from ranks import run_ranks

N, H = 64, 16
ROWS = N * H * 4  # bytes of one boundary
COPY = ("copy", "wait")

plain = partial(checkpoint, use_reentrant=False)


def host(nbytes: int) -> torch.Tensor:
    with scope(HOST):
        return torch.empty(nbytes, dtype=torch.uint8)


def offloading(layers: int, **options: Any) -> CheckpointOffload:
    options = {"host_budget": None, **options}
    return CheckpointOffload(host(slab_bytes(N, H, torch.float32, layers)), **options)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(H, H)
        self.runs: list[bool] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.runs.append(is_recomputing())
        return x + scale * torch.nn.functional.dropout(self.up(x.sin()).tanh(), 0.1)


class Toy(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inward = torch.nn.Linear(H, H)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor, checkpointed: Callable[..., Any] = plain) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = checkpointed(block, x)
        return x.square().mean()


def toy(layers: int) -> Toy:
    torch.manual_seed(layers)
    return Toy(layers)


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, H, generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def gradients_of(layers: int, checkpointed: Callable[..., Any]) -> list[torch.Tensor]:
    model = toy(layers)
    model(rows(), checkpointed).backward()
    return gradients(model)


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


class LazyCopies:
    """The slowest of streams: a copy happens when somebody waits for it or for a later one.

    It keeps nothing alive, as a real stream does not: a copy whose memory is gone fails.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._pending: dict[int, Callable[[], None]] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        ticket = len([event for event, _ in self.log if event == "copy"])
        self.log.append(("copy", ticket))
        into, outof = self._later(target), self._later(source)
        self._pending[ticket] = lambda: into().copy_(outof())
        return ticket

    def wait(self, ticket: int, tensor: torch.Tensor) -> None:
        self.log.append(("wait", ticket))
        for due in [number for number in self._pending if number <= ticket]:
            self._pending.pop(due)()

    def all_done(self) -> bool:
        return not self._pending

    @staticmethod
    def _later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        storage = weakref.ref(tensor.untyped_storage())
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype)

        def view() -> torch.Tensor:
            alive = storage()
            assert alive is not None, "memory was freed before the copy had used it"
            return empty.set_(alive, *layout)

        return view


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("copies", [None, LazyCopies()], ids=["at once", "as late as allowed"])
def test_gradients_are_equal_to_the_last_bit(layers, copies):
    with offloading(layers, copies=copies) as offload:
        got = gradients_of(layers, offload.checkpoint)
        assert offload.stats().offloaded_bytes == layers * ROWS
    assert_equal(got, gradients_of(layers, plain))
    assert copies is None or copies.all_done()


@pytest.mark.parametrize(
    ("budget", "taken"),
    [(None, 4), (2 * ROWS, 2), (ROWS, 1), (0, 0)],
    ids=["unlimited", "a half", "a quarter", "none"],
)
def test_fifty_steps_are_equal_to_the_last_bit_and_leave_nothing_behind(budget, taken):
    def trajectory(checkpointed: Callable[..., Any]) -> Iterator[list[torch.Tensor]]:
        model = toy(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(50):
            optimizer.zero_grad()
            torch.manual_seed(step)  # of the dropout
            model(rows(step), checkpointed).backward()
            yield gradients(model)
            optimizer.step()

    with offloading(4, host_budget=budget) as offload, PeakMeter() as meter:
        live = []
        for got, expected in zip(trajectory(offload.checkpoint), trajectory(plain), strict=True):
            assert_equal(got, expected)
            del got, expected
            live.append(meter.live()["boundaries"])
        assert live == [0] * 50
        stats = offload.stats()
        kept = 50 * (4 - taken) * ROWS
        assert (stats.count, stats.slab_bytes, stats.kept_bytes) == (200, taken * ROWS, kept)


def test_a_transformers_model_trains_with_equal_gradients():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        use_cache=False,
    )

    def trained(checkpointed: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).train()
        model._set_gradient_checkpointing(True, gradient_checkpointing_func=checkpointed)
        ids = torch.randint(64, (2, 24))
        model(ids, labels=ids).loss.backward()
        return gradients(model)

    layer = slab_bytes(48, 32, torch.float32, 1)
    with CheckpointOffload(host(4 * layer), host_budget=None) as offload:
        got = trained(offload.checkpoint)
        assert offload.stats().offloaded_bytes == 4 * layer
    assert_equal(got, trained(plain))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def boundary_peaks(layers: int, checkpointed: Callable[..., Any]) -> tuple[int, int]:
    """Peak device bytes of boundaries in the forward and in the backward pass."""
    model, x = toy(layers), rows()
    with PeakMeter() as meter, no_garbage_collection():
        loss = model(x, checkpointed)
        forward = meter.peaks()["boundaries"]
        meter.reset_peaks()
        loss.backward()
        backward = meter.peaks()["boundaries"]
        assert meter.live()["boundaries"] == 0
    return forward, backward


@pytest.mark.parametrize("fitting", range(7))
def test_bytes_on_the_device_are_at_most_one_boundary_below_the_plan(fitting):
    with offloading(6, host_budget=fitting * ROWS) as offload:
        found = max(boundary_peaks(6, offload.checkpoint))
    x = rows()
    planned = device_bytes(*x.shape, x.dtype, 6, capacity=fitting * ROWS)
    assert planned - ROWS * (0 < fitting < 5) <= found <= planned


@pytest.mark.parametrize("layers", [4, 16, 64])
def test_device_bytes_do_not_grow_with_depth_and_the_slab_holds_the_rest(layers):
    with offloading(layers) as offload:
        assert boundary_peaks(layers, offload.checkpoint) == (ROWS, 2 * ROWS)
        assert offload.stats().slab_bytes <= 1.01 * layers * ROWS
    with offloading(layers, host_budget=0) as offload:
        assert boundary_peaks(layers, offload.checkpoint) == (layers * ROWS, layers * ROWS)


class TwoStreams(torch.nn.Module):
    """Layers that hand on hidden states and residuals apart, as families with fused norms do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor, checkpointed: Callable[..., Any] = plain) -> torch.Tensor:
        def layer(block: Block, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
            residual = residual + hidden
            return block(residual) - residual, residual

        hidden = residual = x * 1  # of the first layer both are one tensor
        for block in self.blocks:
            hidden, residual = checkpointed(partial(layer, block), hidden, residual)
        return (hidden * residual).mean()


@pytest.mark.parametrize("layers", [4, 16, 64])
def test_of_a_layer_with_two_streams_both_are_boundaries(layers):
    def run(checkpointed: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = TwoStreams(layers), rows().requires_grad_()
        torch.manual_seed(1)
        model(x, checkpointed).backward()
        assert x.grad is not None
        return [*gradients(model), x.grad]

    with offloading(2 * layers, copies=LazyCopies()) as offload:
        with PeakMeter() as meter, no_garbage_collection():
            got = run(offload.checkpoint)
            # Of two restored layers, two tensors each.
            assert meter.peaks()["boundaries"] == 2 * (2 * ROWS)
            assert meter.live()["boundaries"] == 0
        stats = offload.stats()
        assert (stats.offloaded_bytes, stats.kept_bytes) == (2 * layers * ROWS, 0)
        assert stats.slab_bytes <= 1.01 * 2 * layers * ROWS
    assert_equal(got, run(plain))


def test_boundaries_are_taken_in_forward_order_while_they_fit_the_budget():
    with offloading(5, host_budget=2 * ROWS + ROWS // 2) as offload:
        got = gradients_of(5, offload.checkpoint)
        stats = offload.stats()
    assert_equal(got, gradients_of(5, plain))
    assert (stats.offloaded_bytes, stats.kept_bytes, stats.count) == (2 * ROWS, 3 * ROWS, 5)
    assert (stats.slab_bytes, stats.slab_bytes_needed) == (2 * ROWS, 5 * ROWS)
    with offloading(5, host_budget=2 * ROWS) as offload:
        # Layers 2, 3 and 4 keep theirs; two are gone when that of layer 1 is fetched.
        assert boundary_peaks(5, offload.checkpoint) == (3 * ROWS, 3 * ROWS)


def test_a_boundary_comes_back_while_the_layer_above_recomputes():
    copies, order = LazyCopies(), []
    model = toy(3)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, n=number: copies.log.append(("run", n)))
    with offloading(3, copies=copies) as offload:
        x = model.inward(rows())
        for block in model.blocks:
            x = offload.checkpoint(block, x)
        order, copies.log = copies.log, [("copy", n) for n in range(3)]
        assert order == [
            event for n in range(3) for event in (("copy", n), ("run", n), ("wait", n))
        ]
        x.sum().backward()
    assert copies.log[3:] == [
        *[("copy", 3), ("wait", 3), ("copy", 4), ("run", 2)],  # its own, then one ahead
        *[("wait", 4), ("copy", 5), ("run", 1)],
        *[("wait", 5), ("run", 0)],
    ]


def _kept_after_each_layer(rank: int) -> list[int]:
    model, x = toy(5), rows(rank)
    with offloading(5, host_budget=2 * ROWS + ROWS // 2) as offload:
        kept = []
        for _ in range(2):
            hidden = model.inward((rank + 1) * x)
            for block in model.blocks:
                hidden = offload.checkpoint(block, hidden)
                kept.append(offload.stats().kept_bytes)
            hidden.sum().backward()
            del hidden
    return kept


def test_all_ranks_take_the_same_boundaries():
    one, other = run_ranks(2, _kept_after_each_layer)
    assert one == other == [n * ROWS for n in (0, 0, 1, 2, 3, 3, 3, 4, 5, 6)]


class WatchedCopies(LazyCopies):
    """Notes which way each copy goes, and when its memory on the device is freed."""

    def __init__(self, slab: torch.Tensor) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self._slab = slab.untyped_storage()._cdata
        self._watched: list[Any] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        ticket = super().copy(target, source)
        outward = target.untyped_storage()._cdata == self._slab
        self.events.append(("out" if outward else "in", ticket))
        device = (source if outward else target).untyped_storage()
        event = ("freed", ticket)
        self._watched.append(weakref.ref(device, lambda _: self.events.append(event)))
        return ticket

    def wait(self, ticket: int, tensor: torch.Tensor) -> None:
        super().wait(ticket, tensor)
        self.events.append(("wait", ticket))


def _one_microbatch(offload: CheckpointOffload, run: Callable[..., torch.Tensor]) -> None:
    run(0).backward()


def _one_after_the_other(offload: CheckpointOffload, run: Callable[..., torch.Tensor]) -> None:
    for seed in range(3):
        run(seed).backward()


def _in_flight_together(offload: CheckpointOffload, run: Callable[..., torch.Tensor]) -> None:
    first, second = run(0), run(1)
    second.backward()
    first.backward()


def _out_of_order(offload: CheckpointOffload, run: Callable[..., torch.Tensor]) -> None:
    losses = [run(seed) for seed in range(3)]
    for index in (1, 2, 0):
        losses[index].backward()


def _backward_twice(offload: CheckpointOffload, run: Callable[..., torch.Tensor]) -> None:
    loss = run(0)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("budget", [None, 3 * ROWS], ids=["unlimited", "three layers"])
@pytest.mark.parametrize(
    "passes",
    [_one_microbatch, _one_after_the_other, _in_flight_together, _out_of_order, _backward_twice],
    ids=lambda passes: passes.__name__.strip("_").replace("_", " "),
)
def test_an_asynchronous_stream_never_meets_memory_that_is_used_again(passes, budget):
    model = toy(5)
    slab = host(slab_bytes(N, H, torch.float32, 15))
    copies = WatchedCopies(slab)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, n=number: copies.events.append(("run", n)))
    with (
        CheckpointOffload(slab, host_budget=budget, copies=copies) as offload,
        no_garbage_collection(),
    ):
        passes(offload, lambda seed: model(rows(seed), offload.checkpoint))
    events = copies.events
    tickets = {kind: [n for event, n in events if event == kind] for kind in ("out", "in")}
    assert tickets["in"]
    restored = 0
    for ticket in tickets["out"] + tickets["in"]:
        # All on one stream: a copy is done when a later one is.
        done = next(i for i, (kind, n) in enumerate(events) if kind == "wait" and n >= ticket)
        assert events.index(("freed", ticket)) > done
    for kind, number in events:
        restored += (kind == "in") - (kind == "freed" and number in tickets["in"])
        assert restored <= 2


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[3:17],
        lambda x: x[:, 4:12],
        lambda x: x.t(),
        lambda x: x[1:, ::3].t()[2:],
        lambda x: x[:1].expand(9, H),
        lambda x: x[2].expand(5, 3, H),
        lambda x: x.view(4, 16, H).permute(2, 0, 1),
        lambda x: x[:, :1].squeeze(),
        lambda x: x.as_strided((8, 4), (2, 1)),
        lambda x: x[:0],
    ],
    ids=[
        "rows at an offset",
        "columns",
        "transposed",
        "strided, transposed, at an offset",
        "row repeated",
        "repeated twice",
        "permuted",
        "one column",
        "overlapping windows",
        "no rows",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_views_come_back_with_their_values_and_layout(view, dtype):
    layouts = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        aligned = x.numel() == 0 or x.data_ptr() % 64
        layouts.append((x.shape, x.stride(), x.dtype, x.requires_grad, aligned, x.detach().clone()))
        return x.sin().exp()

    def gradient(checkpointed: Callable[..., Any]) -> torch.Tensor:
        x = rows().to(dtype).requires_grad_()
        checkpointed(layer, view(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    with offloading(1, copies=LazyCopies()) as offload:
        got = gradient(offload.checkpoint)
    *first, values = layouts[0]
    *again, restored = layouts[1]
    assert first == again
    assert torch.equal(values, restored)
    assert torch.equal(got, gradient(plain))


def test_a_view_at_an_offset_survives_a_backward_pass_on_another_thread():
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_recomputing(), x.storage_offset(), x.detach().clone()))
        return x.sin().exp()

    x = rows().requires_grad_()
    with offloading(1, copies=LazyCopies()) as offload:
        loss = offload.checkpoint(layer, x[3:17, 4:]).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    (first, before, values), (again, after, restored) = seen
    assert (first, again) == (False, True)
    assert before % 64 == after
    assert torch.equal(values, restored)
    wanted = rows().requires_grad_()
    layer(wanted[3:17, 4:]).sum().backward()
    assert x.grad is not None
    assert wanted.grad is not None
    assert torch.equal(x.grad, wanted.grad)


def test_a_reload_right_after_the_copy_out_gets_the_copied_values():
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return x.sin()

    copies = LazyCopies()
    slab = host(ROWS).fill_(255)  # NaN, should anything be read before it was written
    with CheckpointOffload(slab, host_budget=None, copies=copies) as offload:
        for seed in range(3):  # all in the same region
            x = rows(seed).requires_grad_()
            offload.checkpoint(layer, x).sum().backward()
            assert copies.log[-4:] == [(kind, 2 * seed + n) for n in (0, 1) for kind in COPY]
            assert torch.equal(seen.pop(), rows(seed))
            assert x.grad is not None
            assert torch.equal(x.grad, rows(seed).cos())


def test_a_parameter_among_the_arguments_is_no_boundary():
    weight = torch.nn.Parameter(rows(1)[:H].clone())
    with offloading(1) as offload, PeakMeter() as meter:
        meter.track(weight, "weights")
        offload.checkpoint(lambda x, w: (x @ w.t()).sin(), rows(), weight).sum().backward()
        assert offload.stats().offloaded_bytes == ROWS
        assert meter.live()["weights"] == weight.nbytes
    assert weight.grad is not None


def test_every_floating_point_argument_travels_and_the_others_stay():
    seen = []

    def layer(x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor, word: str, *, shift: float):
        seen.append((x.requires_grad, y.requires_grad, ids.sum().item(), word))
        return x * y.exp() + shift

    x, y, ids = rows(1).requires_grad_(), rows(2), torch.arange(3)
    with offloading(2) as offload:
        offload.checkpoint(layer, x, ids, y, "word", shift=2.0).sum().backward()
        assert offload.stats().offloaded_bytes == 2 * ROWS
    assert seen == [(True, False, 3, "word")] * 2
    assert x.grad is not None
    assert torch.equal(x.grad, y.exp())


def test_microbatches_in_turn_reuse_the_slab():
    model, alone = toy(3), toy(3)
    with offloading(3) as offload:
        for seed in range(4):
            torch.manual_seed(seed)
            model(rows(seed), offload.checkpoint).backward()
            torch.manual_seed(seed)
            alone(rows(seed)).backward()
        stats = offload.stats()
    assert_equal(gradients(model), gradients(alone))
    assert stats.offloaded_bytes == 12 * ROWS
    assert stats.slab_bytes == stats.slab_bytes_needed == 3 * ROWS


def test_space_given_back_in_pieces_serves_a_larger_boundary():
    with offloading(3) as offload:
        toy(3)(rows(), offload.checkpoint).backward()
        toy(1)(torch.cat([rows()] * 3), offload.checkpoint).backward()
        assert offload.stats().kept_bytes == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first", "last in first"])
def test_microbatches_in_flight_together_share_the_slab(order):
    def run(checkpointed: Callable[..., Any]) -> list[torch.Tensor]:
        model = toy(3)
        losses = [model(rows(seed), checkpointed) for seed in range(2)]
        for index in order:
            losses[index].backward()
        return gradients(model)

    copies = LazyCopies()
    with offloading(6, copies=copies) as offload:
        got = run(offload.checkpoint)
        assert offload.stats().slab_bytes == 6 * ROWS
    assert_equal(got, run(plain))
    assert copies.all_done()


def test_a_forward_without_backward_gives_its_space_back():
    with offloading(2) as offload, no_garbage_collection():
        for _ in range(3):
            toy(2)(rows(), offload.checkpoint)
        assert offload.stats().kept_bytes == 0
        with torch.no_grad():
            toy(2)(rows(), offload.checkpoint)
        assert offload.stats().count == 6


def test_a_graph_that_is_kept_can_go_backward_twice():
    model, alone = toy(3), toy(3)
    with offloading(3, copies=LazyCopies()) as offload:
        for each, checkpointed in ((model, offload.checkpoint), (alone, plain)):
            torch.manual_seed(0)
            loss = each(rows(), checkpointed)
            loss.backward(retain_graph=True)
            loss.backward()
    assert_equal(gradients(model), gradients(alone))


def test_a_layer_recomputes_once_and_knows_it():
    model = toy(2)
    with offloading(2) as offload:
        model(rows(), offload.checkpoint).backward()
    assert [block.runs for block in model.blocks] == [[False, True], [False, True]]


def test_checkpoints_may_nest():
    def run(checkpointed: Callable[..., Any]) -> list[torch.Tensor]:
        model = toy(4)

        def pair(first: Block, second: Block, x: torch.Tensor) -> torch.Tensor:
            return checkpointed(second.forward, checkpointed(first.forward, x))

        x = model.inward(rows())
        for index in (0, 2):
            x = checkpointed(partial(pair, model.blocks[index], model.blocks[index + 1]), x)
        x.sum().backward()
        return gradients(model)

    with offloading(6, copies=LazyCopies()) as offload:
        got = run(offload.checkpoint)
        assert offload.stats().slab_bytes_needed <= 6 * ROWS
    assert_equal(got, run(plain))


def test_a_backward_pass_outside_its_block_is_refused():
    offload = offloading(2)
    with offload:
        loss = toy(2)(rows(), offload.checkpoint)
    with offload, pytest.raises(RuntimeError, match="earlier `with offload:` block"):
        loss.backward()


def test_a_layer_that_changes_its_input_is_refused():
    def layer(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    x = rows().requires_grad_() * 1
    with offloading(1) as offload, pytest.raises(RuntimeError, match="changed its input in place"):
        offload.checkpoint(layer, x)


def test_a_layer_that_fails_leaves_no_copy_under_way():
    def layer(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such layer")

    copies = LazyCopies()
    with offloading(1, copies=copies) as offload:
        with pytest.raises(ValueError, match="no such layer"):
            offload.checkpoint(layer, rows())
        assert copies.all_done()


def test_a_backward_pass_that_stops_midway_leaves_no_copy_under_way():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            raise ValueError("stopped")

    copies = LazyCopies()
    model = toy(3)
    with offloading(3, copies=copies) as offload:
        x = model.inward(rows())
        x = offload.checkpoint(model.blocks[0], x)
        x = offload.checkpoint(model.blocks[1], x)
        x = offload.checkpoint(model.blocks[2], Stop.apply(x))
        with pytest.raises(ValueError, match="stopped"):
            x.sum().backward()
        assert not copies.all_done()
    assert copies.all_done()


def test_fake_tensors_give_the_peaks_of_the_real_run():
    def peaks() -> dict[str, int]:
        with PeakMeter() as meter, offloading(4) as offload:
            toy(4)(rows(), offload.checkpoint).backward()
            return meter.peaks()

    real = peaks()
    with FakeTensorMode():
        # A generator of numbers is not faked; the rows are only shapes here.
        assert peaks() == real
    assert real["boundaries"] == 2 * ROWS


def _sharded_gradients(rank: int, inside: bool, offloaded: bool) -> list[torch.Tensor]:
    """Layers that checkpoint inside FSDP2's hooks, as transformers does, or around them."""
    model = toy(3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with offloading(3) as offload, PeakMeter() as meter:
        checkpointed = offload.checkpoint if offloaded else plain
        if inside:
            for block in model.blocks:
                block.forward = partial(checkpointed, block.forward)
        for step in range(2):
            torch.manual_seed(step)
            model(rows(rank), call_layer if inside else checkpointed).backward()
        if offloaded:
            assert offload.stats().offloaded_bytes == 6 * ROWS
            assert meter.peaks()["boundaries"] == 2 * ROWS
    return [p.grad.to_local().clone() for p in model.parameters()]


def call_layer(layer: Callable[..., Any], *args: Any) -> Any:
    return layer(*args)


@pytest.mark.parametrize("inside", [True, False], ids=["inside the hooks", "around the hooks"])
def test_sharded_layers_have_equal_gradients(inside):
    got = run_ranks(2, _sharded_gradients, inside, True)
    expected = run_ranks(2, _sharded_gradients, inside, False)
    for left, right in zip(got, expected, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize(
    ("slab", "message"),
    [
        (torch.empty(64), "1-D uint8"),
        (torch.empty(8, 8, dtype=torch.uint8), "flatten"),
        (torch.empty(128, dtype=torch.uint8)[::2], "contiguous"),
        (torch.empty(128, dtype=torch.uint8)[8:], "multiple of 64 bytes, not at byte 8"),
        (torch.empty(64, dtype=torch.uint8, device="meta"), "host memory"),
    ],
    ids=["floats", "2-D", "gaps", "odd start", "no host memory"],
)
def test_a_slab_that_cannot_serve_is_refused(slab, message):
    with pytest.raises(InputError, match=message):
        CheckpointOffload(slab, host_budget=None)


def test_a_negative_budget_is_refused():
    with pytest.raises(InputError, match="-1 bytes; set 0"):
        offloading(1, host_budget=-1)


def test_slab_bytes_are_the_boundaries_rounded_up_to_a_cache_line():
    assert slab_bytes(1000, 64, torch.bfloat16, 3) == 3 * 1000 * 64 * 2
    assert slab_bytes(3, 5, torch.float32, 2) == 2 * 64
