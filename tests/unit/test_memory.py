"""Bytes by component: exact on CPU against sums done by hand, and the rule used for CUDA."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from flatpeak.workers.memory import HOST, PeakMeter, ScopeRises, attribute, exclude, scope
from flatpeak.workers.recompute import checkpoint_contexts
from flatpeak.workers.scopes import observed
from ranks import run_ranks

KB = 1024


def kilobytes(count: int = 1) -> torch.Tensor:
    return torch.empty(count * KB, dtype=torch.uint8)


def test_views_count_once_and_memory_is_freed_with_its_last_view():
    with PeakMeter() as meter:
        tensor = kilobytes(4)
        half, turned = tensor[KB:], tensor.view(2, -1).t()
        assert meter.live() == {"other": 4 * KB, "total": 4 * KB}
        del tensor, half
        assert meter.live()["total"] == 4 * KB
        del turned
        assert meter.live() == {"other": 0, "total": 0}
        assert meter.peaks() == {"other": 4 * KB, "total": 4 * KB}


def test_memory_belongs_to_the_innermost_scope_open_when_it_was_made():
    with PeakMeter() as meter:
        with scope("dispatch"):
            rows = kilobytes(2)
            with scope("vocabulary"):
                strip = kilobytes(3)
            more = kilobytes(1)
        outside = kilobytes(5)
        del more
        assert meter.live() == {
            "dispatch": 2 * KB,
            "vocabulary": 3 * KB,
            "other": 5 * KB,
            "total": 10 * KB,
        }
        assert meter.peaks()["dispatch"] == 3 * KB
        assert meter.peaks()["total"] == 11 * KB
        del rows, strip, outside


def test_the_total_peak_is_of_one_moment_and_not_the_sum_of_peaks():
    with PeakMeter() as meter:
        for name in ("dispatch", "vocabulary"):
            with scope(name):
                kilobytes(3)
        assert meter.peaks() == {"dispatch": 3 * KB, "vocabulary": 3 * KB, "total": 3 * KB}


def test_in_place_operations_make_nothing_and_out_of_place_ones_their_result():
    with PeakMeter() as meter:
        tensor = torch.zeros(256)
        tensor.add_(1).mul_(2)
        assert meter.peaks()["total"] == KB
        total = tensor + 1
        assert meter.peaks()["total"] == 2 * KB
        torch.add(tensor, total, out=tensor)
        assert meter.peaks()["total"] == 2 * KB


def test_a_tensor_from_before_the_meter_is_counted_only_when_tracked():
    weight, bias = torch.ones(256), torch.ones(256)
    with PeakMeter() as meter:
        weight.add_(1)
        bias[2:].mul_(2)
        assert meter.live() == {"total": 0}
        meter.track(weight, "weights")
        meter.track(weight.view(2, -1), "weights")
        assert meter.live() == {"weights": KB, "total": KB}


def test_reset_starts_the_step_at_the_live_bytes_and_keeps_the_lifetime():
    with PeakMeter() as meter:
        kept = kilobytes(2)
        kilobytes(6)
        meter.reset_peaks()
        assert meter.peaks() == {"other": 2 * KB, "total": 2 * KB}
        kilobytes(1)
        assert meter.peaks()["total"] == 3 * KB
        assert meter.lifetime_peaks() == {"other": 8 * KB, "total": 8 * KB}
        del kept


@pytest.mark.parametrize("move", [attribute, lambda tensor, name: None], ids=["moved", "left"])
def test_attribute_moves_bytes_without_a_false_peak(move):
    with PeakMeter() as meter:
        tensor = kilobytes(4)
        move(tensor[10:], "boundaries")
        moved = move is attribute
        assert meter.live().get("boundaries", 0) == (4 * KB if moved else 0)
        assert meter.live()["other"] == (0 if moved else 4 * KB)
        assert meter.peaks()["total"] == 4 * KB
        move(tensor, "attention")
        del tensor
        assert set(meter.live().values()) == {0}


def test_meta_tensors_have_no_memory():
    with PeakMeter() as meter:
        torch.empty(256, device="meta").add(1)
        assert meter.peaks() == {"total": 0}


def test_host_memory_is_never_counted():
    with PeakMeter() as meter:
        with scope(HOST):
            arena = kilobytes(8)
        arena[: 2 * KB].fill_(1)
        assert meter.peaks() == {"total": 0}
        slab = kilobytes(4)
        exclude(slab)
        assert meter.live()["total"] == 0
        meter.attribute(slab, "boundaries")
        assert meter.live()["total"] == 0
        assert meter.largest_tensors() == {"other": (4 * KB,)}


def test_a_resized_storage_keeps_its_component_and_follows_its_size():
    with PeakMeter() as meter:
        with scope("weights"):
            gathered = kilobytes(4)
        gathered.untyped_storage().resize_(0)
        assert meter.live()["weights"] == 0
        kilobytes(3)
        gathered.untyped_storage().resize_(2 * KB)
        assert meter.live() == {"weights": 2 * KB, "other": 0, "total": 2 * KB}
        assert meter.peaks()["total"] == 4 * KB
        out = torch.empty(0)
        torch.add(torch.zeros(256), 1, out=out)
        assert meter.live()["other"] == KB
    plain = kilobytes(1)
    plain.untyped_storage().resize_(0)
    assert meter.live()["weights"] == 2 * KB


def test_the_largest_tensor_is_by_elements_and_views_are_not_made():
    with PeakMeter() as meter, scope("vocabulary"):
        row = torch.zeros(8, dtype=torch.float64)
        row.expand(100, 8)
        mask = torch.zeros(3, 4, dtype=torch.bool)
        assert meter.largest_tensors() == {"vocabulary": (3, 4)}
        meter.reset_peaks()
        assert meter.largest_tensors() == {}
        del mask


def test_saved_tensors_live_until_the_backward_pass_frees_them():
    x = torch.ones(256, requires_grad=True)
    with PeakMeter() as meter:
        with scope("attention"):
            y = (x * 2).exp()  # exp saves its result, the product is freed
        assert meter.live()["attention"] == KB
        assert meter.peaks()["attention"] == 2 * KB
        loss = y.sum()
        del y
        assert meter.live() == {"attention": KB, "other": 4, "total": KB + 4}
        meter.reset_peaks()
        with scope("backward"):
            loss.backward()
        assert meter.live() == {"attention": 0, "other": 4, "backward": KB, "total": KB + 4}
        assert meter.peaks()["total"] == 4 + 4 + 2 * KB  # loss, seed, saved, exp's gradient
        del loss
    assert x.grad is not None


def test_a_cycle_that_dies_in_garbage_collection_is_settled():
    with PeakMeter() as meter:
        gc.disable()
        try:
            cycle: list[object] = [kilobytes(2)]
            cycle.append(cycle)
            del cycle
            assert meter.live()["total"] == 2 * KB
            gc.collect()
            assert meter.live()["total"] == 0
        finally:
            gc.enable()


def test_a_checkpointed_layer_keeps_its_input_and_recomputes_under_the_meter():
    weight = torch.ones(16, 16, requires_grad=True)
    x = torch.ones(64, 16, requires_grad=True)
    row = 64 * 16 * 4

    def layer(x: torch.Tensor) -> torch.Tensor:
        with scope("attention"):
            return torch.tanh(x @ weight).exp()

    with PeakMeter() as meter:
        y = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
        assert meter.live() == {"attention": row, "total": row}  # the result alone
        loss = y.sum()
        del y
        assert meter.live()["attention"] == 0
        meter.reset_peaks()
        loss.backward()
        assert meter.peaks()["attention"] == 2 * row  # tanh and exp, saved again
        del loss
        assert meter.live() == {
            "attention": 0,
            "other": x.nbytes + weight.nbytes,
            "total": x.nbytes + weight.nbytes,
        }


def steps_bytes(meter: PeakMeter) -> tuple[dict[str, int], dict[str, int]]:
    weight = torch.ones(8, 8, requires_grad=True)
    with scope("attention"):
        y = torch.nn.functional.silu(torch.ones(32, 8) @ weight)
    y.pow(2).sum().backward()
    return meter.peaks(), meter.live()


def test_fake_tensors_give_the_peaks_of_the_real_run():
    with PeakMeter() as meter:
        real = steps_bytes(meter)
    with FakeTensorMode(), PeakMeter() as meter:
        fake = steps_bytes(meter)
    assert fake == real
    assert fake[0]["attention"] == 3 * 32 * 8 * 4


def test_waiting_for_a_fake_collective_makes_no_second_tensor():
    with FakeTensorMode(), PeakMeter() as meter:
        tensor = torch.empty(256)
        waited = torch.ops._c10d_functional.wait_tensor(tensor)
        assert meter.live()["total"] == KB
        del tensor, waited


def _fsdp_bytes(rank: int) -> dict[str, dict[str, int]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 16)
    seen = {}
    with PeakMeter() as meter:
        for parameter in model.parameters():
            meter.track(parameter, "weights")
        seen["shards"] = meter.live()
        model(x).sum().backward()
        for step in ("second", "third"):
            meter.reset_peaks()
            model.zero_grad()
            model(x).sum().backward()
            seen[step] = meter.peaks()
        seen["end"] = meter.live()
        weight = next(model.parameters()).detach()
        with scope("product"):
            weight @ weight
        seen["product"] = {"peak": meter.peaks()["product"]}
    return seen


def test_fsdp_gathers_are_counted_and_freed():
    layer = 16 * 16 * 4
    for seen in run_ranks(2, _fsdp_bytes):
        assert seen["shards"] == {"weights": 4 * layer // 2, "total": 4 * layer // 2}
        assert seen["end"]["other"] == 4 * layer // 2  # the sharded gradients
        assert seen["second"] == seen["third"]
        # A distributed product gathers at least one side before it makes its result.
        assert seen["product"]["peak"] > layer
        # Two gathered layers at least, never all four on top of shards and gradients.
        assert 2 * layer < seen["third"]["total"] - 4 * layer < 8 * layer


def test_a_second_run_of_one_meter_is_refused_and_nested_meters_see_the_same():
    with PeakMeter() as outer:
        with pytest.raises(AssertionError, match="already running"):
            outer.__enter__()
        with PeakMeter() as inner:
            kilobytes(2)
        kilobytes(3)
    assert inner.peaks()["total"] == 2 * KB
    assert outer.peaks()["total"] == 3 * KB


class FakeAllocator:
    """An allocator whose bytes the test moves by hand."""

    def __init__(self, allocated: int = 0) -> None:
        self.now = self.top = allocated

    def move(self, nbytes: int) -> None:
        self.now += nbytes
        self.top = max(self.top, self.now)

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.top

    def restart(self) -> None:
        self.top = self.now


def test_on_a_device_each_scope_is_charged_with_its_own_rise():
    allocator = FakeAllocator(100)
    rises = ScopeRises(allocator)
    rises.start()
    with observed(rises):
        allocator.move(10)
        with scope("dispatch"):
            allocator.move(7)
            allocator.move(-7)
            allocator.move(2)
            with scope("vocabulary"):
                allocator.move(50)
                allocator.move(-50)
            allocator.move(6)
            allocator.move(-8)
        allocator.move(3)
        assert rises.peaks() == {"other": 13, "dispatch": 8, "vocabulary": 50, "total": 162}
        rises.reset()
        assert rises.peaks() == {"other": 13, "dispatch": 0, "vocabulary": 0, "total": 113}
        with scope("dispatch"):
            allocator.move(-13)  # frees what others made
            with scope("vocabulary"):
                pass
            allocator.move(4)
        assert rises.peaks()["dispatch"] == 4
        assert rises.lifetime_peaks()["dispatch"] == 8


def test_a_device_meter_joins_the_allocator_with_the_tensors_it_was_told_of():
    allocator = FakeAllocator(100)
    meter = PeakMeter(allocator=allocator)
    weight, boundary = torch.ones(256), torch.ones(512)
    with meter:
        meter.track(weight, "weights")
        with scope("dispatch"):
            allocator.move(30)
            allocator.move(-30)
        attribute(boundary, "boundaries")
        assert meter.live() == {"weights": KB, "boundaries": 2 * KB, "total": 100}
        expected = {"weights": KB, "boundaries": 2 * KB, "dispatch": 30, "other": 0, "total": 130}
        assert meter.peaks() == expected
        del boundary
        meter.reset_peaks()
        at_rest = {"boundaries": 0, "dispatch": 0, "other": 0}
        assert meter.peaks() == {"weights": KB, "total": 100, **at_rest}
        with pytest.raises(AssertionError, match="CPU alone"):
            meter.largest_tensors()
    allocator.move(1000)
    assert meter.peaks()["total"] == 100
    assert meter.lifetime_peaks() == expected


def loss_of(hidden: torch.Tensor, head: torch.Tensor, tile: int) -> torch.Tensor:
    targets = torch.zeros(len(hidden), dtype=torch.long)
    with scope("vocabulary"):
        parts = [
            torch.nn.functional.cross_entropy(rows @ head.t(), wanted, reduction="sum")
            for rows, wanted in zip(hidden.split(tile), targets.split(tile), strict=True)
        ]
        return torch.stack(parts).sum()


@pytest.mark.parametrize("tile", [24, 8])
def test_the_meter_tells_whether_tokens_by_vocabulary_were_ever_alive(tile):
    with PeakMeter() as meter:
        loss_of(torch.ones(24, 8), torch.ones(50, 8), tile)
        assert meter.largest_tensors()["vocabulary"] == (tile, 50)


def test_nothing_of_the_last_loss_is_alive_when_the_next_forward_starts():
    head = torch.ones(50, 8, requires_grad=True)
    with PeakMeter() as meter:
        loss = loss_of(torch.ones(24, 8), head, 24)
        assert meter.live()["vocabulary"] >= 24 * 50 * 4
        loss.backward()
        assert meter.live()["vocabulary"] == 4
        del loss
        assert meter.live() == {"vocabulary": 0, "other": 50 * 8 * 4, "total": 50 * 8 * 4}


def test_without_a_meter_nothing_watches():
    plain = torch.UntypedStorage.resize_
    meter = PeakMeter()
    with meter:
        assert torch.UntypedStorage.resize_ is not plain
    assert torch.UntypedStorage.resize_ is plain
    kilobytes(1)
    attribute(kilobytes(1), "boundaries")
    assert meter.peaks() == {"total": 0}
