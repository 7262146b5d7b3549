import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from fake_grafana import TOKEN, FakeGrafana, fake_grafana
from flatpeak.controller.cli import run_command
from flatpeak.controller.dashboards import check_files, dashboards, render_files
from flatpeak.controller.dashboards.grafana import Grafana
from flatpeak.controller.dashboards.panels import WIDTH
from flatpeak.workers.errors import ClusterError, FlatpeakError, InputError
from flatpeak.workers.metrics.names import METRICS

BOARDS = {board["uid"]: board for board in dashboards()}
FOLDER = Path(__file__).parents[2] / "dashboards"
ROWS_OF_A_SCREEN = 26


@pytest.fixture
def server() -> Iterator[FakeGrafana]:
    with fake_grafana() as grafana:
        yield grafana


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_asks_for_metrics_that_are_exported(board: dict[str, Any]):
    known = {metric.full_name for metric in METRICS.values()}
    for expr in queries(board):
        asked = set(re.findall(r"flatpeak_\w+", expr))
        assert asked
        assert asked <= known
        assert expr.count("{") == expr.count('run="$run"')


def test_every_metric_is_on_a_dashboard_or_serves_the_alerts():
    shown = {name for board in BOARDS.values() for name in re.findall(r"flatpeak_\w+", str(board))}
    alerts = {"step_median_seconds", "last_step_timestamp_seconds", "snapshot_every_steps"}
    kept = {"peak_last_step_bytes", "peak_lifetime_bytes", "snapshot_step", "optimizer_step"}
    kept |= {"updated_buckets_total"}
    for metric in METRICS.values():
        assert (metric.full_name in shown) != (metric.name in alerts | kept), metric.name


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_fill_one_screen_without_overlap(board: dict[str, Any]):
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells
        cells |= own
    assert max(x for x, _ in cells) < WIDTH
    assert max(y for _, y in cells) < ROWS_OF_A_SCREEN
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_bound_is_drawn_as_one(board: dict[str, Any]):
    for panel in board["panels"]:
        legends = [target["legendFormat"] for target in panel["targets"]]
        for override in panel["fieldConfig"]["overrides"]:
            pattern = override["matcher"]["options"].strip("/")
            assert sum(bool(re.search(pattern, legend)) for legend in legends) == 1


def test_dashboards_are_made_without_torch():
    names = ", ".join(f"flatpeak.controller.dashboards.{name}" for name in ("files", "grafana"))
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


def test_the_files_of_the_checkout_are_what_is_rendered():
    assert check_files(FOLDER) == [], "run: flatpeak dashboards render"


def test_a_file_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = render_files(tmp_path / "new")
    assert run_command(["dashboards", "check", str(tmp_path / "new")]) == 0
    paths[1].write_text("{}")
    paths[2].unlink()
    assert check_files(tmp_path / "new") == paths[1:]
    assert run_command(["dashboards", "check", str(tmp_path / "new")]) == 2
    assert str(paths[1]) in capsys.readouterr().err


def test_dashboards_cannot_be_written_where_a_file_is(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write dashboards"):
        render_files(tmp_path / "file")


def test_pushing_twice_changes_nothing_the_second_time(
    server: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert run_command(["dashboards", "push", "--url", server.url]) == 0
    assert server.folders == {"flatpeak": "Flatpeak"}
    assert {uid: d["version"] for uid, d in server.dashboards.items()} == dict.fromkeys(BOARDS, 1)
    server.requests.clear()
    capsys.readouterr()
    assert run_command(["dashboards", "push", "--url", server.url, "--json"]) == 0
    assert {method for method, _, _ in server.requests} == {"GET"}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["result"] for line in lines] == ["unchanged"] * len(BOARDS)


def test_a_dashboard_that_was_changed_by_hand_is_replaced(server: FakeGrafana):
    grafana = Grafana(server.url, TOKEN)
    board = dashboards()[0]
    assert grafana.push(board)
    server.dashboards[board["uid"]]["title"] = "mine"
    assert grafana.push(board)
    assert server.dashboards[board["uid"]]["title"] == board["title"]


def test_the_requests_are_those_of_the_api(server: FakeGrafana):
    grafana = Grafana(f"{server.url}/grafana/", TOKEN)
    board = dashboards()[0]
    grafana.push(board)
    grafana.annotate("snapshot of step 4", tags=["flatpeak", "first"], time_s=12.5)
    assert server.requests == [
        ("GET", "/grafana/api/folders/flatpeak", None),
        ("POST", "/grafana/api/folders", {"title": "Flatpeak", "uid": "flatpeak"}),
        ("GET", f"/grafana/api/dashboards/uid/{board['uid']}", None),
        (
            "POST",
            "/grafana/api/dashboards/db",
            {
                "dashboard": board | {"id": None},
                "folderUid": "flatpeak",
                "overwrite": True,
                "message": "flatpeak dashboards push",
            },
        ),
        (
            "POST",
            "/grafana/api/annotations",
            {
                "dashboardId": None,
                "panelId": None,
                "time": 12500,
                "timeEnd": 12500,
                "tags": ["flatpeak", "first"],
                "text": "snapshot of step 4",
            },
        ),
    ]


WRONG = {
    "401": ((401, '{"message": "Invalid API key"}'), InputError, "GRAFANA_TOKEN"),
    "403": ((403, '{"message": "Access denied"}'), InputError, "role Editor"),
    "404 of something else": ((404, "<html>nothing here</html>"), InputError, "no Grafana at"),
    "412": ((412, '{"message": "name exists"}'), InputError, "name exists"),
    "500": ((500, '{"message": "database is locked"}'), ClusterError, "database is locked"),
    "502 in HTML": ((502, "<html>bad gateway</html>"), ClusterError, "failed \\(502\\)"),
    "a page": ((200, "<html>welcome</html>"), InputError, "not in JSON"),
    "a list": ((200, "[]"), InputError, "something else than an object"),
}


@pytest.mark.parametrize(("broken", "kind", "text"), WRONG.values(), ids=WRONG)
def test_an_answer_that_goes_wrong_is_one_message(
    server: FakeGrafana,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: tuple[int, str],
    kind: type[FlatpeakError],
    text: str,
):
    server.broken = broken
    with pytest.raises(kind, match=text):
        Grafana(server.url, TOKEN).push(dashboards()[0])
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert run_command(["dashboards", "push", "--url", server.url]) == kind.exit_code
    said = capsys.readouterr().err
    assert TOKEN not in said
    assert said.count("\n") == 1


def test_a_server_that_is_slow_or_gone_is_one_message(server: FakeGrafana):
    server.delay_s = 0.5
    with pytest.raises(ClusterError, match=r"within 0\.1 s"):
        Grafana(server.url, TOKEN, timeout_s=0.1).push(dashboards()[0])
    with pytest.raises(ClusterError, match="no Grafana can be reached"):
        Grafana("http://127.0.0.1:9", TOKEN).push(dashboards()[0])


@pytest.mark.parametrize(
    "url", ["localhost:3000", "ftp://host", "http://", "http://h:99999", "http://h/?q=1", ""]
)
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(InputError, match="address of a Grafana"):
        Grafana(url, TOKEN)


@pytest.mark.parametrize("token", [None, "", "two words", "wörd"])
def test_pushing_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str | None
):
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("GRAFANA_TOKEN", token)
    assert run_command(["dashboards", "push"]) == 2
    assert "GRAFANA_TOKEN" in capsys.readouterr().err


def typed(board: Any) -> Any:
    """The dashboard as read into the types of Grafana's own SDK and written again."""
    register_default_plugins()
    read = Dashboard.from_json(json.loads(json.dumps(board)))
    return json.loads(json.dumps(read, cls=JSONEncoder))


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """What of `given` is not in `kept`, which may have more."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [text for key in given for text in lost(given[key], kept.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [text for n, pair in pairs for text in lost(*pair, f"{path}[{n}]")]
    return [] if given == kept else [f"{path}: {given!r}, {kept!r}"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_types_of_grafana_know_all_of_a_dashboard(board: dict[str, Any]):
    assert lost(board, typed(board)) == []


def test_the_types_of_grafana_lose_what_they_do_not_know():
    board = json.loads(json.dumps(dashboards()[0]))
    board["panels"][-1]["fieldConfig"]["defaults"]["custom"]["nonsense"] = 1
    assert [text.rpartition("/")[2] for text in lost(board, typed(board))] == ["nonsense: 1, None"]
