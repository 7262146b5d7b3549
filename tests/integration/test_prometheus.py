"""Real Prometheus servers that scrape a real run: every panel and every rule has data, two servers
see the same, and the series of a process end with it."""

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml

from driven_run import PATIENCE_S, Driver, driving, tiny_job
from flatpeak.controller.dashboards import dashboards
from flatpeak.controller.metrics import RunMetrics
from flatpeak.workers.metrics import Serving
from flatpeak.workers.metrics.names import PROCESS_LABELS

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
    folder.mkdir(exist_ok=True)
    config = yaml.safe_load((DEPLOY / name).read_text())
    config["global"] = {
        "scrape_interval": f"{SCRAPE_S}s",
        "evaluation_interval": f"{SCRAPE_S}s",
        # By these a server chooses when within the interval it scrapes.
        "external_labels": {"replica": folder.name},
    }
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


def ask(api: str, path: str, **parameters: str) -> Any:
    """What the API answers, None where it is not up yet."""
    url = f"{api}/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        with error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
    except OSError:
        return None


def query(api: str, expr: str, **at: str) -> list[dict[str, Any]]:
    data = ask(api, "query", query=expr, **at)
    return [] if data is None else data["result"]


def eventually(what: str, found: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S / 2
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def variables(api: str) -> dict[str, list[str]]:
    """The choices of each variable of the dashboards, asked for in their order, as Grafana does."""
    choices: dict[str, list[str]] = {}
    for variable in (v for board in dashboards() for v in board["templating"]["list"]):
        if variable["type"] == "datasource":
            continue
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert asked is not None, variable
        selector, label = asked.groups()
        for name, (chosen, *_) in choices.items():
            selector = selector.replace(f"${name}", chosen)
        found = ask(api, f"label/{label}/values", **{"match[]": selector})
        assert choices.get(variable["name"], found) == found
        choices[variable["name"]] = found
    return choices


def panel_queries() -> list[str]:
    """Of all panels, as Grafana asks them about both ranks of run `tiny`."""
    panels = [panel for board in dashboards() for panel in board["panels"]]
    assert all(panel["targets"] for panel in panels)
    asked = {target["expr"] for panel in panels for target in panel["targets"]}
    for name, value in {
        "$run": "tiny",
        "$rank": "(0|1)",
        "$__rate_interval": f"{5 * SCRAPE_S}s",
    }.items():
        asked = {expr.replace(name, value) for expr in asked}
    assert not [expr for expr in asked if "$" in expr]
    return sorted(asked)


def unhealthy_rules(api: str) -> list[Any]:
    """Rules that Prometheus itself could not evaluate, or did not yet."""
    groups = ask(api, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(all_rules())
    return [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"]


def all_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_queries() -> list[str]:
    """The recorded series, and of each alert what it looks at, whatever the comparison says."""
    rules = all_rules()
    recorded = [rule["record"] for rule in rules if "record" in rule]
    sides = [
        side
        for rule in rules
        if "alert" in rule
        for side in re.split(r" (?:>|==|<|and(?: on \(run\))?) ", rule["expr"])
    ]
    return [*recorded, *(side for side in sides if re.search("[a-z]", side))]


def gone_in_two_scrapes(api: str, series: str, since: float) -> bool:
    """Whether `series`, which was there before, is not at the second scrape after `since`.

    Prometheus is asked about the past: how late the question comes does not matter.
    """
    (one,) = query(api, f"{series}", time=f"{since - 0.1:.3f}")
    labels = one["metric"]
    own = ",".join(f'{name}="{labels[name]}"' for name in PROCESS_LABELS)
    found = [float(at) for up in query(api, f"up{{{own}}}[1h]") for at, _ in up["values"]]
    later = [at for at in found if at > since]
    # Fewer where discovery has dropped the target before them.
    at = later[1] if len(later) > 1 else since + 2 * SCRAPE_S
    return query(api, series, time=f"{at:.3f}") == []


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


@pytest.mark.timeout(500)
def test_panels_and_rules_have_data_for_every_server_and_the_dead_have_none(
    driver: Driver, tmp_path: Path
):
    targets = driver.wait_for(kind="metrics")["detail"]["address"]
    driver.wait_for(step=1)
    with (
        prometheus(tmp_path / "first", targets) as first,
        prometheus(tmp_path / "second", targets) as second,
    ):
        for api in (first, second):
            eventually("four processes are scraped", lambda api=api: len(query(api, "up==1")) == 4)
        assert len(panel_queries()) > 25
        for expr in [*panel_queries(), *rule_queries()]:
            eventually(f"no data for {expr}", lambda expr=expr: query(first, expr))
        assert variables(first) == {"run": ["tiny"], "rank": ["0", "1"]}
        eventually("all rules are evaluated", lambda: unhealthy_rules(first) == [])
        firing = 'ALERTS{alertstate="firing",alertname!="FlatpeakWaitsForOptimizer"}'
        assert query(first, firing) == []
        # They change with a record alone, and neither server takes one from the other.
        eventually("the servers see the same peaks", lambda: peaks(first) == peaks(second) != {})

        killed = kill(driver, "optimizer-0")
        driver.wait_for(kind="optimizer_lost")
        assert "optimizer" not in roles(targets)
        driver.wait_for(kind="optimizer_replaced")
        for api in (first, second):
            assert gone_in_two_scrapes(api, 'flatpeak_arena_bytes{role="optimizer"}', killed)
            updated = 'flatpeak_updated_buckets_total{role="optimizer"} > 0'
            eventually("the successor is scraped", lambda api=api, e=updated: query(api, e))

        series = 'flatpeak_peak_window_bytes{rank="1",component="total",generation="%d"}'
        killed = kill(driver, "worker-1")
        driver.wait_for(kind="worker_lost")
        assert "worker" not in roles(targets)
        driver.wait_for(kind="workers_replaced")
        for api in (first, second):
            assert gone_in_two_scrapes(api, series % 0, killed)
            eventually("the next generation is scraped", lambda api=api: query(api, series % 1))
        driver.signal(signal.SIGINT)
        assert driver.end().code == 130


def kill(driver: Driver, actor: str) -> float:
    """kill -9; returns the time of it."""
    driver.kill_actor(actor)
    return time.time()


def roles(targets: str) -> list[str]:
    with urllib.request.urlopen(f"http://{targets}/targets", timeout=10) as answer:
        return [target["labels"]["role"] for target in json.load(answer)]


def peaks(api: str) -> dict[tuple[str, ...], str]:
    found = query(api, '{__name__=~"flatpeak_peak_(window|lifetime)_bytes"}')
    return {tuple(sorted(one["metric"].items())): one["value"][1] for one in found}


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
