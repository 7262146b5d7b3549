"""The update on the device: the host's bits, in whatever order its streams get to their work."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.device_update import DeviceUpdate, Slots, Target
from flatpeak.workers.errors import RunFailed
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.streams import Synchronous
from late_streams import Deferred

CPU = torch.device("cpu")
SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
# Sizes that share frames and sizes that do not, tails, and buckets of several parameters.
CUTS = [
    [Range("a", 0, 90)],
    [Range("a", 90, 170), Range("norm", 0, 7)],
    [Range("b", 10, 95)],
    [Range("tiny", 0, 5)],
    [Range("b", 95, 180), Range("c", 0, 1)],
    [Range("c", 1, 88)],
]
STARTS = {"a": (0, 170), "norm": (0, 7), "b": (10, 180), "tiny": (0, 5), "c": (0, 88)}


class Rig:
    """A worker whose buckets are all updated on its "device", and the model's weights."""

    def __init__(self, folder, name, *, dtype, where, slots=2, streams=None):
        cuts = enumerate(CUTS)
        self.buckets = [
            Bucket(n, 0, n % 2, tuple(ranges), dtype, n != 1, "adamw", where) for n, ranges in cuts
        ]
        self.arenas = {
            actor: Arena.create(
                folder / f"{name}-{actor}.arena",
                run="r",
                buckets=[b for b in self.buckets if b.arena == actor],
                spare_frames=slots,
            )
            for actor in (0, 1)
        }
        self.cores = [OptimizerCore([arena], SETTINGS) for arena in self.arenas.values()]
        for n, b in enumerate(self.buckets):
            self.arenas[b.arena].gradient(n).copy_(seeded(n, b.size))
        for core in self.cores:
            core.load_gradients()
            core.commit_load(0)
        self.targets = {
            name: Target(start, torch.full((stop - start,), math.nan, dtype=getattr(torch, dtype)))
            for name, (start, stop) in STARTS.items()
        }
        self.slots = Slots(slots, self.buckets, CPU)
        if where == "device":
            self.device = DeviceUpdate(
                self.buckets,
                self.arenas,
                SETTINGS,
                slots=self.slots,
                streams=streams or Synchronous(),
                targets=self.targets,
            )

    def write(self, step, scale=1.0):
        for b in self.buckets:
            gradient = seeded(100 * step + b.index, b.size, scale)
            self.arenas[b.arena].gradient(b.index).copy_(gradient)

    def state(self):
        """Everything that counts, with the versions."""
        found = []
        for b in self.buckets:
            arena = self.arenas[b.arena]
            frame = arena.frame(b.index)
            found += [part.clone() for part in (*frame.state, frame.weights)]
            found.append(torch.tensor([arena.version(b.index), arena.updates(b.index)]))
        return found

    def release(self):
        """What others do to a bucket once its version has moved on: its gradient and its former
        frame are theirs."""
        for b in self.buckets:
            arena = self.arenas[b.arena]
            if arena.version(b.index) == self.step:
                arena.gradient(b.index).fill_(math.nan)
            for number in arena._free_frames(arena._layout.class_of[b.index]):
                for part in arena._frame(b.index, number).state:
                    part.fill_(math.nan)


def seeded(seed, size, scale=1.0):
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def on_host(folder, dtype, steps):
    """The states after each step of the optimizer actors' own update."""
    rig, states = Rig(folder, "host", dtype=dtype, where="host"), []
    for step, factor in enumerate(steps, 1):
        rig.write(step)
        for core in rig.cores:
            core.update(step, lr=1e-2 / step, clip_factor=factor)
        states.append(rig.state())
    return states


STEPS = (0.5, 1.0, None, 0.25)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_leaves_the_bits_of_the_host_in_arena_and_model(tmp_path, dtype):
    rig = Rig(tmp_path, "device", dtype=dtype, where="device")
    for step, wanted in enumerate(on_host(tmp_path, dtype, STEPS), 1):
        rig.write(step)
        rig.device.update(step, lr=1e-2 / step, clip_factor=STEPS[step - 1])
        assert all(map(torch.equal, rig.state(), wanted))
        check_targets(rig)
    assert sorted(rig.slots.free) == [0, 1]


def check_targets(rig):
    for b in rig.buckets:
        weights, offset = rig.arenas[b.arena].weights(b.index), 0
        for held in b.ranges:
            target = rig.targets[held.name]
            inside = target.weights[held.start - target.start : held.stop - target.start]
            assert torch.equal(inside, weights[offset : offset + held.size])
            offset += held.size


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_no_order_of_the_streams_changes_a_bit(tmp_path_factory, seed, slots, dtype):
    folder = tmp_path_factory.mktemp("order")
    streams = Deferred(seed)
    rig = Rig(folder, "device", dtype=dtype, where="device", slots=slots, streams=streams)
    streams.seen = rig.release
    for step, wanted in enumerate(on_host(folder, dtype, STEPS), 1):
        rig.step = step
        rig.write(step)
        rig.slots.state.fill_(math.nan)
        rig.device.update(step, lr=1e-2 / step, clip_factor=STEPS[step - 1])
        assert all(map(torch.equal, rig.state(), wanted))
        check_targets(rig)
        assert not any(streams.lanes.values())


def test_with_slots_the_next_buckets_are_on_their_way_before_the_first_is_updated(tmp_path):
    for slots in (1, 2, 3):
        streams = Deferred()
        rig = Rig(tmp_path, slots, dtype="bfloat16", where="device", slots=slots, streams=streams)
        rig.write(1)
        rig.device.update(1, lr=1e-2, clip_factor=1.0)
        place = {entry: n for n, entry in enumerate(streams.log)}
        for i in range(len(CUTS)):
            assert place["done", "in", i] < place["done", "update", i] < place["done", "out", i]
            for later in range(i + 1, len(CUTS)):
                early = place["issued", "in", later] < place["done", "update", i]
                assert early == (later < i + slots), (slots, i, later)
                # The slot's former bucket is out, and its version has moved on.
                free = place["done", "out", i] < place["issued", "in", later]
                assert free == (later >= i + slots), (slots, i, later)


def test_weights_are_refreshed_after_what_still_reads_them(tmp_path):
    streams = Deferred()
    rig = Rig(tmp_path, "device", dtype="bfloat16", where="device", streams=streams)
    reading = streams.issue("reader", lambda: None)
    rig.device.update(1, lr=1e-2, clip_factor=1.0, after=(reading,))
    assert streams.log.index(("done", "reader", 0)) < streams.log.index(("done", "update", 0))


def test_a_version_is_never_seen_before_its_frame_is_whole(tmp_path):
    streams = Deferred(7)
    rig = Rig(tmp_path, "device", dtype="bfloat16", where="device", slots=3, streams=streams)
    wanted = on_host(tmp_path, "bfloat16", (1.0,))[0]
    seen = set()

    def look():
        for b in rig.buckets:
            arena = rig.arenas[b.arena]
            if arena.version(b.index) == 1:
                seen.add(b.index)
                assert torch.equal(arena.master(b.index), wanted[5 * b.index])
                assert torch.equal(arena.weights(b.index), wanted[5 * b.index + 3])

    streams.seen = look
    rig.write(1)
    rig.device.update(1, lr=1e-2, clip_factor=1.0)
    assert seen >= set(range(len(CUTS) - 1))


def test_half_a_step_is_finished_by_a_replacement(tmp_path):
    rig = Rig(tmp_path, "device", dtype="bfloat16", where="device", slots=2)
    rig.write(1)

    class Dies(Synchronous):
        def __init__(self):
            self.left = 7

        def issue(self, lane, work, *, after=()):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            work()

    def updater(streams):
        arenas = {actor: Arena.attach(a.path, run="r") for actor, a in rig.arenas.items()}
        slots = Slots(2, rig.buckets, CPU)
        return DeviceUpdate(rig.buckets, arenas, SETTINGS, slots=slots, streams=streams)

    with pytest.raises(KeyboardInterrupt):
        updater(Dies()).update(1, lr=1e-2, clip_factor=1.0)
    versions = [rig.arenas[b.arena].version(b.index) for b in rig.buckets]
    assert set(versions) == {0, 1}
    updater(Synchronous()).update(1, lr=1e-2, clip_factor=1.0)
    assert all(map(torch.equal, rig.state(), on_host(tmp_path, "bfloat16", (1.0,))[0]))


def test_in_a_thread_it_does_the_same_and_its_failure_reaches_who_waits(tmp_path):
    rig = Rig(tmp_path, "device", dtype="float32", where="device")
    for step, wanted in enumerate(on_host(tmp_path, "float32", STEPS), 1):
        rig.write(step)
        rig.device.start(step, lr=1e-2 / step, clip_factor=STEPS[step - 1])
        for b in rig.buckets:
            rig.arenas[b.arena].wait_version(b.index, step, timeout_s=10)
        assert all(map(torch.equal, rig.state(), wanted))
    rig.device.start(len(STEPS) + 2, lr=1e-2, clip_factor=1.0)
    with pytest.raises(RunFailed, match=r"step 6 was asked of bucket 0 .* holds version 4"):
        rig.arenas[1].wait_version(1, 6, timeout_s=10)
    with pytest.raises(RunFailed, match="step 6"):
        rig.device.join()


def test_it_knows_the_weights_that_it_put_in_place(tmp_path):
    rig = Rig(tmp_path, "device", dtype="bfloat16", where="device")
    everything = rig.device.targets
    rig.device.targets = {name: everything[name] for name in everything if name != "norm"}

    def in_place(version):
        return [n for n in range(len(CUTS)) if rig.device.in_place(n, version)]

    # Those of bucket 1, with the norm, are for others to fetch, and those of no update at all.
    found = [in_place(0)]
    for step, factor in enumerate((0.5, None, 1.0), 1):
        rig.write(step)
        rig.device.update(step, lr=1e-2, clip_factor=factor)
        found.append(in_place(step))
        assert not in_place(step - 1)
    assert found == [[], *[[0, 2, 3, 4, 5]] * 3]


def test_what_another_process_updated_is_not_in_place(tmp_path):
    rig = Rig(tmp_path, "device", dtype="bfloat16", where="device")
    rig.write(1)
    rig.device.update(1, lr=1e-2, clip_factor=1.0)
    slots = Slots(2, rig.buckets, CPU)
    after = DeviceUpdate(
        rig.buckets,
        rig.arenas,
        SETTINGS,
        slots=slots,
        streams=Synchronous(),
        targets=rig.targets,
    )
    for step in (1, 2):
        after.update(step, lr=1e-2, clip_factor=None)
        assert not any(after.in_place(n, step) for n in range(len(CUTS)))


def test_host_and_device_share_an_arena_and_a_step(tmp_path):
    wanted = on_host(tmp_path, "bfloat16", (0.5,))[0]
    path = tmp_path / "both.arena"
    sides = [
        Bucket(n, 0, 0, tuple(ranges), "bfloat16", n != 1, "adamw", ("host", "device")[n % 2])
        for n, ranges in enumerate(CUTS)
    ]
    arena = Arena.create(path, run="r", buckets=sides, spare_frames=1)
    core = OptimizerCore([arena], SETTINGS)
    for b in sides:
        arena.gradient(b.index).copy_(seeded(b.index, b.size))
    core.load_gradients()
    core.commit_load(0)
    for b in sides:
        arena.gradient(b.index).copy_(seeded(100 + b.index, b.size))
    core.update(1, lr=1e-2, clip_factor=0.5)
    assert [arena.version(b.index) for b in sides] == [1, 0] * 3
    assert core.step == 0
    with Arena.attach(path, run="r") as workers:
        own = [b for b in sides if b.updater == 0]
        slots = Slots(1, own, CPU)
        device = DeviceUpdate(own, {0: workers}, SETTINGS, slots=slots, streams=Synchronous())
        device.start(1, lr=1e-2, clip_factor=0.5)
        core.wait_for_workers(1, timeout_s=10)
        assert core.step == 1
        device.join()
        core.finish(1, lr=1e-2, clip_factor=0.5)  # nothing is left to do for a successor
    for b in sides:
        assert torch.equal(arena.master(b.index), wanted[5 * b.index])
    core.update(2, lr=1e-2, clip_factor=None)
    assert (core.updates, core.step) == (1, 1)
