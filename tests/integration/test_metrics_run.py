"""Metrics of a real run, as a scraper sees them."""

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from driven_run import PATIENCE_S, driving, tiny_job


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def scrape(target: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """By name, rank, and component where there is one."""
    families = text_string_to_metric_families(get(f"http://{target['targets'][0]}/metrics"))
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = sample.labels
        assert labels.items() >= target["labels"].items()
        rest = [labels[name] for name in sorted(labels.keys() - {"run", "role", "rank"})]
        found[sample.name, labels["rank"], *rest] = sample.value
    return found


def test_every_process_of_a_run_is_listed_and_serves_what_it_did(tmp_path: Path):
    job = tiny_job(tmp_path, train={"steps": 500}, cluster={"workers": 2}, parallel={"expert": 2})
    with driving(job, tmp_path) as driver:
        address = driver.wait_for(kind="metrics")["detail"]["address"]
        driver.wait_for(step=2)
        targets = json.loads(get(f"http://{address}/targets"))
        roles = [(each["labels"]["role"], each["labels"]["rank"]) for each in targets]
        assert roles == [
            ("controller", "0"),
            ("worker", "0"),
            ("worker", "1"),
            ("optimizer", "0"),
        ]
        deadline = time.monotonic() + PATIENCE_S
        found = {}
        while ("flatpeak_step", "0") not in found:
            assert time.monotonic() < deadline
            for target in targets:
                found |= scrape(target)
        for rank in ("0", "1"):
            total = found["flatpeak_peak_window_bytes", rank, "total"]
            assert total >= found["flatpeak_peak_last_step_bytes", rank, "total"]
            assert total > found["flatpeak_peak_window_bytes", rank, "dispatch"]
        assert found["flatpeak_updated_buckets_total", "0"] >= 1
        assert found["flatpeak_target_steps", "0"] == 500
        before = {target["targets"][0] for target in targets}
        driver.kill_actor("worker-0")
        driver.wait_for(kind="workers_replaced")
        driver.wait_for(type="step")
        after = {target["targets"][0] for target in json.loads(get(f"http://{address}/targets"))}
        dead = before - after
        assert (len(dead), len(after)) == (2, 4)
        driver.signal(signal.SIGINT)
        assert driver.end().code == 130
    for gone in (address, *dead):
        try:
            get(f"http://{gone}/health")
        except OSError:
            continue
        raise AssertionError(f"{gone} still answers")


def test_a_run_without_export_serves_nothing(tmp_path: Path):
    with driving(tiny_job(tmp_path, metrics={"export": False}), tmp_path) as driver:
        ended = driver.end()
    assert ended.code == 0
    assert "metrics" not in ended.kinds()
