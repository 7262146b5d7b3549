"""What a process says of itself, asked from another thread than the one that works."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from flatpeak.workers import progress
from flatpeak.workers.progress import PEERS, WEIGHTS, Beat, beat, waited_s, waiting
from flatpeak.workers.scopes import scope


@contextmanager
def at_work(work: Callable[[threading.Event, threading.Event], None]) -> Iterator[None]:
    """A thread that works until it says so, and stands there until the block ends."""
    arrived, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(arrived, go_on))
    thread.start()
    assert arrived.wait(10)
    try:
        yield
    finally:
        go_on.set()
        thread.join(10)
        assert not thread.is_alive()


def stand(arrived: threading.Event, go_on: threading.Event) -> None:
    arrived.set()
    assert go_on.wait(10)


def test_a_thread_says_what_another_one_does():
    def work(arrived: threading.Event, go_on: threading.Event) -> None:
        progress.begin(7)
        progress.enter("forward")
        with scope("attention"), scope("dispatch"), waiting():
            stand(arrived, go_on)

    before = beat().moves
    with at_work(work):
        seen = beat()
        assert (seen.step, seen.phase, seen.scope) == (7, "forward", "dispatch")
        assert seen.waits_for == PEERS
        assert seen.moves == before + 5
        later = beat()
        assert later.moves == seen.moves
        assert later.still_s >= seen.still_s >= 0
    after = beat()
    assert (after.scope, after.waits_for) == ("", "")
    assert after.moves == before + 8
    progress.enter(progress.IDLE)


def test_the_scope_that_is_left_gives_way_to_the_one_around_it():
    def work(arrived: threading.Event, go_on: threading.Event) -> None:
        with scope("attention"):
            with scope("dispatch"):
                pass
            stand(arrived, go_on)

    with at_work(work):
        assert beat().scope == "attention"


def test_the_line_is_that_of_the_thread_that_moved_last():
    def work(arrived: threading.Event, go_on: threading.Event) -> None:
        with scope("attention"):
            from flatpeak.workers.refresh import Ahead

            arrived_then_wait(Ahead, arrived, go_on)

    def arrived_then_wait(ahead: type, arrived: threading.Event, go_on: threading.Event) -> None:
        module = object()

        def deliver(_: object) -> None:
            arrived.set()
            assert go_on.wait(10)

        ahead(deliver, {module: ()}, timeout_s=10).wait_for(module)

    with at_work(work):
        deadline = time.monotonic() + 10
        while not (line := beat().line).endswith(" in wait_for"):  # it may just be on its way
            assert time.monotonic() < deadline, line
        assert line.startswith("refresh.py:")


def fail_after_waiting(seconds: float) -> None:
    with waiting():
        threading.Event().wait(seconds)
        raise ZeroDivisionError


def test_only_waits_for_peers_count_as_such():
    before = waited_s()
    with waiting(WEIGHTS):
        threading.Event().wait(0.02)
    assert waited_s() == before
    with pytest.raises(ZeroDivisionError):
        fail_after_waiting(0.02)
    assert 0.02 <= waited_s() - before < 10
    assert beat().waits_for == ""


def test_a_beat_reads_as_part_of_a_sentence():
    full = Beat(
        step=3,
        phase="backward",
        scope="attention",
        waits_for=PEERS,
        still_s=2.34,
        line="a.py:1 in f",
    )
    assert full.described() == (
        "in attention, backward of step 3, waiting for its peers, for 2.3 s (a.py:1 in f)"
    )
    assert (
        replace(full, scope="", waits_for="", line="").described()
        == "backward of step 3, for 2.3 s"
    )
    assert Beat(step=3, still_s=1).described() == "idle after step 3, for 1.0 s"
