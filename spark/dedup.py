"""Which half messages are void because their `dedup_key` is another's."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

_KEY = ("partition", "grp", "dedup")
_COLUMNS = (*_KEY, "offset", "clock_ms", "id")


def dedup_voids(half: DataFrame, before: DataFrame | None, window_ms: int) -> DataFrame:
    """Return partition and offset of the first records of such half messages.

    The ledger's rule: the last half message of a group with a key that counted holds it; another
    one counts only when more than the dedup window has passed since on the log clock. The same id
    again is no matter of the key.

    Args:
        half: the half table; `void` tells what is void for other reasons.
        before: rows of an earlier run that hold a key, or None.
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
    """Return the first records of half messages that are whole and hold a key."""
    firsts = half.where(F.col("dedup").isNotNull() & (F.col("seq") == 0) & F.col("void").isNull())
    same = ("partition", "base", "id", "grp", "count")
    several = half.where("count > 1").withColumn("base", F.col("offset") - F.col("seq"))
    complete = several.groupBy(*same).agg(F.count("*").alias("there")).where("there = count")
    whole = firsts.where("count > 1").withColumn("base", F.col("offset"))
    return firsts.where("count = 1").unionByName(
        whole.join(complete, [*same], "left_semi").drop("base")
    )


def _held(uses: Column, window_ms: int) -> Column:
    """Return offsets and ids of those uses of a key that came to hold it, in turn."""
    nobody = F.struct(
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

    return F.aggregate(uses, nobody, use_next)
