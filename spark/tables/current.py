"""Transactions of earlier runs, beside those of the run in progress."""

from collections.abc import Callable, Sequence

from pyspark.sql import Column, DataFrame

from txbroker.spark import expressions as F
from txbroker.spark.facts.messages import id_time_ms
from txbroker.spark.schema import TopicRead
from txbroker.spark.tables.layout import TRANSACTIONS
from txbroker.spark.tables.store import TableStore

_DAY_MS = 86_400_000
_YEAR_10000_MS = 253_402_300_800_000

_SHARED = (
    "id", "verdict", "findings", "state", "grp", "decision", "topics", "half_partition",
    "half_offset", "op_offset", "places",
)  # fmt: skip


def day_of(id_ms: Column) -> Column:
    """Return the day of `transactions` for the time in an id; 1970-01-01 for an id without a time,
    or with one after the year 9999, which other tools cannot read."""
    days = F.floor(F.when(id_ms < _YEAR_10000_MS, id_ms) / _DAY_MS).cast("int")
    return F.date_from_unix_date(F.coalesce(days, F.lit(0)))


def earlier_rows(
    store: TableStore, ids: DataFrame | None, keep: Callable[[DataFrame], DataFrame]
) -> DataFrame | None:
    """Return the rows of `transactions` with these ids; None where there can be none.

    Args:
        ids: columns `id` and `id_ms`; without `id_ms` all days are searched.
        keep: caches a table until the end of the run.
    """
    if ids is None or not store.exists:
        return None
    table = store.read(TRANSACTIONS)
    if "id_ms" in ids.columns:
        ids = keep(ids)
        found = ids.select(day_of(F.col("id_ms")).alias("day")).distinct().collect()
        if not found:
            return None
        table = table.where(F.col("day").isin([row["day"] for row in found]))
    return keep(table.join(ids.select("id"), "id", "left_semi"))


def counting_rows(
    store: TableStore, since: str, half: TopicRead, *, without_half: bool = False
) -> DataFrame:
    """Return the rows of `transactions` that count: of the runs from `since` on, and of all whose
    half message is still there, because no later run has replaced those.

    Args:
        half: how the half topic was read.
        without_half: also those of which no half message was seen, for what their targets show.
    """
    kept = is_kept(half)
    if without_half:
        kept = kept | F.col("half_offset").isNull()
    counts = (F.col("run") >= since) | (kept & (F.col("run") >= half.since))
    return store.read(TRANSACTIONS).where(counts)


def is_kept(half: TopicRead) -> Column:
    """Return whether the half message of a row, or of a verdict, is still in the half topic."""
    starts = F.array(*[F.lit(start).cast("bigint") for start in half.starts])
    kept = F.col("half_offset") >= F.get(starts, F.col("half_partition"))
    return F.coalesce(kept, F.lit(False))


def rows_of_topics(rows: DataFrame, topics: Sequence[str]) -> DataFrame:
    """Return the rows of transactions with a message for, or in, one of these targets: columns
    `id`, `id_ms`, `state`, `places`, `run`."""
    names = F.array(*map(F.lit, topics))
    seen = F.exists("places", lambda place: place["topic"].isin(*topics))
    return rows.where(F.arrays_overlap("topics", names) | seen).select(
        "id", id_time_ms(F.col("id")).alias("id_ms"), "state", "places", "run"
    )


def current_verdicts(
    transactions: DataFrame, verdicts: DataFrame, *, whole: bool = True
) -> DataFrame:
    """Return one row for each transaction: some columns of `schema.VERDICT`.

    A run's verdict counts before the row of an earlier run, except that `gone` replaces nothing:
    retention has removed the evidence since.

    Args:
        transactions: the rows of earlier runs that count.
        verdicts: of this run.
        whole: False returns the transactions of this run only.
    """
    if not whole:
        transactions = transactions.join(verdicts.select("id"), "id", "left_semi")
    times = ("prepared_at", "decided_at")
    earlier = transactions.select(
        *_SHARED, *(F.unix_millis(time).alias(f"{time}_ms") for time in times)
    )
    judged = verdicts.select(*_SHARED, *(f"{time}_ms" for time in times))
    gone = F.col("verdict") == "gone"
    unknown = judged.where(gone).join(earlier.select("id"), "id", "left_anti")
    judged = judged.where(~gone).unionByName(unknown)
    return judged.unionByName(earlier.join(judged.select("id"), "id", "left_anti"))
