"""What hands a run's events on: it holds nobody up, and fails once."""

import threading
import time
from dataclasses import replace

import pytest

from flatpeak.controller.outlet import Outlet
from flatpeak.controller.runs import Event, StepRecord
from sample_run import STEP


class Slow(Outlet):
    """Takes what it is sent once it may, and fails where it is told to."""

    def __init__(self, *, last_words_s: float = 10.0, fails_at: int | None = None) -> None:
        super().__init__("a log", consequence="nothing is lost", last_words_s=last_words_s)
        self.may_send, self.fails_at = threading.Event(), fails_at
        self.taken: list[int] = []
        self.ended: bool | None = None

    def wants(self, event: Event) -> bool:
        return isinstance(event, StepRecord)

    def send(self, event: Event) -> None:
        assert isinstance(event, StepRecord)
        assert self.may_send.wait(30)
        if event.step == self.fails_at:
            raise OSError("disk full")
        self.taken.append(event.step)

    def finish(self, *, failed: bool) -> None:
        self.ended = failed


def feed(outlet: Outlet, count: int) -> None:
    for step in range(1, count + 1):
        outlet(replace(STEP, step=step))


def test_leaving_waits_for_what_is_still_to_be_sent():
    with Slow() as outlet:
        feed(outlet, 20)
        assert outlet.taken == []
        outlet.may_send.set()
    assert outlet.taken == [*range(1, 21)]
    assert outlet.ended is False
    assert outlet.take_failure() is None


def test_it_learns_that_the_run_failed():
    outlet = Slow()
    with pytest.raises(ValueError, match="of the run"), outlet:
        raise ValueError("of the run")
    assert outlet.ended is True
    interrupted = Slow()
    with pytest.raises(KeyboardInterrupt), interrupted:
        raise KeyboardInterrupt
    assert interrupted.ended is False


def test_its_first_failure_ends_it():
    with Slow(fails_at=2) as outlet:
        outlet.may_send.set()
        feed(outlet, 5)
    assert outlet.taken == [1]
    assert outlet.ended is None
    assert outlet.take_failure() == "a log: OSError: disk full; nothing is lost"
    assert outlet.take_failure() is None


def test_one_that_cannot_keep_up_holds_nobody_up_and_is_told_of_once():
    with Slow() as outlet:
        began = time.monotonic()
        feed(outlet, 3000)
        assert time.monotonic() - began < 5
        assert outlet.take_failure() == "a log is 1000 records behind; nothing is lost"
        outlet(STEP)
        assert outlet.take_failure() is None
        outlet.may_send.set()
    assert outlet.taken[:1000] == [*range(1, 1001)]


def test_one_that_takes_too_long_at_the_end_is_left():
    with Slow(last_words_s=0.2) as outlet:
        feed(outlet, 1)
    assert outlet.take_failure() == ("a log had not taken everything after 0.2 s; nothing is lost")
    outlet.may_send.set()
