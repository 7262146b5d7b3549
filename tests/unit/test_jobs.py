"""Submission to a cluster: what is sent, what is refused, and a run as its job shows it."""

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import flatpeak.controller.cli
import flatpeak.kernels.adamw.host
import flatpeak.workers.arena
from fake_cluster import DRIVER, TOKEN, JobServer, OneJob, job_details, job_server
from flatpeak.controller.cli import run_command
from flatpeak.controller.jobs import client as client_module
from flatpeak.controller.jobs import submitted as submitted_module
from flatpeak.controller.jobs.access import authorization, job_address
from flatpeak.controller.jobs.request import given_environment
from flatpeak.controller.jobs.submit import packed
from flatpeak.controller.jobs.submitted import SubmittedRun
from flatpeak.controller.runs import RunEvent, RunState, Summary
from flatpeak.controller.spec_file import load_spec
from flatpeak.controller.strict_json import to_json
from flatpeak.workers.errors import ClusterError, DoesNotFit, InputError, RunFailed, WaitTimeout
from sample_run import STEP

EVENT = RunEvent(kind="snapshot", time=1.0, detail={"step": 1, "folder": "/shared/x"})
SUMMARY = Summary(run="tiny", folder="/shared/tiny", steps=9, loss=float("nan"), seconds=3.0)


def line(record: Any) -> str:
    kind = {RunEvent: "event", Summary: "summary"}.get(type(record), "step")
    return to_json({"type": kind} | asdict(record)) + "\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with job_server() as server:
        yield server


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init"]) == 0
    capsys.readouterr()
    return "job.yaml"


def submitting(job_file: str, server: JobServer, *arguments: str) -> list[str]:
    command = ["submit", job_file, "--address", server.url, "--set", "runs_dir=/shared/runs"]
    return [*command, "--set", "run=tiny", *arguments]


# What is sent


def test_a_submission_sends_the_spec_the_code_and_the_command(job_file, server, capsys):
    environment = ("--env", "NCCL_DEBUG=INFO", "--env", "RAY_AUTH_TOKEN")
    assert run_command(submitting(job_file, server, *environment, "--python", "python3.11")) == 0
    [job] = server.submitted
    assert job["submission_id"] == "flatpeak-tiny-1"
    assert job["entrypoint"] == "exec python3.11 -m flatpeak.controller train job.yaml --json"
    assert job["metadata"]["flatpeak_folder"] == "/shared/runs/tiny"
    environment = job["runtime_env"]
    assert environment["working_dir"].startswith("gcs://")
    assert [uri[:6] for uri in environment["py_modules"]] == ["gcs://"]
    assert environment["env_vars"] == {
        "NCCL_DEBUG": "INFO",
        "RAY_AUTH_TOKEN": TOKEN,
        # start_timeout_s, two steps of step_timeout_s, and the end itself.
        "RAY_JOB_STOP_WAIT_TIME_S": str(120 + 2 * 1800 + 120),
    }
    out = capsys.readouterr().out
    assert f"flatpeak watch tiny --address {server.url}" in out


def test_every_part_is_packed_from_where_python_finds_it(job_file):
    spec = load_spec(job_file, ["cluster.address=auto", "run=tiny"])
    with packed(spec) as (code, folder):
        for module in (
            flatpeak.controller.cli,
            flatpeak.workers.arena,
            flatpeak.kernels.adamw.host,
        ):
            found = Path(str(module.__file__))
            inside = module.__name__.split(".")[1:-1]
            assert code.joinpath(*inside, found.name).read_bytes() == found.read_bytes()
        assert (code / "kernels/adamw/host.cpp").is_file()
        assert not [*code.rglob("__pycache__")]
        assert load_spec(folder / "job.yaml") == spec
        kept = code
    assert not kept.exists()


# What is refused


def test_a_spec_with_relative_paths_is_refused_with_their_names(job_file, server, capsys):
    command = ["submit", job_file, "--address", server.url, "--set", "data.source=corpus.txt"]
    assert run_command(command) == 2
    err = capsys.readouterr().err
    assert "relative are runs_dir = runs, data.source = corpus.txt; set each like" in err
    assert "--set runs_dir=/shared/runs" in err
    assert server.requests == []


def test_a_submission_to_nowhere_is_refused(job_file, server, capsys):
    assert run_command(["submit", job_file, "--set", "runs_dir=/shared/runs"]) == 2
    assert "give the cluster's dashboard by --address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "environment", "address"),
    [
        ("http://head:8265/", {}, "http://head:8265"),
        ("https://rays.example.org/a/b", {}, "https://rays.example.org/a/b"),
        ("10.0.0.7:8265", {}, "http://10.0.0.7:8265"),
        ("http://[::1]:8265", {}, "http://[::1]:8265"),
        ("http://a", {"RAY_API_SERVER_ADDRESS": "http://b"}, "http://a"),
        (None, {"RAY_API_SERVER_ADDRESS": "http://b", "RAY_ADDRESS": "http://c"}, "http://b"),
        (None, {"RAY_ADDRESS": "http://c:1"}, "http://c:1"),
        (None, {"RAY_ADDRESS": "10.0.0.7:6379"}, None),
        (None, {}, None),
    ],
)
def test_the_address_is_that_of_the_option_or_of_rays_variables(given, environment, address):
    assert job_address(given, environment) == address


@pytest.mark.parametrize(
    "given", ["ray://head:10001", "http://", "http://a b:1", "http://a:x", "http://a:99999", ""]
)
def test_what_is_no_address_of_a_job_server_is_refused(given):
    with pytest.raises(InputError, match=r"give that of the cluster's dashboard, like http://HEAD"):
        job_address(given, {})


def test_the_token_is_looked_for_where_ray_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert authorization({}) == {}
    with pytest.raises(InputError, match=r"RAY_AUTH_MODE is token, but there is none"):
        authorization({"RAY_AUTH_MODE": "token"})
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("of-home\n")
    (tmp_path / "other").write_text("of-file\n")
    named = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}
    assert authorization({}) == {"Authorization": "Bearer of-home"}
    assert authorization(named) == {"Authorization": "Bearer of-file"}
    assert authorization(named | {"RAY_AUTH_TOKEN": "x"}) == {"Authorization": "Bearer x"}
    assert authorization({"RAY_AUTH_MODE": "disabled"}) == {}
    with pytest.raises(InputError, match=r"absent: No such file"):
        authorization({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "absent")})


@pytest.mark.parametrize("token", ["two words", "two\nlines", "naïve"])
def test_a_token_that_is_no_word_is_refused_and_not_shown(token):
    with pytest.raises(InputError, match=r"is not one word of printable ASCII$") as caught:
        authorization({"RAY_AUTH_TOKEN": token})
    assert token[:3] not in str(caught.value)


@pytest.mark.parametrize("given", ["A-B=1", "=1", "ABSENT_HERE"])
def test_what_is_no_variable_is_refused(given):
    with pytest.raises(InputError, match="names no variable"):
        given_environment([given], {"HERE": "1"})


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"broken": (404, "nothing here")}, 4, "no job server of Ray answers at http://127"),
        ({"broken": (200, "<html>")}, 4, "no job server of Ray answers at http://127"),
        ({"broken": (200, "{}")}, 4, "no job server of Ray answers at http://127"),
        ({"broken": (502, "bad gateway")}, 4, "502 Server Error"),
        ({"versions": ("2.59.0", "3.11.7")}, 2, "has Ray 2.59.0 and Python 3.11.7, here are Ray"),
        ({"versions": (None, "3.8.1")}, 2, "and Python 3.8.1, here are Ray"),
        ({"jobs": [job_details("tiny", "RUNNING")]}, 2, "the run tiny is going on at http://127"),
        ({"jobs": [job_details("tiny", "PENDING")]}, 2, "(pending, job flatpeak-tiny-1); end it"),
    ],
    ids=["404", "page", "other JSON", "gateway", "Ray", "Python", "running", "pending"],
)
def test_a_cluster_that_cannot_take_the_run_is_one_message(
    job_file, server, capsys, changes, code, message
):
    for name, value in changes.items():
        setattr(server, name, value)
    if "versions" in changes and None in changes["versions"]:
        server.versions = (client_module.ray.__version__, changes["versions"][1])
    assert run_command(submitting(job_file, server)) == code
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert {method for method, _ in server.requests} == {"GET"}, "something was sent"


@pytest.mark.parametrize(
    ("token", "message"), [("wrong", "Invalid authentication token"), (None, "Missing")]
)
def test_a_token_that_is_refused_is_one_message(server, monkeypatch, capsys, token, message):
    monkeypatch.setenv("RAY_AUTH_TOKEN", token or "")
    monkeypatch.setenv("RAY_AUTH_MODE", "token" if token else "disabled")
    assert run_command(["status", "--address", server.url]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "put its token into ~/.ray/auth_token" in err
    assert err.count("\n") == 1


def test_an_address_where_nobody_listens_is_one_message(server, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert run_command(["stop", "tiny", "--address", f"http://127.0.0.1:{port}"]) == 4
    err = capsys.readouterr().err
    assert f"no job server of Ray answers at http://127.0.0.1:{port}" in err
    assert err.count("\n") == 1


def test_a_job_server_that_does_not_answer_is_not_waited_for(server, monkeypatch, capsys):
    monkeypatch.setattr(client_module, "_ANSWER_S", 0.2)
    server.delay_s = 1.0
    assert run_command(["status", "--address", server.url]) == 4
    assert "did not answer GET /api/version within 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "watch", "logs", "stop"])
def test_a_run_that_was_not_submitted_is_refused_with_those_that_were(server, capsys, command):
    strange = job_details("x", "RUNNING", metadata={"somebody": "else"})
    server.jobs = [job_details("b", "RUNNING"), job_details("a", "RUNNING"), strange]
    assert run_command([command, "tiny", "--address", server.url]) == 2
    assert "no run 'tiny' was submitted to http://127" in (err := capsys.readouterr().err)
    assert err.endswith("; there are a, b\n")


def test_a_name_is_free_until_a_run_of_it_has_begun(job_file, server, capsys):
    server.jobs = [job_details("tiny", "FAILED", driver_exit_code=2)]
    assert run_command(submitting(job_file, server)) == 0
    assert server.submitted[-1]["submission_id"] == "flatpeak-tiny-2"
    server.jobs.append(job_details("tiny", "SUCCEEDED", number=2))
    server.logs["flatpeak-tiny-2"] = ["Running entrypoint", line(EVENT), line(SUMMARY)]
    capsys.readouterr()
    assert run_command(submitting(job_file, server)) == 2
    err = capsys.readouterr().err
    assert "the run tiny exists at http://127" in err
    assert "(done, in /shared/tiny); go on with it by --resume" in err
    assert run_command(submitting(job_file, server, "--resume")) == 0
    assert server.submitted[-1]["submission_id"] == "flatpeak-tiny-3"


def test_of_two_that_submit_one_run_at_once_one_is_refused(job_file, server, capsys):
    # Its metadata are not ours, so the job is not seen before, as if it came in between.
    server.jobs = [job_details("tiny", "RUNNING", metadata={})]
    assert run_command(submitting(job_file, server)) == 2
    assert "the run tiny is being submitted by another" in capsys.readouterr().err


def test_status_lists_the_newest_job_of_each_run(server, capsys):
    server.jobs = [
        job_details("b", "RUNNING", driver_info=DRIVER),
        job_details("a", "SUCCEEDED", number=2),
        job_details("a", "FAILED"),
    ]
    server.logs["flatpeak-a-1"] = [line(STEP)]
    assert run_command(["status", "--address", server.url, "--json"]) == 0
    a, b = map(json.loads, capsys.readouterr().out.splitlines())
    assert (a["run"], a["state"], a["job"], a["step"]) == ("a", "done", "flatpeak-a-2", 1)
    assert (b["state"], b["pid"], b["host"], b["steps"]) == ("running", 4711, "10.0.0.7", 9)


# A run as its job shows it


def run_of(client: OneJob) -> SubmittedRun:
    return SubmittedRun(client, str(client.job.submission_id), client.job.metadata)  # type: ignore[arg-type]


def test_following_gives_the_records_among_other_lines_however_they_are_cut():
    client = OneJob("SUCCEEDED")
    text = "Running entrypoint\n" + line(STEP) + '{"type": "x"}\n{"broken\n' + line(EVENT)
    second = line(replace(STEP, step=2, loss=float("nan")))
    client.chunks = [text[:40], text[40:300], text[300:], second]
    found = [record for record in run_of(client).follow() if record is not None]
    assert found[:2] == [STEP, EVENT]
    assert (found[2].step, str(found[2].loss)) == (2, "nan")  # type: ignore[union-attr]


def test_a_log_that_breaks_off_says_that_the_run_may_go_on():
    client = OneJob("RUNNING")
    client.chunks = [line(STEP)]
    with pytest.raises(ClusterError, match="the log of the run tiny broke off; it may well go on"):
        [*run_of(client).follow()]
    client.chunks = [line(STEP), RuntimeError("closed with code 1006")]
    with pytest.raises(ClusterError, match=r"went away: closed with code 1006; the run may well"):
        [*run_of(client).follow()]


@pytest.mark.parametrize(
    ("status", "code", "state"),
    [
        ("PENDING", None, RunState.PENDING),
        ("RUNNING", None, RunState.RUNNING),
        ("SUCCEEDED", 0, RunState.DONE),
        ("STOPPED", None, RunState.INTERRUPTED),
        ("FAILED", 130, RunState.INTERRUPTED),
        ("FAILED", 4, RunState.FAILED),
    ],
)
def test_the_state_is_that_of_the_job(status, code, state):
    found = run_of(OneJob(status, driver_exit_code=code)).status()
    assert (found.state, found.over) == (state, status not in ("PENDING", "RUNNING"))


@pytest.mark.parametrize(
    ("code", "log", "kind", "reason"),
    [
        (2, '{"error": {"message": "no corpus", "exit_code": 2}}\n', InputError, "no corpus"),
        (3, '{"error": {"message": "too large"}}\n', DoesNotFit, "too large"),
        (4, '{"error": {"message": "rank 3 died"}}\n', RunFailed, "rank 3 died"),
        (-9, line(STEP), RunFailed, "the driver ended with exit code -9: {"),
        (127, "sh: 1: python: not found\n", RunFailed, r"not found \(--python says by which"),
        (None, "", RunFailed, "Ray could not run the job: no such package"),
    ],
)
def test_a_failed_run_gives_the_reason_and_the_code_of_its_driver(code, log, kind, reason):
    error = run_of(OneJob("FAILED", log, driver_exit_code=code, message="no such package")).error()
    assert type(error) is kind
    with pytest.raises(kind, match=reason):
        raise error


def test_figures_are_found_below_many_other_lines():
    client = OneJob("RUNNING", line(STEP) + line(SUMMARY) + "noise\n" * 500)
    run = run_of(client)
    assert run.last_step() == STEP
    assert str(run.summary().loss) == "nan"  # type: ignore[union-attr]
    assert run.tails(1) == {"driver": ["noise"]}
    client.log = line(EVENT) + line(STEP) + '{"error": {"message": "m"}}\nflatpeak: m\n'
    [snapshot, step, words] = run.tails(20)["driver"]
    assert (snapshot, words) == ("snapshot of step 1", "flatpeak: m")
    assert step.startswith("step 1/9  loss 2.5000")


def test_a_stop_waits_for_the_driver_and_for_what_the_run_has_in_the_cluster(monkeypatch):
    monkeypatch.setattr(submitted_module, "_POLL_S", 0.01)
    client = OneJob("PENDING", job_id="04000000", driver_info=DRIVER)
    client.deaf, client.stopping = 2, ["RUNNING", "RUNNING", "STOPPED"]
    client.left = [["Controller (pid 5)"], []]
    assert run_of(client).stop(timeout_s=10) is RunState.INTERRUPTED
    assert (client.stops, client.stopping, client.left) == (1, [], [[]])
    assert run_of(client).stop(timeout_s=10) is RunState.INTERRUPTED
    assert client.stops == 1, "a run that has ended is left alone"


@pytest.mark.parametrize(
    ("states", "left", "who"),
    [
        (["RUNNING"], [[]], r"its driver \(pid 4711 on 10\.0\.0\.7\)"),
        (["STOPPED"], [["Worker (pid 5)", "placement group 7f"]], "Worker.*, placement group 7f"),
    ],
    ids=["driver", "actors"],
)
def test_a_stop_that_takes_too_long_says_who_is_still_there(monkeypatch, states, left, who):
    monkeypatch.setattr(submitted_module, "_POLL_S", 0.01)
    client = OneJob("RUNNING", job_id="04000000", driver_info=DRIVER)
    client.stopping, client.left = states, left
    with pytest.raises(WaitTimeout, match=rf"still there 0\.1 s .* stop: {who}; .*--timeout 0\.2"):
        run_of(client).stop(timeout_s=0.1)
