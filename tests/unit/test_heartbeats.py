"""Who hangs, with processes by hand that answer or do not, and a clock by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from flatpeak.controller.heartbeats import Heartbeats, Pulse, culprit, silent
from flatpeak.controller.placement import Placed
from flatpeak.workers.progress import IDLE, PEERS, WEIGHTS, Beat

TIMEOUT_S = 10.0


def pulse(who: str, *, silent_s: float = 0.0, **beat: Any) -> Pulse:
    said = Beat(**{"step": 7, "phase": "forward", "still_s": 30.0} | beat)
    return Pulse(who=who, silent_s=silent_s, beat=said)


def blamed(*pulses: Pulse, owed: Sequence[str] = ("worker 0", "worker 1")) -> str | None:
    found = culprit(pulses, owed, stalled_s=10.0)
    return None if found is None else found.who


def test_who_has_been_silent_for_longest_hangs():
    pulses = [pulse("worker 0", silent_s=11), pulse("worker 1", silent_s=12), pulse("worker 2")]
    found = silent(pulses, TIMEOUT_S)
    assert found is not None
    assert found.who == "worker 1"
    assert silent(pulses, 12) is None
    assert silent([], TIMEOUT_S) is None


def test_the_cause_of_a_late_step_is_who_waits_for_nobody():
    waits = pulse("worker 0", scope="attention", waits_for=PEERS, still_s=90)
    assert blamed(waits, pulse("worker 1", scope="dispatch")) == "worker 1"
    # It has not even begun with the step.
    assert blamed(waits, pulse("worker 1", step=6, phase=IDLE)) == "worker 1"


def test_of_several_that_wait_for_nobody_the_first_to_stand_still_is_the_cause():
    assert blamed(pulse("worker 0", still_s=30), pulse("worker 1", still_s=31)) == "worker 1"


def test_who_has_answered_or_still_moves_is_no_cause():
    stuck = pulse("worker 1", still_s=30)
    assert blamed(pulse("worker 0", still_s=90), stuck, owed=["worker 1"]) == "worker 1"
    assert blamed(pulse("worker 0", still_s=9, waits_for=PEERS), stuck) is None
    assert blamed(stuck, owed=["worker 0"]) is None


def test_who_is_silent_is_the_cause_before_those_who_speak():
    spoke = pulse("worker 0", silent_s=11, still_s=0.1, waits_for=PEERS)
    assert blamed(spoke, pulse("worker 1")) == "worker 0"
    assert blamed(Pulse(who="worker 0", silent_s=11), pulse("worker 1")) == "worker 0"


def test_where_all_wait_for_each_other_the_cause_is_who_came_least_far():
    ahead = pulse("worker 0", waits_for=PEERS, moves=12, still_s=30)
    assert blamed(ahead, pulse("worker 1", waits_for=PEERS, moves=11, still_s=29)) == "worker 1"


def test_where_weights_are_waited_for_the_cause_is_who_owes_their_update():
    workers = [
        pulse("worker 0", waits_for=PEERS, moves=12),
        pulse("worker 1", waits_for=WEIGHTS, moves=11),
    ]
    owed = ["worker 0", "worker 1", "optimizer 0"]
    actor = pulse("optimizer 0", phase="update", step=6)
    assert blamed(*workers, actor, owed=owed) == "optimizer 0"
    waits = pulse("optimizer 0", phase="update", waits_for="the workers' part", moves=3)
    assert blamed(*workers, waits, owed=[*owed, "the update on worker 1"]) == "worker 1"


class Process:
    """Answers `heartbeat` as long as it is `awake`."""

    def __init__(self) -> None:
        self.answer: Any = Beat(step=7, phase="forward", scope="attention")
        self.awake = True
        self.asked = 0
        self.heartbeat = self

    def remote(self) -> "Process":
        self.asked += 1
        return self


class World:
    """Processes that are looked at every quarter of a second."""

    def __init__(self, *names: str, step_timeout_s: float = 100.0) -> None:
        self.now = 100.0
        self.processes = {name: Process() for name in names}
        self.heartbeats = Heartbeats(
            lambda: [Placed(name, process, "node") for name, process in self.processes.items()],
            timeout_s=TIMEOUT_S,
            step_timeout_s=step_timeout_s,
            answers=self,
            clock=lambda: self.now,
        )

    def wait(self, refs: list[Any], /, *, timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        return [ref for ref in refs if ref.awake], [ref for ref in refs if not ref.awake]

    def get(self, ref: Any, /) -> Any:
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    def look_for(self, seconds: float) -> Any:
        """The first one found to hang."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            if (hung := self.heartbeats.look()) is not None:
                return hung
        return None


def test_processes_that_answer_are_asked_now_and_then():
    world = World("worker 0", "worker 1")
    assert world.look_for(60) is None
    assert [process.asked for process in world.processes.values()] == [24, 24]


def test_one_that_stops_is_found_in_time_and_named_with_what_it_did_last():
    world = World("worker 0", "worker 1")
    world.look_for(7)
    stopped_at = world.now
    world.processes["worker 1"].awake = False
    hung = world.look_for(60)
    assert hung.who == "worker 1"
    assert hung.how.startswith(
        "hangs: it has not answered for 10.2 s, longer than cluster.heartbeat_timeout_s = 10; "
        "worker 1 was in attention, forward of step 7, for 0.0 s, "
    )
    assert world.now - stopped_at <= TIMEOUT_S + 2.5 + 0.5


def test_one_that_is_late_but_answers_in_the_end_is_not_taken_for_hung():
    world = World("worker 0")
    for _ in range(4):
        world.processes["worker 0"].awake = False
        assert world.look_for(TIMEOUT_S - 1) is None
        world.processes["worker 0"].awake = True
        assert world.look_for(1) is None


def test_time_in_which_nobody_looked_does_not_count():
    world = World("worker 0")
    world.look_for(3)
    world.processes["worker 0"].awake = False
    world.look_for(3)
    world.now += 1000
    assert world.look_for(3) is None
    assert world.look_for(TIMEOUT_S) is not None


def test_a_successor_begins_without_the_silence_of_its_predecessor():
    world = World("worker 0")
    world.processes["worker 0"].awake = False
    assert world.look_for(TIMEOUT_S - 1) is None
    world.processes["worker 0"] = Process()
    assert world.look_for(60) is None


def test_one_that_died_is_left_to_those_who_wait_for_it():
    world = World("worker 0")
    world.processes["worker 0"].answer = ActorDiedError()
    assert world.look_for(60) is None
    assert world.processes["worker 0"].asked == 1


def test_one_that_stays_out_of_reach_hangs():
    world = World("worker 0")
    world.processes["worker 0"].answer = ActorUnavailableError("no connection", None)
    hung = world.look_for(60)
    assert hung.who == "worker 0"
    assert hung.how.endswith("worker 0 has not said what it does")


def test_a_late_step_is_laid_to_the_one_that_stands_still_or_told_of_as_slow():
    world = World("worker 0", "worker 1")
    for name, still_s in (("worker 0", 60.0), ("worker 1", 61.0)):
        waits_for = PEERS if name == "worker 0" else ""
        beat = Beat(step=7, phase="backward", waits_for=waits_for, still_s=still_s)
        world.processes[name].answer = beat
    world.look_for(3)
    owed = ["worker 0", "worker 1"]
    hung = world.heartbeats.overdue(owed)
    assert hung is not None
    assert hung.who == "worker 1"
    assert hung.how.startswith("hangs: worker 1 was backward of step 7, for 61.0 s, ")
    world.processes["worker 1"].answer = Beat(step=7, phase="backward", still_s=0.5)
    world.look_for(6)
    assert world.heartbeats.overdue(owed) is None
    assert world.heartbeats.described(["worker 1"]).startswith(
        "worker 1 was backward of step 7, for 0.5 s, "
    )


@pytest.mark.parametrize("step_timeout_s", [4.0, 1000.0])
def test_stalls_are_told_from_slow_steps_within_the_time_of_a_step(step_timeout_s: float):
    world = World("worker 0", step_timeout_s=step_timeout_s)
    world.processes["worker 0"].answer = Beat(step=7, phase="forward", still_s=2.5)
    assert world.look_for(3) is None
    assert (world.heartbeats.overdue(["worker 0"]) is not None) == (step_timeout_s == 4.0)
