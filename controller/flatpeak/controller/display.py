"""What `flatpeak train` shows of its events: a live bar, plain lines, or JSON lines.

Each display is a context manager that takes one event a call and the summary at the end.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flatpeak.controller.runs import TOTAL, Event, RunEvent, StepRecord, Summary
from flatpeak.controller.strict_json import to_json

MIB, GIB = 2**20, 2**30


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """One line an event, for a file or a pipe."""

    def __init__(self, *, steps: int, write: Callable[[str], object]) -> None:
        self._steps = steps
        self._write = write

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepRecord):
            self._write(step_line(event, steps=self._steps))
        elif (line := event_line(event)) is not None:
            self._write(line)

    def note(self, text: str) -> None:
        """What goes on before the run has any event."""
        self._write(text)

    def summary(self, summary: Summary) -> None:
        self._write(summary_line(summary))

    def __exit__(self, *error: object) -> None:
        return None


class LiveDisplay(PlainDisplay):
    """The same lines above a progress bar that stays at the foot of the terminal."""

    def __init__(self, *, steps: int, console: Console) -> None:
        super().__init__(steps=steps, write=self._print)
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> "LiveDisplay":
        self._progress.start()
        return self

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, StepRecord):
            self._progress.update(
                self._task, completed=event.step, description=f"loss {event.loss:.4f}"
            )

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def _print(self, line: str) -> None:
        # A detail in brackets is no markup, and a narrow terminal breaks lines better than rich.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class JsonDisplay(AbstractContextManager["JsonDisplay"]):
    """One JSON object a line; `type` is step, event or summary."""

    def __init__(self, *, write: Callable[[str], object]) -> None:
        self._write = write

    def __call__(self, event: Event) -> None:
        kind = "step" if isinstance(event, StepRecord) else "event"
        self._write(to_json({"type": kind} | asdict(event)))

    def note(self, text: str) -> None:
        """Nothing that a program could use."""

    def summary(self, summary: Summary) -> None:
        self._write(to_json({"type": "summary"} | asdict(summary)))

    def __exit__(self, *error: object) -> None:
        return None


Display = PlainDisplay | JsonDisplay


def display_for(*, steps: int, json: bool, out: TextIO | None = None) -> Display:
    """The display that suits the stream `out`, standard output by default."""
    stream = out or sys.stdout

    def write(line: str) -> None:
        print(line, file=stream, flush=True)

    if json:
        return JsonDisplay(write=write)
    if stream.isatty():
        return LiveDisplay(steps=steps, console=Console(file=stream))
    return PlainDisplay(steps=steps, write=write)


def step_line(record: StepRecord, *, steps: int) -> str:
    width = len(str(steps))
    columns = [
        f"step {record.step:>{width}}/{steps}",
        f"loss {record.loss:.4f}",
        *([] if record.nll is None or record.nll == record.loss else [f"nll {record.nll:.4f}"]),
        f"grad {record.grad_norm:.3f}",
        f"lr {record.lr:.2e}",
        f"peak {memory(record.peak_bytes.get(TOTAL), record.device_budget_bytes)}",
        f"{record.tokens_per_s:,.0f} tokens/s",
        f"{record.step_seconds:.2f} s",
    ]
    return "  ".join(columns + ["skipped: the gradient is not finite"] * record.skipped)


def event_line(event: RunEvent) -> str | None:
    """What a reader at the terminal needs of an event; None if nothing. `events.jsonl` has all."""
    detail = event.detail
    match event.kind:
        case "starting":
            return detail["what"]
        case "workers_placed":
            nodes = count(len(detail["nodes"]), "node")
            return f"{count(detail['workers'], 'worker')} ({detail['device']}) on {nodes}"
        case "started":
            buckets = count(detail["buckets"], "bucket")
            host = memory(max(detail["planned_host_bytes"].values()), None)
            return (
                f"started with {detail['parameters']:,} parameters in {buckets}, "
                f"{host} of host memory a node"
            )
        case "resumed":
            return f"resumes after step {detail['step']}, from {detail['snapshot']}"
        case "metrics":
            address = detail["address"]
            return f"metrics at http://{address}/metrics, processes at http://{address}/targets"
        case "snapshot":
            return f"snapshot of step {detail['step']}"
        case "snapshot_failed":
            return (
                f"warning: no snapshot of step {detail['step']}: {detail['reason']}; "
                f"the newest is of step {detail['kept']}"
            )
        case "optimizer_lost":
            return f"lost {detail['actor']} at step {detail['step']}; another takes its place"
        case "optimizer_replaced":
            return f"{detail['actor']} replaced in {detail['seconds']:.1f} s"
        case "worker_lost":
            return f"lost {detail['actor']} in step {detail['step']}; all workers start anew"
        case "workers_replaced":
            return f"workers replaced in {detail['seconds']:.1f} s"
        case "controller_lost":
            return f"the controller died after step {detail['step']}; another takes its place"
        case "controller_replaced":
            return f"controller replaced in {detail['seconds']:.1f} s, at step {detail['step']}"
        case "start_failed":
            return f"the start is begun again: {detail['reason']}"
        case "node_lost":
            workers = count(detail["workers"], "worker")
            return f"{detail['reason']}: the run goes on with what the others have, {workers}"
        case "node_draining":
            return (
                f"node {', '.join(detail['nodes'])} is to go: a snapshot of every step from now on"
            )
        case "state_lost":
            source = "the newest snapshot" if detail["snapshot"] else "the start"
            again = count(detail["redone_steps"], "step")
            workers = count(detail["workers"], "worker")
            return (
                f"{detail['reason']}: the run goes on with {workers} from {source}, {again} are "
                "done again"
            )
        case "optimizers_scaled":
            why = f": {detail['reason']}" if "reason" in detail else ""
            return (
                f"{detail['before']} to {count(detail['after'], 'optimizer actor')} after step "
                f"{detail['step']}: {count(detail['arenas'], 'arena')} of "
                f"{memory(detail['arena_bytes'], None)} handed over in {detail['seconds']:.3f} s, "
                f"{detail['copied_bytes']:,} bytes copied{why}"
            )
        case "workers_leaving":
            return f"the workers make way for others after step {detail['step']}"
        case "optimizers_moved":
            return (
                f"{detail['before']} to {count(detail['after'], 'optimizer actor')} after step "
                f"{detail['step']}, {detail['copied_bytes']:,} bytes of state moved, in "
                f"{detail['seconds']:.1f} s"
            )
        case "workers_scaled":
            degrees = ", ".join(f"{n} {detail[n]}" for n in ("sequence", "expert", "vocabulary"))
            return (
                f"{detail['before']} to {count(detail['after'], 'worker')} ({degrees}) after step "
                f"{detail['step']}, {detail['copied_bytes']:,} bytes of state moved, in "
                f"{detail['seconds']:.1f} s"
            )
        case "scaling_refused":
            return f"not scaled: {detail['reason']}"
        case "warning":
            return f"warning: {detail['text']}"
        case "interrupted":
            return f"interrupted after step {detail['step']}"
        case "finished" | "largest_tensors":  # said by the summary; for programs
            return None
    return "  ".join([event.kind, *(f"{key}={value}" for key, value in detail.items())])


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def summary_line(summary: Summary) -> str:
    peak = memory(summary.peak_bytes.get(TOTAL), summary.device_budget_bytes)
    return (
        f"{summary.run}: {summary.steps} steps in {summary.seconds:.1f} s, loss "
        f"{summary.loss:.4f}, peak {peak}, in {summary.folder}"
    )


def memory(peak_bytes: int | None, budget_bytes: int | None) -> str:
    """A peak and its share of its budget, as far as they are known."""
    if peak_bytes is None:
        return "-"
    share = f" ({peak_bytes / budget_bytes:.1%})" if budget_bytes else ""
    if peak_bytes < GIB:
        return f"{peak_bytes / MIB:.1f} MiB{share}"
    return f"{peak_bytes / GIB:.3f} GiB{share}"


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds; 0 where it is less."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
