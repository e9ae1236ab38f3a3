"""From facts to verdicts: one shuffle groups all facts by transaction id.

Most transactions are plain: one whole half message, one deciding marker, each message visible once
and unchanged. SQL alone judges those, with the same result as `judge`, and their verdicts are
written at once. The facts of all others are written beside them, for `judge`. Ids are spread
evenly, so no hot group or topic makes one task longer than others.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import reduce
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.window import Window

from txbroker.spark import expressions as F
from txbroker.spark import schema
from txbroker.spark.facts.messages import id_partition
from txbroker.spark.judge import fold, judge, kinds, rows
from txbroker.spark.judge.horizon import of_partition
from txbroker.spark.judge.judge import judge_rows
from txbroker.spark.judge.rows import Horizon, JudgeTerms
from txbroker.spark.schema import Facts, arrow_types
from txbroker.spark.session import setting

_SIDES = Facts._fields
_LEFT_OUT = frozenset({"id", "id_ms", "dedup", "cause"})
"""Columns that no verdict needs."""
_FIRST = {"half": "seq", "visible": "seq"}
"""The sort column of each array."""

_ORDERED = "array<struct<topic: string, partition: int, offset: bigint>>"
_HASH_FIRST = "spark.sql.execution.useObjectHashAggregateExec"

_FOR_ORDER = ("order_mark", "ordered")
_UNJUDGED = "unjudged"
"""The verdict of transactions that SQL cannot judge, until `judge` has."""


def _judged() -> StructType:
    """Return the columns of a transaction before the order within keys is checked."""
    return schema.types_of(f"{schema.VERDICT}, order_mark bigint, ordered {_ORDERED}")


def judge_facts(
    spark: SparkSession,
    facts: Facts,
    terms: JudgeTerms,
    horizon: Horizon,
    path: str,
    chosen: Callable[[DataFrame], DataFrame] | None = None,
) -> DataFrame:
    """Write a row for each transaction, and return these rows: the columns of `schema.VERDICT`.

    Args:
        path: an empty folder, a path or URI that Hadoop knows.
        chosen: returns the rows to keep; all others are only compared with. None keeps all.
    """
    grouped, judged = _by_sql(_grouped(facts), terms), f"{path}/judged"
    unjudged = F.col("verdict") == _UNJUDGED
    counts = F.RowFigures({"unjudged": F.count_if(unjudged), "ordered": F.count("ordered")})
    # Sort-based aggregates: Spark would first collect arrays in a hash table and give up after a
    # few ids, which costs half as much work again.
    with setting(spark, _HASH_FIRST, "false"):
        _append(counts.of(grouped), judged)
    seen = counts.get()
    if seen["unjudged"]:  # a worker of Python starts even for none
        rest = spark.read.schema(grouped.schema).parquet(judged).where(unjudged)
        _append(_by_judge(rest, terms, horizon), judged)
    rows, count = spark.read.schema(_judged()).parquet(judged).where(~unjudged), 0
    with ExitStack() as kept:
        if any(seen.values()):
            # Cached and counted, so that Spark knows whether it can broadcast them to the verdicts.
            late = _overtaken(rows, horizon).persist()
            kept.callback(late.unpersist)
            # Usually there are none, which saves joining and writing the verdicts again.
            count = late.count()
            rows = _with_late(rows, late) if count else rows
        if count or chosen is not None:
            _append(rows if chosen is None else chosen(rows), f"{path}/corrected")
            rows = spark.read.schema(_judged()).parquet(f"{path}/corrected")
    return F.select(rows, *(name for name in _judged().names if name not in _FOR_ORDER))


def _append(rows: DataFrame, path: str) -> None:
    """Write verdicts by verdict, so that findings are read without all others."""
    # A task keeps a file of each verdict open; otherwise Spark would sort its rows by verdict.
    with setting(rows.sparkSession, "spark.sql.maxConcurrentOutputFileWriters", "32"):
        rows.write.mode("append").partitionBy("verdict").parquet(path)


# --- one shuffle -----------------------------------------------------------------------------


def _grouped(facts: Facts) -> DataFrame:
    """Return a row for each id: arrays of the rows of each table."""
    tables = facts._asdict()
    structs = {side: _struct(side, table) for side, table in tables.items()}
    kinds = {
        side: table.select(structs[side].alias("s")).schema["s"].dataType
        for side, table in tables.items()
    }
    # Ids of one time and partition share a prefix, and Spark sorts by the first eight bytes. In
    # reversed ids those are random, so Spark rarely compares more.
    parts = [
        table.select(
            F.reverse("id").alias("di"),
            *(
                structs[side].alias(side) if other == side else F.lit(None).cast(kind).alias(other)
                for other, kind in kinds.items()
            ),
        )
        for side, table in tables.items()
    ]
    # Repartition first: otherwise Spark sorts before the shuffle, for a partial aggregate, and
    # again after it.
    rows = reduce(DataFrame.unionAll, parts).repartition(_tasks(parts[0].sparkSession), "di")
    arrays: DataFrame = rows.groupBy("di").agg(
        *(F.collect_list(side).alias(side) for side in _SIDES)
    )
    # Nearly all arrays have one row and need no sorting.
    in_order = {
        side: F.when(F.size(side) > 1, F.sort_array(side)).otherwise(F.col(side)) for side in _FIRST
    }
    return arrays.withColumns(in_order).withColumn("id", F.reverse("di")).drop("di")


def _tasks(spark: SparkSession) -> int:
    """Return the number of tasks of a shuffle, see `session.spread`. Spark would join some of them,
    which then sort more rows than they have memory for."""
    return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)


def _struct(side: str, table: DataFrame) -> Column:
    first = _FIRST.get(side)
    names = [name for name in table.columns if name not in _LEFT_OUT and name != first]
    return F.struct(*([first] if first else []), *names)


# --- plain transactions, by SQL
# ----------------------------------------------------------------------


def _by_sql(grouped: DataFrame, terms: JudgeTerms) -> DataFrame:
    """Return the verdicts of plain transactions, and the facts of the others, each with nulls in
    the columns of the other.

    `terms` decide which pending transactions may be overdue.
    """
    flagged = grouped.withColumn("plain", F.coalesce(_is_plain(terms), F.lit(False)))
    plain = F.col("plain")
    values, kinds = _plain_verdict(), _judged()
    verdict = F.when(plain, values.pop("verdict")).otherwise(_UNJUDGED)
    return F.select(
        flagged,
        "id",
        verdict.alias("verdict"),
        *(
            F.when(plain, value.cast(kinds[name].dataType)).alias(name)
            for name, value in values.items()
        ),
        *(F.when(~plain, F.col(side)).alias(side) for side in _SIDES),
    )


def _is_plain(terms: JudgeTerms) -> Column:
    """Return whether all expected records are there and no others; see `judge` for every rule."""
    half, marker = F.get("half", F.lit(0)), F.get("op", F.lit(0))
    size = F.size("half")
    numbers = F.sequence(F.lit(1), size - 1)
    whole = (
        (size > 0)
        & (half["count"] == size)
        & (half["seq"] == 0)
        & half["void"].isNull()
        & (half["partition"] == id_partition(F.col("id")))
        & ((size == 1) | F.forall(numbers, _follows))
    )
    decides = (
        (F.size("op") == 1)
        & marker["kind"].isin("commit", "rollback")
        & (marker["partition"] == half["partition"])
        & ((marker["grp"] == "") | (marker["grp"] == half["grp"]))
        & (F.coalesce(marker["contents_count"], F.lit(0)) == 0)
    )
    commit = (
        (F.size("visible") == size) & _shows(F.lit(0)) & ((size == 1) | F.forall(numbers, _shows))
    )
    nothing = F.size("visible") == 0
    ended = decides & F.when(marker["kind"] == "commit", commit).otherwise(nothing)
    # A half message of several records is prepared no earlier than its first record.
    due_ms = half["clock_ms"] + half["after_ms"]
    young = due_ms >= F.lit(terms.now_ms - terms.overdue_after_ms)
    pending = (F.size("op") == 0) & nothing & young
    return F.when(~whole | (F.size("parked") > 0), F.lit(False)).otherwise(ended | pending)


def _follows(seq: Column) -> Column:
    """Return whether record `seq` continues the half message that the first record begins."""
    first, row = F.get("half", F.lit(0)), F.get("half", seq)
    return (
        (row["seq"] == seq)
        & (row["count"] == first["count"])
        & (row["grp"] == first["grp"])
        & row["void"].isNull()
        & (row["partition"] == first["partition"])
        & (row["offset"] == first["offset"] + seq)
    )


def _shows(seq: Column) -> Column:
    """Return whether message `seq` is visible as it was prepared."""
    half, marker, row = F.get("half", seq), F.get("op", F.lit(0)), F.get("visible", seq)
    return (
        (row["seq"] == seq)
        & (row["count"] == half["count"])
        & (row["topic"] == half["topic"])
        & (row["partition"] == half["target_partition"])
        & (row["body"] == half["body"])
        & (row["headers"] == half["headers"])
        & F.when(row["append_time"], row["at_ms"] >= marker["at_ms"] - fold.EARLY_MS).otherwise(
            row["at_ms"] == F.coalesce(half["timestamp_ms"], marker["at_ms"])
        )
        & row["former"].isNull()
    )


def _plain_verdict() -> dict[str, Column]:
    half, marker = F.get("half", F.lit(0)), F.get("op", F.lit(0))
    commit = marker["kind"].eqNullSafe(F.lit("commit"))
    state = F.when(marker.isNull(), "pending").when(commit, "promoted").otherwise("rolled_back")
    single = F.size("half") == 1
    # Functions on arrays are slow, and nearly all transactions have one message.
    topics = F.when(single, F.array(half["topic"])).otherwise(
        F.array_distinct(F.col("half")["topic"])
    )
    shown = F.get("visible", F.lit(0))
    all_by_broker = F.when(single, shown["append_time"]).otherwise(
        F.forall("visible", lambda row: row["append_time"])
    )
    last_ms = F.when(single, shown["at_ms"]).otherwise(F.array_max(F.col("visible")["at_ms"]))
    places = _visible_at(single & commit, ("topic", "partition", "offset", "seq"))
    ordered = _visible_at(single, ("topic", "partition", "offset"))
    return {
        "verdict": F.when(marker.isNull(), "pending").otherwise("settled"),
        "findings": F.array(),
        "state": state,
        "grp": half["grp"],
        "decision": marker["kind"],
        "source": marker["source"],
        "prepared_at_ms": F.when(single, half["clock_ms"]).otherwise(
            F.array_max(F.col("half")["clock_ms"])
        ),
        "decided_at_ms": marker["at_ms"],
        "visible_at_ms": F.when(commit & all_by_broker, last_ms),
        "attempts": F.lit(0),
        "messages": F.size("half"),
        "topics": topics,
        "half_partition": half["partition"],
        "half_offset": half["offset"],
        "op_offset": marker["offset"],
        "places": places,
        "why": F.lit(None),
        "carry": marker.isNull(),
        "order_mark": half["order_mark"],
        "ordered": F.when(commit & half["order_mark"].isNotNull(), ordered),
    }


def _visible_at(one: Column, fields: tuple[str, ...]) -> Column:
    """Return these fields of all visible records; `one`: whether there is exactly one."""
    shown = F.get("visible", F.lit(0))
    return F.when(one, F.array(F.struct(*(shown[name] for name in fields)))).otherwise(
        F.transform("visible", lambda row: F.struct(*(row[name] for name in fields)))
    )


# --- the others, by the judge ------------------------------------------------------------------


def _by_judge(rest: DataFrame, terms: JudgeTerms, horizon: Horizon) -> DataFrame:
    kind = _judged()
    return F.select(rest, "id", *_SIDES).mapInArrow(_judging(kind, terms, horizon), kind)


def _judging(
    kind: StructType, terms: JudgeTerms, horizon: Horizon
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function that judges record batches of grouped rows on an executor."""
    for module in (judge, fold, kinds, rows):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    types = arrow_types(kind)

    def judging(batches: Iterator[Any]) -> Iterator[Any]:
        from pyarrow import RecordBatch

        for batch in batches:
            judged = judge_rows(batch.to_pylist(), terms, horizon)
            yield RecordBatch.from_pylist(judged, types)

    return judging


# --- order within a key ----------------------------------------------------------------------


def _overtaken(rows: DataFrame, horizon: Horizon) -> DataFrame:
    """Return transactions that are visible after one with a later decision: `late_id` and
    `late_why`.

    Order holds for transactions of one order key and one half partition: in each target partition
    they follow the order of their deciding markers. A refusal gives up the place, so decisions
    older than the parked topic's records of refusals are not compared.
    """
    places = rows.where("ordered is not null").select(
        "id", "op_offset", "decided_at_ms", "half_partition", "order_mark", F.inline("ordered")
    )
    earlier = (
        Window.partitionBy("topic", "partition", "half_partition", "order_mark")
        .orderBy("offset")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    # Since then the parked topic shows every refusal.
    since_ms = of_partition(horizon.parked_from_ms or {}, F.col("half_partition"))
    overtaken = places.withColumn("before", F.max("op_offset").over(earlier)).where(
        (F.col("op_offset") < F.col("before")) & (F.col("decided_at_ms") >= since_ms)
    )
    return overtaken.groupBy(F.col("id").alias("late_id")).agg(
        F.min_by(
            F.format_string(
                "out_of_order: %s-%d at %d follows a message decided at %d, but was decided at %d",
                "topic", "partition", "offset", "before", "op_offset",
            ),
            F.struct("topic", "partition", "offset"),
        ).alias("late_why")
    )  # fmt: skip


def _with_late(rows: DataFrame, late: DataFrame) -> DataFrame:
    """Add `out_of_order` to the findings of late transactions."""
    joined = rows.join(late, rows["id"] == late["late_id"], "left")
    is_late = F.col("late_id").isNotNull()
    findings = F.array_union("findings", F.array(F.lit("out_of_order")))
    by_gravity = F.filter(
        F.array(*map(F.lit, kinds.KIND_NAMES)), lambda kind: F.array_contains(findings, kind)
    )
    changed = {
        "findings": F.when(is_late, by_gravity).otherwise(F.col("findings")),
        "verdict": F.when(is_late, F.get(by_gravity, F.lit(0))).otherwise(F.col("verdict")),
        "why": F.when(is_late, F.concat_ws("; ", "why", "late_why")).otherwise(F.col("why")),
    }
    return joined.withColumns(changed).drop("late_id", "late_why")
