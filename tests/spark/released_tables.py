"""Tables as version 1 writes them, in `tables_v1`: python -m tests.spark.released_tables

Write them again only for a new version of the tables, into another folder.
"""

from __future__ import annotations

import shutil
import tempfile
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txbroker.spark.tables.layout import ATTEMPTS, DRIFT, LATENCY, RUNS, TRANSACTIONS
from txbroker.spark.tables.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER = Path(__file__).parent / "tables_v1"
INSTALLATION = "shop"
DAY = date(2026, 1, 2)
AT = datetime(2026, 1, 2, 3, 4, 5, 678000)
_SKETCH = {"count": 1, "p50_ms": 99.0, "p95_ms": 99.0, "p99_ms": 99.0, "sketch": {233: 1}}
ROWS: dict[str, list[dict[str, Any]]] = {
    TRANSACTIONS.name: [
        {
            "id": id, "grp": "orders", "topics": ["paid"], "messages": 1, "state": "promoted",
            "verdict": "settled", "findings": [], "decision": "commit", "source": "producer",
            "attempts": 0, "prepared_at": AT, "decided_at": AT, "visible_at": AT,
            "visible_estimated": False, "observed_at": AT, "decide_ms": 99, "visible_ms": 120,
            "half_partition": 0, "half_offset": 1, "op_offset": 2, "run": "run1",
            "places": [{"topic": "paid", "partition": 0, "offset": 7, "seq": 0}],
        }
        for id in ("a", "b")
    ],
    ATTEMPTS.name: [
        {
            "id": "a", "grp": "orders", "round": 1, "number": 1, "at": AT, "reason": "due",
            "outcome": "decided", "partition": 0, "offset": 2, "run": "run1",
        }
    ],
    DRIFT.name: [
        {
            "id": "b", "kind": "late", "severity": "warning", "grp": "orders", "state": "healed",
            "topic": "paid", "partition": 0, "offset": 7, "why": "late", "times": 2,
            "opened_at": AT, "opened_run": "run0", "seen_at": AT, "seen_run": "run0",
            "closed_at": AT, "closed_run": "run1",
        }
    ],
    RUNS.name: [
        {
            "run": "run1", "mode": "full", "version": "1", "began_at": AT, "started_at": AT,
            "took_s": 1.5, "transactions": 2, "states": {"promoted": 2}, "drift": {},
            "records": {"half": 2}, "carried": 0, "quarantined": 0, "taken": 0, "checks": [],
            "cost": {"tasks": 9},
        }
    ],
    LATENCY.name: [
        {
            "minute": AT.replace(second=0, microsecond=0), "grp": "orders", "topic": "paid",
            "transactions": 2, "estimated": 0, "undecided": 0, "parked": 0, "decide": _SKETCH,
            "visible": _SKETCH,
        }
    ],
}  # fmt: skip


def write(spark: SparkSession, out: Path) -> None:
    """Write the tables with `ROWS`."""
    store = open_store(spark, str(out), INSTALLATION)
    for table in (TRANSACTIONS, ATTEMPTS, DRIFT, RUNS, LATENCY):
        rows = [{"day": DAY, "installation": INSTALLATION, **row} for row in ROWS[table.name]]
        store.stage("run1", table, spark.createDataFrame(rows, table.ddl).coalesce(1))
    store.apply("run1")


if __name__ == "__main__":
    from txbroker.spark.session import SparkSettings, spark_session

    with tempfile.TemporaryDirectory() as made:
        with spark_session(SparkSettings("local[1]")) as session:
            write(session, Path(made))
        hidden = shutil.ignore_patterns(".*")
        shutil.copytree(made, FOLDER, ignore=hidden, dirs_exist_ok=True)
