"""How Grafana wants a dashboard written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

Json = dict[str, Any]

SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24


@dataclass(frozen=True)
class Query:
    """A query and the legend of its result."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel; its `kind` decides its look.

    Args:
        kind: `stat`, `timeseries` or `table`.
        width, height: of the 24 columns; in Grafana's units of 30 pixels.
        unit: as Grafana names it.
        red_from: the value from which it is red, where there is one.
        red_below: the value below which it is red.
        units: of a table's columns.
        hidden: columns of a table that are left out.
    """

    kind: str
    title: str
    text: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    unit: str = "short"
    red_from: float | None = None
    red_below: float | None = None
    units: Sequence[tuple[str, str]] = ()
    hidden: Sequence[str] = ()

    def lettered(self) -> Iterable[tuple[str, Query]]:
        """Return the queries, each with the letter by which Grafana knows it."""
        return zip(ascii_uppercase, self.queries, strict=False)

    def json(self, number: int, x: int, y: int) -> Json:
        """Return it as Grafana reads it."""
        made = {"stat": _stat, "timeseries": _timeseries, "table": _table}[self.kind](self)
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [_target(self.kind, *each) for each in self.lettered()],
            **made,
        }


def _target(kind: str, letter: str, query: Query) -> Json:
    over_time = kind == "timeseries"
    return {
        "refId": letter,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": over_time,
        "instant": not over_time,
        **({"format": "table"} if kind == "table" else {}),
    }


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return {"mode": "absolute", "steps": steps}


def _stat(panel: Panel) -> Json:
    defaults = {"unit": panel.unit, "noValue": "no data", "thresholds": _thresholds(panel)}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _timeseries(panel: Panel) -> Json:
    line = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "showPoints": "never"}
    if panel.red_from is not None:
        # Where the alert begins.
        line["thresholdsStyle"] = {"mode": "dashed"}
    defaults = {"unit": panel.unit, "min": 0, "custom": line, "thresholds": _thresholds(panel)}
    if panel.red_from is None:
        defaults["color"] = {"mode": "palette-classic"}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _table(panel: Panel) -> Json:
    columns = {f"Value #{letter}": q.legend for letter, q in panel.lettered()}
    return {
        "fieldConfig": {
            "defaults": {"noValue": "none", "custom": {"align": "auto", "filterable": True}},
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": name},
                    "properties": [{"id": "unit", "value": unit}],
                }
                for name, unit in panel.units
            ],
        },
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": dict.fromkeys(["Time", *panel.hidden], True),
                    "renameByName": columns if len(panel.queries) > 1 else {},
                },
            },
        ],
    }


# --- all together ----------------------------------------------------------------------------


def laid_out(rows: Mapping[str, Sequence[Panel]]) -> list[Json]:
    """Return all panels, row by row, each from left to right."""
    made: list[Json] = []
    y = 0
    for title, row in rows.items():
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        head = {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        made.append({"id": len(made) + 1, **head})
        x, y = 0, y + 1
        for panel in row:
            made.append(panel.json(len(made) + 1, x, y))
            x += panel.width
            if x == WIDTH or panel is row[-1]:
                x, y = 0, y + panel.height
    return made


def variable(label: str, asked: str) -> Json:
    """Return a choice among the values of a label. "All" includes series without it."""
    query = f"label_values({asked}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }
