"""The page and the plot of a comparison, from figures that were made up; peers are not run here."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def figure(number: int, in_flight: int, per_s: float | None, p50: float | None = None) -> Any:
    times = None if p50 is None else {"p50": p50, "p99": 2 * p50}
    return {
        "round": number,
        "in_flight": in_flight,
        "per_s": per_s,
        "acked_ms": None,
        "visible_ms": times,
        "extra": {},
    }


def peer(title: str, figures: list[Any], **more: str) -> Any:
    return {"title": title, "counts": "what it is", "version": "v1", "figures": figures, **more}


@pytest.fixture
def data() -> Any:
    """Three rounds of two peers, and one that is missing."""
    ours = [figure(n, 64, rate, 5.0) for n, rate in ((1, 900.0), (2, 3000.0), (3, 1200.0))]
    theirs = [figure(n, 64, rate) for n, rate in ((1, 300.0), (2, 1500.0), (3, 800.0))]
    return {
        "command": "python -m benchmarks.compare",
        "at": "2026-01-02",
        "machine": "2 cores (a processor), 4 GiB, Linux 6",
        "plan": {"in_flight": [1, 64], "size": 1024, "warmup_s": 10.0, "duration_s": 20.0},
        "busy_before": [0.01, None, 0.02],
        "peers": {
            "txbroker": peer("txbroker", ours),
            "rocketmq": peer("RocketMQ <5>", [*theirs, figure(1, 1, None, 3.25)]),
            "dtm": peer("dtm", [], missing="it takes\nGo to build it"),
        },
    }


def test_page_has_medians_and_missing_peers(data: Any) -> None:
    from benchmarks.peers.page import page

    text = page(data, "comparison")
    assert "| txbroker | – | 1,200 (900–3,000) |" in text
    assert "| RocketMQ <5> | – | 800 (300–1,500) |" in text
    assert "| RocketMQ <5> | 3.2 / 6.5 | – |" in text
    # Round by round: 3, 2 and 1.5 times, not the medians' quotient.
    assert "| txbroker ÷ RocketMQ <5> | – | 2.00 (1.50–3.00) |" in text
    assert "- **dtm**: it takes Go to build it" in text
    assert "| dtm |" not in text
    assert "not quiet" not in text
    assert "(comparison.svg)" in text


def test_busy_machine_is_noted(data: Any) -> None:
    from benchmarks.peers.page import page

    data["busy_before"] = [0.02, 0.6, 0.5]
    assert "others took 50% of it, and up to 60%" in page(data, "comparison")


def test_the_plot_has_a_bar_for_each_figure(data: Any) -> None:
    from benchmarks.peers.page import plot

    root = ET.fromstring(plot(data))
    name = "{http://www.w3.org/2000/svg}"
    bars = [one for one in root.iter(f"{name}rect") if one.get("height") == "12"]
    legend = [bar for bar in bars if bar.get("width") == "12"]
    assert (len(bars) - len(legend), len(legend)) == (2, 2)
    words = [text.text for text in root.iter(f"{name}text")]
    assert {"txbroker", "RocketMQ <5>", "1,200", "800", "64 in flight"} <= set(words)
    described = root.find(f"{name}desc")
    assert described is not None
    assert described.text == "txbroker: 1,200 at 64; RocketMQ <5>: 800 at 64"


def test_page_without_figures_is_valid(data: Any) -> None:
    from benchmarks.peers.page import page, plot

    for one in data["peers"].values():
        one["figures"] = []
    data["busy_before"] = []
    assert "## Not measured" in page(data, "comparison")
    ET.fromstring(plot(data))


def test_failed_peer_does_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import compare
    from benchmarks.peers.base import Figure, Missing, Plan

    class Made:
        counts = "made up"

        def __init__(self, name: str, *ends: Exception) -> None:
            self.name = self.title = name
            self._ends = list(ends)

        def version(self) -> str:
            if self.name == "absent":
                raise Missing("it is not there")
            return "v1"

        def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
            assert folder.is_dir()
            yield Figure(1, 10.0)
            if self._ends:
                raise self._ends.pop()

    monkeypatch.setattr(compare, "busy_share", lambda: 0.0)
    peers = [Made("whole"), Made("absent"), Made("broken", OSError("no room")), Made("last")]
    comparison = compare.Comparison(peers, Plan((1,), 1, 0.0, 1.0), tmp_path / "out")
    comparison.prepare()
    for number in (1, 2):
        comparison.round(number)
    found = json.loads((tmp_path / "out.json").read_text())["peers"]
    assert {name: len(one["figures"]) for name, one in found.items()} == {
        "whole": 2,
        "absent": 0,
        "broken": 1,
        "last": 2,
    }
    text = (tmp_path / "out.md").read_text()
    assert re.findall(r"^- \*\*(\w+)\*\*: it .*$", text, re.M) == ["absent", "broken"]
    assert "it failed: OSError: no room" in text
    assert (tmp_path / "out.svg").exists()


def test_every_jar_of_rocketmq_is_locked() -> None:
    from benchmarks.peers.rocketmq import ARTIFACTS, LOCK, VERSION
    from txbroker.embedded.lock import read_lock_file

    names = [jar.name for jar in read_lock_file(LOCK)]
    assert {f"{one}-{VERSION}.jar" for one in ARTIFACTS} <= set(names)
    assert len(names) == len(set(names))


def test_rocketmq_reports_are_parsed() -> None:
    from benchmarks.peers.rocketmq import _REPORT

    for line in (
        "Current Time: 2026-11-21 19:13:48,924 | Send TPS:  2337 | Max RT(ms):   194 | "
        "AVG RT(ms): 1.7 | Send Failed: 0 | Check: 0",
        "Current Time: 1795 Send TPS: 2337 Max RT(ms):  194 AVG RT(ms):1.7 Send Failed: 0 check",
    ):
        report = _REPORT.search(line)
        assert report is not None
        assert report.groupdict() == {"per_s": "2337", "max": "194", "mean": "1.7", "failed": "0"}


def rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables of a page in docs."""
    for line in (Path(__file__).parents[1] / "docs" / page).read_text().splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_figures_of_the_choice_are_those_of_the_comparison() -> None:
    measured: dict[str, list[str]] = {}
    for name, *cells in rows("comparison.md"):
        if re.match(r"\w", name):
            measured.setdefault(name, []).extend(re.sub(r" \(.*?\)", "", cell) for cell in cells)
    shown = [row for row in rows("when-not-to-use-it.md") if len(row) == 7 and row[0] in measured]
    assert len(shown) == 7
    for name, *cells in shown:
        assert cells == measured[name][: len(cells)], name
