"""What a step costs more while it is exported and scraped: CPU and wall seconds, with and without.

One process trains a small model of experts, one rank on one thread. Three kinds of steps alternate:

plain: the step alone.
exported: the step, whose results then go into the registries of a worker and of a controller, while
    `scrapers` processes each read both and the list of targets once a second.
metered: the step, with the memory of every tensor watched, as peaks are on the CPU. On a GPU they
    are read off the allocator instead.

Losses must be those of a fourth training in which nothing is measured, and each scraper's last page
must hold the last step's peak; where they do not, nothing is reported of speed.

`export_share` is the CPU time of the exporting itself, in the training thread and in the servers'
threads, over the CPU time of a plain step. The other ratios are medians over the rounds of a step
over the plain one beside it; they hold the noise of the machine as well.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from flatpeak.controller.bench import check_ranges
from flatpeak.controller.metrics import RunMetrics
from flatpeak.controller.spec import Spec
from flatpeak.controller.step_results import step_record
from flatpeak.workers.metrics import MetricsServer, Serving
from flatpeak.workers.metrics.roles import WorkerMetrics
from flatpeak.workers.trainer import StepResult
from local_run import LocalRun, job

DEFAULTS = {
    "hidden": 128,
    "layers": 4,
    "sequence_length": 512,
    "sequences": 2,
    "rounds": 15,
    "scrapers": 2,
}
WARM_UP = 2
KINDS = ("plain", "exported", "metered")
SCRAPER = """
import json, sys, time, urllib.request
from pathlib import Path
worker, controller, going, page = sys.argv[1:]
urls = [f"http://{worker}/metrics", f"http://{controller}/metrics", f"http://{controller}/targets"]
while True:
    if Path(going).exists():
        texts = [urllib.request.urlopen(url, timeout=10).read().decode() for url in urls]
        with open(page, "a") as file:
            file.write(json.dumps(texts) + "\\n")
    time.sleep(1)
"""


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    check_ranges(config, dict.fromkeys(config, (1, inf)) | {"rounds": (2, inf)})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                return measure(config, Path(folder))
            finally:
                dist.destroy_process_group()
    finally:
        torch.set_num_threads(threads)


def measure(config: dict, folder: Path) -> tuple[bool, list[dict], dict[str, float | None]]:
    bench = Bench(config, folder)
    try:
        rounds = [bench.round(number) for number in range(WARM_UP + config["rounds"])][WARM_UP:]
        exact = bench.agrees()
    finally:
        bench.close()
    rows = [row_of(kind, [each[kind] for each in rounds]) for kind in KINDS]
    rows[1] |= bench.traffic()
    plain = statistics.median(each["plain"].cpu_s for each in rounds)
    exporting = statistics.median(
        each["exported"].beside_s - each["plain"].beside_s for each in rounds
    )
    ratios: dict[str, float | None] = {"export_share": exporting / plain}
    for kind in KINDS[1:]:
        for clock in ("cpu_s", "wall_s"):
            pairs = [getattr(each[kind], clock) / getattr(each["plain"], clock) for each in rounds]
            ratios[f"{kind}_{clock.removesuffix('_s')}"] = statistics.median(pairs)
    return exact, rows, ratios


def spec_of(config: dict, steps: int, *, peaks: bool) -> Spec:
    hidden = config["hidden"]
    return job(
        "qwen3_moe",
        model={
            "hidden_size": hidden,
            "moe_intermediate_size": hidden,
            "num_hidden_layers": config["layers"],
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "head_dim": hidden // 4,
        },
        train={
            "steps": steps,
            "sequences_per_step": config["sequences"],
            "sequence_length": config["sequence_length"],
        },
        memory={"optimizer": {"bucket_parameters": 100_000}},
        metrics={"peaks": peaks},
    )


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float
    """Of the whole process."""
    beside_s: float
    """Of that, what is not the step's own: exporting, and all other threads."""


class Bench:
    """The trainings, and the processes that scrape them."""

    def __init__(self, config: dict, folder: Path) -> None:
        steps = WARM_UP + config["rounds"]
        self.spec = spec_of(config, steps, peaks=False)
        specs = {kind: spec_of(config, steps, peaks=kind == "metered") for kind in KINDS}
        self.runs = {kind: made(specs[kind], folder / kind) for kind in KINDS}
        self.alone = made(self.spec, folder / "alone")
        self.worker, self.controller = WorkerMetrics(self.spec, 0), RunMetrics(self.spec)
        self.servers = [
            MetricsServer(Serving(), metrics.registry, pages={"/targets": self.controller.targets})
            for metrics in (self.worker, self.controller)
        ]
        for metrics, server in zip((self.worker, self.controller), self.servers, strict=True):
            self.controller.add_target(metrics.labels["role"], server.address, metrics.labels)
        self.going = folder / "going"
        self.pages = [folder / f"page-{number}" for number in range(config["scrapers"])]
        addresses = [server.address for server in self.servers]
        self.scrapers = [
            subprocess.Popen([sys.executable, "-c", SCRAPER, *addresses, self.going, page])
            for page in self.pages
        ]

    def round(self, number: int) -> dict[str, Cost]:
        """One step of each kind, first those that go last in the next round."""
        steps: dict[str, Callable[[], Cost]] = {
            kind: lambda kind=kind: cost_of(self.runs[kind].train_step) for kind in KINDS
        }
        steps["exported"] = self.exported
        costs = {kind: steps[kind]() for kind in (KINDS if number % 2 else reversed(KINDS))}
        self.alone.train_step()
        return costs

    def exported(self) -> Cost:
        self.going.touch()
        cost = cost_of(self.runs["exported"].train_step, then=self.export)
        self.going.unlink()
        return cost

    def export(self, result: StepResult) -> None:
        # As if it had been metered: without peaks there would be less to export.
        metered = self.runs["metered"].outcome.results
        peaks = metered[-1].peaks if metered else {}
        result = StepResult(**vars(result) | {"peaks": peaks})
        self.worker.observe(result)
        self.controller.observe(step_record(self.spec, [result], 1e-3, result.seconds))

    def agrees(self) -> bool:
        """Whether nothing that is measured changes the training, and every scraper saw its end."""
        losses = [run.outcome.losses for run in (*self.runs.values(), self.alone)]
        peak = self.runs["metered"].outcome.results[-1].peaks["total"]
        self.export(self.runs["exported"].outcome.results[-1])
        wanted = {
            "flatpeak_peak_last_step_bytes": peak,
            "flatpeak_loss": self.runs["exported"].outcome.losses[-1],
        }
        self.going.touch()
        before = [self.scrapes(page) for page in self.pages]
        deadline = time.monotonic() + 60
        while any(self.scrapes(p) < n + 2 for p, n in zip(self.pages, before, strict=True)):
            assert time.monotonic() < deadline, "no scrape within 60 s"
            time.sleep(0.1)
        self.going.unlink()
        return losses == losses[:1] * len(losses) and all(
            total_of(name, last_page(page)) == value
            for page in self.pages
            for name, value in wanted.items()
        )

    def scrapes(self, page: Path) -> int:
        return page.read_bytes().count(b"\n") if page.exists() else 0

    def traffic(self) -> dict[str, Any]:
        texts = json.loads(self.pages[0].read_text().splitlines()[-1])
        return {
            "scrapes": sum(self.scrapes(page) for page in self.pages),
            "scrape_bytes": sum(len(text) for text in texts),
        }

    def close(self) -> None:
        for scraper in self.scrapers:
            scraper.kill()
            scraper.wait()
        for server in self.servers:
            server.close()
        for run in (*self.runs.values(), self.alone):
            run.close()


def made(spec: Spec, folder: Path) -> LocalRun:
    folder.mkdir()
    return LocalRun(0, spec, str(folder))


def cost_of(
    step: Callable[[], StepResult], *, then: Callable[[StepResult], None] = lambda result: None
) -> Cost:
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    result = step()
    own = time.thread_time() - thread
    then(result)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall_s=wall, cpu_s=cpu, beside_s=cpu - own)


def last_page(page: Path) -> str:
    worker, controller, _ = json.loads(page.read_text().splitlines()[-1])
    return worker + controller


def total_of(name: str, text: str) -> float | None:
    """The value of a metric, of the total where it has components."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("component", "total") == "total":
                return sample.value
    return None


def row_of(kind: str, costs: list[Cost]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": kind}
    for clock in ("wall_s", "cpu_s", "beside_s"):
        values = [getattr(cost, clock) for cost in costs]
        row |= {clock: statistics.median(values)}
        if clock != "beside_s":
            row |= {f"{clock}_min": min(values), f"{clock}_max": max(values)}
    return row
