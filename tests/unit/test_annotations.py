import time
from pathlib import Path

import pytest

from fake_grafana import TOKEN, fake_grafana
from flatpeak.controller import launch
from flatpeak.controller.dashboards.annotations import Annotator
from flatpeak.controller.dashboards.grafana import Grafana
from flatpeak.controller.runs import RunEvent
from flatpeak.workers.errors import InputError
from local_run import tiny_spec
from sample_run import STEP
from tiny_models import tiny_content

SNAPSHOT = RunEvent(kind="snapshot", time=12.5, detail={"step": 4, "folder": "x"})


def test_what_happens_to_a_run_is_marked_and_its_steps_are_not():
    with fake_grafana() as server:
        with Annotator(Grafana(server.url, TOKEN), "first") as marks:
            for event in (STEP, SNAPSHOT, RunEvent(kind="warning", time=0.0), STEP):
                marks(event)
            marks(RunEvent(kind="failed", time=13.0, detail={"reason": "worker 1 died"}))
        marked = [(each["time"], each["tags"], each["text"]) for each in server.annotations]
    assert marked == [
        (12500, ["flatpeak", "first", "snapshot"], "snapshot of step 4"),
        (13000, ["flatpeak", "first", "failed"], "failed  reason=worker 1 died"),
    ]
    assert marks.take_failure() is None


def test_a_grafana_that_fails_is_told_of_once_and_holds_nobody_up():
    with fake_grafana() as server:
        server.broken = (500, '{"message": "database is locked"}')
        server.delay_s = 0.2
        began = time.monotonic()
        with Annotator(Grafana(server.url, TOKEN), "first") as marks:
            for _ in range(5000):
                marks(SNAPSHOT)
            assert time.monotonic() - began < 2
        assert len(server.requests) == 1
    failure = marks.take_failure()
    assert failure is not None
    assert "database is locked" in failure
    assert TOKEN not in failure
    assert marks.take_failure() is None


def test_a_job_that_asks_for_marks_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    spec = tiny_spec(
        tiny_content("qwen3_moe", vocab_size=257),
        runs_dir=str(tmp_path),
        cluster={"shm_dir": str(tmp_path)},
        data={"cache_dir": str(tmp_path / "cache")},
        metrics={"grafana_url": "http://localhost:3000"},
    )
    with pytest.raises(InputError, match="GRAFANA_TOKEN"):
        launch.resolve(spec)
