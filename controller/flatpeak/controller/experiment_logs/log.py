"""What goes into an experiment log, whoever writes it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Protocol

from flatpeak.controller.outlet import Outlet
from flatpeak.controller.runs import Event, StepRecord

_NO_FIGURES = frozenset({"step", "time", "first_sample", "last_sample"})


class Writer(Protocol):
    """One experiment log, open. Whatever it raises ends the log, and not the run."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None:
        """`failed` says how the run ended."""
        ...


class ExperimentLog(Outlet):
    """Writes every step of a run with the writer that `open_writer` makes of the first step's
    number: a run that never comes to a step leaves no log, and a resumed one goes on there."""

    def __init__(
        self, name: str, open_writer: Callable[[int], Writer], *, last_words_s: float
    ) -> None:
        super().__init__(
            name, consequence=f"the run goes on without {name}", last_words_s=last_words_s
        )
        self._open_writer = open_writer
        self._writer: Writer | None = None

    def wants(self, event: Event) -> bool:
        return isinstance(event, StepRecord)

    def send(self, event: Event) -> None:
        assert isinstance(event, StepRecord)
        if self._writer is None:
            self._writer = self._open_writer(event.step)
        self._writer.write(event.step, figures_of(event))

    def finish(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close(failed=failed)


def figures_of(record: StepRecord) -> dict[str, float]:
    """By their names in `steps.jsonl`, those of a section as `section/name`."""
    figures: dict[str, float | None] = {}
    for name, value in asdict(record).items():
        if isinstance(value, dict):
            figures |= {f"{name}/{inner}": figure for inner, figure in value.items()}
        elif name not in _NO_FIGURES:
            figures[name] = value
    return {name: float(figure) for name, figure in figures.items() if figure is not None}
