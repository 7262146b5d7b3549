"""Buckets of an actor without shared memory: the same results to the bit, and what goes wrong."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.errors import ClusterError, WaitTimeout
from flatpeak.workers.gradients import GradientStream
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.remote import STAGING_BYTES, ArenaServer, RemoteArena
from flatpeak.workers.remote.link import BULK_BYTES

HERE = "127.0.0.1"
LARGE = BULK_BYTES // 4 + 77  # takes two messages in fp32 and one in bf16
SHARDS = [
    Shard(Range("large", 0, LARGE), 0, "float32", True),
    Shard(Range("low", 3, 3 + LARGE), 0, "bfloat16", True),
    Shard(Range("empty", 0, 0), 0, "float32", True),
    Shard(Range("idle", 0, 19), 0, "float32", False),
    Shard(Range("bias", 0, 8), 0, "float32", False, "bias"),
]
OTHER = [Shard(Range("other", 0, 5), 1, "float32", True)]


def make(folder, shards=SHARDS, *, actors=1, bucket_parameters=10**6):
    """Arenas by actor, loaded as version 0."""
    buckets = cut_buckets(
        shards, bucket_parameters=bucket_parameters, arenas_of_rank=lambda rank: range(actors)
    )
    folder.mkdir(exist_ok=True)
    arenas = {}
    for actor in range(actors):
        own = [bucket for bucket in buckets if bucket.arena == actor]
        path = folder / f"{actor}.arena"
        arenas[actor] = Arena.create(path, run="r", buckets=own, spare_frames=1)
        core = OptimizerCore([arenas[actor]], AdamW())
        for held in (held for bucket in own for held in bucket.ranges):
            core.load(held, torch.full((held.size,), 0.5))
        core.commit_load(0)
    return buckets, arenas


@contextmanager
def served(arena, ranks=(0,), *, timeout_s=30.0):
    """The arena as those workers reach it, all in this process."""
    server = ArenaServer(arena, ranks, host=HERE, timeout_s=timeout_s)
    remote = [
        RemoteArena.connect(server.address, actor=7, rank=rank, host=HERE, timeout_s=timeout_s)
        for rank in ranks
    ]
    try:
        yield remote
    finally:
        for arena in remote:
            arena.close()
        server.join(10)


def train(buckets, arenas, homes):
    """Two steps, each with two microbatches and a gradient that comes in parts; what they gave."""
    stream = GradientStream([b for b in buckets if b.rank == 0], homes)
    found = []
    draw = torch.Generator().manual_seed(0)
    for step in (1, 2):
        stream.begin_step(version=step - 1, timeout_s=20)
        for last in (False, True):
            large, low = torch.randn(2, LARGE, generator=draw).unbind()
            stream.write("large", 0, large, accumulate=last, final=last)
            stream.write("low", 3, low[:50].bfloat16(), accumulate=last)
            stream.write("low", 53, low[50:].bfloat16(), accumulate=last, final=last)
        stream.write("bias", 0, torch.ones(16, dtype=torch.float16)[::2], accumulate=False)
        found += [stream.finish(), stream.squared_norm().item(), stream.buckets_before(step)]
        found += [arena.gradient(b.index).clone() for arena in arenas for b in arena.buckets]
        for arena in arenas:
            OptimizerCore([arena], AdamW()).update(step, lr=1e-2, clip_factor=0.5)
        for held, dtype in ((SHARDS[0], torch.float32), (SHARDS[1], torch.bfloat16)):
            out = torch.empty(LARGE, dtype=dtype)
            name, start = held.range.name, held.range.start
            stream.fetch(name, start, out, version=step, timeout_s=20)
            found.append(out)
        found.append(stream.buckets_before(step))
    return found


@pytest.mark.parametrize("bucket_parameters", [10**6, 90_001], ids=["whole", "cut"])
def test_gradients_norms_and_weights_are_those_of_shared_memory(tmp_path, bucket_parameters):
    sides = [
        make(tmp_path / side, actors=2, bucket_parameters=bucket_parameters)
        for side in ("shared", "remote")
    ]
    wanted = train(sides[0][0], sides[0][1].values(), sides[0][1])
    buckets, arenas = sides[1]
    with served(arenas[0]) as [remote]:
        got = train(buckets, arenas.values(), {0: remote, 1: arenas[1]})
    assert all(
        torch.equal(one, other) if torch.is_tensor(one) else one == other
        for one, other in zip(got, wanted, strict=True)
    )


def test_bytes_are_counted_and_bf16_travels_as_bf16(tmp_path):
    _, arenas = make(tmp_path, [Shard(Range("p", 0, 10_000), 0, "bfloat16", True)])
    with served(arenas[0]) as [remote]:
        before = remote.sent_bytes, remote.received_bytes
        remote.write_gradient(0, 0, torch.ones(10_000, dtype=torch.bfloat16), accumulate=False)
        remote.settle()
        remote.settle()  # nothing to ask
        assert remote.sent_bytes - before[0] == 20_000 + 2 * 64
        remote.read_places(0, 0, [(100, torch.empty(900))])
        assert remote.received_bytes - before[1] == 2 * 900 + 2 * 64


def test_places_that_follow_each_other_are_read_at_once(tmp_path):
    shards = [Shard(Range("p", 0, 4 * LARGE), 0, "bfloat16", True)]
    _, arenas = make(tmp_path, shards, bucket_parameters=4 * LARGE)
    arenas[0].weights(0).copy_(torch.arange(4 * LARGE) % 256)
    with served(arenas[0]) as [remote]:
        before = remote.sent_bytes, remote.received_bytes
        places = [(7, 2 * LARGE), (7 + 2 * LARGE, LARGE), (3, 0), (3, 4)]
        outs = [(start, torch.full((size,), -1.0)) for start, size in places]
        remote.read_places(0, 0, outs)
        assert remote.sent_bytes - before[0] == 2 * 64
        values = sum(size for _, size in places)
        assert remote.received_bytes - before[1] == 2 * values + 64 * (
            1 + -(-6 * LARGE // BULK_BYTES)
        )
    for (start, size), (_, out) in zip(places, outs, strict=True):
        assert torch.equal(out, (torch.arange(start, start + size) % 256).float())


def test_more_than_the_buffers_hold_arrives_and_memory_stays_what_was_planned(tmp_path):
    size = STAGING_BYTES // 2
    shards = [Shard(Range("p", 0, size), 0, "float32", True)]
    _, arenas = make(tmp_path, shards, bucket_parameters=size)
    arena, values = arenas[0], torch.randn(size)
    with served(arena) as [remote]:
        remote.write_gradient(0, 0, values, accumulate=False)
        remote.write_gradient(0, 1, values[1:], accumulate=True)
        square = remote.square_gradient(0, 0, size)
        remote.zero_gradient(0, 5, 9)
        remote.settle()
        ends = [
            slot for line in (remote._gradients, remote._weights) for slot in buffers(line.link)
        ]
    assert sum(len(slot.data) for slot in ends) == STAGING_BYTES
    expected = torch.cat([values[:1], 2 * values[1:]])
    assert square == pytest.approx(expected.double().square().sum().item(), rel=1e-9)
    expected[5:9] = 0
    assert torch.equal(arena.gradient(0), expected)


def buffers(link):
    return link._outgoing + link._incoming


def test_what_the_actor_refuses_is_raised_here_and_the_connection_goes_on(tmp_path):
    _, arenas = make(tmp_path, [*SHARDS, *OTHER])
    with served(arenas[0], ranks=[0, 1]) as [remote, other]:
        assert (remote.count_before(1, rank=0), other.count_before(1, rank=1)) == (4, 1)
        with pytest.raises(WaitTimeout, match=r"bucket 0 of arena 0 did not reach ver"):
            remote.wait_version(0, 1, timeout_s=0.05)
        with pytest.raises(ClusterError, match="version 3 were asked of bucket 0"):
            remote.read_places(0, 3, [(0, torch.empty(4))])
        out = torch.empty(4)
        remote.read_places(0, 0, [(0, out)])
        assert out.tolist() == [0.5] * 4
        other.close()
        remote.wait_version(0, 0, timeout_s=1)


def test_nobody_outside_is_listened_to(tmp_path):
    _, arenas = make(tmp_path)
    with served(arenas[0]) as _:
        sockets = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
        listening = []
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    listening.append(fields[1].split(":")[0])
    assert len(listening) >= 3  # the store, and a link of each side at the least
    assert set(listening) == {f"{int.from_bytes(socket.inet_aton(HERE), 'little'):08X}"}


def test_an_actor_that_is_not_there_is_named():
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        address = closed.getsockname()
    with pytest.raises(ClusterError, match=r"worker 2 cannot reach optimizer actor 7 at 127.0.0.1"):
        RemoteArena.connect(address, actor=7, rank=2, host=HERE, timeout_s=1)


SERVE = """
import sys, time
sys.path[:] = {path!r}
from flatpeak.workers.arena import Arena
from flatpeak.workers.remote import ArenaServer
server = ArenaServer(
    Arena.attach({arena!r}, run="r"), [0, 1], host="127.0.0.1", timeout_s=60
)
print(server.address[1], flush=True)
time.sleep(600)
"""


def write_and_settle(remote):
    remote.write_gradient(0, 0, torch.ones(4), accumulate=False)
    remote.settle()


def test_a_stopped_and_a_killed_actor_end_the_waits_for_them(tmp_path):
    _, arenas = make(tmp_path, [*SHARDS, *OTHER])
    text = SERVE.format(path=sys.path, arena=str(arenas[0].path))
    actor = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    try:
        assert actor.stdout is not None
        address = (HERE, int(actor.stdout.readline()))
        first, second = (
            RemoteArena.connect(address, actor=7, rank=rank, host=HERE, timeout_s=60)
            for rank in (0, 1)
        )
        first._weights.link.timeout_s = 1.0  # not before: to connect may take a busy machine longer
        actor.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, actor.pid, os.WSTOPPED | os.WNOWAIT)  # until then it may still answer
        with pytest.raises(WaitTimeout, match=r"actor 7 at 127.0.0.1 did not answer within 1 s"):
            first.read_places(0, 0, [(0, torch.empty(4))])
        actor.kill()
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"connection to optimizer actor 7 at .* is lost: "):
            second.read_places(0, 0, [(0, torch.empty(4))])
        with pytest.raises(ClusterError, match="is lost"):
            write_and_settle(second)
        assert time.monotonic() - began < 30
        first.close()
        second.close()
    finally:
        actor.kill()
        actor.wait()
        if actor.stdout is not None:
            actor.stdout.close()
