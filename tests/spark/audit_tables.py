"""What an audit leaves: its verdicts, which it removes itself, and the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from txbroker.spark.report.summary import add_up
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.schema import VERDICT, RunSummary
from txbroker.spark.tables.current import current_verdicts
from txbroker.spark.tables.layout import TRANSACTIONS, Table
from txbroker.spark.tables.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OF_RUN = (
    "run", "observed_at", "opened_run", "opened_at", "seen_run", "seen_at", "times", "closed_run",
    "closed_at",
)  # fmt: skip
"""Columns that tell one run from another."""


class Audited(NamedTuple):
    """A run, and its verdicts by id."""

    summary: RunSummary
    rows: dict[str, dict[str, Any]]

    @property
    def carried(self) -> dict[str, dict[str, Any]]:
        """The verdicts that the next run judges again."""
        return {id: row for id, row in self.rows.items() if row["carry"]}


def audited(spark: SparkSession, access: Any, settings: AuditSettings) -> Audited:
    """Audit, and return the verdicts too; no id has two."""
    found: list[dict[str, Any]] = []

    def kept(verdicts: DataFrame, now_ms: int) -> Any:
        found.extend(row.asDict(recursive=True) for row in verdicts.collect())
        return add_up(verdicts, now_ms)

    with mock.patch("txbroker.spark.run.add_up", kept):
        summary = run_audit(spark, access, settings)
    return Audited(summary, by_keys(found, ("id",)))


def valid(spark: SparkSession, out: str, last: Audited) -> DataFrame:
    """Return the valid verdict of each transaction after a run."""
    rows = spark.createDataFrame(list(last.rows.values()), VERDICT)
    return current_verdicts(open_store(spark, out).read(TRANSACTIONS), rows)


def rows_in(spark: SparkSession, out: str, table: Table = TRANSACTIONS) -> dict[Any, Any]:
    """Return the rows of a table by key, each once, without the columns of `OF_RUN`."""
    rows = open_store(spark, out).read(table).drop(*OF_RUN).collect()
    return by_keys([row.asDict(recursive=True) for row in rows], table.keys)


def by_keys(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        key = key if len(key) > 1 else key[0]
        assert key not in found, f"{key} has two rows"
        found[key] = row
        if row.get("places"):
            row["places"].sort(key=str)
    return found
