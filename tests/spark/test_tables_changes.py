"""Rows of the tables from runs' verdicts: transactions, attempts, latency, and the row of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date
from random import Random
from typing import TYPE_CHECKING, Any

from tests.spark.table_runs import NAMES, START_MS, Row, Tables, id_at, now_ms, time_of, verdict
from txbroker import __version__
from txbroker.spark.schema import CheckResult, RunSummary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY_MS = 86_400_000
BEFORE_MIDNIGHT_MS = START_MS - START_MS % DAY_MS - 1
TIMES: Row = {"prepared_at_ms": START_MS, "decision": "commit", "decided_at_ms": START_MS + 200}
"""Of a committed transaction."""


# --- transactions ------------------------------------------------------------------------------

ENDED: dict[str, tuple[Row, Row]] = {
    "by the broker's timestamps": (
        verdict("", **TIMES, visible_at_ms=START_MS + 250),
        {
            "day": date(2023, 11, 14), "prepared_at": START_MS, "decided_at": START_MS + 200,
            "visible_at": START_MS + 250, "visible_estimated": False, "decide_ms": 200,
            "visible_ms": 250,
        },
    ),
    "by the users' timestamps": (
        verdict("", **TIMES),
        {"visible_at": START_MS + 200, "visible_estimated": True, "visible_ms": 200},
    ),
    "rolled back": (
        verdict("", "rolled_back", **{**TIMES, "decision": "rollback"}),
        {"visible_at": None, "visible_estimated": False, "visible_ms": None, "decide_ms": 200},
    ),
    "prepared before midnight": (
        verdict("", **{**TIMES, "prepared_at_ms": BEFORE_MIDNIGHT_MS}),
        {"day": date(2023, 11, 14)},
    ),
    "without a half message": (
        verdict("", "gone", decided_at_ms=BEFORE_MIDNIGHT_MS),
        {"day": date(2023, 11, 14), "prepared_at": None, "decide_ms": None, "visible_ms": None},
    ),
    "void": (verdict("", "void"), {"day": date(2023, 11, 14), "visible_estimated": False}),
}  # fmt: skip


def test_an_ended_transaction_becomes_a_row(spark: SparkSession) -> None:
    ids = {label: id_at(number) for number, label in enumerate(ENDED)}
    verdicts = [{**row, "id": ids[label]} for label, (row, _) in ENDED.items()]
    odd = [verdict("no id", "void"), verdict(id_at(9, (1 << 48) - 1), "void")]
    unfinished = [
        verdict(id_at(100 + n), state) for n, state in enumerate(("pending", "committed"))
    ]
    found = Tables(spark).run(1, [*verdicts, *odd, *unfinished])["transactions"]
    rows = {row["id"]: row for row in found}
    assert rows.keys() == {*ids.values(), *(row["id"] for row in odd)}
    for label, (_, expected) in ENDED.items():
        row = rows[ids[label]]
        for name, value in expected.items():
            moment = name.endswith("_at") and value is not None
            assert row[name] == (time_of(value) if moment else value), f"{label}: {name}"
    assert {rows[row["id"]]["day"] for row in odd} == {date(1970, 1, 1)}
    for row in found:
        assert (row["installation"], row["run"]) == (NAMES.prefix, "run1")
        assert row["observed_at"] == time_of(now_ms(1))


def test_a_later_run_replaces_a_row_unless_its_evidence_is_gone(spark: SparkSession) -> None:
    twice, removed, new = map(id_at, range(3))
    tables = Tables(spark)
    tables.run(1, [verdict(twice, **TIMES), verdict(removed, **TIMES), verdict(new, "gone")])
    again = verdict(twice, **TIMES, findings=["visible_twice"])
    tables.run(2, [again, verdict(removed, "gone"), verdict(new, **TIMES)])
    rows = {row["id"]: (row["verdict"], row["run"]) for row in tables.rows["transactions"]}
    assert rows == {
        twice: ("visible_twice", "run2"),
        removed: ("settled", "run1"),
        new: ("settled", "run2"),
    }


# --- attempts ----------------------------------------------------------------------------------


def mark(kind: str, number: int = 0, *, turn: int = 1, source: str = "schedule") -> Row:
    return {"kind": kind, "number": number, "round": turn, "source": source, "reason": "due"}


ATTEMPTED = {
    "answered": (
        [mark("check", 1), mark("commit", source="check")],
        ["decided"],
    ),
    "not by a checker": ([mark("check", 1), mark("rollback", source="operator")], ["none"]),
    "returned, then answered": (
        [mark("check", 1), mark("returned", 1), mark("check", 2), mark("rollback", source="check")],
        ["returned", "decided"],
    ),
    "not yet": (
        [mark("check", 1), mark("later", 1), mark("check", 2), mark("commit", source="producer")],
        ["later", "none"],
    ),
    "parked and revived": (
        [
            *(mark("check", 1), mark("check", 2), mark("park"), mark("revive")),
            *(mark("check", 1, turn=2), mark("returned", 1, turn=2)),
            mark("commit", source="operator"),
        ],
        ["none", "parked", "returned"],
    ),
    "never checked": ([mark("commit", source="producer")], []),
}  # fmt: skip


def test_an_attempt_shows_what_came_of_it(spark: SparkSession) -> None:
    ids = {label: id_at(number) for number, label in enumerate(ATTEMPTED)}
    op: list[dict[str, Any]] = []
    for label, (marks, _) in ATTEMPTED.items():
        for each in marks:
            offset = len(op)
            place = {"partition": 0, "offset": offset, "at_ms": START_MS + offset}
            op.append({**each, **place, "id": ids[label]})
    op += [{**op[0], "id": id_at(100)}, op[0]]  # an open transaction; a record that was read twice
    tables = Tables(spark)
    verdicts = [verdict(id, **TIMES) for id in ids.values()] + [verdict(id_at(100), "pending")]
    rows = sorted(tables.run(1, verdicts, op=op)["attempts"], key=lambda row: row["offset"])
    found = {label: [r["outcome"] for r in rows if r["id"] == id] for label, id in ids.items()}
    assert found == {label: expected for label, (_, expected) in ATTEMPTED.items()}
    assert {row["id"] for row in rows} <= set(ids.values())
    first = rows[0]
    assert (first["at"], first["reason"], first["grp"]) == (time_of(START_MS), "due", "g")
    tables.run(2, verdicts, op=op)
    assert sorted(tables.rows["attempts"], key=lambda row: row["offset"]) == [
        {**row, "run": "run2"} for row in rows
    ]


# --- latency -----------------------------------------------------------------------------------

SEED = 26
SIZES = (1, 2, 3, 7, 100, 1500)
SHAPES: dict[str, Callable[[Random], int]] = {
    "equal": lambda random: 250,
    "none": lambda random: random.choice((0, 1)),
    "even": lambda random: random.randrange(1, 60_000),
    "skewed": lambda random: round(random.lognormvariate(5, 2)),
    "heavy": lambda random: round(random.paretovariate(0.7)),
    "apart": lambda random: random.choice((3, 90_000_000)),
}
"""Of a duration, ms."""
GAMMA = 1.02


def exact(values: list[int], percentile: int) -> int:
    return sorted(values)[math.ceil(len(values) * percentile / 100) - 1]


def durations(random: Random) -> dict[str, list[int]]:
    return {
        f"{shape}-{size}": [draw(random) for _ in range(size)]
        for shape, draw in SHAPES.items()
        for size in SIZES
    }


def transaction(number: int, group: str, decide_ms: int, visible_ms: int | None) -> Row:
    visible_at_ms = None if visible_ms is None else START_MS + visible_ms
    times = {"decided_at_ms": START_MS + decide_ms, "visible_at_ms": visible_at_ms}
    return verdict(id_at(number), **{**TIMES, **times}, grp=group)


def shown(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["minute"], row["grp"], row["topic"]))


def test_percentiles_are_exact_to_one_percent_and_sketches_merge(spark: SparkSession) -> None:
    random = Random(SEED)
    drawn = durations(random)
    verdicts = [
        transaction(number, group, value, None)
        for group, values in drawn.items()
        for number, value in enumerate(values, 10_000 * list(drawn).index(group))
    ]
    at_once = Tables(spark)
    at_once.run(1, verdicts)
    for row in at_once.rows["latency"]:
        values = drawn[row["grp"]]
        assert row["decide"]["count"] == row["transactions"] == len(values)
        for percentile in (50, 95, 99):
            expected, found = exact(values, percentile), row["decide"][f"p{percentile}_ms"]
            assert abs(found - expected) <= (0.01 * expected or 1), (row["grp"], percentile)
        for place, count in row["decide"]["sketch"].items():
            inside = [v for v in values if GAMMA ** (place - 1) < v <= GAMMA**place]
            assert count == (len(inside) if place else sum(v <= 1 for v in values))
    assert {row["grp"] for row in at_once.rows["latency"]} == drawn.keys()
    random.shuffle(verdicts)
    parts = [verdicts[::3], verdicts[1::3], verdicts[2::3]]
    for order in (parts, [*reversed(parts)], [parts[0], [*parts[0], *parts[1]], parts[2]]):
        several = Tables(spark)
        for number, part in enumerate(order, 1):
            several.run(number, part)
        assert shown(several.rows["latency"]) == shown(at_once.rows["latency"])


def test_open_transactions_count_in_the_newest_run_only(spark: SparkSession) -> None:
    tables = Tables(spark)
    first, second, parked = map(id_at, range(3))
    open_times = {"prepared_at_ms": START_MS, "topics": ["orders", "bills"]}
    parked_row = verdict(parked, "parked", **open_times)
    tables.run(1, [verdict(first, "pending", **open_times), parked_row])
    assert counts(tables) == {"bills": (0, 1, 1), "orders": (0, 1, 1)}
    assert "latency" not in tables.run(2, [verdict(first, "pending", **open_times), parked_row])
    later = {**TIMES, "topics": ["orders"], "visible_at_ms": START_MS + 300}
    tables.run(3, [verdict(first, **later), verdict(second, **later), parked_row])
    assert counts(tables) == {"bills": (0, 0, 1), "orders": (2, 0, 1)}
    tables.run(4, [])
    assert counts(tables) == {"bills": (0, 0, 0), "orders": (2, 0, 0)}
    reads = tables.reads
    assert not tables.run(5, [])
    assert tables.reads == reads, "an empty run reads no table"


def counts(tables: Tables) -> dict[str, tuple[int, int, int]]:
    return {
        row["topic"]: (row["transactions"], row["undecided"], row["parked"])
        for row in tables.rows["latency"]
    }


def test_a_replaced_row_is_taken_out_of_the_latencies(spark: SparkSession) -> None:
    tables = Tables(spark)
    rows = [transaction(number, "g", 100, 200) for number in range(3)]
    estimated = transaction(3, "g", 100, None)
    tables.run(1, [*rows, estimated])
    (before,) = tables.rows["latency"]
    assert (before["transactions"], before["estimated"]) == (4, 1)
    assert (before["decide"]["count"], before["visible"]["count"]) == (4, 3)
    assert not tables.run(2, [*rows, estimated], mode="full")["latency"], "nothing has changed"
    tables.run(3, [transaction(0, "g", 100, 9000), verdict(rows[1]["id"], "gone")], mode="full")
    (row,) = tables.rows["latency"]
    assert row["decide"] == before["decide"]
    assert sum(row["visible"]["sketch"].values()) == row["visible"]["count"] == 3
    assert abs(row["visible"]["p99_ms"] - 9000) <= 90


# --- runs --------------------------------------------------------------------------------------


def test_a_run_becomes_a_row(spark: SparkSession) -> None:
    from txbroker.spark.tables.changes import run_row
    from txbroker.spark.tables.judged import JudgedRun

    check = CheckResult("p99", "error", "decide_p99_s", None, 2.5, None)
    summary = RunSummary(
        *("run7", "full", START_MS + 5, 12.5, None, {"half": 4}, 3, {"pending": 1}, {"lost": 2}),
        carried=1,
        quarantined=6,
        taken={"a": 1, "b": 2},
        checks=(check,),
        cost={"jobs": 9},
    )
    nothing = spark.range(0)
    judged = JudgedRun(summary, NAMES, START_MS, nothing, nothing)
    (row,) = run_row(judged, summary).rows.collect()
    assert row.asDict(recursive=True) == {
        "day": date(2023, 11, 14), "installation": "shop", "run": "run7", "mode": "full",
        "version": __version__, "began_at": time_of(START_MS), "started_at": time_of(START_MS + 5),
        "took_s": 12.5, "transactions": 3, "states": {"pending": 1}, "drift": {"lost": 2},
        "records": {"half": 4}, "carried": 1, "quarantined": 6, "taken": 3, "cost": {"jobs": 9},
        "checks": [
            {"name": "p99", "severity": "error", "value": None, "limit": 2.5, "ok": None}
        ],
    }  # fmt: skip
