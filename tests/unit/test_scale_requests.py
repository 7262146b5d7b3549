"""`flatpeak scale` and the driver of a run, as far as they meet in the run folder."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatpeak.controller.cli import run_command
from flatpeak.controller.runs import RunFolder, event
from flatpeak.controller.scale_requests import (
    DONE,
    REFUSED,
    ScaleRequest,
    put_request,
    scale_run,
    take_request,
)
from flatpeak.workers.errors import InputError, RunFailed, WaitTimeout
from local_run import tiny_spec
from tiny_models import tiny_content

SCALED = {
    "step": 7,
    "before": 1,
    "after": 3,
    "joined": ["optimizer 1", "optimizer 2"],
    "left": [],
    "arenas": 3,
    "arena_bytes": 3 * 2**20,
    "copied_bytes": 0,
    "state_bytes": {"optimizer 0": 5},
    "seconds": 0.0123,
    "start_seconds": 4.0,
}


def new_folder(folder: Path) -> RunFolder:
    return RunFolder.create(tiny_spec(tiny_content("qwen3_moe"), run="first", runs_dir=str(folder)))


@contextmanager
def driver(folder: RunFolder, kind: str | None, **detail: object) -> Iterator[list[ScaleRequest]]:
    """Takes one request and answers it, if by any `kind`, after an answer to somebody else's."""
    heard: list[ScaleRequest] = []

    def drive() -> None:
        while not heard and time.monotonic() < deadline:
            if (request := take_request(folder)) is not None:
                heard.append(request)
                folder.record(event(REFUSED, request="another", reason="not yours"))
                if kind is not None:
                    folder.record(event(kind, request=request.id, **detail))
            time.sleep(0.01)

    deadline = time.monotonic() + 30
    thread = threading.Thread(target=drive)
    thread.start()
    yield heard
    thread.join()


def test_the_answer_is_the_event_with_the_requests_id(tmp_path):
    with new_folder(tmp_path) as folder:
        folder.record(event("started", step=0))
        with driver(folder, DONE, **SCALED) as heard:
            happened = scale_run(folder, ScaleRequest(optimizers=3), timeout_s=30)
        assert [request.optimizers for request in heard] == [3]
        assert happened.detail == SCALED | {"request": heard[0].id}
        assert not (folder.path / "scale.json").exists()


def test_a_refusal_is_bad_input_with_the_reason(tmp_path):
    with (
        new_folder(tmp_path) as folder,
        driver(folder, REFUSED, reason="4 free"),
        pytest.raises(InputError, match=r"^4 free$"),
    ):
        scale_run(folder, ScaleRequest(optimizers=9), timeout_s=30)


def test_a_driver_that_does_not_look_is_named_and_the_request_taken_back(tmp_path):
    with new_folder(tmp_path) as folder:
        with pytest.raises(WaitTimeout) as caught:
            scale_run(folder, ScaleRequest(optimizers=3), timeout_s=0.2)
        assert f"process {os.getpid()} on " in str(caught.value)
        assert "did not get to 3 optimizer actors within 0.2 s; the request was not" in str(
            caught.value
        )
        assert take_request(folder) is None


def test_the_request_of_somebody_else_is_not_taken_back(tmp_path):
    with new_folder(tmp_path) as folder:
        other = ScaleRequest(id="b", workers=3)
        seen: list[ScaleRequest | None] = []

        def take_and_put() -> None:
            while (taken := take_request(folder)) is None:
                time.sleep(0.01)
            seen.append(taken)
            put_request(folder, other)

        driver = threading.Thread(target=take_and_put)
        driver.start()
        with pytest.raises(WaitTimeout, match="the request is under way"):
            scale_run(folder, ScaleRequest(id="a", optimizers=3), timeout_s=1)
        driver.join()
        assert seen == [ScaleRequest(id="a", optimizers=3)]
        assert take_request(folder) == other


def test_a_request_that_was_taken_and_not_answered_is_said_to_be_under_way(tmp_path):
    with (
        new_folder(tmp_path) as folder,
        driver(folder, None) as heard,
    ):
        with pytest.raises(WaitTimeout, match="the request is under way"):
            scale_run(folder, ScaleRequest(optimizers=3), timeout_s=2)
        assert len(heard) == 1


def test_a_run_that_has_ended_or_ends_is_not_waited_for(tmp_path):
    with new_folder(tmp_path) as folder:
        ending = threading.Timer(0.3, lambda: folder.__exit__(None, None, None))
        ending.start()
        with pytest.raises(RunFailed, match=r"the run first ended \(done\) before it scaled"):
            scale_run(folder, ScaleRequest(optimizers=3), timeout_s=30)
        ending.join()
        assert take_request(folder) is None
        with pytest.raises(InputError, match=r"first does not go on \(done\): there is nothing"):
            scale_run(folder, ScaleRequest(optimizers=3), timeout_s=30)


def test_a_second_request_does_not_replace_one_that_waits(tmp_path):
    with new_folder(tmp_path) as folder:
        put_request(folder, ScaleRequest(id="a", optimizers=2))
        with pytest.raises(InputError, match="another request waits in"):
            put_request(folder, ScaleRequest(id="b", optimizers=3))
        assert take_request(folder) == ScaleRequest(id="a", optimizers=2)
        assert [path.name for path in folder.path.glob("*scale*")] == []


@pytest.mark.parametrize("content", ["", "{", '{"id": 3}', '{"id": "a", "optimizers": "two"}'])
def test_what_is_no_request_is_dropped(tmp_path, content):
    with new_folder(tmp_path) as folder:
        (folder.path / "scale.json").write_text(content)
        assert take_request(folder) is None
        assert not (folder.path / "scale.json").exists()


def test_a_request_to_a_driver_that_died_is_not_heard_by_the_next_one(tmp_path):
    with new_folder(tmp_path) as folder:
        put_request(folder, ScaleRequest(id="a", optimizers=2))
    job = tiny_spec(tiny_content("qwen3_moe"), run="first", runs_dir=str(tmp_path), resume=True)
    with RunFolder.create(job) as resumed:
        assert take_request(resumed) is None


def test_the_command_prints_what_happened_and_exits_2_where_it_is_refused(tmp_path, capsys):
    command = ["scale", "first", "--optimizers", "3", "--runs-dir", str(tmp_path)]
    with new_folder(tmp_path) as folder:
        with driver(folder, DONE, **SCALED):
            assert run_command(command) == 0
        assert capsys.readouterr().out == (
            "first: 1 to 3 optimizer actors after step 7: 3 arenas of 3.0 MiB handed over in "
            "0.012 s, 0 bytes copied\n"
        )
        with driver(folder, DONE, **SCALED):
            assert run_command([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out).items() >= ({"run": "first"} | SCALED).items()
        with driver(folder, REFUSED, reason="4 CPUs are free"):
            assert run_command(command) == 2
        assert capsys.readouterr() == ("", "flatpeak: 4 CPUs are free\n")
