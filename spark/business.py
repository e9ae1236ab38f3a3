"""Compare visible messages with the rows of the business.

A service writes the transaction's id into its table, in the local transaction that the message
stands for. So in the end there is a row for every visible message and a visible message for every
row; anything else was not one transaction.

The rows are read **after** the topics. A message that was visible then had its row before, so a row
that is missing now was never there. A row without a visible message may be younger than the
snapshot bounds: the time in its id decides, because a half message that is appended later than the
dedup window after that time is void. Transactions still open at the bounds are left to a later run.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession

from txbroker.core.routing import make_id
from txbroker.errors import ConfigurationError
from txbroker.spark import expressions as F
from txbroker.spark.facts.messages import id_partition, id_time_ms
from txbroker.spark.jdbc import JdbcTable, quoted, ranges
from txbroker.spark.judge.horizon import of_partition
from txbroker.spark.judge.kinds import BUSINESS_KINDS, NOT_VISIBLE
from txbroker.spark.schema import Terms

FINDINGS = MESSAGE_WITHOUT_ROW, ROW_WITHOUT_MESSAGE = [kind.name for kind in BUSINESS_KINDS]


class BusinessTable(Struct, frozen=True):
    """The table of the business.

    Attributes:
        source: `jdbc:…` in the form of the database's driver, or `parquet:` and a path or URI.
        table: the table; for Parquet a folder below the path, or empty.
        id_column: the column with the transaction's id.
        user, password: for JDBC, where they are not in the URL.
        groups: only these producer groups write rows; all of them if empty.
    """

    source: str
    table: str
    id_column: str
    user: str = ""
    password: str = ""
    groups: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raise a `ConfigurationError` where a part is missing or wrong."""
        if not self.source.startswith(("jdbc:", "parquet:")):
            raise ConfigurationError(
                f"the business must be jdbc:URL or parquet:PATH, not {self.shown}"
            )
        if self.source.startswith("jdbc:") and not self.table:
            raise ConfigurationError("a table is missing: name it with --table")
        if not self.id_column:
            raise ConfigurationError(
                "a column is missing: name the one with the transaction's id with --id-column"
            )

    @property
    def shown(self) -> str:
        """The source without login and options, which may hold a password."""
        return re.split(r"[?;]", re.sub(r"//[^/@]*@", "//", self.source))[0]

    @property
    def _path(self) -> str:
        root = self.source.removeprefix("parquet:")
        return f"{root.rstrip('/')}/{self.table}" if self.table else root


def compare(
    spark: SparkSession,
    verdicts: DataFrame,
    business: BusinessTable,
    terms: Terms,
    *,
    keep: Callable[[DataFrame, StorageLevel], DataFrame] | None = None,
    unknown_to_ms: Mapping[int, int] = {},
    half_partitions: int = 1,
) -> tuple[DataFrame, dict[str, int]]:
    """Compare messages with rows; call it after the topics were read.

    Args:
        verdicts: one row for each transaction, of this run and, where it did not begin at the start
            of the logs, of earlier ones.
        terms: the terms of the verdicts.
        keep: caches a table until the result was used; None: until Spark ends.
        unknown_to_ms: the last time in ids of transactions that may be unknown because retention or
            expiry removed them, by half partition, where there are any.
        half_partitions: number of parallel reads of a table.

    Returns:
        The findings, columns as in `judged.FOUND`, and counts: of both findings; of `rows`; of
        those that are not compared: `rows_open` (their transaction is not settled), `rows_young`
        (too young to judge), `rows_gone` (retention removed the evidence) and `rows_without_id`
        (null, or no transaction's id).
    """
    business.validate()
    rows = _rows(spark, business, half_partitions)
    rows = rows.groupBy("id").agg(F.count("*").alias("rows"))
    known = verdicts.select(
        "id",
        F.lit(True).alias("known"),
        "state",
        "grp",
        F.arrays_overlap("findings", F.array(*map(F.lit, NOT_VISIBLE))).alias("overdue"),
        (F.size("places") > 0).alias("visible"),
        F.get("places", F.lit(0)).alias("place"),
        F.coalesce("decided_at_ms", "prepared_at_ms").alias("decided_ms"),
    )
    joined = rows.join(known, "id", "full_outer").withColumn("id_ms", id_time_ms(F.col("id")))
    kind = _kind(business, terms, unknown_to_ms)
    compared = joined.select(
        *("id", kind.alias("kind"), "grp", "place.topic", "place.partition", "place.offset"),
        F.coalesce("rows", F.lit(0)).alias("rows"),
    ).where("kind IS NOT NULL")
    keep = keep or DataFrame.persist
    compared = keep(compared, StorageLevel.DISK_ONLY)
    with _readable(business):
        counted = compared.groupBy("kind").agg(
            F.count("*").alias("ids"), F.sum("rows").alias("rows")
        )
        counts = _counts(counted.collect())
    findings = compared.where(F.col("kind").isin(*FINDINGS)).drop("rows")
    meanings = [F.lit(text) for each in BUSINESS_KINDS for text in (each.name, each.meaning)]
    return findings.withColumn("why", F.create_map(*meanings)[F.col("kind")]), counts


def _kind(business: BusinessTable, terms: Terms, unknown_to_ms: Mapping[int, int]) -> Column:
    """Return the finding or count of a transaction and its rows; null: none."""
    visible, state = F.col("visible"), F.col("state")
    ours = F.col("grp").isin(*business.groups) if business.groups else F.lit(True)
    decided_ms = F.coalesce("decided_ms", "id_ms")
    old = decided_ms <= terms.now_ms - terms.late_after_ms
    # A half message of that time would be void by now.
    closed = F.col("id_ms") < terms.now_ms - terms.dedup_window_ms
    without_row = F.when(visible & ours & old, MESSAGE_WITHOUT_ROW)
    taken = F.col("id_ms") <= of_partition(unknown_to_ms, id_partition(F.col("id")))
    unknown = F.when(taken, "rows_gone").when(closed, ROW_WITHOUT_MESSAGE).otherwise("rows_young")
    return (
        F.when(F.col("rows").isNull(), without_row)
        .when(F.col("id_ms").isNull(), "rows_without_id")
        .when(F.col("known").isNull(), unknown)
        .when(visible, "rows_visible")
        .when(F.col("overdue"), ROW_WITHOUT_MESSAGE)
        .when((state == "rolled_back") & old, ROW_WITHOUT_MESSAGE)
        .when((state == "void") & closed, ROW_WITHOUT_MESSAGE)
        .when(state.isin("rolled_back", "void"), "rows_young")
        .when(state == "gone", "rows_gone")
        .otherwise("rows_open")
    )


def _counts(kinds: Sequence[Any]) -> dict[str, int]:
    counts = dict.fromkeys(FINDINGS, 0)
    rows = 0
    for row in kinds:
        rows += row["rows"]
        if row["kind"] != "rows_visible":
            counts[row["kind"]] = row["ids"] if row["kind"] in FINDINGS else row["rows"]
    return {**counts, "rows": rows}


# --- reading rows ----------------------------------------------------------------------------


def _rows(spark: SparkSession, business: BusinessTable, half_partitions: int) -> DataFrame:
    """Return the ids of all rows, one by one, as `id`."""
    with _readable(business):
        if business.source.startswith("jdbc:"):
            table = _jdbc(spark, business, half_partitions)
        else:
            table = spark.read.parquet(business._path)
            _column(table, business)
    # Columns of fixed length are filled up with spaces.
    return table.select(F.trim(table[business.id_column].cast("string")).alias("id"))


def _column(table: DataFrame, business: BusinessTable) -> str:
    for name in table.columns:
        if name.lower() == business.id_column.lower():
            return name
    raise ConfigurationError(
        f"{business.table or business.shown} has no column {business.id_column}; it has "
        f"{', '.join(table.columns[:30])}"
    )


def _jdbc(spark: SparkSession, business: BusinessTable, half_partitions: int) -> DataFrame:
    """Return a table of a database, read in `half_partitions` parts.

    Ids begin with their half partition, so ranges of ids are about equally large, and an index on
    the column helps.
    """
    login = {"user": business.user, "password": business.password}
    table = JdbcTable(business.source, business.table, login)
    name = _column(table.rows(spark), business)
    return table.rows(spark, id_ranges(quoted(business.source, name), half_partitions))


def id_ranges(column: str, half_partitions: int) -> list[str]:
    """Return SQL conditions of which every row meets exactly one, in any collation."""
    return ranges(column, [f"'{make_id(number, 0, 0)}'" for number in range(1, half_partitions)])


# --- errors ----------------------------------------------------------


@contextmanager
def _readable(business: BusinessTable) -> Iterator[None]:
    """Turn errors of Spark and of a driver into a `ConfigurationError`."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise ConfigurationError(_sentence(business, error)) from None


def _sentence(business: BusinessTable, error: Exception) -> str:
    text = str(getattr(error, "java_exception", None) or error)
    where = f"table {business.table} of {business.shown}" if business.table else business.shown
    if "PATH_NOT_FOUND" in text:
        return f"{business._path} does not exist: check --business and --table"
    lines = re.sub(r"^(?:[\w$]+\.)+\w*(?:Exception|Error): ", "", text.strip()).splitlines()
    line = lines[0] if lines else type(error).__name__
    if business.password:
        line = line.replace(business.password, "…")
    return f"{where} cannot be read: {line[:300]}"
