"""Tables of a small shop, for the queries that the docs show."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from tests.spark.table_cases import rows_of
from txbroker.core.routing import make_id
from txbroker.spark.tables.layout import ATTEMPTS, DRIFT, LATENCY, RUNS, TRANSACTIONS
from txbroker.spark.tables.sketch import bucket, sketch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from txbroker.spark.tables.store import TableStore

BEGIN = datetime(2026, 1, 14, 20, tzinfo=UTC)
GROUPS = ("orders", "payments", "refunds")
TRANSACTIONS_MADE = 240


def write_demo(spark: SparkSession, store: TableStore) -> None:
    """Write every table as one run does."""
    settled = spark.createDataFrame(
        [tuple(each.values()) for each in map(_transaction, range(TRANSACTIONS_MADE))],
        """id string, day date, grp string, topics array<string>, messages int, state string,
            verdict string, decision string, source string, prepared_at timestamp,
            decided_at timestamp, visible_at timestamp, decide_ms bigint, visible_ms bigint""",
    ).cache()
    tables = {
        TRANSACTIONS: settled,
        ATTEMPTS: rows_of(spark, ATTEMPTS, *_attempts()),
        DRIFT: rows_of(spark, DRIFT, *_findings()),
        RUNS: rows_of(spark, RUNS, *_runs()),
        LATENCY: _latency(settled),
    }
    for table, rows in tables.items():
        lacking = rows_of(spark, table).schema
        null = {f.name: F.lit(None).cast(f.dataType) for f in lacking if f.name not in rows.columns}
        store.stage("demo", table, rows.withColumns(null))
    store.apply("demo")
    settled.unpersist()


def _id(n: int) -> str:
    prepared_ms = round((BEGIN + timedelta(minutes=6 * n)).timestamp() * 1000)
    return make_id(n % 8, prepared_ms, n * 0x9E3779B97F4A7C15 % (1 << 64))


def _transaction(n: int) -> dict[str, Any]:
    prepared = BEGIN + timedelta(minutes=6 * n)
    group = GROUPS[n % 3]
    decide_ms = 40 + n * 37 % 200 + (300 if group == "refunds" else 0)
    visible_ms = decide_ms + 20 + (900 if n % 50 == 49 else n % 7)
    committed = n % 11 != 10
    state = "promoted" if committed else "rolled_back"
    return {
        "id": _id(n),
        "day": prepared.date(),
        "grp": group,
        "topics": [group],
        "messages": 1 + n % 2,
        "state": state,
        "verdict": {77: "body_changed", 123: "too_many_attempts"}.get(n, "settled"),
        "decision": "commit" if committed else "rollback",
        "source": "operator" if n % 40 == 39 else "check" if n % 12 == 3 else "producer",
        "prepared_at": prepared,
        "decided_at": prepared + timedelta(milliseconds=decide_ms),
        "visible_at": prepared + timedelta(milliseconds=visible_ms) if committed else None,
        "decide_ms": decide_ms,
        "visible_ms": visible_ms if committed else None,
    }


def _latency(settled: DataFrame) -> DataFrame:
    minutes = settled.withColumn("minute", F.date_trunc("minute", "prepared_at")).select(
        "day", "minute", "grp", F.explode("topics").alias("topic"), "decide_ms", "visible_ms"
    )

    def counts(name: str) -> Any:
        value = bucket(F.col(name))
        return sketch(F.array_compact(F.array(F.when(value.isNotNull(), _counted(value)))))

    is_last = F.col("minute") == F.lit(BEGIN + timedelta(minutes=6 * (TRANSACTIONS_MADE - 1)))
    waiting = {
        name: F.when(is_last, count).otherwise(0).cast("bigint")
        for name, count in (("undecided", 2), ("parked", 1))
    }
    return minutes.select(
        "day", "minute", "grp", "topic",
        F.lit(1).cast("bigint").alias("transactions"),
        counts("decide_ms").alias("decide"), counts("visible_ms").alias("visible"),
    ).withColumns(waiting)  # fmt: skip


def _counted(value: Any) -> Any:
    return F.struct(value.alias("bucket"), F.lit(1).cast("bigint").alias("n"))


def _attempts() -> list[dict[str, Any]]:
    made = []
    for n, checks in ((15, 1), (63, 4), (123, 6)):
        prepared = BEGIN + timedelta(minutes=6 * n)
        for number in range(1, checks + 1):
            at = prepared + timedelta(seconds=60 * number)
            outcome = "decided" if number == checks else "later"
            where = {"partition": n % 8, "offset": 100 * n + number}
            made.append(
                {"id": _id(n), "grp": GROUPS[n % 3], "day": at.date(), "round": 1, "number": number}
                | {"at": at, "reason": "due", "outcome": outcome, **where}
            )
    return made


def _findings() -> list[dict[str, Any]]:
    opened, seen = BEGIN + timedelta(hours=10), BEGIN + timedelta(hours=24)
    old = BEGIN - timedelta(days=20)
    healed = {"state": "healed", "closed_at": seen}
    agreed = {
        "acknowledged_at": seen,
        "acknowledged_by": "kim@ops",
        "acknowledged_why": "known client",
        "acknowledged_until": BEGIN + timedelta(days=14),
    }
    found = (
        (77, "body_changed", "critical", opened, "value differs from the prepared one", agreed),
        (123, "too_many_attempts", "error", seen, "checked 6 times, its policy allows 5", {}),
        (81, "late", "warning", opened, "decided 74 s ago, and not visible", healed),
        (12, "lost", "critical", old, "decided 11 minutes ago, and not visible", healed),
    )
    return [
        {
            "id": _id(n),
            "day": (BEGIN + timedelta(minutes=6 * n)).date(),
            "kind": kind,
            "severity": severity,
            "grp": GROUPS[n % 3],
            "topic": GROUPS[n % 3],
            "partition": n % 8,
            "offset": 7 * n,
            "why": why,
            "state": "open",
            "opened_at": at,
            "seen_at": at,
            "times": 1,
            **more,
            **({"closed_at": old} if at is old else {}),
        }
        for n, kind, severity, at, why, more in found
    ]


def _runs() -> list[dict[str, Any]]:
    runs = []
    for number, hours in enumerate((10, 24)):
        began = BEGIN + timedelta(hours=hours)
        count = 10 * hours - 100 * number
        runs.append(
            {
                "day": began.date(),
                "run": f"{began:%Y%m%dT%H%M%S}000Z-{number:04x}",
                "mode": "incremental" if number else "full",
                "began_at": began,
                "took_s": 31.5 - 9.25 * number,
                "transactions": count,
                "records": {"half": 2 * count, "op": count + 5, "visible": 2 * count, "parked": 1},
                "cost": {"cpu_ms": 38_200 - 9_100 * number, "shuffle_bytes": 4_300_000, "jobs": 40}
                | {"spill_bytes": 0},
            }
        )
    return runs
