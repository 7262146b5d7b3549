"""Experiment logs, read back from what the packages themselves wrote."""

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flatpeak.controller import launch
from flatpeak.controller.experiment_logs import (
    check_experiment_logs,
    experiment_logs,
    figures_of,
)
from flatpeak.controller.runs import Event, RunFolder, StepRecord
from flatpeak.controller.spec import LoggingSpec, Spec
from flatpeak.workers.errors import InputError
from local_run import tiny_spec
from sample_run import STEP
from tiny_models import tiny_content
from wandb_file import figures, records

OFFLINE = {"project": "moe", "entity": "team", "mode": "offline"}


@pytest.fixture(autouse=True)
def no_reports_of_errors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def job(folder: Path, **logging: object) -> Spec:
    content = tiny_content("qwen3_moe", vocab_size=257)
    return tiny_spec(
        content,
        runs_dir=str(folder),
        cluster={"shm_dir": str(folder)},
        data={"cache_dir": str(folder / "cache")},
        logging=logging,
    )


def log(spec: Spec, folder: Path, steps: Iterable[Event], *, failing: bool = False) -> list[str]:
    """Logs the steps as a run does; returns what the logs failed of."""
    logs = experiment_logs(spec, folder)
    try:
        for each in logs:
            with each:
                for step in steps:
                    each(step)
                if failing:
                    raise InputError("the run failed")
    except InputError:
        assert failing
    return [failure for each in logs if (failure := each.take_failure()) is not None]


def steps(*numbers: int, loss: float = 2.5) -> list[StepRecord]:
    return [replace(STEP, step=number, loss=loss) for number in numbers]


def tensorboard(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_a_log_has_every_figure_of_a_step_by_its_name_in_the_record():
    assert figures_of(replace(STEP, time=1.8e9)) == {
        "loss": 2.5,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens": 640.0,
        "tokens_per_s": 320.0,
        "step_seconds": 2.0,
        "peak_bytes/dispatch": 3 * 2**20,
        "peak_bytes/attention": 2**20,
        "peak_bytes/total": 5 * 2**20,
        "device_budget_bytes": 10 * 2**20,
        "planned_peak_bytes/attention": 2 * 2**20,
        "dispatch/imbalance_before": 2.0,
        "dispatch/imbalance_after": 1.1,
        "dispatch/planned_bytes": 2 * 2**20,
        "dispatch/budget_bytes": 4 * 2**20,
        "optimizer/exposed_s": 0.1,
        "skipped": 0.0,
    }


def test_tensorboard_reads_back_the_steps_and_the_spec(tmp_path: Path):
    spec = job(tmp_path, tensorboard=True)
    assert log(spec, tmp_path / "run", [*steps(1, 2), *steps(3, loss=math.nan)]) == []
    read = tensorboard(tmp_path / "run" / "tensorboard")
    assert set(read.Tags()["scalars"]) == figures_of(STEP).keys()
    loss = [(point.step, point.value) for point in read.Scalars("loss")]
    assert loss[:2] == [(1, 2.5), (2, 2.5)]
    assert math.isnan(loss[2][1])
    assert read.Scalars("peak_bytes/total")[0].value == 5 * 2**20
    (text,) = read.Tensors("spec/text_summary")
    assert yaml.safe_load(text.tensor_proto.string_val[0]) == spec.model_dump(mode="json")


def test_tensorboard_forgets_the_steps_that_a_resumed_run_does_again(tmp_path: Path):
    spec = job(tmp_path, tensorboard=str(tmp_path / "all"))
    assert log(spec, tmp_path, steps(1, 2, 3, loss=2.0)) == []
    assert log(spec, tmp_path, steps(3, 4, loss=1.0)) == []
    read = tensorboard(tmp_path / "all" / "tiny")
    points = [(point.step, point.value) for point in read.Scalars("loss")]
    assert points == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)]


def wandb_files(folder: Path) -> list[Path]:
    """In the order in which they were begun."""
    found = folder.glob("wandb/offline-run-*/run-*.wandb")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def test_weights_and_biases_gets_the_steps_the_spec_and_the_end(tmp_path: Path):
    spec = job(tmp_path, wandb=OFFLINE | {"name": "shown"})
    assert log(spec, tmp_path, steps(1, 2), failing=True) == []
    (path,) = wandb_files(tmp_path)
    read = records(path)
    (run,) = [content for kind, content in read if kind == "run"]
    assert (run.project, run.entity, run.display_name) == ("moe", "team", "shown")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert spec.model_dump(mode="json").items() <= config.items()
    logged = [figures(row) for kind, row in read if kind == "history"]
    assert [row["step"] for row in logged] == [1, 2]
    assert all(row.items() >= figures_of(STEP).items() for row in logged)
    axes = [metric.step_metric for kind, metric in read if kind == "metric" and metric.glob_name]
    assert axes == ["step"]
    assert [content.exit_code for kind, content in read if kind == "exit"] == [1]


def test_a_resumed_run_goes_on_with_its_run_of_weights_and_biases(tmp_path: Path):
    spec = job(tmp_path, wandb=OFFLINE)
    for numbers in ((1, 2), (3, 4), (1, 2)):  # the last without a snapshot to go on from
        assert log(spec, tmp_path, steps(*numbers)) == []
    first, second, third = (path.stem for path in wandb_files(tmp_path))
    assert first == second
    assert third != first


def test_nothing_is_logged_of_a_run_without_a_step_nor_where_nothing_is_asked_for(tmp_path: Path):
    spec = job(tmp_path, tensorboard=True, wandb=OFFLINE)
    assert log(spec, tmp_path, [], failing=True) == []
    assert list(tmp_path.iterdir()) == []
    assert experiment_logs(job(tmp_path), tmp_path) == []


def test_a_log_that_cannot_be_written_is_told_of_once(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("in the way")
    logs = experiment_logs(job(tmp_path, tensorboard=True), tmp_path)
    with logs[0]:
        for step in steps(*range(1, 50)):
            logs[0](step)
    failure = logs[0].take_failure()
    assert failure is not None
    assert failure.startswith("TensorBoard: ")
    assert str(tmp_path / "tensorboard") in failure
    assert failure.endswith("; the run goes on without TensorBoard")
    assert logs[0].take_failure() is None


def test_a_log_that_fails_is_one_warning_among_the_events_of_the_run(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    spec = job(tmp_path, tensorboard=str(tmp_path / "taken"))
    seen: list[Event] = []
    with RunFolder.create(spec) as folder:
        logs = experiment_logs(spec, folder.path)
        follower = launch._Follower(folder, seen.append, logs)
        with logs[0]:
            for step in steps(1, 2, 3):
                follower(step)
        follower.warn_of_failures()
        assert [record.step for record in seen if isinstance(record, StepRecord)] == [1, 2, 3]
        (warning,) = folder.events()
    assert warning.kind == "warning"
    assert "the run goes on without TensorBoard" in warning.detail["text"]
    assert seen.count(warning) == 1


@pytest.mark.parametrize(
    ("logging", "package", "extra"),
    [
        ({"tensorboard": True}, "tensorboard", "tensorboard"),
        ({"wandb": OFFLINE}, "wandb", "wandb"),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_job_whose_package_is_missing_is_refused_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    logging: dict[str, object],
    package: str,
    extra: str,
):
    for name in [name for name in sys.modules if "tensorboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"pip install 'flatpeak\[{extra}\]'"):
        launch.resolve(job(tmp_path, **logging))


def test_a_job_that_is_to_be_logged_online_without_credentials_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    logging = LoggingSpec.model_validate({"wandb": {"project": "moe"}})
    with pytest.raises(InputError, match="WANDB_API_KEY"):
        check_experiment_logs(logging)
    check_experiment_logs(LoggingSpec.model_validate({"wandb": OFFLINE}))
