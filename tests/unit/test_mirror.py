"""Mirrors of arenas: the same state to the bit, whoever dies on the way, and whatever survives."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flatpeak.workers.arena import Arena
from flatpeak.workers.arena_owner import ArenaOwner
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.errors import ConnectionLost
from flatpeak.workers.mirror import MirrorLink, MirrorPort, MirrorServer, Route
from flatpeak.workers.optimizer import AdamW, OptimizerCore
from flatpeak.workers.remote.link import BULK_BYTES, open_store

HERE, TIMEOUT_S = "127.0.0.1", 30.0
SETTINGS = AdamW(betas=(0.9, 0.95), weight_decay=0.1)
LARGE = BULK_BYTES // 4 + 77  # takes two messages
SHARDS = [
    Shard(Range("large", 0, LARGE), 0, "bfloat16", True),
    Shard(Range("small", 0, 500), 0, "float32", True),
    Shard(Range("idle", 0, 19), 0, "float32", False),
    Shard(Range("bias", 0, 8), 0, "float32", False, "bias"),
]
MIRROR = 1
"""The number of the mirror, and the index of the actor that has it; those of the original are 0."""

# The other process of a pair: it has the original and sends, or the mirror and is sent to. It kills
# itself before the part of a gradient, or the commit of a bucket, that it is told.
PEER = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from flatpeak.workers.arena_owner import ArenaOwner
from flatpeak.workers.mirror import MirrorPort, Route
from flatpeak.workers.optimizer import AdamW
number, path, doomed, calls = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
owner = ArenaOwner("r", {SETTINGS!r}, mirrors_from={MIRROR})
owner.attach({{number: Path(path)}}, timeout_s={TIMEOUT_S})
(arena,) = owner.arenas.values()

def dying(call):
    def called(*arguments):
        global calls
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return called

if doomed != "-":
    setattr(arena, doomed, dying(getattr(arena, doomed)))
port = MirrorPort(owner, number, host="{HERE}", timeout_s={TIMEOUT_S})
if number == {MIRROR}:
    print(*port.serve([0]), flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "send":
        port.link([Route({MIRROR}, ("{HERE}", int(words[0])), (0,))])
        print(port.send(int(words[1])), flush=True)
    else:
        for core in owner.cores:
            core.finish(int(words[0]), lr=1e-2, clip_factor=0.5)
        print("done", flush=True)
"""


@contextmanager
def peer(number: int, path: Path, dies_in: str = "-", call: int = 0) -> Iterator[subprocess.Popen]:
    """A process that owns the arena at `path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(number), str(path), dies_in, str(call)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen, line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def address_of(process: subprocess.Popen) -> tuple[str, int]:
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    return host, int(port)


def make(folder: Path, name: str) -> Arena:
    """Loaded, and owned by nobody."""
    buckets = cut_buckets(SHARDS, bucket_parameters=LARGE, arenas_of_rank=lambda rank: [0])
    assert len(buckets) >= 3
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.arena"
    arena = Arena.create(path, run="r", buckets=buckets, spare_frames=1)
    core = OptimizerCore([arena], SETTINGS)
    for held in (held for bucket in buckets for held in bucket.ranges):
        core.load(held, torch.linspace(-1, 1, held.size))
    core.commit_load(0)
    return arena


def write_gradients(arena: Arena, step: int) -> None:
    for bucket in arena.buckets:
        generator = torch.Generator().manual_seed(1000 * bucket.index + step)
        arena.gradient(bucket.index).copy_(torch.randn(bucket.size, generator=generator))


def state(arena: Arena) -> list[torch.Tensor]:
    parts = [
        part.clone()
        for b in arena.buckets
        for part in (*arena.frame(b.index).state, arena.weights(b.index))
    ]
    counts = [[arena.version(b.index), arena.updates(b.index)] for b in arena.buckets]
    return [*parts, torch.tensor(counts)]


def same(one: Arena, other: Arena) -> bool:
    return all(map(torch.equal, state(one), state(other)))


def expected(folder: Path, steps: int) -> Arena:
    """An arena that has done so many steps undisturbed."""
    arena = make(folder, "expected")
    core = OptimizerCore([arena], SETTINGS)
    for step in range(1, steps + 1):
        write_gradients(arena, step)
        core.update(step, lr=1e-2, clip_factor=0.5)
    return arena


def port_of(number: int, arena: Arena, *, timeout_s: float = TIMEOUT_S) -> MirrorPort:
    owner = ArenaOwner("r", SETTINGS, mirrors_from=MIRROR)
    owner.attach({number: arena.path}, timeout_s=TIMEOUT_S)
    return MirrorPort(owner, number, host=HERE, timeout_s=timeout_s)


def update(port: MirrorPort, step: int, *, clip_factor: float | None = 0.5) -> None:
    for core in port._owner.cores:
        core.update(step, lr=1e-2, clip_factor=clip_factor)


def test_a_mirror_that_gets_gradients_has_the_state_of_its_original_to_the_bit(tmp_path):
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    sender, holder = port_of(0, original), port_of(MIRROR, mirror)
    assert (holder._owner.core.buckets, holder._owner.originals) == ([], {})
    assert sender.link([Route(MIRROR, holder.serve([0]), (0,))]) is None
    for step in (1, 2, 3):
        write_gradients(original, step)
        sent = sender.send(step)
        assert sent.lost is None
        assert 0 < sent.nbytes - 4 * sum(bucket.size for bucket in original.buckets) < 1000
        for port in (sender, holder):
            update(port, step)
    assert same(original, mirror)
    assert same(original, expected(tmp_path, 3))
    for port in (sender, holder):
        update(port, 4, clip_factor=None)  # a skipped step needs no gradients
    assert same(original, mirror)
    sender.close()
    assert holder._server is not None
    holder._server.join(10)


def test_gradients_of_a_step_that_is_not_the_next_are_not_taken(tmp_path):
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    write_gradients(original, 2)
    server = MirrorServer([mirror], [0], host=HERE, timeout_s=TIMEOUT_S)
    link = MirrorLink(Route(MIRROR, server.address, (0,)), sender=0, host=HERE, timeout_s=TIMEOUT_S)
    with pytest.raises(ConnectionLost, match=r"optimizer actor 1 at 127\.0\.0\.1"):
        send_all(link, original, 2)
    server.join(10)
    assert all(not mirror.gradient(bucket.index).any() for bucket in mirror.buckets)


def send_all(link: MirrorLink, arena: Arena, step: int) -> None:
    link.send(arena, step)
    link.settle()


def test_a_sender_that_has_a_successor_writes_no_more(tmp_path):
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    old, new, holder = (
        port_of(0, original),
        port_of(2, make(tmp_path, "x")),
        port_of(MIRROR, mirror),
    )
    new._owner = old._owner
    old.link([Route(MIRROR, holder.serve([0]), (0,))])
    new.link([Route(MIRROR, holder.serve([2]), (0,))])
    write_gradients(original, 1)
    assert new.send(1).lost is None
    before = [mirror.gradient(bucket.index).clone() for bucket in mirror.buckets]
    write_gradients(original, 7)
    lost = old.send(1).lost
    assert lost is not None
    assert "the connection to optimizer actor 1 at 127.0.0.1 is lost" in lost
    assert all(
        torch.equal(mirror.gradient(bucket.index), gradient)
        for bucket, gradient in zip(mirror.buckets, before, strict=True)
    )


def test_what_is_not_connected_is_not_taken_for_mirrored(tmp_path):
    original = make(tmp_path, "original")
    sender = port_of(0, original)
    assert sender.send(1).lost == "of arenas [0] mirrors of [] are connected"
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        reason = sender.link([Route(1, closed.getsockname(), (0,))])
    assert reason is not None
    assert "optimizer 0 cannot reach optimizer actor 1 at 127.0.0.1: [Errno 111]" in reason


def test_a_holder_that_dies_before_it_is_connected_is_no_long_wait(tmp_path):
    sender = port_of(0, make(tmp_path, "original"), timeout_s=0.5)
    store = open_store(HERE, timeout_s=1)  # as the holder left it: nobody is to come
    reason = sender.link([Route(1, (HERE, store.port), (0,))])
    assert reason is not None
    assert "optimizer actor 1 at 127.0.0.1 did not answer within 0.5 s" in reason
    assert sender.send(1).lost is not None


def test_a_connection_outlasts_the_time_in_which_it_had_to_be_made(tmp_path):
    mirror = make(tmp_path, "mirror")
    original = make(tmp_path, "original")
    write_gradients(original, 1)
    server = MirrorServer([mirror], [0], host=HERE, timeout_s=TIMEOUT_S)
    route = Route(MIRROR, server.address, (0,))
    link = MirrorLink(route, sender=0, host=HERE, timeout_s=TIMEOUT_S, connect_s=0.5)
    with server._writing:  # so long is the first answer delayed
        link.send(original, 1)
        time.sleep(1.0)
    link.settle()
    link.close()
    server.join(10)
    assert all(
        torch.equal(mirror.gradient(bucket.index), original.gradient(bucket.index))
        for bucket in mirror.buckets
    )


@pytest.mark.parametrize("dies_in", ["gradient", "version"], ids=["a write", "the first"])
def test_a_holder_killed_while_it_is_sent_to_has_a_successor_that_gets_all_again(tmp_path, dies_in):
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    sender = port_of(0, original)
    write_gradients(original, 1)
    with peer(MIRROR, mirror.path, dies_in, 2 if dies_in == "gradient" else 1) as holder:
        assert sender.link([Route(MIRROR, address_of(holder), (0,))]) is None
        lost = sender.send(1).lost
        assert lost is not None
        assert "optimizer actor 1" in lost
        assert holder.wait(30) == -signal.SIGKILL
    with peer(MIRROR, mirror.path) as holder:
        assert sender.link([Route(MIRROR, address_of(holder), (0,))]) is None
        assert sender.send(1).lost is None
        update(sender, 1)
        assert ask(holder, "finish 1") == "done"
    assert same(original, mirror)
    assert same(original, expected(tmp_path, 1))


def test_a_sender_killed_in_the_middle_has_a_successor_that_sends_all_again(tmp_path):
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    holder = port_of(MIRROR, mirror)
    write_gradients(original, 1)
    for dies_in, call in (("gradient", 2), ("-", 0)):
        address = holder.serve([0])
        with peer(0, original.path, dies_in, call) as sender:
            answer = ask(sender, f"send {address[1]} 1")
            assert ("Sent(" in answer and "lost=None" in answer) == (dies_in == "-")
            if dies_in == "-":
                assert ask(sender, "finish 1") == "done"
            else:
                assert sender.wait(30) == -signal.SIGKILL
    update(holder, 1)
    assert same(original, mirror)
    assert same(original, expected(tmp_path, 1))


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_holder_killed_in_its_update_has_a_successor_that_finishes_it(tmp_path, commits):
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    sender = port_of(0, original)
    write_gradients(original, 1)
    with peer(MIRROR, mirror.path, "commit_update", commits) as holder:
        sender.link([Route(MIRROR, address_of(holder), (0,))])
        assert sender.send(1).lost is None
        assert ask(holder, "finish 1") == ""
        assert holder.wait(30) == -signal.SIGKILL
    assert sum(mirror.version(bucket.index) for bucket in mirror.buckets) == commits - 1
    update(sender, 1)
    with peer(MIRROR, mirror.path) as holder:
        address_of(holder)
        assert ask(holder, "finish 1") == "done"
    assert same(original, mirror)


@pytest.mark.parametrize("flipped", [0, 1, 2, 3])
@pytest.mark.parametrize("lost", ["original", "mirror"])
def test_whatever_survives_of_a_lost_node_is_brought_to_the_step_whose_update_was_asked(
    tmp_path, lost, flipped
):
    """Up to the last of what each of the two may have done of the update when the node went."""
    original, mirror = make(tmp_path, "original"), make(tmp_path, "mirror")
    sender, holder = port_of(0, original), port_of(MIRROR, mirror)
    sender.link([Route(MIRROR, holder.serve([0]), (0,))])
    write_gradients(original, 1)
    assert sender.send(1).lost is None
    survivor = original if lost == "mirror" else mirror
    chosen = sorted(survivor.buckets, key=lambda bucket: bucket.index)[:flipped]
    OptimizerCore([survivor], SETTINGS, buckets=chosen).update(1, lr=1e-2, clip_factor=0.5)
    for bucket in chosen:
        if survivor is original:  # a worker of another node may be in the next step already
            original.gradient(bucket.index).fill_(float("nan"))
    OptimizerCore([survivor], SETTINGS).finish(1, lr=1e-2, clip_factor=0.5)
    assert same(survivor, expected(tmp_path, 1))


def test_arenas_and_mirrors_of_an_owner_are_updated_apart_and_change_hands_alike(tmp_path):
    other = [Shard(Range("other", 0, 9), 1, "float32", True)]
    own = make(tmp_path, "own")
    buckets = cut_buckets(
        SHARDS + other, bucket_parameters=LARGE, arenas_of_rank=lambda rank: [rank]
    )
    path = tmp_path / "of-other.arena"
    foreign = [bucket for bucket in buckets if bucket.arena == 1]
    Arena.create(path, run="r", buckets=foreign, spare_frames=1).close()
    owner = ArenaOwner("r", SETTINGS, mirrors_from=2)
    owner.attach({0: own.path, 3: path}, timeout_s=0)
    assert [len(core.buckets) for core in owner.cores] == [len(own.buckets), len(foreign)]
    assert ([*owner.originals], [*owner.arenas]) == ([0], [0, 3])
    owner.release([3])
    assert (owner.mirrors.buckets, owner.core.arenas) == ([], (owner.arenas[0],))
    assert os.path.exists(path)
