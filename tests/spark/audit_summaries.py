"""Summaries of runs for tests of the journal, the news and the report."""

from __future__ import annotations

from typing import Any

from txbroker.spark.schema import Example, Histogram, RunSummary, SnapshotBounds, TopicRead

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
        "decide_latency": (Histogram("topic:payments", (10, 100, 1000), (400, 500, 40, 10)),),
        "visible_latency": (Histogram("group:orders", (10, 100, 1000), (100, 800, 50, 0)),),
    }
    return summary(number, **{**given, **changes})
