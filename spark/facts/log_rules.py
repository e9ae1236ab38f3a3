"""Rules that no single record decides: the log clock, and half messages void by their `dedup_key`.

The log clock of a partition is the running maximum of its append times, in order of offsets. Append
times hardly ever go back (only where brokers' clocks differ and the leader changes), so rows are
written with their own append time as clock, and a survey checks whether that was right. It works on
buckets of offsets, so that no partition is one task, however long it is.
"""

from collections.abc import Sequence

from msgspec import Struct
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

BUCKET = 1 << 14
"""Offsets in a bucket."""

_PLACE = ("partition", "bucket")


class LogClock(Struct, frozen=True):
    """A topic's log clock where reading began, by partition, ms since 1970; 0 at the start."""

    begins: tuple[int, ...]

    @classmethod
    def after(cls, partitions: int, ends: Sequence[int]) -> "LogClock":
        """Return the clock that continues an earlier run's; partitions may have been added
        since."""
        return cls((*ends, *[0] * (partitions - len(ends))))

    def at_begin(self) -> Column:
        """Return the clock at the begin of a row's partition."""
        begins = F.array(*[F.lit(begin).cast("bigint") for begin in self.begins])
        return F.get(begins, F.col("partition"))

    def unless_back(self) -> Column:
        """Return a row's clock, provided that append times never go back."""
        return F.greatest(F.col("at_ms"), self.at_begin())


class ClockSurvey(Struct, frozen=True):
    """The result of a survey. `ends`: the clock at the end, by partition. `goes_back`: whether
    append times go back anywhere. `buckets`: where the clock begins in each bucket, and whether
    append times go back inside it; one row for `BUCKET` offsets."""

    ends: tuple[int, ...]
    goes_back: bool
    buckets: DataFrame


def survey(rows: DataFrame, clock: LogClock, bucket: int = BUCKET) -> ClockSurvey:
    """Find where append times go back in a table with `partition`, `offset` and `at_ms`."""
    by_time = rows.groupBy("partition", _bucket(bucket), "at_ms").agg(
        F.min("offset").alias("first"), F.max("offset").alias("last")
    )
    # Append times do not go back where later ones begin after the end of all earlier ones.
    earlier = Window.partitionBy(*_PLACE).orderBy("at_ms").rowsBetween(*_BEFORE)
    marked = by_time.withColumn("back", F.col("first") < F.max("last").over(earlier))
    inside = marked.groupBy(*_PLACE).agg(
        F.min("at_ms").alias("lowest"),
        F.max("at_ms").alias("highest"),
        F.coalesce(F.bool_or("back"), F.lit(False)).alias("back_inside"),
    )
    buckets_before = Window.partitionBy("partition").orderBy("bucket").rowsBetween(*_BEFORE)
    begin = F.greatest(F.max("highest").over(buckets_before), clock.at_begin())
    buckets = inside.withColumn("begin_ms", begin).select(
        *_PLACE,
        "begin_ms",
        F.greatest("begin_ms", "highest").alias("end_ms"),
        F.col("back_inside"),
        # Nothing goes back before the first record, even if an earlier run's clock is later.
        ((F.col("lowest") < F.col("begin_ms")) | F.col("back_inside")).alias("back"),
    )
    buckets = buckets.persist()
    by_partition = {
        row["partition"]: (row["end_ms"], row["back"])
        for row in buckets.groupBy("partition")
        .agg(F.max("end_ms").alias("end_ms"), F.bool_or("back").alias("back"))
        .collect()
    }
    ends = tuple(by_partition.get(p, (begin, False))[0] for p, begin in enumerate(clock.begins))
    return ClockSurvey(ends, any(back for _, back in by_partition.values()), buckets)


def with_clock(rows: DataFrame, surveyed: ClockSurvey, bucket: int = BUCKET) -> DataFrame:
    """Return a table with the correct `clock_ms` where append times go back."""
    begins = F.broadcast(surveyed.buckets.select(*_PLACE, "begin_ms", "back_inside"))
    placed = rows.withColumn("bucket", _bucket(bucket)).join(begins, [*_PLACE], "left")
    forward = placed.where(~F.col("back_inside")).withColumn("running", F.col("at_ms"))
    # Only buckets in which append times go back are sorted.
    order = Window.partitionBy(*_PLACE).orderBy("offset").rowsBetween(*_SO_FAR)
    back = placed.where("back_inside").withColumn("running", F.max("at_ms").over(order))
    both = forward.unionByName(back)
    return both.withColumn("clock_ms", F.greatest("running", "begin_ms")).drop(
        "bucket", "begin_ms", "back_inside", "running"
    )


def _bucket(size: int) -> Column:
    return F.floor(F.col("offset") / size).alias("bucket")


_BEFORE = (Window.unboundedPreceding, -1)
_SO_FAR = (Window.unboundedPreceding, Window.currentRow)


_KEY = ("partition", "grp", "dedup")
_COLUMNS = (*_KEY, "offset", "clock_ms", "id")


def dedup_voids(half: DataFrame, before: DataFrame | None, window_ms: int) -> DataFrame:
    """Return partition and offset of first records that are void by their `dedup_key`.

    The ledger's rule: the last half message of a group with a key that counted holds the key;
    another one counts only after more than the dedup window on the log clock. A repeated id is not
    decided by the key. `before`: rows of an earlier run that hold a key.
    """
    of_now = whole_with_key(half).select(*_COLUMNS, F.lit(True).alias("now"))
    rows = of_now
    if before is not None:
        rows = rows.unionByName(before.select(*_COLUMNS, F.lit(False).alias("now")))
    by_key = rows.groupBy(*_KEY).agg(
        F.array_sort(F.collect_list(F.struct("offset", "clock_ms", "id", "now"))).alias("uses")
    )
    several = by_key.where(F.size("uses") > 1)
    held = several.withColumn("held", _held(F.col("uses"), window_ms))
    void = F.filter(
        "uses",
        lambda use: (
            use["now"]
            & ~F.array_contains(F.col("held")["offsets"], use["offset"])
            & ~F.array_contains(F.col("held")["ids"], use["id"])
        ),
    )
    return held.select("partition", F.explode(void["offset"]).alias("offset"))


def whole_with_key(half: DataFrame) -> DataFrame:
    """Return the first records of whole half messages with a key."""
    firsts = half.where(F.col("dedup").isNotNull() & (F.col("seq") == 0) & F.col("void").isNull())
    same = ("partition", "base", "id", "grp", "count")
    several = half.where("count > 1").withColumn("base", F.col("offset") - F.col("seq"))
    complete = several.groupBy(*same).agg(F.count("*").alias("there")).where("there = count")
    whole = firsts.where("count > 1").withColumn("base", F.col("offset"))
    return firsts.where("count = 1").unionByName(
        whole.join(complete, [*same], "left_semi").drop("base")
    )


def _held(uses: Column, window_ms: int) -> Column:
    """Return offsets and ids of the uses of a key that held it in turn."""
    free_key = F.struct(
        F.lit(None).cast("bigint").alias("clock_ms"),
        F.array().cast("array<bigint>").alias("offsets"),
        F.array().cast("array<string>").alias("ids"),
    )

    def use_next(holder: Column, use: Column) -> Column:
        free = holder["clock_ms"].isNull() | (
            (use["clock_ms"] - holder["clock_ms"] > window_ms)
            & ~F.array_contains(holder["ids"], use["id"])
        )
        taken = F.struct(
            use["clock_ms"].alias("clock_ms"),
            F.array_append(holder["offsets"], use["offset"]).alias("offsets"),
            F.array_append(holder["ids"], use["id"]).alias("ids"),
        )
        return F.when(free, taken).otherwise(holder)

    return F.aggregate(uses, free_key, use_next)
