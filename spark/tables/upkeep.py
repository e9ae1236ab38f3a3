"""Compaction and retention of the tables, beside audits that are running.

Both hold the tables' lock, as an audit does while it reads and changes them. A change that takes
several renames is staged and applied like that of a run, so a kill neither loses nor doubles a row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from pyspark.sql import SparkSession

from txbroker.errors import ConfigurationError
from txbroker.spark import expressions as F
from txbroker.spark.commit import settle
from txbroker.spark.journal import Journal
from txbroker.spark.storage.folder import DataFolder, data_folder
from txbroker.spark.tables.layout import DRIFT, RUNS, TABLES
from txbroker.spark.tables.store import TableStore, open_store

_UPKEEP = "upkeep"
"""Where changes are staged, in place of the name of a run."""


def compact(spark: SparkSession, out: str, data_dir: Path | DataFolder) -> dict[str, int]:
    """Join the small files of each day; return how many there were, by table.

    Args:
        out: the output folder of audits.
        data_dir: their data folder.

    Raises:
        ConfigurationError: there are no tables, or they cannot be changed.
    """
    with _changing(spark, out, data_dir) as store:
        return store.compact(_UPKEEP)


def expire(
    spark: SparkSession, out: str, data_dir: Path | DataFolder, keep_days: int
) -> date | None:
    """Remove rows of earlier days, but no open finding; return the first day that is kept.

    Days count back from the newest run by the brokers' clocks, or from today by this machine's if
    that is earlier: one wrong clock removes nothing. Without a run nothing is removed, and None
    returned. The next audit removes the facts of runs whose transactions are all older.

    Args:
        keep_days: number of days to keep before that of the newest run.
    """
    with _changing(spark, out, data_dir) as store:
        row = store.read(RUNS).agg(F.max("day").alias("day")).first()
        newest: date | None = None if row is None else row["day"]
        if newest is None:
            return None
        first = min(newest, datetime.now(UTC).date()) - timedelta(days=keep_days)
        if first.isoformat() > (store.manifest.expired_before or ""):
            store.note_expiry(first.isoformat())
        for table in TABLES:
            old = store.read(table).where(F.col("day") < F.lit(first))
            if table is DRIFT:
                closed = F.coalesce(F.to_date("closed_at"), F.col("day"))
                old = old.where("state != 'open'").where(closed < F.lit(first))
            old = old.select("day", *table.keys)
            if not old.isEmpty():
                store.stage(_UPKEEP, table, spark.createDataFrame([], table.ddl), old)
        return first


@contextmanager
def _changing(spark: SparkSession, out: str, data_dir: Path | DataFolder) -> Iterator[TableStore]:
    """Yield the tables, locked; apply at the end of the block what it has staged."""
    folder = data_folder(data_dir)
    journal = Journal(folder.journal)
    with folder.tables_locked():
        series = journal.series() if journal.exists else ""
        store = open_store(spark, out, series=series)
        if not store.exists:
            raise ConfigurationError(
                f"there are no tables in {out}: name the output folder of audits with --out"
            )
        settle(store, journal)
        store.discard(_UPKEEP)  # of one that died before it counted
        yield store
        if _UPKEEP in store.staged_runs():
            folder.check()
            store.conclude(_UPKEEP)
            settle(store, journal)
