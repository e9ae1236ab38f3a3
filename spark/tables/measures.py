"""What the table `latency` has for the checks of a run, in one query.

Every measure is counted in cells (check, group or topic, day, bucket): buckets of a sketch for a
percentile, else bucket 0 for transactions and 1 for parked ones.
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Row, Window

from txbroker.spark import expressions as F
from txbroker.spark.checks import DAYS_BEFORE, Reading, evaluate
from txbroker.spark.schema import Check, CheckResult
from txbroker.spark.tables.judged import JudgedRun, Replacement, known_keys
from txbroker.spark.tables.layout import LATENCY, Table
from txbroker.spark.tables.sketch import GAMMA, MIDDLE

HOUR_MS = 3_600_000
_DAY_MS = 86_400_000
SCOPES_MAX = 10_000
"""Groups and topics of all checks together: those with the most transactions."""


def check_run(
    judged: JudgedRun, change: Replacement | None, read: Callable[[Table], DataFrame]
) -> tuple[CheckResult, ...]:
    """Compare a run with its limits; one Spark job at most.

    Args:
        change: of the table `latency` by this run.
        read: returns the rows that a table holds now.
    """
    if not judged.checks:
        return ()
    latency = read(LATENCY)
    if change is not None:
        known = change.rows if change.known is None else change.known
        latency = latency.join(known, known_keys(LATENCY), "left_anti").unionByName(change.rows)
    last, age_ms = judged.last, None
    if last is not None and last.terms is not None:
        age_ms = judged.now_ms - last.terms.now_ms - round(last.took_s * 1000)
    readings = readings_of(latency, judged.checks, judged.now_ms)
    return evaluate(judged.checks, readings, judged.summary.oldest_undecided_ms, age_ms)


def readings_of(
    latency: DataFrame, checks: Sequence[Check], now_ms: int
) -> dict[str, list[Reading]]:
    """Return what checks compare with their limits, by their names; one Spark job at most.

    Args:
        latency: the table, with the rows of this run.
        now_ms: the run's now.
    """
    reading = [check for check in checks if check.hours]
    if not reading:
        return {}
    cells = _cells(latency, reading, now_ms)
    # The table's first minute: days before it had no transactions to compare with.
    rows = _by_scope(cells, len(reading)).collect()
    first_ms = min((row["first_ms"] for row in rows), default=now_ms)
    found: dict[str, list[Reading]] = {check.name: [] for check in reading}
    for row in rows:
        if row["check"] < len(reading):
            check = reading[row["check"]]
            found[check.name].append(_reading(row, check, now_ms, first_ms))
    return found


def _reading(row: Row, check: Check, now_ms: int, first_ms: int) -> Reading:
    begin_ms, _ = window_of(check, now_ms)
    days = sum(begin_ms - back * _DAY_MS >= first_ms for back in range(1, DAYS_BEFORE + 1))
    volumes = [row[f"volume{back}"] or 0 for back in range(days + 1)]
    bucket = row["p99"]
    p99_ms = None if bucket is None else value_ms(bucket)
    return Reading(row["scope"], p99_ms, row["parked"] or 0, volumes)


def value_ms(bucket: int) -> float:
    """Return the value of a sketch's bucket: within 1 % of all that are in it."""
    return float(GAMMA**bucket * MIDDLE)


def window_of(check: Check, now_ms: int) -> tuple[int, int]:
    """Return the begin and end of a check's hours, ms since 1970: complete hours for volumes."""
    end_ms = now_ms - now_ms % HOUR_MS if check.is_daily else now_ms
    return end_ms - check.hours * HOUR_MS, end_ms


def _cells(latency: DataFrame, checks: Sequence[Check], now_ms: int) -> DataFrame:
    """Return the number of transactions in each cell; one more check counts the whole table."""
    at_ms = F.unix_millis("minute")
    windows = [window_of(check, now_ms) for check in checks]
    begins_ms = [
        begin_ms - (DAYS_BEFORE * _DAY_MS if check.is_daily else 0)
        for check, (begin_ms, _) in zip(checks, windows, strict=True)
    ]
    entries: list[Column] = []
    for number, (check, (begin_ms, end_ms)) in enumerate(zip(checks, windows, strict=True)):
        back = F.floor((F.lit(end_ms - 1) - at_ms) / _DAY_MS).cast("int")
        inside = (at_ms < end_ms) & (at_ms + (back * _DAY_MS if check.is_daily else 0) >= begin_ms)
        counted = F.struct(
            F.lit(number).alias("check"),
            _scope(check).alias("scope"),
            (back if check.is_daily else F.lit(0)).alias("back"),
            _counts(check).alias("counts"),
        )
        entries.append(F.when(inside & _matches(check), counted))
    table = F.struct(
        F.lit(len(checks)).alias("check"),
        F.lit("").alias("scope"),
        F.lit(0).alias("back"),
        _counted(F.lit(0)).alias("counts"),
    )
    since = F.timestamp_millis(F.lit(min(begins_ms)))
    return (
        latency.where((F.col("day") >= F.to_date(since)) & (F.col("minute") >= since))
        .select(
            at_ms.alias("at_ms"), F.explode(F.array_compact(F.array(*entries, table))).alias("e")
        )
        .select("at_ms", "e.*")
        .select("at_ms", "check", "scope", "back", F.explode("counts").alias("bucket", "n"))
        .groupBy("check", "scope", "back", "bucket")
        .agg(F.sum("n").alias("n"), F.min("at_ms").alias("first_ms"))
    )


def _scope(check: Check) -> Column:
    name = "grp" if check.group is not None else "topic" if check.topic is not None else None
    return F.lit("") if name is None else F.coalesce(name, F.lit(""))


def _matches(check: Check) -> Column:
    pattern = check.topic if check.group is None else check.group
    if pattern is None:
        return F.lit(True)
    for special in "\\%_":
        pattern = pattern.replace(special, f"\\{special}")
    return _scope(check).like(pattern.replace("*", "%"))


def _counts(check: Check) -> Column:
    if check.measure.endswith("_p99_s"):
        return F.col(check.measure.removesuffix("_p99_s"))["sketch"]
    total = reduce(operator.add, (F.col(name) for name in ("transactions", "undecided", "parked")))
    if check.measure == "parked_share":
        return _counted(total, F.col("parked"))
    return _counted(total)


def _counted(*numbers: Column) -> Column:
    """Return a map as sketches are: the numbers, by their place."""
    pairs = [part for n, number in enumerate(numbers) for part in (F.lit(n), number.cast("bigint"))]
    return F.create_map(*pairs)


def _by_scope(cells: DataFrame, checks: int) -> DataFrame:
    """Return a row for each check and group or topic, those with the most transactions."""
    scope = Window.partitionBy("check", "scope")
    upto = scope.orderBy("bucket").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    total, seen = F.sum("n").over(scope), F.sum("n").over(upto)
    return (
        cells.withColumn("reached", (seen >= F.ceil(total * 0.99)) & (total > 0))
        .groupBy("check", "scope")
        .agg(
            F.min(F.when(F.col("reached"), F.col("bucket"))).alias("p99"),
            F.sum(F.when(F.col("bucket") == 1, F.col("n"))).alias("parked"),
            F.min("first_ms").alias("first_ms"),
            F.sum("n").alias("total"),
            *(
                F.sum(F.when((F.col("bucket") == 0) & (F.col("back") == back), F.col("n"))).alias(
                    f"volume{back}"
                )
                for back in range(DAYS_BEFORE + 1)
            ),
        )
        .orderBy((F.col("check") == checks).desc(), F.col("total").desc(), "scope")
        .limit(SCOPES_MAX)
    )
