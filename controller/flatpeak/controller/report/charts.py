"""Charts of a run as SVG text that takes its ink from the page it is put into."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

# One colour of matplotlib's that stands for the page's ink, whatever that is.
_INK = "#010203"
# Distinct for all kinds of colour vision, and on light and dark grounds (Okabe and Ito).
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8b7fd6", "#999999")
BOUND = "#d4351c"
_MOST_POINTS = 1500
_SIZE_INCHES = (4.8, 2.6)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: sharp, and found by a search
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#888888",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "flatpeak",
}

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    name: str
    values: Values
    """One a step; None and NaN leave a gap."""
    color: str | None = None
    dashed: bool = False
    """For a bound."""


def line_chart(
    steps: Sequence[int],
    lines: Iterable[Line],
    *,
    title: str,
    unit: str = "",
    logarithmic: bool = False,
    from_zero: bool = True,
) -> str:
    """An SVG element; `title` is what a screen reader says of it."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, steps, list(lines))
        axes.margins(y=0.08)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if unit:
            axes.set_ylabel(unit)
        if logarithmic:
            axes.set_yscale("log")
            for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                axis(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        elif from_zero:
            axes.set_ylim(bottom=0)
        return _svg(figure, title)


def _draw(axes: Axes, steps: Sequence[int], lines: list[Line]) -> None:
    x = np.asarray(steps, dtype=float)
    ends = _bins(len(x))
    colors = iter(PALETTE * 4)
    for line in lines:
        values = np.array([math.nan if v is None else v for v in line.values], dtype=float)
        color = line.color or (BOUND if line.dashed else next(colors))
        axes.plot(
            x[ends],
            _highest(values, ends),
            color=color,
            label=line.name,
            linestyle="--" if line.dashed else "-",
            marker="o" if len(x) == 1 else "",  # a line of one point is none
            markersize=4,
        )
    if len(lines) > 1 or any(line.dashed for line in lines):
        columns = min(4, len(lines))
        axes.figure.legend(loc="outside lower center", ncols=columns)


def _bins(count: int) -> np.ndarray:
    """The last step of each bin, as few as a screen can show."""
    bins = min(count, _MOST_POINTS)
    return np.arange(1, bins + 1) * count // max(1, bins) - 1


def _highest(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The largest value of each bin, so that no spike is lost; NaN where all of them are."""
    if len(ends) == len(values):
        return values
    starts = np.concatenate([[0], ends[:-1] + 1])
    return np.fmax.reduceat(values, starts)


def _svg(figure: Figure, title: str) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # The page gives the size; the view box keeps the shape.
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Charts share one page, so what they define must not share names.
    text = _apart(text, title)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _apart(text: str, title: str) -> str:
    mark = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'\bid="', f'id="{mark}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\1{mark}-", text)
