"""A run that scales by itself, from step to step, with a cluster by hand."""

from types import SimpleNamespace
from typing import Any

from flatpeak.controller.autoscaler import AUTO, Autoscaler, RoomForWorkers
from flatpeak.controller.ownership import HeldArena, assign_arenas
from flatpeak.controller.placement import Placed
from flatpeak.controller.scaling import Capacity, Change, Refused, Scaling
from flatpeak.controller.spec import AutoscaleSpec
from flatpeak.workers.update_report import UpdateReport

SETTINGS = AutoscaleSpec(
    optimizers=(1, 4), window_steps=3, cooldown_steps=2, exposed_share=0.1, workers=(1, 4)
)


class Run:
    """A run of steps of a second without waiting, whose updates take an actor `work` seconds
    together, a quarter for each of four arenas, and `slowness` times as long as that for some."""

    def __init__(
        self, settings: AutoscaleSpec = SETTINGS, *, present: int = 1, cpus: float = 8
    ) -> None:
        self.work, self.cpus, self.hidden = 0.4, cpus, 0.1
        self.slowness: dict[str, float] = {}
        self.actors = [self.start(index, "a") for index in range(present)]
        self.scaling = Scaling(
            self.actors,
            capacity=lambda: Capacity(("a",), 4, 1, {"a": self.cpus}),
            start=self.start,
            timeout_s=60.0,
            end=lambda handle: None,
            answers=self,
        )
        self.scaling.open()
        self.arenas = [HeldArena(100, "a")] * 4
        self.auto = Autoscaler(
            settings, self.actors, scaling=self.scaling, arenas=lambda: self.arenas
        )
        self.own()
        self.changes: list[Change] = []
        self.told: list[Refused] = []

    def start(self, index: int, node: str) -> Placed:
        ready = SimpleNamespace(remote=lambda: index)
        return Placed(f"optimizer {index}", SimpleNamespace(ready=ready), node)

    def wait(self, refs: list[Any], /, *, timeout: float) -> tuple[list[Any], list[Any]]:
        return refs, []

    def get(self, ref: Any, /) -> Any:
        return None

    def own(self) -> None:
        homes = [actor.node for actor in self.actors]
        owners = assign_arenas(self.arenas, homes, self.auto.rates(self.actors)).owners
        self.arenas = [HeldArena(100, "a", owner) for owner in owners]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            reports = {}
            for index, actor in enumerate(self.actors):
                arenas = [arena.owner for arena in self.arenas].count(index)
                slowness = self.slowness.get(actor.name, 1.0)
                reports[actor.name] = UpdateReport(arenas * 100, arenas * self.work / 4 * slowness)
            slowest = max(report.seconds for report in reports.values())
            exposed = max(0.0, slowest - self.hidden)
            self.auto.observe(1.0 + exposed, [0.0, exposed], reports)
            self.told += [told for told in [self.auto.look()] if told]
            if isinstance(change := self.scaling.due(), Change):
                self.changes.append(change)
                self.actors.extend(change.joining)
                del self.actors[change.wanted :]
                self.own()
                self.scaling.settle()
                self.auto.changed()


def test_a_run_goes_to_what_it_needs_and_stays():
    run = Run()
    run.step(5 * 10)
    assert [change.wanted for change in run.changes] == [2]
    assert run.changes[0].request == AUTO
    assert "forward passes waited for updates" in run.changes[0].reason
    run.work = 4.0
    run.step(5 * 10)
    assert [change.wanted for change in run.changes] == [2, 4]
    run.work = 0.01
    run.step(5 * 10)
    assert [change.wanted for change in run.changes] == [2, 4, 3, 2, 1]
    assert run.told == []


def test_no_change_is_wanted_before_a_cool_down_and_a_window_have_passed():
    run = Run()
    run.step(4)
    assert run.changes == []
    run.step(1)
    assert len(run.changes) == 1


def test_a_change_that_a_user_asked_for_begins_a_cool_down():
    run = Run()
    run.step(4)
    assert run.scaling.ask("a user's", 3) is None
    run.step(1)
    assert [change.request for change in run.changes] == ["a user's"]
    run.work = 0.04
    run.step(4)
    assert len(run.changes) == 1
    run.step(1)
    assert [(change.request, change.wanted) for change in run.changes[1:]] == [(AUTO, 2)]


def test_what_is_refused_is_told_once_and_tried_again_after_a_cool_down():
    run = Run(cpus=0)
    run.step(40)
    (told,) = run.told
    assert (told.request, told.wanted) == (AUTO, 2)
    assert "need 1 more CPUs on node a, which has 0 free" in told.reason
    assert "(asked for by cluster.autoscale)" in told.reason
    run.cpus = 1
    run.step(5)
    assert [change.wanted for change in run.changes] == [2]


def test_a_start_that_failed_is_told_once_and_begins_a_cool_down():
    run = Run()
    run.step(4)
    assert run.auto.refused(2, "it died") == Refused(
        AUTO, "it died (asked for by cluster.autoscale)", 2
    )
    assert run.auto.refused(2, "it died again") is None
    run.step(4)
    assert run.changes == []


def test_while_nothing_is_heard_nothing_is_asked():
    run = Run()
    run.scaling.close("the run ends")
    run.step(20)
    assert (run.changes, run.told) == ([], [])


def test_arenas_change_hands_when_one_actor_is_much_slower_even_without_a_range():
    off = AutoscaleSpec(window_steps=5, cooldown_steps=2)
    run = Run(off, present=2)
    run.work = 1.0
    run.step(20)
    assert run.changes == []
    run.slowness = {"optimizer 1": 3.0}
    run.step(40)
    (change,) = run.changes
    assert (change.wanted, change.joining) == (2, ())
    assert "times as long as it would with other arenas" in change.reason
    assert [arena.owner for arena in run.arenas].count(0) == 3


def test_actors_that_differ_by_noise_keep_their_arenas():
    run = Run(AutoscaleSpec(window_steps=5, cooldown_steps=2), present=2)
    run.work = 1.0
    for number in range(60):
        run.slowness = {f"optimizer {number % 2}": 1.4}
        run.step()
    run.slowness = {"optimizer 1": 1.4}
    run.step(30)
    assert run.changes == []


def test_room_for_workers_counts_from_the_last_time_that_there_was_less():
    times = iter(range(0, 1000, 20))
    room = RoomForWorkers(
        SETTINGS.model_copy(update={"workers_free_s": 60.0}), clock=lambda: next(times)
    )
    decisions = []
    for free in (3, 3, 0, 3, 3, 3, 3, 3):
        room.observe(free)
        decisions.append(room.decide(1, [1, 2, 4]).wanted)
    assert decisions == [None, None, None, None, None, None, 4, 4]
