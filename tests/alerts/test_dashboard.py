"""The dashboard is the one that its code makes, and each of its queries finds something."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.alerts import promql
from txbroker.proxy.observe.metrics import Metrics

CHARTS = Path(__file__).parents[2] / "charts"
FILE = CHARTS / "txbroker/files/dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
KNOWN = promql.series({one.name: (one.kind, one.labels) for one in Metrics().described()})
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
GRAFANAS = {"__rate_interval": "5m", "__range": "3h"}


def queries() -> Iterator[tuple[str, str]]:
    for panel in SHOWN:
        for target in panel["targets"]:
            yield f"{panel['title']}-{target['refId']}", target["expr"]


QUERIES = list(queries())


def test_dashboard_file_is_generated() -> None:
    made = subprocess.run(
        [sys.executable, CHARTS / "dashboard.py"], capture_output=True, text=True, check=True
    )
    assert FILE.read_text() == made.stdout, "run make docs"


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[0])
def test_dashboard_queries_exported_metrics(query: tuple[str, str]) -> None:
    expression = query[1]
    assert promql.names(expression)
    assert promql.unknown(expression, KNOWN) == []
    used = set(re.findall(r"\$(\w+)", expression))
    assert used <= set(VARIABLES) | set(GRAFANAS)
    # The variables above the panels apply to all of them.
    for inside in re.findall(r"(?:txbroker_\w+|ALERTS)\{([^}]*)\}", expression):
        chosen = set(re.findall(r"\$(\w+)", inside))
        assert {"cluster", "namespace", "job"} <= chosen
    assert not re.search(r"txbroker_\w+(?![\w{])", expression)


def test_dashboard_shows_every_metric() -> None:
    shown = set().union(*(promql.names(expression) for _, expression in QUERIES))
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {one.name for one in Metrics().described()} - stems == set()


def test_dashboard_variables_match_exported_labels() -> None:
    assert list(VARIABLES) == ["datasource", "cluster", "namespace", "job", "group"]
    for name, variable in VARIABLES.items():
        if name == "datasource":
            continue
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert asked is not None
        assert asked[2] == name
        earlier = list(VARIABLES)[: list(VARIABLES).index(name)]
        assert set(re.findall(r"\$(\w+)", asked[1])) <= set(earlier)
        names = promql.names(asked[1].replace("(", " ").replace("|", " "))
        assert names - set(KNOWN) <= {"txbroker_"}


def test_panels_have_unique_ids_and_positions() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = [
        (x, y)
        for panel in PANELS
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))
    rows = [(panel["gridPos"]["y"], panel["title"]) for panel in PANELS if panel["type"] == "row"]
    assert rows == sorted(rows)
    titles = [
        (row["title"], panel["title"])
        for row, panel in itertools.product(PANELS, SHOWN)
        if row["type"] == "row" and row["gridPos"]["y"] == _row_of(panel)
    ]
    assert len(set(titles)) == len(titles) == len(SHOWN)
    assert all(panel["description"] for panel in SHOWN)


def _row_of(panel: dict[str, Any]) -> int:
    above = [p["gridPos"]["y"] for p in PANELS if p["type"] == "row"]
    return max(y for y in above if y < panel["gridPos"]["y"])
