import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flatpeak.controller.cli import run_command
from flatpeak.controller.report import write_report
from flatpeak.controller.report.charts import Line, line_chart
from flatpeak.controller.report.page import render
from flatpeak.controller.runs import RunEvent, RunFolder, RunState, StepRecord
from local_run import tiny_spec
from sample_run import INFO, STEP
from tiny_models import tiny_content

CHARTS = [
    "Whole peak",
    "Peaks by component",
    "Dispatch above inputs and results",
    "Loss",
    "Gradient norm",
    "Step time",
    "Load imbalance",
    "Learning rate",
]


def steps(count: int) -> list[StepRecord]:
    return [replace(STEP, step=n, loss=2.5 / n) for n in range(1, count + 1)]


class Page(HTMLParser):
    """Text, charts by title, what the page would fetch, and the tags left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.charts, self.fetched, self.open = "", [], [], []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "svg":
            self.charts.append(given["aria-label"])
        if tag not in ("meta",):
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self._look(given)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self._look(given)

    def _look(self, given: dict[str, str | None]) -> None:
        for name in ("src", "href", "xlink:href"):
            value = given.get(name)
            if value is not None and not value.startswith("#"):
                self.fetched.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_a_report_has_the_figures_and_charts_of_its_run():
    events = [RunEvent(kind="snapshot", time=3.0, detail={"step": 2, "folder": "/x"})]
    page = Page(render(INFO, steps(3), events, "run: first\n"))
    assert page.open == []
    assert page.charts == CHARTS
    text = " ".join(page.text.split())
    for said in (
        "steps 3 of 9",
        "total 5.0 MiB 5.0 MiB 10.0 MiB",
        "tokens a second 320",
        "dispatch 3.0 MiB 3.0 MiB",
        "attention 1.0 MiB 1.0 MiB",
        "snapshot snapshot of step 2",
        "run: first",
        "flatpeak 0.1.0",
    ):
        assert said in text


def test_a_report_needs_no_network_and_repeats_no_id():
    text = render(INFO, steps(3), [], "")
    page = Page(text)
    assert page.fetched == []
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert len(page.ids) == len(set(page.ids)) > 20


def test_what_a_run_says_is_text_and_not_markup():
    info = replace(INFO, state=RunState.FAILED, reason="<script>alert(1)</script> & more")
    page = Page(render(info, [], [RunEvent(kind="<b>", time=0.0)], "<!-- "))
    assert "<script>alert(1)</script> & more" in page.text
    assert "<b>" in page.text
    assert "<!-- " in page.text
    assert "script" not in page.open


def test_a_run_that_made_no_step_has_a_report():
    page = Page(render(INFO, [], [], ""))
    assert page.charts == []
    assert "before its first step" in page.text


def test_steps_without_finite_figures_or_peaks_leave_gaps():
    odd = replace(STEP, loss=math.nan, grad_norm=math.nan, peak_bytes={}, skipped=True)
    page = Page(render(INFO, [odd, replace(odd, step=2)], [], ""))
    assert page.charts == CHARTS[3:]
    mixed = [STEP, replace(odd, step=2), replace(STEP, step=3, device_budget_bytes=None)]
    assert "skipped steps 1" in " ".join(Page(render(INFO, mixed, [], "")).text.split())


def test_many_events_are_cut_and_counted():
    events = [RunEvent(kind="warning", time=n, detail={"text": f"no. {n}"}) for n in range(250)]
    text = Page(render(INFO, [], events, "")).text
    assert "50 earlier ones" in text
    assert "no. 49" not in text
    assert "no. 50" in text


def test_a_long_run_keeps_its_spikes():
    values = [1.0] * 20_000
    values[777] = 9.0
    long = line_chart(range(20_000), [Line("peak", values)], title="long")
    assert len(long) < 100_000
    short = line_chart([0, 1, 2], [Line("peak", [1.0, 9.0, 1.0])], title="short")
    # The top of the axis follows the highest point that is drawn.
    tops = [max(float(t) for t in re.findall(r">(\d+)</text>", svg)[-5:]) for svg in (long, short)]
    assert tops[0] == tops[1]


def test_a_chart_is_well_formed_and_takes_the_ink_of_the_page():
    svg = line_chart([1], [Line("a & b", [2.0]), Line("cap", [3.0], dashed=True)], title="one")
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    assert root.get("width") is root.get("height") is None
    assert root.get("viewBox")
    assert "currentColor" in svg
    assert "#000000" not in svg


def test_the_command_writes_the_file_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spec = tiny_spec(tiny_content("qwen3_moe"), run="first", runs_dir=str(tmp_path))
    with RunFolder.create(spec) as folder:
        folder.record(STEP)
    assert run_command(["report", "first", "--runs-dir", str(tmp_path)]) == 0
    assert str(tmp_path / "first" / "report.html") in capsys.readouterr().out
    page = Page((tmp_path / "first" / "report.html").read_text())
    assert page.charts == CHARTS
    assert run_command(["report", "second", "--runs-dir", str(tmp_path)]) == 2


def test_a_report_that_cannot_be_written_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spec = tiny_spec(tiny_content("qwen3_moe"), run="first", runs_dir=str(tmp_path))
    with RunFolder.create(spec) as folder:
        folder.record(STEP)
    (folder.path / "report.html").mkdir()
    assert run_command(["report", "first", "--runs-dir", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_writing_twice_leaves_one_file(tmp_path: Path):
    spec = tiny_spec(tiny_content("qwen3_moe"), run="first", runs_dir=str(tmp_path))
    with RunFolder.create(spec) as folder:
        pass
    assert write_report(folder) == write_report(folder)
    assert [path.name for path in folder.path.glob("*report*")] == ["report.html"]
