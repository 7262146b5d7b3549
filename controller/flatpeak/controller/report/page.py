"""What a report says, out of the records of a run."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

import jinja2

from flatpeak.controller.display import GIB, MIB, clock, event_line, memory
from flatpeak.controller.report.charts import Line, line_chart
from flatpeak.controller.runs import (
    TOTAL,
    RunEvent,
    RunFolder,
    RunInfo,
    StepRecord,
    highest_of,
    in_order_of_peaks,
)
from flatpeak.controller.strict_json import to_json
from flatpeak.workers.errors import InputError

FILE = "report.html"
_PACKAGES = ("flatpeak", "torch", "ray", "transformers", "triton", "numpy", "pyarrow")
_MOST_EVENTS = 200


def write_report(folder: RunFolder) -> Path:
    """Writes `report.html` into the run folder; returns its path.

    Raises InputError where a record cannot be read or the file not be written.
    """
    path = folder.path / FILE
    text = render(folder.info, folder.steps(), folder.events(), _spec_of(folder))
    new = path.with_name(f".{FILE}.new")
    try:
        # Renamed, so that a browser never sees half a page.
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path


def render(
    info: RunInfo, steps: Sequence[StepRecord], events: Sequence[RunEvent], spec: str
) -> str:
    """The page of a run with these records."""
    template = (
        resources.files("flatpeak.controller.report")
        .joinpath("report.html.jinja")
        .read_text("utf-8")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        run=info.run,
        state=str(info.seen_state),
        reason=info.reason,
        started=_moment(info.started),
        facts=_facts(info, steps),
        peaks=_peaks(steps),
        charts=_charts(steps) if steps else [],
        events=[_event(event) for event in events[-_MOST_EVENTS:]],
        events_left_out=max(0, len(events) - _MOST_EVENTS),
        spec=spec,
        versions=_versions(),
        written=_moment(time.time()),
    )


@dataclass(frozen=True)
class Fact:
    name: str
    value: str


@dataclass(frozen=True)
class Peak:
    """A component's row; bars are percentages of the largest figure in the table."""

    component: str
    highest: str
    last: str
    bound: str
    bar: float
    bound_bar: float | None


@dataclass(frozen=True)
class Chart:
    title: str
    help: str
    svg: str


def _facts(info: RunInfo, steps: Sequence[StepRecord]) -> list[Fact]:
    facts = [Fact("steps", f"{steps[-1].step if steps else 0} of {info.steps}")]
    if not steps:
        return facts
    last = steps[-1]
    peak = max((step.peak_bytes.get(TOTAL, 0) for step in steps), default=0)
    seconds = sum(step.step_seconds for step in steps)
    return [
        *facts,
        Fact("loss", f"{last.loss:.4f}"),
        Fact("peak", memory(peak or None, last.device_budget_bytes)),
        Fact("tokens a second", f"{sum(step.tokens for step in steps) / seconds:,.0f}"),
        Fact("time in steps", _duration(seconds)),
        Fact("skipped steps", str(sum(step.skipped for step in steps))),
    ]


def _peaks(steps: Sequence[StepRecord]) -> list[Peak]:
    highest = highest_of(step.peak_bytes for step in steps)
    largest = max([1, *highest.values()])
    bounds = {name: steps[-1].bound(name) for name in highest}
    # One that is far above would leave no bar to be seen.
    near = [bound for bound in bounds.values() if bound is not None and bound < 2 * largest]
    largest = max([largest, *near])
    found = []
    for name in in_order_of_peaks(highest):
        bound = bounds[name]
        found.append(
            Peak(
                name,
                memory(highest[name], None),
                memory(steps[-1].peak_bytes.get(name, 0), None),
                "" if bound is None else memory(bound, None),
                100 * highest[name] / largest,
                None if bound is None or bound > largest else 100 * bound / largest,
            )
        )
    return found


def _charts(steps: Sequence[StepRecord]) -> list[Chart]:
    numbers = [step.step for step in steps]
    unit, scale = ("GiB", GIB) if _largest_peak(steps) >= GIB else ("MiB", MIB)

    def of_peak(name: str) -> Callable[[StepRecord], float | None]:
        return lambda step: step.peak_bytes[name] / scale if name in step.peak_bytes else None

    def chart(title: str, help: str, *lines: Line, **options: object) -> Chart:
        svg = line_chart(numbers, lines, title=title, **options)  # type: ignore[arg-type]
        return Chart(title, help, svg)

    def line(name: str, of: Callable[[StepRecord], float | None], **options: object) -> Line:
        return Line(name, [of(step) for step in steps], **options)  # type: ignore[arg-type]

    def level(name: str, nbytes: float) -> Line:
        return Line(name, [nbytes / scale] * len(steps), dashed=True)

    components = sorted({name for step in steps for name in step.peak_bytes} - {TOTAL})
    found = []
    if components:
        budget = steps[-1].device_budget_bytes
        total = [line("whole peak", of_peak(TOTAL))]
        if budget is not None:
            total.append(level("budget", budget))
        found += [
            chart(
                "Whole peak",
                "Device memory of the fullest rank in each step, beside its budget if it has one.",
                *total,
                unit=unit,
            ),
            chart(
                "Peaks by component",
                "Each of the rank where it was highest. They come at different times, so they do "
                "not add up to the whole.",
                *(line(name, of_peak(name)) for name in components),
                unit=unit,
            ),
        ]
        dispatch_budget = steps[-1].dispatch.get("budget_bytes")
        if dispatch_budget is not None:
            found.append(
                chart(
                    "Dispatch above inputs and results",
                    "What the worst layer takes, and memory.dispatch.budget_bytes, which bounds "
                    "it.",
                    line("dispatch", lambda step: (step.dispatch["planned_bytes"] or 0) / scale),
                    level("budget", dispatch_budget),
                    unit=unit,
                )
            )
    return [
        *found,
        chart("Loss", "All that is minimised.", line("loss", lambda s: s.loss), from_zero=False),
        chart(
            "Gradient norm",
            "Over all parameters, before clipping.",
            line("norm", lambda step: step.grad_norm or None),
            logarithmic=True,
        ),
        chart(
            "Step time",
            "Wall time of a step, and what of it the slowest forward pass waited for weights.",
            line("step", lambda step: step.step_seconds),
            line("waiting for the optimizer", lambda step: step.optimizer.get("exposed_s")),
            unit="s",
        ),
        chart(
            "Load imbalance",
            "Routes of the busiest rank over the mean in the worst layer; 1 is level.",
            line("as routed", lambda step: step.dispatch.get("imbalance_before") or None),
            line("as planned", lambda step: step.dispatch.get("imbalance_after") or None),
        ),
        chart("Learning rate", "Of each step.", line("learning rate", lambda step: step.lr)),
    ]


def _event(event: RunEvent) -> tuple[str, str, str]:
    if (line := event_line(event)) is not None:
        return _moment(event.time), event.kind, line
    detail = ", ".join(
        f"{key}: {value if isinstance(value, str) else to_json(value)}"
        for key, value in event.detail.items()
    )
    return _moment(event.time), event.kind, detail


def _spec_of(folder: RunFolder) -> str:
    try:
        return (folder.path / "spec.yaml").read_text("utf-8")
    except (OSError, UnicodeError) as error:
        return f"(spec.yaml cannot be read: {error})"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue  # triton is on Linux alone
    return ", ".join(found)


def _largest_peak(steps: Sequence[StepRecord]) -> int:
    return max((nbytes for step in steps for nbytes in step.peak_bytes.values()), default=0)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _duration(seconds: float) -> str:
    return clock(seconds) if seconds >= 60 else f"{seconds:.1f} s"
