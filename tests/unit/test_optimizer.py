"""The bucketed AdamW against torch's, and the paths of gradients and weights through arenas."""

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatpeak.kernels.adamw import LEAST_COMPILED
from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.errors import (
    CheckpointError,
    ClusterError,
    InputError,
    RunFailed,
    WaitTimeout,
)
from flatpeak.workers.optimizer import (
    AdamW,
    GradientStream,
    OffloadStreamAdamW,
    OptimizerCore,
    clipping_factor,
    global_norm,
    update_bucket,
)
from ranks import run_ranks

SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, lr_bias=0.01)
SIZES = {"embedding": 500, "norm": 20, "expert": 301, "bias": 8}
SHARDS = [
    Shard(Range("embedding", 0, 500), 0, "float32", True),
    Shard(Range("norm", 0, 20), 0, "float32", False),
    Shard(Range("empty", 0, 0), 0, "float32", True),
    Shard(Range("bias", 0, 8), 0, "float32", False, "bias"),
    Shard(Range("expert", 0, 301), 0, "float32", True),
]


def seeded(seed, size, scale=1.0):
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def gradients(step, scale=1.0):
    return {
        name: seeded(100 * step + n, size, scale) for n, (name, size) in enumerate(SIZES.items())
    }


class Rig:
    """One worker rank and its actors, in one process, over the parameters of SIZES."""

    def __init__(self, folder, *, bucket_parameters=64, actors=2, shards=SHARDS):
        self.shards = [shard for shard in shards if shard.range.size]
        self.buckets = cut_buckets(
            shards, bucket_parameters=bucket_parameters, arenas_of_rank=lambda rank: range(actors)
        )
        self.arenas = {
            actor: Arena.create(
                folder / f"{actor}.arena",
                run="r",
                buckets=[b for b in self.buckets if b.arena == actor],
                spare_frames=1,
            )
            for actor in range(actors)
        }
        self.cores = [OptimizerCore([arena], SETTINGS) for arena in self.arenas.values()]
        self.stream = GradientStream(self.buckets, self.arenas)

    def load(self, values):
        self.write(values, version=-1)
        for core in self.cores:
            core.load_gradients()
            core.commit_load(0)
        return self

    def write(self, values, *, version):
        self.stream.begin_step(version=version, timeout_s=1)
        for name, value in values.items():
            self.stream.write(name, 0, value, accumulate=False)
        self.stream.finish()

    def step(self, step, values, *, lr=1e-2, clip=1.0):
        self.write(values, version=step - 1)
        norm = math.sqrt(self.stream.squared_norm().item())
        for core in self.cores:
            core.update(step, lr=lr, clip_factor=clipping_factor(norm, clip))
        return norm

    def weights(self, version):
        return {shard.range.name: self.fetch(shard.range, version) for shard in self.shards}

    def fetch(self, held, version, dtype=torch.float32):
        out = torch.empty(held.size, dtype=dtype)
        self.stream.fetch(held.name, held.start, out, version=version, timeout_s=1)
        return out

    def state(self):
        """All bytes of all frames in use."""
        return [
            part.clone()
            for arena in self.arenas.values()
            for b in arena.buckets
            for part in arena.frame(b.index).state
        ]


START = {name: seeded(n, size) for n, (name, size) in enumerate(SIZES.items())}


def padded(values):
    """Whole vectors: in what is left over, torch's fused AdamW rounds otherwise."""
    return torch.nn.functional.pad(values, (0, -len(values) % 64))


class Reference:
    """torch.optim.AdamW with clip_grad_norm_ on the same parameters."""

    def __init__(self):
        p = self._padded = {
            n: torch.nn.Parameter(padded(v)) for n, v in START.items() if n != "bias"
        }
        self.parameters = {n: p[n].detach()[: SIZES[n]] for n in p}
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p["embedding"], p["expert"]], "weight_decay": SETTINGS.weight_decay},
                {"params": [p["norm"]], "weight_decay": 0.0},
            ],
            betas=SETTINGS.betas,
            eps=SETTINGS.eps,
            fused=True,
        )

    def step(self, values, *, lr=1e-2, clip=1.0):
        for name, p in self._padded.items():
            p.grad = padded(values[name])
        norm = torch.nn.utils.clip_grad_norm_(self._padded.values(), clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm.item()


@pytest.mark.parametrize("bucket_parameters", [17, 64, 10_000])
@pytest.mark.parametrize("clip", [1.0, None], ids=["clipped", "unclipped"])
def test_equal_to_torch_adamw_with_clipping(tmp_path, bucket_parameters, clip):
    rig, reference = Rig(tmp_path, bucket_parameters=bucket_parameters).load(START), Reference()
    for step in range(1, 13):
        values, lr = gradients(step), 1e-2 / step
        norm = rig.step(step, values, lr=lr, clip=clip)
        assert norm == pytest.approx(reference.step(values, lr=lr, clip=clip), rel=1e-6)
    weights = rig.weights(12)
    for name, p in reference.parameters.items():
        torch.testing.assert_close(weights[name], p, rtol=0, atol=1e-6)
        if clip is None:
            assert torch.equal(weights[name], p), name


def test_the_cut_and_the_number_of_threads_do_not_change_a_bit(tmp_path):
    ends = []
    for number, (bucket_parameters, threads) in enumerate([(7, 1), (64, 2), (10_000, 2)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            rig = Rig(folder, bucket_parameters=bucket_parameters, actors=3).load(START)
            for step in range(1, 4):
                rig.step(step, gradients(step), clip=None)
            ends.append(rig.weights(3))
        finally:
            torch.set_num_threads(before)
    for end in ends[1:]:
        assert all(torch.equal(end[name], ends[0][name]) for name in SIZES)


@pytest.mark.parametrize("size", [3 * 32768 + 5, LEAST_COMPILED + 5], ids=["plain", "compiled"])
def test_buckets_larger_than_a_block_are_updated_whole(tmp_path, size):
    rig = Rig(
        tmp_path,
        shards=[Shard(Range("p", 0, size), 0, "float32", True)],
        bucket_parameters=size,
        actors=1,
    )
    rig.load({"p": seeded(1, size)})
    rig.step(1, {"p": seeded(2, size)}, clip=None)
    p = torch.nn.Parameter(padded(seeded(1, size)))
    p.grad = padded(seeded(2, size))
    options = {"betas": SETTINGS.betas, "weight_decay": SETTINGS.weight_decay}
    torch.optim.AdamW([p], lr=1e-2, fused=True, **options).step()
    assert torch.equal(rig.weights(1)["p"], p.detach()[:size])


def test_a_step_with_learning_rate_zero_leaves_loaded_weights_as_they_are(tmp_path):
    rig = Rig(tmp_path).load(START)
    rig.step(1, gradients(1) | {"bias": torch.zeros(8)}, lr=0.0)
    assert all(torch.equal(rig.weights(1)[name], START[name]) for name in SIZES)


def test_a_balancing_bias_follows_its_own_rule(tmp_path):
    rig = Rig(tmp_path).load(START)
    direction = torch.tensor([1.0, -1, 0, 1, -1, 0, 1, 1])
    norm = rig.step(1, gradients(1) | {"bias": direction}, clip=1e-3)
    without = rig.stream.squared_norm().item() - norm**2
    assert without == 0
    assert norm == pytest.approx(Reference().step(gradients(1)), rel=1e-6)
    torch.testing.assert_close(rig.weights(1)["bias"], START["bias"] - 0.01 * direction)
    rig.step(2, gradients(2) | {"bias": direction}, clip=1e-3)
    torch.testing.assert_close(rig.weights(2)["bias"], START["bias"] - 0.02 * direction)


def test_no_gradient_is_a_zero_gradient_and_never_the_last_steps(tmp_path):
    rig, reference = Rig(tmp_path).load(START), Reference()
    for step in (1, 2, 3):
        values = gradients(step)
        if step == 2:
            values = {name: value for name, value in values.items() if name != "expert"}
        rig.step(step, values, clip=None)
        reference.step({"expert": torch.zeros(301)} | values, clip=None)
        for name, p in reference.parameters.items():
            assert torch.equal(rig.weights(step)[name], p)


def test_one_huge_gradient_in_the_last_bucket_scales_every_bucket(tmp_path):
    rig, reference = Rig(tmp_path).load(START), Reference()
    values = gradients(1)
    last = rig.buckets[-1].ranges[-1]
    values[last.name][last.stop - 1] = 1e6
    assert rig.step(1, values) == pytest.approx(reference.step(values), rel=1e-6)
    for name, p in reference.parameters.items():
        torch.testing.assert_close(rig.weights(1)[name], p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_no_bit_and_lets_workers_go_on(tmp_path, poison):
    rig, reference = Rig(tmp_path).load(START), Reference()
    rig.step(1, gradients(1), clip=None)
    reference.step(gradients(1), clip=None)
    before = rig.state()
    values = gradients(2)
    values["expert"][17] = poison
    rig.step(2, values)
    assert all(map(torch.equal, before, rig.state()))
    assert [core.counters.skipped_steps for core in rig.cores] == [1, 1]
    rig.weights(2)  # does not wait
    # The skipped step does not count in the bias correction either.
    rig.step(3, gradients(3), clip=None)
    reference.step(gradients(3), clip=None)
    for name, p in reference.parameters.items():
        assert torch.equal(rig.weights(3)[name], p)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_moves_of_a_norm_weight_are_not_lost(tmp_path, dtype):
    shards = [Shard(Range("norm", 0, 16), 0, dtype, False)]
    rig = Rig(tmp_path, shards=shards, actors=1).load({"norm": torch.ones(16)})
    for step in range(1, 21):
        rig.step(step, {"norm": torch.ones(16)}, lr=1e-4, clip=None)
    master = rig.arenas[0].master(0)
    torch.testing.assert_close(master, torch.full((16,), 1 - 20e-4), rtol=0, atol=1e-5)
    weights = rig.fetch(shards[0].range, 20, getattr(torch, dtype))
    assert torch.equal(weights, master.to(weights.dtype))
    assert (weights < 1).all()


@pytest.mark.parametrize("wrong", [0, 2, 4, 9], ids=["older", "repeated", "skipping", "far ahead"])
def test_a_step_that_is_not_the_next_is_refused(tmp_path, wrong):
    rig = Rig(tmp_path).load(START)
    rig.step(1, gradients(1))
    rig.step(2, gradients(2))
    before = rig.state()
    with pytest.raises(RunFailed, match=f"step {wrong} was asked of .* has committed step 2"):
        rig.cores[0].update(wrong, lr=1.0, clip_factor=1.0)
    assert all(map(torch.equal, before, rig.state()))


def test_an_arena_that_was_not_loaded_is_not_updated(tmp_path):
    with pytest.raises(RunFailed, match="before it was loaded"):
        Rig(tmp_path).cores[0].update(0, lr=1.0, clip_factor=1.0)


def test_an_update_cut_off_half_way_is_finished_by_a_replacement(tmp_path):
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    whole.mkdir()
    halved.mkdir()
    undisturbed = Rig(whole, actors=1).load(START)
    undisturbed.step(1, gradients(1), clip=None)

    rig = Rig(halved, actors=1).load(START)
    rig.write(gradients(1), version=0)
    arena = rig.arenas[0]
    update_bucket(arena, 0, step=1, lr=1e-2, clip_factor=1.0, settings=SETTINGS)
    arena.begin_update(1).master.fill_(math.nan)  # and here the actor dies
    with Arena.attach(arena.path, run="r") as attached:
        replacement = OptimizerCore([attached], SETTINGS)
        assert replacement.step == 0
        replacement.update(1, lr=1e-2, clip_factor=1.0)
        assert replacement.counters.updated_buckets == len(rig.buckets) - 1
    assert all(map(torch.equal, undisturbed.state(), rig.state()))


@pytest.mark.parametrize("done", [0, 1, None], ids=["nothing", "a bucket", "all"])
def test_whatever_a_predecessor_did_of_a_step_is_finished_once(tmp_path, done):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    undisturbed = Rig(whole, actors=1).load(START)
    undisturbed.step(1, gradients(1), clip=None)

    rig = Rig(cut, actors=1).load(START)
    rig.write(gradients(1), version=0)
    for bucket in rig.buckets[:done]:
        update_bucket(
            rig.arenas[0], bucket.index, step=1, lr=1e-2, clip_factor=1.0, settings=SETTINGS
        )
    with Arena.attach(rig.arenas[0].path, run="r") as attached:
        successor = OptimizerCore([attached], SETTINGS)
        for _ in range(2):
            successor.finish(1, lr=1e-2, clip_factor=1.0)
        assert successor.step == 1
        with pytest.raises(RunFailed, match="step 3 was asked of"):
            successor.finish(3, lr=1e-2, clip_factor=1.0)
    assert all(map(torch.equal, undisturbed.state(), rig.state()))


def fifty_steps():
    """Microbatches of each step; "expert" has none in every fifth, step 7 is not finite, and in
    step 13 one element of the last bucket outweighs all others."""
    for step in range(1, 51):
        parts = [gradients(step), gradients(1000 + step, 0.5)]
        if step % 5 == 0:
            for part in parts:
                del part["expert"]
        if step == 7:
            parts[1]["embedding"][17] = math.inf
        if step == 13:
            parts[0]["expert"][-1] = 1e6
        yield step, parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_steps_equal_one_bucket_in_one_process_and_torch(tmp_path, dtype):
    shards = [replace(shard, dtype=dtype) for shard in SHARDS]
    rigs = []
    for number, cut in enumerate(({"bucket_parameters": 64}, {"bucket_parameters": 10**6})):
        folder = tmp_path / str(number)
        folder.mkdir()
        rigs.append(Rig(folder, actors=3 - 2 * number, shards=shards, **cut).load(START))
    reference = Reference()
    for step, parts in fifty_steps():
        for rig in rigs:
            rig.stream.begin_step(version=step - 1, timeout_s=1)
            for part in parts:
                for name, value in part.items():
                    rig.stream.write(name, 0, value, accumulate=True)
            rig.stream.finish()
            norm = math.sqrt(rig.stream.squared_norm().item())
            for core in rig.cores:
                core.update(step, lr=1e-2 / step, clip_factor=clipping_factor(norm, 1.0))
        if step != 7:
            total = {
                name: sum((part[name] for part in parts if name in part), torch.zeros(size))
                for name, size in SIZES.items()
            }
            reference.step(total, lr=1e-2 / step)
    assert {core.counters.skipped_steps for rig in rigs for core in rig.cores} == {1}
    masters = [{r.name: whole(rig, r) for r in (s.range for s in rig.shards)} for rig in rigs]
    for name, master in masters[0].items():
        assert torch.equal(master, masters[1][name]), name
        if name in reference.parameters:
            torch.testing.assert_close(master, reference.parameters[name], rtol=0, atol=1e-6)
    weights = rigs[0].weights(50) if dtype == "float32" else low_weights(rigs[0], 50)
    for name, master in masters[0].items():
        assert torch.equal(weights[name], master.to(getattr(torch, dtype))), name


def whole(rig, held):
    """The masters of a whole parameter, from all of its buckets."""
    cores = [core for core in rig.cores if core.buckets]
    found = torch.full((held.size,), math.nan)
    for core in cores:
        for bucket in core.buckets:
            for piece in (r for r in bucket.ranges if r.name == held.name):
                found[piece.start : piece.stop] = core.read(piece)[0]
    return found


def low_weights(rig, version):
    return {s.range.name: rig.fetch(s.range, version, torch.bfloat16) for s in rig.shards}


def test_microbatches_add_up_in_fp32_and_start_from_nothing(tmp_path):
    rig = Rig(tmp_path).load(START)
    rig.step(1, gradients(1))
    rig.stream.begin_step(version=1, timeout_s=1)
    parts = [seeded(n, 500).bfloat16() for n in range(4)]
    for part in parts:
        rig.stream.write("embedding", 0, part, accumulate=True, final=True)
    # An expert that only later microbatches reach, and only in part.
    rig.stream.write("expert", 50, torch.ones(150), accumulate=True)
    rig.stream.write("expert", 100, torch.ones(150), accumulate=True)
    assert rig.stream.finish() == SIZES["norm"] + SIZES["bias"] + unreached(rig, 50, 250)

    expert = torch.zeros(301)
    expert[50:200] += 1
    expert[100:250] += 1
    total = sum(part.float() for part in parts)
    assert torch.equal(gradient_of(rig, Range("embedding", 0, 500)), total)
    assert torch.equal(gradient_of(rig, Range("expert", 0, 301)), expert)
    assert torch.equal(gradient_of(rig, Range("norm", 0, 20)), torch.zeros(20))
    expected = total.double().square().sum() + expert.double().square().sum()
    torch.testing.assert_close(rig.stream.squared_norm(), expected, rtol=1e-14, atol=0)


def unreached(rig, start, stop):
    """Elements of bucket ranges of `expert` that [start, stop) does not touch."""
    ranges = [r for b in rig.buckets for r in b.ranges if r.name == "expert"]
    return sum(r.size for r in ranges if r.stop <= start or r.start >= stop)


def gradient_of(rig, held):
    found = torch.empty(held.size)
    for b in rig.buckets:
        offset = 0
        for r in b.ranges:
            if r.name == held.name:
                region = rig.arenas[b.arena].gradient(b.index)
                found[r.start - held.start : r.stop - held.start] = region[offset : offset + r.size]
            offset += r.size
    return found


def test_a_gradient_waits_for_the_commit_of_the_step_before(tmp_path):
    rig = Rig(tmp_path).load(START)
    rig.stream.begin_step(version=1, timeout_s=0.01)
    with pytest.raises(WaitTimeout, match="did not reach version 1"):
        rig.stream.write("norm", 0, torch.ones(20), accumulate=False)
    with pytest.raises(WaitTimeout, match="did not reach version 1"):
        rig.stream.finish()


def test_a_gradient_outside_a_step_is_refused(tmp_path):
    rig = Rig(tmp_path).load(START)
    with pytest.raises(AssertionError, match="outside"):
        rig.stream.write("norm", 0, torch.ones(20), accumulate=False)


def test_a_forward_fetches_early_buckets_while_later_ones_update(tmp_path):
    rig = Rig(tmp_path, actors=1).load(START)
    rig.write(gradients(1), version=0)
    update_bucket(rig.arenas[0], 0, step=1, lr=1e-2, clip_factor=1.0, settings=SETTINGS)
    first = rig.buckets[0].ranges[0]
    assert torch.equal(rig.fetch(first, 1), rig.arenas[0].master(0)[: first.size])
    assert rig.stream.buckets_before(1) == rig.stream.buckets - 1 > 0
    with pytest.raises(WaitTimeout, match="bucket 1 of arena 0"):
        rig.stream.fetch("embedding", first.stop, torch.empty(4), version=1, timeout_s=0.01)
    with pytest.raises(ClusterError, match="holds version 1"):
        rig.fetch(first, 0)


def test_clipping_is_torchs_and_skips_what_is_not_finite():
    assert clipping_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clipping_factor(0.5, 1.0) == 1.0
    assert clipping_factor(1e9, None) == 1.0
    assert clipping_factor(0.0, 1.0) == 1.0
    assert clipping_factor(math.inf, 1.0) is None
    assert clipping_factor(math.nan, None) is None


def _write_or_update(rank, folder, start, gradient):
    from pathlib import Path

    shards = [Shard(Range("p", 0, 40), 0, "bfloat16", True)]
    buckets = cut_buckets(shards, bucket_parameters=16, arenas_of_rank=lambda rank: [0])
    path = Path(folder) / "0.arena"
    if rank == 1:  # the actor
        arena = Arena.create(path, run="r", buckets=buckets, spare_frames=1)
        core = OptimizerCore([arena], SETTINGS)
        core.load(Range("p", 0, 40), start)
        core.commit_load(0)
        dist.barrier()
        box = [None]
        dist.broadcast_object_list(box, src=0)  # the clipping factor, when gradients are there
        core.update(1, lr=1e-2, clip_factor=box[0])
        dist.barrier()
        return core.read(Range("p", 0, 40))[0]
    dist.barrier()
    stream = GradientStream(buckets, {0: Arena.attach(path, run="r")})
    stream.begin_step(version=0, timeout_s=5)
    stream.write("p", 0, gradient, accumulate=False)
    stream.finish()
    factor = clipping_factor(math.sqrt(stream.squared_norm().item()), 1.0)
    dist.broadcast_object_list([factor], src=0)
    weights = torch.empty(40, dtype=torch.bfloat16)
    stream.fetch("p", 0, weights, version=1, timeout_s=20)
    dist.barrier()
    return weights


def test_one_process_writes_gradients_and_another_updates(tmp_path):
    start, gradient = seeded(1, 40), seeded(2, 40).bfloat16()
    weights, master = run_ranks(2, _write_or_update, str(tmp_path), start, gradient)
    p = torch.nn.Parameter(start.clone())
    p.grad = gradient.float()
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    torch.optim.AdamW([p], lr=1e-2, betas=SETTINGS.betas, weight_decay=SETTINGS.weight_decay).step()
    torch.testing.assert_close(master, p.detach(), rtol=0, atol=1e-6)
    assert torch.equal(weights, master.bfloat16())


def _norm_of_rank(rank):
    return global_norm(torch.tensor(float(rank + 3) ** 2, dtype=torch.float64))


def test_the_global_norm_is_the_same_on_all_ranks():
    assert run_ranks(2, _norm_of_rank) == [5.0, 5.0]


class Scalar:
    """Stands in for a tensor []: a value, and where it is."""

    def __init__(self, value: float, device: torch.device) -> None:
        self.value, self.device = value, device

    def to(self, device, *, copy):
        assert copy
        return Scalar(self.value, device)

    def item(self):
        return self.value


class Elsewhere:
    """Stands in for torch.distributed with a group that takes tensors of its device alone."""

    def is_initialized(self):
        return True

    def get_backend(self, group):
        return "nccl"

    def all_reduce(self, tensor, group):
        assert tensor.device == torch.device("cuda", 1)
        tensor.value *= 4  # three more ranks have as much


def test_the_norm_of_gradients_on_the_host_is_summed_where_the_group_is(monkeypatch):
    monkeypatch.setattr("flatpeak.workers.gradients.dist", Elsewhere())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    own = Scalar(9.0, torch.device("cpu"))
    assert global_norm(own) == 6.0
    assert own.value == 9.0


# The stand-alone optimizer


def model(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.LayerNorm(20), torch.nn.Linear(20, 3)
    ).to(dtype)


def backward(net, step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()


def groups(net):
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def train(net, optimizer, steps, clip=0.5):
    for step in steps:
        backward(net, step)
        if isinstance(optimizer, OffloadStreamAdamW):
            assert all(p.grad is None for p in net.parameters())
            optimizer.step(clip)
        else:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def test_stand_alone_it_equals_torch_adamw_with_groups_and_a_schedule():
    ours, theirs = model(), model()
    optimizers = [
        OffloadStreamAdamW(groups(ours), lr=1e-2, bucket_parameters=30),
        torch.optim.AdamW(groups(theirs), lr=1e-2),
    ]
    for net, optimizer in zip((ours, theirs), optimizers, strict=True):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        for step in range(12):
            train(net, optimizer, [step])
            schedule.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_stand_alone_bf16_parameters_are_the_rounding_of_fp32_masters():
    net = model(torch.bfloat16)
    optimizer = OffloadStreamAdamW(net.parameters(), lr=1e-4, bucket_parameters=50)
    train(net, optimizer, range(3))
    for number, p in enumerate(net.parameters()):
        master = optimizer.state_dict()["state"][number]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), p)
        assert not torch.equal(master, p.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_on", ["device", "auto"])
def test_stand_alone_where_it_updates_does_not_change_a_bit(dtype, update_on):
    nets = [model(dtype), model(dtype)]
    for net, where in zip(nets, ("host", update_on), strict=True):
        optimizer = OffloadStreamAdamW(groups(net), lr=1e-2, bucket_parameters=30, update_on=where)
        train(net, optimizer, range(3))
        next(net.parameters()).grad = torch.full((20, 6), math.inf, dtype=dtype)
        optimizer.step()
        net[3].weight.data = net[3].weight.data.clone()  # to be found where it is now
        train(net, optimizer, range(3, 6))
        assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_stand_alone_a_parameter_that_is_not_contiguous_is_refreshed_from_a_device_update():
    turned = torch.nn.Parameter(seeded(1, 12).view(3, 4).t())
    plain = torch.nn.Parameter(turned.detach().clone())
    optimizer = OffloadStreamAdamW([turned], lr=0.1, bucket_parameters=5, update_on="device")
    for p in (turned, plain):
        (p * seeded(2, 12).view(4, 3)).sum().backward()
    optimizer.step()
    torch.optim.AdamW([plain], lr=0.1).step()
    assert torch.equal(turned, plain)


def test_stand_alone_loaded_parameters_are_not_undone_by_the_next_step():
    net = model()
    optimizer = OffloadStreamAdamW(net.parameters(), lr=0.0)
    train(net, optimizer, range(2))
    loaded = {name: value + 1 for name, value in net.state_dict().items()}
    net.load_state_dict(loaded)
    train(net, optimizer, range(2))
    assert all(torch.equal(value, loaded[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stand_alone_ten_steps_equal_five_and_five_through_a_state_dict(dtype):
    straight, first = model(dtype), model(dtype)
    train(straight, OffloadStreamAdamW(groups(straight), lr=1e-2), range(10))
    optimizer = OffloadStreamAdamW(groups(first), lr=1e-2, bucket_parameters=30)
    train(first, optimizer, range(5))
    second = model(dtype)
    second.load_state_dict(first.state_dict())
    resumed = OffloadStreamAdamW(groups(second), lr=77.0, bucket_parameters=11)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, resumed, range(5, 10))
    assert all(map(torch.equal, straight.parameters(), second.parameters()))


def test_stand_alone_it_continues_from_torchs_own_state():
    ours, theirs = model(), model()
    reference = torch.optim.AdamW(groups(theirs), lr=1e-2)
    train(theirs, reference, range(3))
    ours.load_state_dict(theirs.state_dict())
    optimizer = OffloadStreamAdamW(groups(ours), lr=1e-2)
    optimizer.load_state_dict(reference.state_dict())
    train(theirs, reference, range(3, 6))
    train(ours, optimizer, range(3, 6))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_stand_alone_state_of_uneven_age_is_refused():
    net = model()
    optimizer = OffloadStreamAdamW(net.parameters())
    state = optimizer.state_dict()
    state["state"][1]["step"] = torch.tensor(4.0)
    with pytest.raises(CheckpointError, match=r"updated \[0, 4\] times"):
        optimizer.load_state_dict(state)


def test_stand_alone_zero_grad_drops_and_backward_adds_up():
    ours, theirs = model(), model()
    optimizer, reference = (
        OffloadStreamAdamW(ours.parameters()),
        torch.optim.AdamW(theirs.parameters()),
    )
    backward(ours, 99)
    optimizer.zero_grad()
    for step in (1, 2):
        backward(ours, step)
        backward(theirs, step)
    norm = optimizer.step()
    assert norm == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).item(), rel=1e-6
    )
    reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_stand_alone_a_step_that_is_not_finite_changes_nothing():
    net = model()
    optimizer = OffloadStreamAdamW(net.parameters())
    before = copy.deepcopy(net.state_dict())
    next(net.parameters()).grad = torch.full((20, 6), math.inf)
    assert optimizer.step(1.0) == math.inf
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_stand_alone_frozen_and_non_contiguous_parameters(tmp_path):
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    empty = torch.nn.Parameter(torch.ones(0, 5))
    turned = torch.nn.Parameter(seeded(1, 128).view(32, 4).t())
    plain = torch.nn.Parameter(turned.detach().clone())
    optimizer = OffloadStreamAdamW([frozen, empty, turned], arena=tmp_path / "a.arena", lr=0.1)
    reference = torch.optim.AdamW([plain], lr=0.1, fused=True)
    (empty.sum() * 2).backward()
    for p in (turned, plain):
        (p * seeded(2, 128).view(4, 32)).sum().backward()
    optimizer.step()
    reference.step()
    assert torch.equal(frozen, torch.ones(3))
    assert torch.equal(turned, plain)
    optimizer.close()
    assert not list(tmp_path.iterdir())


def test_stand_alone_a_dead_arena_is_replaced_and_a_living_one_is_not(tmp_path):
    path = tmp_path / "a.arena"
    optimizer = OffloadStreamAdamW(model().parameters(), arena=path)
    with pytest.raises(ClusterError, match="exists already"):
        OffloadStreamAdamW(model().parameters(), arena=path)
    del optimizer
    assert path.exists()
    OffloadStreamAdamW(model().parameters(), arena=path).close()


def _train_sharded(rank, steps):
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model())
    optimizer = OffloadStreamAdamW(groups(net), lr=1e-2, bucket_parameters=30)
    for step in steps:
        backward(net, 2 * step + rank)
        norm = optimizer.step(0.05, group=dist.group.WORLD)
    return norm, [p.full_tensor().detach() for p in net.parameters()]


def test_stand_alone_sharded_parameters_equal_the_whole_model():
    results = run_ranks(2, _train_sharded, range(4))
    net = model()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
    for step in range(4):
        for rank in range(2):
            backward(net, 2 * step + rank)
        for p in net.parameters():
            p.grad /= 2  # FSDP averages
        expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05).item()
        optimizer.step()
        optimizer.zero_grad()
    for norm, parameters in results:
        assert norm == pytest.approx(expected, rel=1e-5)
        for mine, other in zip(parameters, net.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=0, atol=1e-6)


def test_stand_alone_a_forgotten_optimizer_lets_go_of_the_parameters():
    net = model()
    OffloadStreamAdamW(net.parameters())
    backward(net, 1)
    assert all(p.grad is not None for p in net.parameters())


WRONG_OPTIONS = [
    ({"lr": -1}, r"lr is -1; .* for instance 0\.001$"),
    ({"lr": math.nan}, "lr is nan"),
    ({"lr": "1e-3"}, "lr is '1e-3'"),
    ({"lr": torch.ones(2)}, "lr is tensor"),
    ({"betas": (1.5, 0.9)}, r"betas is \(1\.5, 0\.9\); .* for instance \(0\.9, 0\.999\)$"),
    ({"betas": (0.9, math.nan)}, "betas is"),
    ({"betas": 0.9}, "betas is 0.9"),
    ({"eps": -1.0}, "eps is -1.0; .* for instance 1e-08$"),
    ({"weight_decay": -1.0}, r"weight_decay is -1\.0; .* for instance 0\.01$"),
    ({"weight_decay": math.inf}, "weight_decay is inf"),
]


@pytest.mark.parametrize(
    ("options", "message"), WRONG_OPTIONS, ids=[str(o) for o, _ in WRONG_OPTIONS]
)
def test_stand_alone_options_that_cannot_work_are_refused_for_all_and_for_a_group(options, message):
    net = model()
    with pytest.raises(InputError, match=f"^{message}"):
        OffloadStreamAdamW(net.parameters(), **options)
    with pytest.raises(InputError, match=f"^parameter group 1: {message}"):
        OffloadStreamAdamW(
            [{"params": [net[0].weight]}, {"params": [net[0].bias]} | options], lr=1e-3
        )
    train(net, OffloadStreamAdamW(net.parameters(), lr=torch.tensor(0.0), betas=[0.0, 0.9]), [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "^slots is 0; it must be a whole number from 1 up, for instance 2$"),
        ({"slots": 1.5}, r"^slots is 1\.5"),
        ({"bucket_parameters": 0}, "^bucket_parameters is 0; .* for instance 4194304$"),
        ({"arena": "state.bin"}, r"^arena: state\.bin must end in \.arena.* state\.bin\.arena$"),
    ],
    ids=["no slots", "half a slot", "no bucket", "other suffix"],
)
def test_stand_alone_an_arena_that_cannot_work_names_the_argument(options, message):
    with pytest.raises(InputError, match=message):
        OffloadStreamAdamW(model().parameters(), **options)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (-1.0, r"^clip is -1\.0; .* for instance 1\.0"),
        (0, "^clip is 0"),
        (math.nan, "^clip is nan"),
        ("1", "^clip is '1'"),
        (lambda: 1.0, "takes no closure"),
    ],
    ids=["negative", "zero", "nan", "text", "closure"],
)
def test_stand_alone_a_step_that_is_refused_changes_nothing_and_can_be_done_right(clip, message):
    ours, undisturbed = model(), model()
    optimizer, other = (OffloadStreamAdamW(net.parameters()) for net in (ours, undisturbed))
    train(ours, optimizer, [0])
    train(undisturbed, other, [0])
    backward(ours, 1)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(InputError, match=message):
        optimizer.step(clip)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    backward(undisturbed, 1)
    assert optimizer.step(clip=0.1) == other.step(clip=0.1)
    train(ours, optimizer, [2])
    train(undisturbed, other, [2])
    assert all(map(torch.equal, ours.parameters(), undisturbed.parameters()))


def test_stand_alone_parameters_belong_to_one_optimizer_until_it_is_closed_or_forgotten():
    net = model()
    first = OffloadStreamAdamW(net.parameters())
    with pytest.raises(InputError, match=r"parameter 1 of group 1, \[3\], .* call close\(\)"):
        OffloadStreamAdamW(
            [
                {"params": [torch.nn.Parameter(torch.ones(1))]},
                {"params": [torch.nn.Parameter(torch.ones(1)), net[3].bias]},
            ]
        )
    train(net, first, [0])
    first.close()
    second = OffloadStreamAdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(second, step_size=1)
    train(net, second, [1])
    del second, schedule
    train(net, OffloadStreamAdamW(net.parameters()), [2])


def test_stand_alone_a_parameter_without_a_gradient_moves_as_with_a_gradient_of_zero():
    idle, busy = (torch.nn.Parameter(seeded(size, size)) for size in (5, 7))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in (idle, busy)]
    optimizer, reference = (
        kind([a, b], lr=0.1)
        for kind, a, b in ((OffloadStreamAdamW, idle, busy), (torch.optim.AdamW, *twins))
    )
    for step in range(3):
        for a, b in ((idle, busy), twins):
            b.square().sum().backward()
            if step == 0:
                a.square().sum().backward()
        if step:
            twins[0].grad = torch.zeros(5)
        before = idle.detach().clone()
        optimizer.step()
        reference.step()
        reference.zero_grad()
        assert not torch.equal(idle, before)
    for mine, other in zip((idle, busy), twins, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_stand_alone_what_is_not_supported_is_said():
    net = model()
    with pytest.raises(InputError, match=r"update_on: gpu is not known; use one of host, device"):
        OffloadStreamAdamW(net.parameters(), update_on="gpu")
    optimizer = OffloadStreamAdamW(net.parameters())
    with pytest.raises(InputError, match="to the constructor"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(InputError, match="float16"):
        OffloadStreamAdamW(model(torch.float16).parameters())


def test_stand_alone_a_parameter_without_state_starts_from_no_moments():
    ours, theirs = model(), model()
    optimizer = OffloadStreamAdamW(ours.parameters(), lr=1e-2)
    train(ours, optimizer, range(3))
    ours.load_state_dict(theirs.state_dict())
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer.load_state_dict(reference.state_dict())
    train(ours, optimizer, range(3))
    train(theirs, reference, range(3))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", None),
        ("lr", float("nan")),
        ("betas", (0.9,)),
        ("betas", (2.0, 3.0)),
        ("weight_decay", -1.0),
        ("maximize", True),
        ("amsgrad", True),
    ],
)
def test_stand_alone_an_option_that_cannot_work_changes_nothing(name: str, value: Any):
    net, other = model(), model()
    optimizer, reference = (
        OffloadStreamAdamW(net.parameters()),
        torch.optim.AdamW(other.parameters()),
    )
    train(net, optimizer, range(2))
    train(other, reference, range(2))
    before, usual = copy.deepcopy(net.state_dict()), optimizer.param_groups[0].get(name)
    backward(net, 2)
    optimizer.param_groups[0][name] = value
    with pytest.raises(InputError, match=f"parameter group 0: {name}"):
        optimizer.step()
    assert all(torch.equal(now, before[key]) for key, now in net.state_dict().items())
    optimizer.param_groups[0][name] = usual if usual is not None else False
    optimizer.step()
    backward(other, 2)
    reference.step()
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"exp_avg": torch.zeros(1)}, r"exp_avg of parameter 0 has the shape \[1\]"),
        ({"master": torch.zeros(2, 3, 4)}, r"master of parameter 0 has the shape \[2, 3, 4\]"),
        ({"exp_avg": None}, "state of parameter 0 is not AdamW's"),
    ],
    ids=["another shape", "another master", "no moment"],
)
def test_stand_alone_a_state_that_does_not_belong_is_refused_whole(
    broken: dict[str, Any], text: str
):
    net = model()
    optimizer = OffloadStreamAdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    entry = {key: value for key, value in state["state"][0].items() if key not in broken}
    state["state"][0] = entry | {key: value for key, value in broken.items() if value is not None}
    state["param_groups"][0]["lr"] = 5.0
    with pytest.raises(CheckpointError, match=text):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, kept in before["state"].items():
        assert all(torch.equal(after["state"][number][key], kept[key]) for key in kept)


def test_stand_alone_a_parameter_given_twice_is_refused():
    parameter = torch.nn.Parameter(torch.ones(3))
    with (
        pytest.warns(UserWarning, match="duplicate"),
        pytest.raises(InputError, match="given twice"),
    ):
        OffloadStreamAdamW([parameter, parameter])


def test_what_cannot_be_updated_or_copied_is_refused(tmp_path):
    with pytest.raises(InputError, match="a parameter is on the meta device; give it memory"):
        OffloadStreamAdamW([torch.nn.Parameter(torch.empty(4, device="meta"))])
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = OffloadStreamAdamW(table.parameters())
    with pytest.raises(
        InputError, match=r"shape \[10, 4\] has a gradient of layout torch.sparse_coo"
    ):
        table(torch.tensor([1])).sum().backward()
    for copy_it in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InputError, match="cannot be copied or pickled"):
            copy_it(optimizer)
