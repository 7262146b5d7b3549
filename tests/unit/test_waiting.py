"""Waiting for answers, with a stand-in for Ray that hands them out in a given order."""

import pickle
import time
from collections.abc import Collection
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from flatpeak.controller.waiting import Died, Hung, Interrupted, collect
from flatpeak.workers.errors import ConnectionLost, DoesNotFit, RunFailed, WaitTimeout


class Script:
    """Answers become ready one a `wait`, in the order given; what is not listed never does."""

    def __init__(self, *answers: tuple[str, Any]) -> None:
        self.coming = list(answers)
        self.ready: dict[str, Any] = {}

    def wait(self, refs: list[Any], /, *, timeout: float) -> tuple[list[Any], list[Any]]:
        if self.coming:
            name, answer = self.coming.pop(0)
            self.ready[name] = answer
        else:
            time.sleep(min(timeout, 0.01))
        ready = [ref for ref in refs if ref in self.ready]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any, /) -> Any:
        answer = self.ready[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(script: Script, *names: str, timeout_s: float = 5.0, **options: Any) -> dict[str, Any]:
    refs = {name: name for name in names}
    return collect(refs, what="step 7", timeout_s=timeout_s, answers=script, **options)


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("step", f"\x1b[36mray::step\x1b[39m\n{error!r}", error)


def test_all_answers_are_collected_by_name():
    script = Script(("worker 1", 11), ("worker 0", 10))
    assert ask(script, "worker 0", "worker 1") == {"worker 0": 10, "worker 1": 11}


def test_nobody_to_wait_for_is_no_wait():
    assert ask(Script(), timeout_s=0.0) == {}


def test_the_first_failure_surfaces_although_the_others_never_answer(monkeypatch):
    monkeypatch.setattr("flatpeak.controller.waiting._CAUSE_S", 0.05)
    script = Script(("worker 3", raised(ZeroDivisionError("a bug"))))
    with pytest.raises(RunFailed) as caught:
        ask(script, "worker 0", "worker 3")
    wanted = "step 7: worker 3 raised\nray::step\nZeroDivisionError('a bug')"
    assert str(caught.value) == wanted


def test_an_error_of_ours_keeps_its_type_and_names_the_process():
    script = Script(("optimizer 1", raised(DoesNotFit("needs 9 bytes of 8"))))
    with pytest.raises(DoesNotFit) as caught:
        ask(script, "optimizer 0", "optimizer 1")
    assert str(caught.value) == "optimizer 1: needs 9 bytes of 8"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class Death(ActorDiedError):
    """As Ray words one."""

    def __str__(self) -> str:
        return (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainWorker\n"
            "\tpid: 4711\n\tip: 10.0.0.7\nThe actor is dead because its worker process has died."
        )


def test_a_death_names_the_process_what_is_known_of_it_and_the_cause():
    script = Script(("worker 1", Death()))
    with pytest.raises(RunFailed) as caught:
        ask(script, "worker 0", "worker 1", last_seen=lambda who: f"{who} was at step 6")
    assert str(caught.value) == (
        "step 7: worker 1 died (worker 1 was at step 6; pid 4711, ip 10.0.0.7): "
        "The actor is dead because its worker process has died."
    )


@pytest.mark.parametrize("death", [Death(), OutOfMemoryError("it took too much")])
def test_the_death_of_one_who_can_be_replaced_comes_with_what_the_others_answered(death):
    script = Script(("worker 0", 10), ("optimizer 1", death))
    with pytest.raises(Died) as caught:
        ask(script, "worker 0", "worker 1", "optimizer 1", mortal=["optimizer 0", "optimizer 1"])
    assert (caught.value.who, caught.value.answers) == ("optimizer 1", {"worker 0": 10})
    assert isinstance(caught.value.cause, RunFailed)
    assert str(caught.value.cause).startswith("step 7: optimizer 1 died")


def test_an_error_of_one_who_can_be_replaced_is_a_failure():
    script = Script(("optimizer 1", raised(RunFailed("step 9 was asked"))))
    with pytest.raises(RunFailed, match="optimizer 1: step 9 was asked"):
        ask(script, "optimizer 1", mortal=["optimizer 1"])


@pytest.mark.parametrize("error", [RuntimeError, ConnectionLost])
def test_the_death_of_a_peer_explains_the_failure_that_came_first(error):
    lost = raised(error("Connection closed by peer"))
    script = Script(("worker 0", lost), ("worker 2", 12), ("worker 1", ActorDiedError()))
    with pytest.raises(RunFailed, match="worker 1 died"):
        ask(script, "worker 0", "worker 1", "worker 2")


def test_the_death_of_one_who_can_be_replaced_comes_before_the_failures_of_its_peers():
    lost = raised(RuntimeError("Connection closed by peer"))
    script = Script(("worker 0", lost), ("worker 1", Death()))
    with pytest.raises(Died) as caught:
        ask(script, "worker 0", "worker 1", mortal=["worker 0", "worker 1"])
    assert caught.value.who == "worker 1"
    assert str(caught.value.cause).startswith("step 7: worker 1 died")


def test_one_whose_peer_hung_up_is_lost_too(monkeypatch):
    monkeypatch.setattr("flatpeak.controller.waiting._CAUSE_S", 0.05)
    script = Script(("worker 0", raised(ConnectionLost("the connection to optimizer 0 is lost"))))
    with pytest.raises(Died) as caught:
        ask(script, "worker 0", "worker 1", mortal=["worker 0", "worker 1"])
    assert caught.value.who == "worker 0"
    assert str(caught.value.cause) == "worker 0: the connection to optimizer 0 is lost"


def test_who_is_watched_is_not_waited_for_but_may_fail():
    assert ask(Script(("worker 0", 10)), "worker 0", watched={"worker 1": "worker 1"}) == {
        "worker 0": 10
    }
    script = Script(("worker 1", Death()))
    with pytest.raises(Died) as caught:
        ask(script, "worker 0", watched={"worker 1": "worker 1"}, mortal=["worker 1"])
    assert caught.value.who == "worker 1"
    with pytest.raises(WaitTimeout, match="no answer from worker 0 within"):
        ask(Script(), "worker 0", watched={"worker 1": "worker 1"}, timeout_s=0.05)


def test_a_timeout_names_those_who_did_not_answer():
    script = Script(("worker 0", 10))
    with pytest.raises(WaitTimeout) as caught:
        ask(script, "worker 0", "worker 1", "worker 2", timeout_s=0.05)
    assert "step 7: no answer from worker 1, worker 2 within 0.05 s" in str(caught.value)


class Watchman:
    """Finds `hung` at the given look, and `late` to blame when the time is over."""

    def __init__(self, *, hung_at: int = 0, late: str = "") -> None:
        self.hung_at, self.late, self.looks = hung_at, late, 0

    def look(self) -> Hung | None:
        self.looks += 1
        return Hung("worker 1", "hangs: it is silent") if self.looks == self.hung_at else None

    def overdue(self, owed: Collection[str], /) -> Hung | None:
        return Hung(self.late, f"hangs: late are {', '.join(owed)}") if self.late else None

    def described(self, owed: Collection[str], /) -> str:
        return " and ".join(f"{who} was busy" for who in owed)


def test_one_that_hangs_counts_as_dead_while_the_others_are_waited_for():
    with pytest.raises(Died) as caught:
        ask(Script(("worker 0", 10)), "worker 0", "worker 1", watch=Watchman(hung_at=3))
    assert (caught.value.who, caught.value.answers) == ("worker 1", {"worker 0": 10})
    assert isinstance(caught.value.cause, RunFailed)
    assert str(caught.value.cause) == "step 7: worker 1 hangs: it is silent"


def test_when_the_time_is_over_the_one_to_blame_counts_as_dead():
    script, names = Script(("worker 0", 10)), ("worker 0", "worker 1", "worker 2")
    with pytest.raises(Died) as caught:
        ask(script, *names, timeout_s=0.05, watch=Watchman(late="worker 2"))
    assert (caught.value.who, caught.value.answers) == ("worker 2", {"worker 0": 10})
    told = str(caught.value.cause)
    assert told.startswith("step 7: worker 2 hangs: late are worker ")
    assert "worker 0" not in told


def test_a_timeout_tells_what_those_do_who_are_slow():
    with pytest.raises(WaitTimeout) as caught:
        ask(Script(), "worker 1", timeout_s=0.05, watch=Watchman())
    wanted = "step 7: no answer from worker 1 within 0.05 s (worker 1 was busy); raise "
    assert str(caught.value).startswith(wanted)


def test_a_stop_ends_the_wait():
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        ask(Script(("worker 0", 10)), "worker 0", "worker 1", interrupted=lambda: next(asked))
