"""Summaries of runs for tests of the journal, the news and the report."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.report.contents import (
    DriftDay,
    GroupLatency,
    KindCount,
    Percentiles,
    ReportTables,
    ShownFinding,
)
from txbroker.spark.report.plots import LatencyPoint, TimeAxis
from txbroker.spark.report.report import render
from txbroker.spark.schema import (
    BrokenRecord,
    CheckResult,
    Example,
    Histogram,
    RunSummary,
    SnapshotBounds,
    Terms,
    TopicRead,
)

STARTED_MS = 1_760_000_000_000
DAY_MS = 86_400_000


def cut() -> SnapshotBounds:
    return SnapshotBounds(
        TopicRead("txbroker.half", (0, 0), (0, 10), (500, 620)),
        TopicRead("txbroker.op", (0, 0), (0, 0), (800, 910)),
        TopicRead("txbroker.parked", (0, 0), (0, 0), (3, 0)),
        (TopicRead("payments", (7,), (7,), (990,), taken=7),),
        (790, 900),
        (500, 610),
        (STARTED_MS, STARTED_MS),
    )


def summary(number: int = 0, **changes: Any) -> RunSummary:
    """The summary of run `number`, a day after the one before it."""
    given: dict[str, Any] = {
        "run": f"run-{number:06}",
        "mode": "full",
        "started_ms": STARTED_MS + number * DAY_MS,
        "took_s": 12.5,
        "cut": cut(),
        "records": {"half": 1110, "op": 1710, "visible": 983, "parked": 3},
        "transactions": 1100,
        "states": {"promoted": 950, "rolled_back": 120, "pending": 27, "parked": 3},
        "drift": {},
        "carried": 27,
    }
    return RunSummary(**{**given, **changes})


def drifted(number: int = 0, **changes: Any) -> RunSummary:
    """The same with findings and the fields that depend on them."""
    given: dict[str, Any] = {
        "drift": {"lost": 2, "visible_twice": 1},
        "quarantined": 1,
        "taken": {"payments": 7},
        "examples": (
            Example(
                "01" + "A" * 24, ("lost",), "orders", "not visible 11 minutes after its commit"
            ),
            Example("02" + "B" * 24, ("visible_twice", "lost"), "bills", "at payments-0 12 and 13"),
        ),
        "pending_age": Histogram("pending", (1000, 60_000, 3_600_000), (3, 20, 4, 0)),
    }
    return summary(number, **{**given, **changes})


def finding(kind: str, state: str = "open", **changes: Any) -> ShownFinding:
    """A row of the table of findings."""
    severity = next((one.severity for one in ALL_KINDS if one.name == kind), "critical")
    known = ("ada", "an old outage", STARTED_MS + 30 * DAY_MS) if state == "acknowledged" else ()
    by, by_why, until_ms = known or (None, None, None)
    closed_ms = STARTED_MS if state == "healed" else None
    found = ShownFinding(
        *("01" + "A" * 24, kind, severity, state, "orders", "payments-0@17", "why it is drift", 1),
        *(STARTED_MS - DAY_MS, STARTED_MS, closed_ms, False, by, by_why, until_ms),
    )
    return found._replace(**changes)


def counts_of(findings: list[ShownFinding]) -> list[KindCount]:
    """The numbers of these findings."""
    pairs = {(one.kind, one.state): one.grp for one in findings}
    numbers = [(one.kind, one.state) for one in findings]
    return [
        KindCount(kind, state, numbers.count((kind, state)), grp, numbers.count((kind, state)))
        for (kind, state), grp in pairs.items()
    ]


HOURS = TimeAxis(STARTED_MS - DAY_MS, STARTED_MS, 3_600_000)


def latency(grp: str = "orders", transactions: int = 1000, **changes: Any) -> GroupLatency:
    """The latencies of a group over a day, without transactions in one hour of the night."""
    points = [
        LatencyPoint(HOURS.begin_ms + hour * HOURS.step_ms, *(base * (1 + hour % 5) for base in of))
        for hour in range(24)
        if hour != 3
        for of in [(8.0, 40.0, 180.0)]
    ]
    later = [LatencyPoint(at, 2 * p50, 3 * p95, 4 * p99) for at, p50, p95, p99 in points]
    whole = Percentiles(24.0, 120.0, 700.0), Percentiles(48.0, 360.0, 2800.0)
    return GroupLatency(grp, transactions, points, later, *whole)._replace(**changes)


def drift_day(number: int, acknowledged: dict[str, int] | None = None, **found: int) -> DriftDay:
    """The open findings after run `number`, the last of its day."""
    return DriftDay(STARTED_MS + number * DAY_MS, found, acknowledged or {})


def tables(
    *findings: ShownFinding,
    groups: tuple[GroupLatency, ...] = (),
    days: tuple[DriftDay, ...] = (),
) -> ReportTables:
    """What the tables hold for a report."""
    return ReportTables(counts_of([*findings]), findings, groups, HOURS, days)


def sample_pages() -> dict[str, str]:
    """The reports of a clean run and of one with every kind of finding, for pictures."""
    limits = (
        CheckResult("orders-latency", "critical", "visible_p99_s", 2.8, 5, True, "orders"),
        CheckResult("few-transactions", "error", "volume_min", 0.93, 0.5, True),
        CheckResult("parked", "warning", "parked_share", 0.0027, 0.01, True),
    )
    groups = (
        latency("orders", 812_000),
        latency("bills", 88_000, visible=[], shown=Percentiles(None, None, None), estimated=88_000)
        ._replace(
            earliest=Percentiles(31.0, 140.0, 720.0), latest=Percentiles(4.1e6, 8.6e6, 8.9e6)
        ),
    )  # fmt: skip
    runs = [
        summary(n, transactions=900_000 + n % 7 * 40_000, took_s=30 + n % 5) for n in range(-29, 0)
    ]
    runs[17] = drifted(-12, transactions=870_000, took_s=41)
    whole = {
        "transactions": 1_061_000,
        "states": {"promoted": 982_140, "rolled_back": 78_790, "pending": 67, "parked": 3},
        "records": {"half": 1_061_000, "op": 1_064_212, "visible": 982_140, "parked": 3},
        "took_s": 33.0,
        "terms": Terms(STARTED_MS),
    }
    clean = summary(checks=limits, **whole)
    kinds = {kind.name: 1 + n * n % 23 for n, kind in enumerate(ALL_KINDS)}
    found = drifted(
        drift=kinds,
        acknowledged={"late": 2},
        checks=(structs.replace(limits[0], value=7.25, ok=False), *limits[1:]),
        **whole,
        set_aside=(BrokenRecord("payments", 1, 99, "no transaction id"),),
    )
    # Two weeks of a fault that was acknowledged, two nights without a run, and what this run found.
    days = [drift_day(n) for n in range(-29, -14)]
    days += [
        drift_day(n, {"late": 4} if n > -8 else {}, late=18 + n) for n in (*range(-14, -4), -2)
    ]
    days += [drift_day(-1, {"late": 4}, late=4, lost=60), drift_day(0, {"late": 2}, **kinds)]
    findings = [finding(kind) for kind in kinds] + [
        finding("late", "acknowledged"),
        finding("lost", "healed"),
    ]
    return {
        "audit-clean": render(clean, runs, tables(groups=groups, days=(*days[:15], drift_day(0)))),
        "audit-drift": render(found, runs, tables(*findings, groups=groups, days=(*days,))),
    }
