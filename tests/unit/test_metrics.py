import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flatpeak.controller.metrics import RunMetrics, serving_of
from flatpeak.controller.runs import RunEvent
from flatpeak.controller.spec import MetricsSpec
from flatpeak.workers.boundaries import BoundaryStats
from flatpeak.workers.dispatch import DispatchReport
from flatpeak.workers.errors import ClusterError, SpecError
from flatpeak.workers.memory import PeakMeter, scope
from flatpeak.workers.metrics import (
    METRICS,
    MetricsServer,
    ProcessMetrics,
    Serving,
    WindowPeak,
)
from flatpeak.workers.metrics.names import PROCESS_LABELS
from flatpeak.workers.metrics.roles import WorkerMetrics
from flatpeak.workers.refresh import RefreshReport
from flatpeak.workers.trainer import StepResult
from local_run import tiny_spec
from sample_run import STEP
from tiny_models import tiny_content

RESULT = StepResult(
    step=3,
    loss=2.5,
    grad_norm=1.0,
    targets=8,
    tokens=8,
    seconds=0.25,
    dispatch=DispatchReport(imbalance_before=2.0, imbalance_after=1.1, chunks=3, planned_bytes=77),
    refresh=RefreshReport(buckets=5, overlapped_buckets=4, exposed_s=0.125),
    boundaries=BoundaryStats(offloaded_bytes=11, kept_bytes=2, slab_bytes=9),
    peaks={"dispatch": 100, "total": 300},
    planned={"boundaries": 120},
    waited_s=0.0625,
)
RECORD = replace(STEP, step=3, tokens=64, step_seconds=0.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def values(metrics: ProcessMetrics) -> dict[tuple[str, ...], float]:
    """By name without prefix, and the labels that are not the process's."""
    return samples(generate_latest(metrics.registry).decode())


def samples(text: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in PROCESS_LABELS}
            found[sample.name.removeprefix("flatpeak_"), *labels.values()] = sample.value
    return {key: value for key, value in found.items() if not key[0].endswith("_created")}


def worker_metrics() -> WorkerMetrics:
    spec = tiny_spec(
        tiny_content("qwen3_moe"),
        memory={"device_budget_bytes": 1000, "dispatch": {"receive_rows": 64}},
    )
    return WorkerMetrics(spec, 1, generation=2)


def test_names_keep_the_rules_of_prometheus():
    units = ("bytes", "seconds", "ratio", "rows", "total", "steps")
    plain = {"step", "loss", "learning_rate", "gradient_norm", "buckets", "overlapped_buckets"}
    plain |= {"dispatch_chunks", "dispatch_foreign_experts", "snapshot_step", "optimizer_step"}
    for metric in METRICS.values():
        assert metric.name.rsplit("_", 1)[-1] in units or metric.name in plain, metric.name
        assert metric.full_name == f"flatpeak_{metric.name}".lower()
        assert not {"step", "pid", "actor", "id"} & {*metric.labels}


def exported() -> list[ProcessMetrics]:
    """The metrics of all roles, every one with a value."""
    made = []
    for role in ("controller", "worker", "optimizer"):
        metrics = ProcessMetrics(run="r", role=role)
        for metric in METRICS.values():
            if metric.role == role:
                put = metrics.add if metric.is_counter else metrics.set
                put(metric.name, 1.0, *metric.labels)
        made.append(metrics)
    return made


def test_what_is_exported_passes_the_linter_of_prometheus():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on the PATH; it comes with Prometheus")
    for metrics in exported():
        text = generate_latest(metrics.registry)
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_a_worker_exports_its_last_step():
    metrics = worker_metrics()
    metrics.observe(RESULT)
    assert values(metrics) == {
        ("peak_window_bytes", "dispatch"): 100,
        ("peak_window_bytes", "total"): 300,
        ("peak_last_step_bytes", "dispatch"): 100,
        ("peak_last_step_bytes", "total"): 300,
        ("peak_lifetime_bytes", "dispatch"): 100,
        ("peak_lifetime_bytes", "total"): 300,
        ("planned_peak_bytes", "boundaries"): 120,
        ("dispatch_planned_bytes",): 77,
        ("dispatch_budget_bytes",): 125,
        ("device_budget_bytes",): 1000,
        ("worker_step_seconds",): 0.25,
        ("optimizer_exposed_seconds",): 0.125,
        ("peer_wait_seconds",): 0.0625,
        ("buckets",): 5,
        ("overlapped_buckets",): 4,
        ("dispatch_imbalance_before_ratio",): 2.0,
        ("dispatch_imbalance_after_ratio",): 1.1,
        ("dispatch_chunks",): 3,
        ("dispatch_foreign_experts",): 0,
        ("dispatch_received_rows",): 0,
        ("dispatch_receive_cap_rows",): 64,
        ("boundaries_offloaded_bytes",): 11,
        ("boundaries_kept_bytes",): 2,
        ("boundaries_slab_bytes",): 9,
    }
    assert metrics.labels == {"run": "tiny", "role": "worker", "rank": "1", "generation": "2"}


def test_a_spike_stays_in_the_window_and_in_the_lifetime_whoever_has_read_it():
    metrics = worker_metrics()
    for peak in (100, 900, 100):
        metrics.observe(replace(RESULT, peaks={"dispatch": peak}))
    first, second = values(metrics), values(metrics)
    assert first == second
    assert first["peak_window_bytes", "dispatch"] == 900
    assert first["peak_lifetime_bytes", "dispatch"] == 900
    assert first["peak_last_step_bytes", "dispatch"] == 100


class Scraper(threading.Thread):
    """Reads over HTTP every 0.4 s from `offset_s` on, until it is told to stop."""

    def __init__(self, server: MetricsServer, *, offset_s: float) -> None:
        super().__init__()
        self.url, self.offset_s = f"http://{server.address}/metrics", offset_s
        self.seen: list[dict[tuple[str, ...], float]] = []
        self.stop = threading.Event()

    def run(self) -> None:
        self.stop.wait(self.offset_s)
        while not self.stop.wait(0.4):
            self.seen.append(samples(fetch(self.url)[1].decode()))


def test_a_spike_of_50_ms_between_two_scrapes_is_seen_alike_by_scrapers_at_different_offsets():
    metrics, meter, spike = worker_metrics(), PeakMeter(), 64 * 2**20
    server = MetricsServer(Serving(), metrics.registry, pages={})
    scrapers = [Scraper(server, offset_s=offset) for offset in (0.0, 0.2)]

    def step(nbytes: int) -> None:
        with meter:
            meter.reset_peaks()
            with scope("dispatch"):
                held = torch.empty(nbytes, dtype=torch.uint8)
                time.sleep(0.05)
                del held
        metrics.observe(replace(RESULT, peaks=meter.peaks()))

    def scraped(number: int) -> bool:
        return all(len(scraper.seen) >= number for scraper in scrapers)

    try:
        step(1000)
        for scraper in scrapers:
            scraper.start()
        wait_until(lambda: scraped(1))
        before = [len(scraper.seen) for scraper in scrapers]
        step(spike)
        step(1000)
        wait_until(lambda: scraped(max(before) + 2))
    finally:
        for scraper in scrapers:
            scraper.stop.set()
            scraper.join()
        server.close()
    (first, second), key = ((s.seen for s in scrapers), ("peak_window_bytes", "dispatch"))
    assert [seen[0][key] for seen in (first, second)] == [1000, 1000]
    assert [seen[-1][key] for seen in (first, second)] == [spike, spike]
    assert first[-1] == second[-1]
    assert first[-1]["peak_lifetime_bytes", "dispatch"] == spike
    # Which of them came just then does not matter: the spike was over for all later ones.
    assert first[-1]["peak_last_step_bytes", "dispatch"] == 1000


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_window_forgets_what_is_older_but_never_the_newest():
    clock = Clock()
    window = WindowPeak(10.0, clock=clock)
    assert window.peak() == 0
    for now, value, expected in ((0, 5, 5), (4, 9, 9), (6, 3, 9), (13, 4, 9), (15, 1, 4)):
        clock.now = now
        window.record(value)
        assert window.peak() == expected
    clock.now = 24
    assert window.peak() == 1  # 4 was recorded at 13
    clock.now = 1000
    assert window.peak() == 1


def test_the_controller_exports_the_run():
    metrics = RunMetrics(tiny_spec(tiny_content("qwen3_moe"), train={"steps": 9}))
    metrics.observe(RECORD)
    metrics.observe(replace(RECORD, step=4, skipped=True, step_seconds=1.5, loss=float("nan")))
    metrics.observe(RunEvent(kind="snapshot", time=123.0, detail={"step": 4, "folder": "x"}))
    found = values(metrics)
    assert found["target_steps",] == 9
    assert found["step",] == 4
    assert found["loss",] != found["loss",]
    assert found["tokens_total",] == 128
    assert found["skipped_steps_total",] == 1
    assert found["step_median_seconds",] == 1.0
    assert (found["snapshot_step",], found["snapshot_timestamp_seconds",]) == (4, 123.0)
    assert found["events_total", "snapshot"] == 1


def fetch(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=10
        ) as got:
            return got.status, got.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture
def server():
    metrics = worker_metrics()
    metrics.observe(RESULT)
    serving = Serving(token="secret-word")
    server = MetricsServer(serving, metrics.registry, pages={"/health": lambda: {"fine": True}})
    yield server
    server.close()


def test_a_server_asks_for_its_token_except_for_its_health(server: MetricsServer):
    base = f"http://{server.address}"
    assert fetch(f"{base}/health") == (200, b'{"fine": true}')
    assert fetch(f"{base}/metrics")[0] == 401
    assert fetch(f"{base}/metrics", Authorization="Bearer other")[0] == 401
    status, text = fetch(f"{base}/metrics", Authorization="Bearer secret-word")
    assert status == 200
    assert b'flatpeak_peak_last_step_bytes{component="dispatch"' in text


def test_a_server_answers_what_it_does_not_have(server: MetricsServer):
    status, text = fetch(f"http://{server.address}/else", Authorization="Bearer secret-word")
    assert status == 404
    assert json.loads(text)["error"] == "there is /metrics, /health"


def test_a_server_listens_on_loopback_alone(server: MetricsServer):
    assert server.host == "127.0.0.1"


def test_a_port_in_use_is_an_error_of_the_server_and_a_warning_of_the_run():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serving = Serving(port=taken.getsockname()[1])
        metrics = RunMetrics(tiny_spec(tiny_content("qwen3_moe")))
        with pytest.raises(ClusterError, match=r"metrics\.port"):
            MetricsServer(serving, metrics.registry, pages={})
        warning = metrics.serve(serving)
    assert warning.kind == "warning"
    assert f"127.0.0.1:{serving.port}" in warning.detail["text"]


def test_targets_are_those_of_the_living():
    metrics = RunMetrics(tiny_spec(tiny_content("qwen3_moe")))
    event = metrics.serve(Serving())
    try:
        metrics.add_target("worker 0", "127.0.0.1:1", {"run": "tiny", "role": "worker"})
        for index in (0, 1):
            labels = {"run": "tiny", "role": "optimizer", "rank": str(index)}
            metrics.add_target(f"optimizer {index}", f"127.0.0.1:{2 + index}", labels)
        for kind, actor in (("worker_lost", "worker 1"), ("optimizer_lost", "optimizer 0")):
            lost = {"actor": actor, "step": 1, "reason": "died"}
            metrics.observe(RunEvent(kind=kind, time=0.0, detail=lost))
        _, text = fetch(f"http://{event.detail['address']}/targets")
        assert json.loads(text) == [
            {"targets": [event.detail["address"]], "labels": metrics.labels},
            {"targets": ["127.0.0.1:3"], "labels": labels},
        ]
        _, health = fetch(f"http://{event.detail['address']}/health")
        assert json.loads(health)["processes"] == ["controller", "optimizer 1"]
    finally:
        metrics.close()


def test_a_token_comes_out_of_its_file(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("a-word\n")
    spec = MetricsSpec(token_file=str(path), port=9400)
    assert serving_of(spec) == Serving(port=9400, token="a-word")
    assert serving_of(MetricsSpec(export=False)) is None


@pytest.mark.parametrize("content", [None, "", " \n", "two words", "wörd"])
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: str | None):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=r"metrics\.token_file"):
        serving_of(MetricsSpec(token_file=str(path)))
