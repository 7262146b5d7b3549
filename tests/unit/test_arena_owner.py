"""Arenas that pass from one owner to another, in real processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from flatpeak.workers.arena import Arena, sweep_stale
from flatpeak.workers.arena_owner import ArenaOwner
from flatpeak.workers.buckets import Range, Shard, cut_buckets
from flatpeak.workers.errors import WaitTimeout
from flatpeak.workers.optimizer import AdamW, OptimizerCore

SETTINGS = AdamW(betas=(0.9, 0.95), weight_decay=0.1)
SIZE, ARENAS = 100, (0, 1, 2)
OWNER = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from flatpeak.workers.arena_owner import ArenaOwner
from flatpeak.workers.errors import WaitTimeout
from flatpeak.workers.optimizer import AdamW
owner = ArenaOwner("r", {SETTINGS!r})
for line in sys.stdin:
    what, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    answer = "done"
    if what == "attach":
        try:
            owner.attach({{n: Path(sys.argv[1]) / f"{{n}}.arena" for n in numbers}}, timeout_s=0.1)
        except WaitTimeout:
            answer = "owned by another"
    elif what == "release":
        owner.release(numbers)
    elif what == "update":
        owner.forget()
        owner.core.update(numbers[0], lr=1e-2, clip_factor=0.5)
    print(answer, *owner.arenas, flush=True)
"""


class Owner:
    """An `ArenaOwner` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def owners(folder: Path, count: int) -> Iterator[list[Owner]]:
    with ExitStack() as stack:
        started = [Owner(folder) for _ in range(count)]
        for owner in started:
            stack.callback(owner.close)
        yield started


def make_arenas(folder: Path) -> list[Arena]:
    """Loaded, with buckets that take turns among the arenas, and owned by nobody."""
    folder.mkdir(exist_ok=True)
    buckets = cut_buckets(
        [Shard(Range(f"p{n}", 0, SIZE), 0, "bfloat16", True) for n in range(9)],
        bucket_parameters=SIZE,
        arenas_of_rank=lambda rank: ARENAS,
    )
    arenas = []
    for number in ARENAS:
        own = [bucket for bucket in buckets if bucket.arena == number]
        path = folder / f"{number}.arena"
        arena = Arena.create(path, run="r", buckets=own, spare_frames=1)
        core = OptimizerCore([arena], SETTINGS)
        for bucket in own:
            core.load(bucket.ranges[0], values(bucket.index, 0))
        core.commit_load(0)
        arenas.append(arena)
    return arenas


def values(bucket: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * bucket + step)
    return torch.randn(SIZE, generator=generator)


def write_gradients(arenas: list[Arena], step: int) -> None:
    for arena in arenas:
        for bucket in arena.buckets:
            arena.gradient(bucket.index).copy_(values(bucket.index, step))


def state(arenas: list[Arena]) -> list[torch.Tensor]:
    return [
        part.clone()
        for arena in arenas
        for bucket in arena.buckets
        for part in (*arena.frame(bucket.index).state, arena.weights(bucket.index))
    ]


def test_arenas_pass_between_processes_and_no_bit_differs_from_one_owner(tmp_path):
    alone = make_arenas(tmp_path / "alone")
    core = OptimizerCore(alone, SETTINGS)
    arenas = make_arenas(tmp_path)
    inodes = [arena.path.stat().st_ino for arena in arenas]
    with owners(tmp_path, 3) as (first, second, third):
        turns = [
            [(first, "attach 0 1 2")],
            [(first, "release 1 2"), (second, "attach 1"), (third, "attach 2")],
            [(third, "release 2"), (second, "attach 2")],
            [(first, "release 0"), (second, "release 1"), (third, "attach 0 1")],
        ]
        for step, asked in enumerate(turns, start=1):
            for owner, line in asked:
                assert owner.ask(line).startswith("done")
            write_gradients(arenas, step)
            write_gradients(alone, step)
            core.update(step, lr=1e-2, clip_factor=0.5)
            for owner in (first, second, third):
                owner.ask(f"update {step}")
        assert first.ask("done") == "done"
        assert second.ask("done") == "done 2"
        assert third.ask("done") == "done 0 1"
    assert all(map(torch.equal, state(arenas), state(alone)))
    assert [arena.path.stat().st_ino for arena in arenas] == inodes


def test_of_two_processes_that_want_an_arena_one_gets_it_until_it_lets_go(tmp_path):
    make_arenas(tmp_path)
    with owners(tmp_path, 2) as (first, second):
        assert first.ask("attach 0 1") == "done 0 1"
        assert second.ask("attach 1 2") == "owned by another"
        assert first.ask("release 1") == "done 0"
        assert second.ask("attach 1 2") == "done 1 2"
        assert first.ask("attach 1") == "owned by another 0"
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        assert first.ask("attach 1 2") == "done 0 1 2"


def test_what_is_released_is_no_dead_runs_until_it_is_forgotten(tmp_path):
    for arena in make_arenas(tmp_path):
        arena.close()
    owner = ArenaOwner("r", SETTINGS)
    owner.attach({number: tmp_path / f"{number}.arena" for number in ARENAS}, timeout_s=0)
    owner.release([1])
    assert sweep_stale(tmp_path) == []
    owner.forget()
    assert sweep_stale(tmp_path) == [tmp_path / "1.arena"]


def test_a_refused_takeover_leaves_the_arena_unmapped_and_the_owner_as_it_was(tmp_path):
    arenas = make_arenas(tmp_path)
    arenas[2].own()
    owner = ArenaOwner("r", SETTINGS)
    owner.attach({0: arenas[0].path}, timeout_s=0)
    with pytest.raises(WaitTimeout, match=r"another process still updates .*2\.arena"):
        owner.attach({0: arenas[0].path, 2: arenas[2].path}, timeout_s=0)
    assert list(owner.arenas) == [0]
    assert owner.core.arenas == (owner.arenas[0],)


def test_an_update_keeps_the_order_of_need_over_all_arenas_of_an_owner(tmp_path):
    arenas = make_arenas(tmp_path)
    owner = ArenaOwner("r", SETTINGS)
    owner.attach({n: arenas[n].path for n in (2, 0)}, timeout_s=0)
    order: list[int] = []
    for arena in owner.arenas.values():
        commit = arena.commit_update

        def noted(i, version, commit=commit):
            order.append(i)
            commit(i, version)

        arena.commit_update = noted
    write_gradients(arenas, 1)
    owner.core.update(1, lr=1e-2, clip_factor=1.0)
    of_both = {bucket.index for n in (0, 2) for bucket in arenas[n].buckets}
    assert order == sorted(of_both)
    assert len({b.index for b in arenas[0].buckets} & set(order[:3])) in (1, 2)


def test_counters_go_on_when_arenas_come_and_go(tmp_path):
    arenas = make_arenas(tmp_path)
    owner = ArenaOwner("r", SETTINGS)
    owner.attach({0: arenas[0].path, 1: arenas[1].path}, timeout_s=0)
    write_gradients(arenas, 1)
    owner.core.update(1, lr=1e-2, clip_factor=1.0)
    owner.release([0])
    owner.core.update(2, lr=1e-2, clip_factor=None)
    assert owner.core.counters.updated_buckets == 6
    assert (owner.core.counters.updated_steps, owner.core.counters.skipped_steps) == (1, 1)
    assert [arena.version(arena.buckets[0].index) for arena in arenas] == [1, 2, 0]
