"""A run as it goes, in a terminal or as lines."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatpeak.controller.display import JsonDisplay, PlainDisplay, clock, event_line, memory
from flatpeak.controller.observed import ObservedRun, RunStatus
from flatpeak.controller.runs import (
    TOTAL,
    Event,
    RunEvent,
    StepRecord,
    highest_of,
    in_order_of_peaks,
)

_RECENT_STEPS = 20
_RECENT_EVENTS = 5
_BAR = 26


@dataclass
class Seen:
    """What of a run has been read so far."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    events: deque[RunEvent] = field(default_factory=lambda: deque(maxlen=_RECENT_EVENTS))
    highest: dict[str, int] = field(default_factory=dict)
    skipped: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunEvent):
            self.events.append(event)
            return
        self.steps.append(event)
        self.skipped += event.skipped
        self.highest = highest_of([self.highest, event.peak_bytes])


def watch(run: ObservedRun, *, as_json: bool = False) -> None:
    """Shows the run until it has ended; a run that has ended is shown once."""
    console = Console()
    if as_json or not console.is_terminal:
        _print_lines(run, as_json=as_json)
        return
    seen = Seen()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for event in run.follow():
            if event is not None:
                seen(event)
                continue
            live.update(picture(run.status(), seen, run.last_words()), refresh=True)
    if reason := run.status().reason:
        console.print(reason, markup=False, highlight=False, soft_wrap=True)


def _print_lines(run: ObservedRun, *, as_json: bool) -> None:
    def write(line: str) -> None:
        print(line, file=sys.stdout, flush=True)

    show: Callable[[Event], object] = (
        JsonDisplay(write=write) if as_json else PlainDisplay(steps=run.status().steps, write=write)
    )
    for event in run.follow():
        if event is not None:
            show(event)
    if not as_json:
        write(_state(run.status()))


def picture(status: RunStatus, seen: Seen, ages: dict[str, float]) -> RenderableType:
    """What the terminal shows, made for 80 columns and more, and for no colour."""
    parts: list[RenderableType] = [Text(_state(status), style="bold")]
    if seen.steps:
        last = seen.steps[-1]
        parts += [Text(line) for line in _progress(status, seen, last)]
        if last.peak_bytes:
            parts += [Text(), _peaks(seen, last)]
        parts += [Text(), *(Text(line) for line in _operators(last))]
    parts += [Text(), Text(_actors(ages))] if ages else []
    parts.append(Text())
    parts += [
        Text(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {line}")
        for event in seen.events
        if (line := event_line(event)) is not None
    ]
    return Group(*parts)


def _state(status: RunStatus) -> str:
    return f"{status.run}: {status.state}"


def _progress(status: RunStatus, seen: Seen, last: StepRecord) -> list[str]:
    seconds = sum(step.step_seconds for step in seen.steps) / len(seen.steps)
    rate = sum(step.tokens for step in seen.steps) / (seconds * len(seen.steps))
    left = clock((status.steps - last.step) * seconds)
    skipped = f"  {seen.skipped} skipped" if seen.skipped else ""
    return [
        f"step {last.step} of {status.steps}  loss {last.loss:.4f}  grad {last.grad_norm:.3f}  "
        f"lr {last.lr:.2e}",
        f"{rate:,.0f} tokens/s  {seconds:.2f} s a step  {left} left{skipped}",
    ]


def _peaks(seen: Seen, last: StepRecord) -> Table:
    scale = max([1, *seen.highest.values()])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (("peak", "left"), ("", "left"), ("last", "right"), ("highest", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("bound", justify="right", no_wrap=True)
    for name in in_order_of_peaks(seen.highest):
        bound = last.device_budget_bytes if name == TOTAL else None
        near = bound is not None and seen.highest[name] > 0.95 * bound
        table.add_row(
            Text(name),
            ProgressBar(
                total=scale,
                completed=seen.highest[name],
                width=_BAR,
                complete_style="red" if near else "cyan",
                finished_style="red" if near else "cyan",
            ),
            Text(memory(last.peak_bytes.get(name), None)),
            Text(memory(seen.highest[name], None)),
            Text("" if bound is None else memory(int(bound), None)),
        )
    return table


def _operators(last: StepRecord) -> Iterator[str]:
    dispatch, optimizer = last.dispatch, last.optimizer
    if dispatch.get("chunks"):
        yield (
            f"dispatch   imbalance {dispatch['imbalance_before']:.2f}, as planned "
            f"{dispatch['imbalance_after']:.2f}; chunks {dispatch['chunks']:.0f}, "
            f"foreign experts {dispatch['foreign_experts']:.0f}"
        )
    if (budget := dispatch.get("budget_bytes")) is not None:
        planned = memory(int(dispatch["planned_bytes"] or 0), int(budget))
        yield f"           {planned} of its budget above inputs and results"
    if optimizer.get("buckets"):
        yield (
            f"optimizer  {optimizer['overlapped_buckets']:.0f} of {optimizer['buckets']:.0f} "
            f"buckets updated beside the forward pass; it waited {optimizer['exposed_s']:.3f} s"
        )


def _actors(ages: dict[str, float]) -> str:
    return "last words  " + ", ".join(f"{name} {_age(age)}" for name, age in ages.items())


def _age(seconds: float) -> str:
    return f"{max(0, round(seconds))} s ago" if seconds < 100 else f"{seconds / 60:.0f} min ago"
