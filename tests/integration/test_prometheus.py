"""A real Prometheus that scrapes a real run: every panel and every rule has data."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from driven_run import PATIENCE_S, Driver, driving, tiny_job
from flatpeak.controller.dashboards import dashboards
from flatpeak.controller.metrics import RunMetrics
from flatpeak.workers.metrics import Serving

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
SCRAPE_S = 1

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not on the PATH; Debian's package of that name has it",
)


@contextmanager
def prometheus(
    folder: Path, targets: str, *, name: str = "prometheus.yaml", token: Path | None = None
) -> Iterator[str]:
    """Scrapes what `targets` lists as the configuration `name` of `deploy/` says, with the rules
    there; `token` is the file that it reads. Yields the API's address."""
    config = yaml.safe_load((DEPLOY / name).read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(DEPLOY / "rules.yaml")]
    (job,) = config["scrape_configs"]
    job["scrape_timeout"] = f"{SCRAPE_S}s"
    (discovery,) = job["http_sd_configs"]
    discovery |= {"url": f"http://{targets}/targets", "refresh_interval": "1s"}
    for asks in (each for each in (job, discovery) if "authorization" in each):
        asks["authorization"]["credentials_file"] = str(token)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://{address}/api/v1"
        finally:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def query(api: str, expr: str) -> list[dict[str, Any]]:
    url = f"{api}/query?{urllib.parse.urlencode({'query': expr})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from None
    except OSError:
        return []  # it is not up yet


def eventually(what: str, found: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S / 2
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def panel_queries() -> list[str]:
    """Of all panels and variables, as Grafana asks them about run `tiny`."""
    asked = []
    for board in dashboards():
        exprs = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        variables = [v["query"]["query"] for v in board["templating"]["list"][1:]]
        exprs += [re.fullmatch(r"label_values\((.*), \w+\)", text)[1] for text in variables]  # type: ignore[index]
        asked += exprs
    fill = {"$run": "tiny", "$rank": ".*", "$__rate_interval": f"{5 * SCRAPE_S}s"}
    for name, value in fill.items():
        asked = [expr.replace(name, value) for expr in asked]
    return sorted(set(asked))


def rule_queries() -> list[str]:
    """The recorded series, and of each alert what it looks at, whatever the comparison says."""
    rules = [
        rule
        for group in yaml.safe_load((DEPLOY / "rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    recorded = [rule["record"] for rule in rules if "record" in rule]
    sides = [
        side
        for rule in rules
        if "alert" in rule
        for side in re.split(r" (?:>|==|<|and(?: on \(run\))?) ", rule["expr"])
    ]
    return [*recorded, *(side for side in sides if re.search("[a-z]", side))]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    job = tiny_job(
        tmp_path,
        train={"steps": 5000},
        cluster={"workers": 2},
        parallel={"expert": 2},
        memory={
            "device_budget_bytes": 2**30,
            "dispatch": {"budget_bytes": 2**27, "receive_rows": 4096},
        },
        snapshots={"every_steps": 1000},
    )
    with driving(job, tmp_path) as driver:
        yield driver


@pytest.mark.timeout(400)
def test_panels_and_rules_have_data_and_the_dead_have_none(driver: Driver, tmp_path: Path):
    targets = driver.wait_for(kind="metrics")["detail"]["address"]
    with prometheus(tmp_path, targets) as api:
        eventually("four processes are scraped", lambda: len(query(api, "up == 1")) == 4)
        assert len(panel_queries()) > 25
        for expr in [*panel_queries(), *rule_queries()]:
            eventually(f"no data for {expr}", lambda expr=expr: query(api, expr))
        assert query(api, 'ALERTS{alertname!="FlatpeakWaitsForOptimizer"}') == []
        driver.kill_actor("worker-1")
        gone = 'flatpeak_worker_step_seconds{rank="1"}'
        eventually("the series of the dead end", lambda: not query(api, gone))
        assert driver.end().code == 4


def test_the_configuration_for_kubernetes_shows_the_token(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("a-word\n")
    run = RunMetrics(tiny_job(tmp_path))
    targets = run.serve(Serving(token="a-word")).detail["address"]
    try:
        with prometheus(tmp_path, targets, name="kubernetes.yaml", token=token) as api:
            up = 'up{job="flatpeak", role="controller"} == 1'
            eventually("the controller is scraped", lambda: query(api, up))
    finally:
        run.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "prometheus.yaml"],
        ["check", "config", "--syntax-only", "kubernetes.yaml"],  # the token is not here
        ["check", "rules", "rules.yaml"],
        ["test", "rules", "rules_test.yaml"],
    ],
    ids=["configuration", "kubernetes", "rules", "alerts"],
)
def test_promtool_accepts(arguments: list[str]):
    done = subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
