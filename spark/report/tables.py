"""Reads what the report shows of the tables: a bounded number of rows."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window

from txbroker.spark import expressions as F
from txbroker.spark.report.contents import (
    FINDINGS_A_KIND,
    HEALED_DAYS,
    LATENCY_DAYS,
    DriftDay,
    GroupLatency,
    KindCount,
    Percentiles,
    ReportTables,
    ShownFinding,
)
from txbroker.spark.report.plots import LatencyPoint, TimeAxis
from txbroker.spark.schema import RunSummary
from txbroker.spark.tables.layout import DRIFT, LATENCY, TRANSACTIONS
from txbroker.spark.tables.sketch import sketch
from txbroker.spark.tables.store import TableStore

_MINUTE_MS, _DAY_MS = 60_000, 86_400_000
GROUPS_SHOWN = 6
DRIFT_DAYS = 30
"""How far the drift by day goes back, with the day of the run."""
_STEPS_MS = tuple(minutes * _MINUTE_MS for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360))
_STEPS_MAX = 84
"""Points of a line."""


def report_tables(store: TableStore, now_ms: int, daily: Sequence[RunSummary]) -> ReportTables:
    """Return what the report shows.

    Args:
        now_ms: the run's now, by the brokers' clocks.
        daily: the last run of each day, the oldest first.
    """
    counts, findings = _drift(store.read(DRIFT), now_ms)
    groups, time = _latency(store.read(LATENCY), store.read(TRANSACTIONS), now_ms)
    days = drift_days(store.read(DRIFT), daily)
    return ReportTables(counts, findings, groups, time, days)


def _time(at_ms: int) -> Column:
    return F.timestamp_millis(F.lit(at_ms))


def _ms(name: str) -> Column:
    return F.unix_millis(name).alias(name.replace("_at", "_ms").replace("acknowledged_", ""))


# --- drift -------------------------------------------------------------------------------------


def _drift(drift: DataFrame, now_ms: int) -> tuple[list[KindCount], list[ShownFinding]]:
    known = F.col("acknowledged_until") > _time(now_ms)
    state = F.when(F.col("state") != "open", "healed").when(known, "acknowledged").otherwise("open")
    lately = F.col("closed_at") > _time(now_ms - HEALED_DAYS * _DAY_MS)
    shown = drift.where((F.col("state") == "open") | lately).select(
        *("id", "kind", "severity"),
        state.alias("state"),
        F.coalesce("grp", F.lit("")).alias("grp"),
        F.when(F.col("topic").isNull(), "")
        .otherwise(F.format_string("%s-%d@%d", "topic", "partition", "offset"))
        .alias("place"),
        *("why", "times"),
        *map(_ms, ("opened_at", "seen_at", "closed_at")),
        (F.col("state") == "expired").alias("expired"),
        F.col("acknowledged_by").alias("by"),
        F.col("acknowledged_why").alias("by_why"),
        F.unix_millis("acknowledged_until").alias("until_ms"),
    )
    newest = Window.partitionBy("kind", "state").orderBy(F.col("seen_ms").desc(), "id")
    numbered = shown.withColumn("place_in_kind", F.row_number().over(newest))
    few = numbered.where(F.col("place_in_kind") <= FINDINGS_A_KIND).drop("place_in_kind")
    findings = [ShownFinding(*row) for row in few.collect()]
    by_group = shown.groupBy("kind", "state", "grp").agg(F.count("*").alias("n"))
    counts = by_group.groupBy("kind", "state").agg(F.sum("n"), F.max_by("grp", "n"), F.max("n"))
    return [KindCount(*row) for row in counts.collect()], findings


def drift_days(drift: DataFrame, daily: Sequence[RunSummary]) -> list[DriftDay]:
    """Return the open findings after these runs. The journal has their number, which no later run
    changes; the table `drift`, which of them were acknowledged."""
    # Entries of versions without the table have what the run found.
    found = {
        run.run: {
            kind: max(run.drift.get(kind, 0), run.open_findings.get(kind, 0))
            for kind in {*run.drift, *run.open_findings}
        }
        for run in daily
    }
    known: dict[str, dict[str, int]] = {}
    times = [
        F.struct(F.lit(run.run).alias("at_run"), _time(run.now_ms).alias("at"))
        for run in daily
        if any(found[run.run].values())
    ]
    if times:
        rows = (
            drift.where("acknowledged_run IS NOT NULL")
            .select("*", F.inline(F.array(*times)))
            .where(
                "opened_run <= at_run AND acknowledged_run <= at_run AND acknowledged_until > at "
                "AND (closed_run IS NULL OR closed_run > at_run)"
            )
            .groupBy("at_run", "kind")
            .count()
        )
        for run, kind, number in rows.collect():
            known.setdefault(run, {})[kind] = min(number, found[run].get(kind, 0))
    return [DriftDay(run.started_ms, found[run.run], known.get(run.run, {})) for run in daily]


# --- latency -----------------------------------------------------------------------------------


def _latency(
    latency: DataFrame, transactions: DataFrame, now_ms: int
) -> tuple[list[GroupLatency], TimeAxis]:
    since = _time(now_ms - LATENCY_DAYS * _DAY_MS)
    recent = latency.where(
        (F.col("day") >= F.to_date(since))
        & (F.col("minute") >= since)
        & F.col("grp").isNotNull()
        & (F.col("transactions") > 0)
    )
    most = (
        recent.groupBy("grp")
        .agg(
            F.sum("transactions").alias("n"),
            F.sum("estimated").alias("estimated"),
            F.min(F.unix_millis("minute")).alias("first_ms"),
        )
        .orderBy(F.col("n").desc(), "grp")
        .head(GROUPS_SHOWN)
    )
    if not most:
        return [], TimeAxis(now_ms - 1, now_ms, 1)
    time = axis_from(min(row["first_ms"] for row in most), now_ms)
    names = [row["grp"] for row in most]
    points = _points(recent.where(F.col("grp").isin(names)), time)
    guesses = [row["grp"] for row in most if row["estimated"]]
    estimates = _estimates(transactions, guesses, now_ms) if guesses else {}
    groups = []
    for row in most:
        of_group = points.get(row["grp"], {})
        decided, shown = of_group.get(None, (Percentiles(None, None, None),) * 2)
        steps = sorted((at_ms, pair) for at_ms, pair in of_group.items() if at_ms is not None)
        decide, visible = (
            [_point(at_ms, pair[n]) for at_ms, pair in steps if pair[n].p50] for n in (0, 1)
        )
        groups.append(
            GroupLatency(
                row["grp"], row["n"], decide, visible, decided, shown, row["estimated"],
                *estimates.get(row["grp"], (None, None)),
            )
        )  # fmt: skip
    return groups, time


def axis_from(first_ms: int, now_ms: int) -> TimeAxis:
    """Return the time from the first minute to now, in steps of a usual length."""
    span_ms = now_ms - first_ms
    step_ms = next((step for step in _STEPS_MS if span_ms <= step * _STEPS_MAX), _STEPS_MS[-1])
    begin_ms = first_ms - first_ms % step_ms
    return TimeAxis(begin_ms, max(now_ms, begin_ms + step_ms), step_ms)


def _points(
    recent: DataFrame, time: TimeAxis
) -> dict[str, dict[int | None, tuple[Percentiles, Percentiles]]]:
    """Return the percentiles by group and begin of a step, None for the whole time."""
    at_ms = F.unix_millis("minute")
    step = at_ms - at_ms % time.step_ms
    measures = ("decide", "visible")
    entries = [_entries(number, name) for number, name in enumerate(measures)]
    buckets = (
        recent.select(
            "grp",
            F.explode(F.array(step, F.lit(None))).alias("at_ms"),
            F.concat(*entries).alias("entries"),
        )
        .select("grp", "at_ms", F.inline("entries"))
        .groupBy("grp", "at_ms", "measure", "bucket")
        .agg(F.sum("n").alias("n"))
    )
    count = F.struct("bucket", "n")
    lists = [
        F.collect_list(F.when(F.col("measure") == n, count)).alias(name)
        for n, name in enumerate(measures)
    ]
    rows = buckets.groupBy("grp", "at_ms").agg(*lists)
    found: dict[str, dict[int | None, tuple[Percentiles, Percentiles]]] = {}
    shown = [sketch(F.col(name)).dropFields("count", "sketch").alias(name) for name in measures]
    for row in rows.select("grp", "at_ms", *shown).collect():
        pair = Percentiles(*row["decide"]), Percentiles(*row["visible"])
        found.setdefault(row["grp"], {})[row["at_ms"]] = pair
    return found


def _entries(number: int, measure: str) -> Column:
    """Return the buckets of a measure's sketch."""

    def entry(one: Column) -> Column:
        named = {"measure": F.lit(number), "bucket": one["key"], "n": one["value"]}
        return F.struct(*(column.alias(name) for name, column in named.items()))

    return F.coalesce(F.transform(F.map_entries(F.col(measure)["sketch"]), entry), F.array())


def _point(at_ms: int, values: Percentiles) -> LatencyPoint:
    return LatencyPoint(at_ms, *(value or 0.0 for value in values))


def _estimates(
    transactions: DataFrame, groups: Sequence[str], now_ms: int
) -> dict[str, tuple[Percentiles, Percentiles]]:
    """Return prepare to deciding marker, and to the observation, of estimated transactions."""
    since = _time(now_ms - LATENCY_DAYS * _DAY_MS)
    observed_ms = F.unix_millis("observed_at") - F.unix_millis("prepared_at")
    shares = [0.5, 0.95, 0.99]
    rows = (
        transactions.where(
            (F.col("day") >= F.to_date(since))
            & (F.col("prepared_at") >= since)
            & F.col("visible_estimated")
            & F.col("grp").isin(list(groups))
        )
        .groupBy("grp")
        .agg(
            F.percentile_approx("visible_ms", shares).alias("marker"),
            F.percentile_approx(observed_ms, shares).alias("observed"),
        )
        .collect()
    )
    return {
        row["grp"]: (Percentiles(*row["marker"]), Percentiles(*row["observed"])) for row in rows
    }
