"""Building blocks of Grafana dashboards in the classic JSON model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 41
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]
Color = Literal["green", "yellow", "orange", "red", "blue", "text"]


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its series, with {{label}} in it."""

    expr: str
    legend: str
    is_bound: bool = False
    """A plan, a cap or a budget: drawn as a dashed red line without a fill."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`kind` is the Grafana panel type; `width` of 24 columns, `height` in rows of 38 pixels."""

    title: str
    queries: tuple[Query, ...]
    help: str
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    height: int = 8
    decimals: int | None = None
    least: float | None = 0
    most: float | None = None
    thresholds: tuple[tuple[float, Color], ...] = ()
    """From each value on, the color of what is shown."""
    logarithmic: bool = False

    def json(self, number: int, x: int, y: int) -> Json:
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.help,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [self._target(place, query) for place, query in enumerate(self.queries)],
            "fieldConfig": {
                "defaults": self._defaults(),
                "overrides": [_bound(query) for query in self.queries if query.is_bound],
            },
            "options": _OPTIONS[self.kind],
        }

    def _target(self, place: int, query: Query) -> Json:
        return {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "instant": self.kind != "timeseries",
            "range": self.kind == "timeseries",
        }

    def _defaults(self) -> Json:
        found: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
            "thresholds": {"mode": "absolute", "steps": self._steps()},
        }
        limits = {"min": self.least, "max": self.most, "decimals": self.decimals}
        found |= {name: value for name, value in limits.items() if value is not None}
        if self.kind == "timeseries":
            found["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 8,
                "showPoints": "never",
                "spanNulls": False,
                "thresholdsStyle": {"mode": "line" if self.thresholds else "off"},
                "scaleDistribution": {"type": "log", "log": 10}
                if self.logarithmic
                else {"type": "linear"},
            }
        return found

    def _steps(self) -> list[Json]:
        base = "text" if self.kind == "stat" and not self.thresholds else "green"
        steps: list[Json] = [{"value": None, "color": base}]
        return steps + [{"value": value, "color": color} for value, color in self.thresholds]


_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True}
_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, Json] = {
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {
        "reduceOptions": _LAST,
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
}


def _bound(query: Query) -> Json:
    # Legends of several series start alike: up to where a label comes in.
    start = query.legend.partition("{{")[0]
    dashed = {"fill": "dash", "dash": [8, 6]}
    return {
        "matcher": {"id": "byRegexp", "options": f"/^{start}/"},
        "properties": [
            {"id": "custom.lineStyle", "value": dashed},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        ],
    }


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice at the top of a dashboard, of the values of a label."""

    name: str
    label: str
    query: str
    several: bool = False

    def json(self) -> Json:
        every: Json = {"text": "All", "value": "$__all"}
        return {
            "type": "query",
            "name": self.name,
            "label": self.label,
            "datasource": SOURCE,
            "query": {"query": self.query, "refId": self.name},
            "refresh": 2,  # when the time range changes: runs come and go
            "sort": 3,
            "multi": self.several,
            "includeAll": self.several,
            **({"current": every, "allValue": ".*"} if self.several else {}),
        }


_DATASOURCE: Json = {
    "type": "datasource",
    "name": "datasource",
    "label": "Data source",
    "query": "prometheus",
    "refresh": 1,
}


def dashboard(
    *, uid: str, title: str, help: str, variables: Sequence[Variable], panels: Sequence[Panel]
) -> Json:
    """The JSON of a dashboard; panels flow in rows from left to right."""
    return {
        "uid": uid,
        "title": title,
        "description": help,
        "tags": ["flatpeak"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Flatpeak",
                "tags": ["flatpeak"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_DATASOURCE, *(variable.json() for variable in variables)]},
        "annotations": {"list": [_EVENTS]},
        "panels": _placed(panels),
    }


_EVENTS: Json = {
    "name": "Run events",
    "enable": True,
    "iconColor": "purple",
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "target": {"type": "tags", "tags": ["flatpeak", "$run"], "matchAny": False, "limit": 100},
}


def _placed(panels: Sequence[Panel]) -> list[Json]:
    found: list[Json] = []
    x = y = height = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        found.append(panel.json(number, x, y))
        x, height = x + panel.width, max(height, panel.height)
    return found
