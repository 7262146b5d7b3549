"""SIGINT and SIGTERM: raised before a run has processes, counted while it has."""

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flatpeak.controller.leftovers import HeldArenas
from flatpeak.controller.lives import Lives
from flatpeak.controller.runs import RunFolder, event
from flatpeak.controller.signals import StopSignals, terminated_as_interrupted
from local_run import tiny_spec
from tiny_models import tiny_content

BOTH = [signal.SIGINT, signal.SIGTERM]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_sigterm_raises_like_sigint_and_the_handler_goes_again():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT has its handler, as in a shell: a job in the background starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", BOTH, ids=lambda number: number.name)
def test_signals_are_counted_and_raise_nothing(number):
    before = [signal.getsignal(other) for other in BOTH]
    with StopSignals() as signals:
        send(number)
        send(number)
        assert signals.count == 2
    assert [signal.getsignal(other) for other in BOTH] == before


def test_a_handler_that_another_library_installed_is_taken_over():
    with StopSignals() as signals:
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("the other one was called"))
        signals.catch()
        send(signal.SIGTERM)
        assert signals.count == 1


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGINT)
            assert signals.count == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_handlers_are_left_alone():
    before = [signal.getsignal(number) for number in BOTH]
    found = []

    def drive() -> None:
        with StopSignals() as signals:
            found.append(([signal.getsignal(number) for number in BOTH], signals.count))

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join()
    assert found == [(before, 0)]


@pytest.mark.parametrize("answers", [False, True], ids=["not up yet", "answers"])
def test_a_controller_that_is_not_up_is_not_waited_for(monkeypatch, tmp_path, answers):
    from flatpeak.controller import launch

    controller, answer = Mock(), object()
    controller.stop.remote.return_value = answer
    interrupted = event("interrupted", step=0)
    controller.run.options.return_value.remote.return_value = events = iter([interrupted])
    waits = []

    def wait(refs, *, timeout):
        [ref] = refs
        waits.append(ref)
        # The event comes in the third round, if the controller is waited for until then.
        is_ready = answers if ref is answer else waits.count(events) > 2
        return (refs, []) if is_ready else ([], refs)

    kill, follower = Mock(), Mock(folder=RunFolder(tmp_path))
    ray = SimpleNamespace(wait=wait, get=lambda value: value, kill=kill)
    monkeypatch.setattr(launch, "ray", ray)
    monkeypatch.setattr(launch, "_start_controller", lambda *args: controller)
    monkeypatch.setattr(launch, "_ANSWER_S", 0.0)
    signals = StopSignals()
    signals.count = 1
    lives = Lives(tiny_spec(tiny_content("qwen3_moe")), tmp_path, None)
    arguments = (lives, HeldArenas(str(tmp_path), "tiny"), Mock(), follower, signals)
    if answers:
        launch._follow(*arguments)
        follower.assert_called_once_with(interrupted)
    else:
        with pytest.raises(KeyboardInterrupt):
            launch._follow(*arguments)
        follower.assert_not_called()
    controller.stop.remote.assert_called_once_with()
    kill.assert_called_once_with(controller)
