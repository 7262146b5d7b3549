"""When the controller asks for snapshots, completes them, and goes on or ends without one."""

import faulthandler
import logging
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatpeak.controller.controller import Controller
from flatpeak.controller.lives import Life
from flatpeak.controller.optimizer_team import Update
from flatpeak.controller.placement import NodeWatch, Placed
from flatpeak.controller.runs import RunEvent
from flatpeak.workers.boundaries import BoundaryStats
from flatpeak.workers.dispatch import DispatchReport
from flatpeak.workers.errors import SnapshotFailed
from flatpeak.workers.refresh import RefreshReport
from flatpeak.workers.snapshot import saved_steps, write_snapshot_part
from flatpeak.workers.trainer import StepResult
from local_run import tiny_spec
from saved_run import SavedRun
from tiny_models import tiny_content


class Team:
    """One optimizer actor without a process; its disk does not take the steps in `fails`."""

    def __init__(self, run: SavedRun, fails: set[int]) -> None:
        self.run, self.fails = run, fails
        self.last = Update(0, 0.0, None)
        self.updates: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self.asked: list[str] = []

    def update(self, update: Update, *, beside: Mapping[str, Any]) -> None:
        self.last = update
        self.run.update()
        self.asked.append(f"update {update.step}")

    def snapshot(self, folder: str) -> None:
        self.asked.append(f"snapshot {self.last.step}")
        self.parts = {"optimizer 0": Path(folder)}

    def gather(
        self,
        what: str,
        timeout_s: float,
        *pending: dict[str, Any],
        watched: Mapping[str, Any] | None = None,
        watch: Any = None,
    ) -> Generator[Any, None, dict[str, Any]]:
        self.asked.append(f"wait for {what}")
        yield from ()
        answers = {who: answer for refs in pending for who, answer in refs.items()}
        return {who: self.written(answer) for who, answer in answers.items()}

    def written(self, answer: Any) -> Any:
        if not isinstance(answer, Path):
            return answer
        step = self.last.step
        if step in self.fails:
            return [SnapshotFailed("no space left")]
        return [write_snapshot_part(answer, self.run.arena, 0, step)]


def result(step: int) -> StepResult:
    return StepResult(
        step=step,
        loss=2.5,
        grad_norm=1.0,
        targets=8,
        tokens=8,
        seconds=0.25,
        dispatch=DispatchReport(),
        refresh=RefreshReport(),
        boundaries=BoundaryStats(),
    )


@pytest.fixture
def logs() -> Iterator[None]:
    """The controller's log and traces go where they went before."""
    log = logging.getLogger("flatpeak")
    before = list(log.handlers)
    yield
    for handler in set(log.handlers) - set(before):
        log.removeHandler(handler)
        faulthandler.enable(sys.__stderr__)
        handler.stream.close()  # pyright: ignore[reportAttributeAccessIssue]


def controller_of(
    folder: Path, fails: set[int] = frozenset(), **snapshots: int
) -> tuple[Controller, Team]:
    spec = tiny_spec(
        tiny_content("qwen3_moe", vocab_size=257),
        runs_dir=str(folder),
        train={"steps": 3, "sequences_per_step": 4, "sequence_length": 32},
        snapshots=snapshots,
    )
    run = SavedRun(spec)
    controller = Controller(Life(spec, "token"), str(run.folder.path), None)
    worker = SimpleNamespace(step=SimpleNamespace(remote=result))
    controller._workers.append(Placed("worker 0", worker, "node"))
    controller._snapshots.sizes, controller._snapshots.arenas = run.sizes, 1
    controller._watch = NodeWatch(alive=set, draining=set)
    team: Any = Team(run, fails)
    controller._team = controller._snapshots.team = team
    return controller, team


def kinds(events: Iterator[Any]) -> list[str]:
    return [
        f"{happened.kind} {happened.detail['step']}"
        if isinstance(happened, RunEvent)
        else f"step {happened.step}"
        for happened in events
    ]


@pytest.mark.usefixtures("logs")
def test_a_snapshot_is_written_beside_the_next_step_and_completed_beside_the_one_after(tmp_path):
    """No update is asked for before the actors are done with the state that it changes."""
    controller, team = controller_of(tmp_path, every_steps=1, keep=2)
    assert kinds(controller._train()) == ["step 1", "step 2", "snapshot 1", "step 3"]
    assert team.asked == [
        *("wait for step 1", "update 1", "snapshot 1"),
        *("wait for step 2", "wait for snapshot of step 1", "update 2", "snapshot 2"),
        *("wait for step 3", "wait for snapshot of step 2", "update 3", "snapshot 3"),
    ]
    assert kinds(controller._keep_committed(5.0)) == ["snapshot 2", "snapshot 3"]
    assert saved_steps(controller.folder) == [2, 3]


@pytest.mark.usefixtures("logs")
def test_a_snapshot_that_fails_is_said_and_the_next_one_is_written(tmp_path):
    controller, _ = controller_of(tmp_path, fails={2}, every_steps=1, keep=1)
    happened = kinds(controller._train()) + kinds(controller._keep_committed(5.0))
    assert happened[3:] == ["step 3", "snapshot_failed 2", "snapshot 3"]
    assert saved_steps(controller.folder) == [3]
    assert [path.name for path in (controller.folder / "snapshots").iterdir()] == ["step-3"]


@pytest.mark.usefixtures("logs")
def test_a_run_whose_last_state_cannot_be_kept_has_failed(tmp_path):
    controller, _ = controller_of(tmp_path, fails={3}, every_steps=2)
    assert kinds(controller._train())[-1] == "step 3"
    end = controller._keep_committed(5.0)
    assert (next(end).detail["step"], next(end).kind) == (2, "snapshot_failed")
    with pytest.raises(SnapshotFailed, match="optimizer 0: no space left"):
        next(end)
    assert saved_steps(controller.folder) == [2]
