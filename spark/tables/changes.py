"""From a run's verdicts to the rows of the tables that it adds or replaces: pure Spark SQL.

The rows follow from the verdicts and from what the tables hold, so a run that is repeated makes the
same rows. Where nothing changed, no job starts: the counts in the summaries of this run and of the
run before show which tables stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from functools import partial, reduce

from msgspec import structs
from pyspark.sql import Column, DataFrame

from txbroker import __version__
from txbroker.spark import expressions as F
from txbroker.spark.facts.messages import id_time_ms
from txbroker.spark.schema import RunSummary
from txbroker.spark.tables.current import day_of
from txbroker.spark.tables.findings import drift
from txbroker.spark.tables.judged import (
    JudgedRun,
    Replacement,
    known_keys,
    local_rows,
    moment,
    shaped,
)
from txbroker.spark.tables.layout import ATTEMPTS, LATENCY, RUNS, TRANSACTIONS, Table
from txbroker.spark.tables.sketch import bucket, sketch


def changes(judged: JudgedRun, read: Callable[[Table], DataFrame]) -> Iterator[Replacement]:
    """Yield the changes of every table but `runs`; see `run_row`.

    `read`: returns the rows that a table holds now.
    """
    new, replaced = transactions(judged), _replaced(judged)
    if new is not None:
        yield Replacement(TRANSACTIONS, new, _keys_of(TRANSACTIONS, replaced))
        if judged.checked:
            known = None if replaced is None else attempts(judged, replaced)
            yield Replacement(ATTEMPTS, attempts(judged, new), _keys_of(ATTEMPTS, known))
    for change in (latency(judged, new, replaced, read), drift(judged, read)):
        if change is not None:
            yield change


def _keys_of(table: Table, rows: DataFrame | None) -> DataFrame | None:
    return None if rows is None else rows.select(*known_keys(table))


# --- transactions ------------------------------------------------------------------------------


def _replaced(judged: JudgedRun) -> DataFrame | None:
    """Return the rows that this run removes or replaces; None where there are none.

    A transaction that is open again leaves the table. One that was promoted, or whose evidence is
    gone since, keeps the row that it has until there is another one.
    """
    if judged.earlier is None:
        return None
    replaced = judged.earlier
    if judged.summary.states.get("gone"):
        gone = judged.verdicts.where("verdict = 'gone'").select("id")
        replaced = replaced.join(gone, "id", "left_anti")
    kept = _reopened(judged)
    return replaced if kept is None else replaced.join(kept.select("id"), "id", "left_anti")


def count_reopened(judged: JudgedRun) -> int:
    """Return how many transactions are open although an earlier run saw them promoted."""
    rows = _reopened(judged)
    return 0 if rows is None else rows.count()


def _reopened(judged: JudgedRun) -> DataFrame | None:
    """Return the rows of promoted transactions that are open again: no message becomes unseen, so
    its record has vanished. None where there are none."""
    if judged.earlier is None or not (judged.summary.carried and judged.records_vanished):
        return None
    open_again = judged.verdicts.where("carry").select("id")
    return judged.earlier.where("state = 'promoted'").join(open_again, "id", "left_semi")


def transactions(judged: JudgedRun) -> DataFrame | None:
    """Return the rows of the transactions that ended, without those whose evidence is gone since
    an earlier run; None where there are none."""
    summary = judged.summary
    if summary.transactions == summary.carried and judged.earlier is None:
        return None
    ended = judged.verdicts.where("NOT carry")
    if judged.earlier is not None and summary.states.get("gone"):
        gone = F.col("verdict") == "gone"
        known = judged.earlier.select("id")
        ended = ended.where(~gone).unionAll(
            ended.where(gone).join(known, "id", "left_anti").select(*ended.columns)
        )
    estimated = F.when(F.col("state") == "promoted", F.col("decided_at_ms"))
    visible_ms = F.coalesce("visible_at_ms", estimated)
    return shaped(
        TRANSACTIONS,
        F.with_columns(
            ended,
            {
                "day": day_of(id_time_ms(F.col("id"))),
                "installation": F.lit(judged.names.prefix),
                "prepared_at": moment(F.col("prepared_at_ms")),
                "decided_at": moment(F.col("decided_at_ms")),
                "visible_at": moment(visible_ms),
                "visible_estimated": F.col("visible_at_ms").isNull() & visible_ms.isNotNull(),
                "observed_at": moment(judged.now_ms),
                "decide_ms": F.col("decided_at_ms") - F.col("prepared_at_ms"),
                "visible_ms": visible_ms - F.col("prepared_at_ms"),
                "run": F.lit(judged.run),
            },
        ),
    )


# --- attempts ----------------------------------------------------------------------------------

_MARK = ("offset", "at_ms", "kind", "source", "round", "number", "reason")
_NEXT = ("check", "commit", "rollback", "park", "revive")
"""Markers that show how the attempt before them ended."""


def attempts(judged: JudgedRun, ended: DataFrame) -> DataFrame:
    """Return the check-backs of these transactions, each with what came of it."""
    checked = judged.op.where("kind = 'check'").select("id").distinct()
    mark = F.struct(*_MARK)
    marks = (
        judged.op.join(checked, "id", "left_semi")
        .groupBy("id", "partition")
        .agg(F.sort_array(F.collect_set(mark)).alias("marks"))
    )
    checks = F.filter("marks", lambda each: each["kind"] == "check")
    rows = marks.select("id", "partition", "marks", F.explode(checks).alias("made"))
    made = F.col("made")
    return shaped(
        ATTEMPTS,
        rows.join(ended.select("id", "grp"), "id").select(
            "id",
            "grp",
            "partition",
            *(made[name].alias(name) for name in ("offset", "round", "number", "reason")),
            day_of(made["at_ms"]).alias("day"),
            moment(made["at_ms"]).alias("at"),
            _outcome(made).alias("outcome"),
            F.lit(judged.names.prefix).alias("installation"),
            F.lit(judged.run).alias("run"),
        ),
    )


def _outcome(made: Column) -> Column:
    later = F.filter("marks", lambda each: each["offset"] > made["offset"])
    answers = F.filter(
        later,
        lambda each: (
            each["kind"].isin("returned", "later")
            & (each["round"] == made["round"])
            & (each["number"] == made["number"])
        ),
    )
    after = F.get(F.filter(later, lambda each: each["kind"].isin(*_NEXT)), F.lit(0))
    decided = after["kind"].isin("commit", "rollback") & (after["source"] == "check")
    ended = F.when(after["kind"] == "park", "parked").when(decided, "decided")
    return F.coalesce(F.get(answers, F.lit(0))["kind"], ended, F.lit("none"))


# --- latency -----------------------------------------------------------------------------------

_SUMS = ("transactions", "estimated", "undecided", "parked")
_SKETCHES = ("decide", "visible")
_OPEN = ("undecided", "parked")
"""Of the newest run of all transactions only; all others add up."""
_STILL_OPEN = "(undecided > 0 OR parked > 0)"


def latency(
    judged: JudgedRun,
    new: DataFrame | None,
    replaced: DataFrame | None,
    read: Callable[[Table], DataFrame],
) -> Replacement | None:
    """Return the changed minutes: the counts that they have, and those of this run's transactions,
    less those of the rows that these replace.

    Args:
        new: the new rows of `transactions`.
        replaced: the rows that they replace.
    """
    parts = [_settled(rows, sign) for rows, sign in ((new, 1), (replaced, -1)) if rows is not None]
    if not judged.is_part and any(map(judged.summary.states.get, ("pending", "parked"))):
        parts.append(_unsettled(judged.verdicts))
    before = judged.before
    were_open = not judged.is_part and (
        before is None or any(map(before.states.get, ("pending", "parked")))
    )
    if not parts and not were_open:
        return None
    if before is not None and _stands(before, judged.summary) and new is None and replaced is None:
        return None
    counted = judged.keep(_counted(parts)) if parts else None
    values = [] if counted is None else [counted]
    if not judged.first:
        held = read(LATENCY)
        if counted is None:
            held = held.where(_STILL_OPEN)
        else:
            held = _touched(held, counted, _days(judged, replaced))
        values.append(_counted_before(judged, held))
    if not values:
        return None
    rows = judged.keep(_minutes(judged, reduce(DataFrame.unionByName, values)))
    return Replacement(LATENCY, rows, None if judged.first else rows.select(*known_keys(LATENCY)))


def _days(judged: JudgedRun, replaced: DataFrame | None) -> list[date]:
    """Return the days of the minutes that may change."""
    if replaced is None:
        return sorted(judged.days)
    rows = replaced.select(F.to_date("prepared_at").alias("day")).distinct().collect()
    return sorted(judged.days.union(row["day"] for row in rows if row["day"] is not None))


def _touched(held: DataFrame, counted: DataFrame, days: Sequence[date]) -> DataFrame:
    """Return the rows of the table in which this run counts transactions, or an earlier one has
    counted open ones."""
    keys = counted.select(*known_keys(LATENCY)).distinct().withColumn("touched", F.lit(True))
    near = held.where(F.col("day").isin(*days) | F.expr(_STILL_OPEN))
    touched = near.join(keys, known_keys(LATENCY), "left")
    return touched.where(f"touched OR {_STILL_OPEN}")


def _stands(before: RunSummary, now: RunSummary) -> bool:
    """Return whether the open transactions of a run are those of the run before it."""
    same = [before.states.get(state) == now.states.get(state) for state in ("pending", "parked")]
    return all(same) and not any(now.records.values())


def _settled(rows: DataFrame, sign: int) -> DataFrame:
    """Return the parts of `transactions` rows. `sign`: 1 to count them, -1 to take them out."""
    shown = (F.col("state") == "promoted") & ~F.col("visible_estimated")
    return F.select(
        rows.where("prepared_at IS NOT NULL"),
        "prepared_at",
        "grp",
        "topics",
        F.col("visible_estimated").alias("estimated"),
        bucket(F.col("decide_ms")).alias("decide"),
        bucket(F.when(shown, F.col("visible_ms"))).alias("visible"),
        F.lit(None).cast("string").alias("open"),
        F.lit(sign).alias("sign"),
    )


def _unsettled(verdicts: DataFrame) -> DataFrame:
    """Return the parts of the transactions that are pending or parked."""
    pending = F.col("state") == "pending"
    rows = verdicts.where("carry AND state IN ('pending', 'parked')").select(
        moment(F.col("prepared_at_ms")).alias("prepared_at"),
        "grp",
        "topics",
        F.lit(False).alias("estimated"),
        F.lit(None).cast("int").alias("decide"),
        F.lit(None).cast("int").alias("visible"),
        F.when(pending, "undecided").otherwise("parked").alias("open"),
        F.lit(1).alias("sign"),
    )
    return rows.where("prepared_at IS NOT NULL")


def _counted(parts: Sequence[DataFrame]) -> DataFrame:
    """Return counts by minute, group, topic, measure and bucket. `n`: the count; `by`: how much it
    differs from that in the table."""
    rows = parts[0]
    for part in parts[1:]:
        rows = rows.unionByName(part)
    alike = ("estimated", "decide", "visible", "open")
    alone = rows.withColumn("minute", F.date_trunc("minute", "prepared_at"))
    several = alone.groupBy("minute", "grp", "topics", *alike).agg(F.sum("sign").alias("n"))
    each = F.select(several, "minute", "grp", F.explode("topics").alias("topic"), *alike, "n")
    measures = {
        "transactions": F.when(F.col("open").isNull(), 0),
        "estimated": F.when(F.col("estimated"), 0),
        **{name: F.when(F.col("open") == name, 0) for name in _OPEN},
        **{name: F.col(name) for name in _SKETCHES},
    }
    values = [_value(name, at.cast("int"), F.col("n"), F.col("n")) for name, at in measures.items()]
    day = F.to_date("minute").alias("day")
    counted = each.select(day, *LATENCY.keys, F.explode(F.array(*values)).alias("value"))
    return counted.select(*known_keys(LATENCY), "value.*").where("bucket IS NOT NULL")


def _counted_before(judged: JudgedRun, current: DataFrame) -> DataFrame:
    """Return the counts in rows of the table. Open transactions count until a run has judged all of
    them again."""
    again = () if judged.is_part else _OPEN
    none = F.lit(0).cast("bigint")
    values = [
        F.array(
            *(_value(name, F.lit(0), F.col(name), none) for name in _SUMS if name not in again),
            *(_value(name, F.lit(0), none, -F.col(name)) for name in again),
        ),
        *(
            F.transform(F.map_entries(F.col(name)["sketch"]), partial(_entry, name))
            for name in _SKETCHES
        ),
    ]
    counted = current.select(*known_keys(LATENCY), F.explode(F.concat(*values)).alias("value"))
    return counted.select(*known_keys(LATENCY), "value.*")


def _entry(measure: str, entry: Column) -> Column:
    return _value(measure, entry["key"], entry["value"], F.lit(0).cast("bigint"))


def _value(measure: str, at: Column, n: Column, by: Column) -> Column:
    columns = {"measure": F.lit(measure), "bucket": at, "n": n, "by": by}
    return F.struct(*(column.alias(name) for name, column in columns.items()))


def _minutes(judged: JudgedRun, values: DataFrame) -> DataFrame:
    keys = known_keys(LATENCY)
    # Rows of one key meet in one task, so that the second sum needs no second shuffle.
    by_bucket = (
        values.repartition(*keys)
        .groupBy(*keys, "measure", "bucket")
        .agg(F.sum("n").alias("n"), F.sum("by").alias("by"))
    )
    is_measure = {name: F.col("measure") == name for name in (*_SUMS, *_SKETCHES)}
    count = F.struct("bucket", "n")
    rows = by_bucket.groupBy(*keys).agg(
        F.bool_or(F.col("by") != 0).alias("changed"),
        *(F.sum(F.when(is_measure[name], F.col("n")).otherwise(0)).alias(name) for name in _SUMS),
        *(
            F.collect_list(F.when(is_measure[name] & (F.col("n") != 0), count)).alias(name)
            for name in _SKETCHES
        ),
    )
    columns = {
        "installation": F.lit(judged.names.prefix),
        **{name: sketch(F.col(name)) for name in _SKETCHES},
    }
    return shaped(LATENCY, rows.where("changed").withColumns(columns))


# --- runs --------------------------------------------------------------------------------------


def run_row(judged: JudgedRun, summary: RunSummary) -> Replacement:
    """Return the row of a run. `summary`: with its end."""
    began = _iso(judged.now_ms)
    row = {
        "day": began[:10],
        "installation": judged.names.prefix,
        "run": summary.run,
        "mode": summary.mode,
        "version": __version__,
        "began_at": began,
        "started_at": _iso(summary.started_ms),
        "took_s": summary.took_s,
        "transactions": summary.transactions,
        "states": summary.states,
        "drift": summary.drift,
        "records": summary.records,
        "carried": summary.carried,
        "quarantined": summary.quarantined,
        "taken": sum(summary.taken.values()),
        "checks": [structs.asdict(check) for check in summary.checks],
        "cost": summary.cost,
    }
    spark = judged.verdicts.sparkSession
    return Replacement(RUNS, local_rows(spark, [row], RUNS.ddl))


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
