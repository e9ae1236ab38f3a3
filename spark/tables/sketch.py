"""DDSketch in Spark SQL: percentiles of durations, exact to 1 %, from counts by bucket.

Masson, Rim and Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", VLDB 2019. Bucket `i` counts values from GAMMA^(i-1) to GAMMA^i ms, and bucket 0 those
up to 1 ms. Sketches merge by adding up their counts, in any order, and a value that was counted can
be taken out again.
"""

import math

from pyspark.sql import Column

from txbroker.spark import expressions as F

GAMMA = 1.02
"""The relative error is at most (GAMMA - 1) / (GAMMA + 1) = 0.99 %."""
MIDDLE = 2 / (GAMMA + 1)
"""Of a bucket, as a share of its upper bound: no value in it is further away than the error."""
PERCENTILES = (50, 95, 99)


def bucket(value_ms: Column) -> Column:
    """Return the bucket of a duration, null for null; clocks that differ may make it negative."""
    over = F.ceil(F.log(value_ms) / math.log(GAMMA)).cast("int")
    return F.when(value_ms <= 1, F.lit(0)).otherwise(over)


def sketch(counts: Column) -> Column:
    """Return a sketch as the tables hold it, with its percentiles, which are null without a value.

    `counts`: array of structs of `bucket` and `n`, each bucket once.
    """
    ordered = F.array_sort(counts)
    zero = F.lit(0).cast("bigint")
    total = F.aggregate(counts, zero, lambda so_far, each: so_far + each["n"])
    names = {q: f"p{q}_ms" for q in PERCENTILES}

    def passed(state: Column, each: Column) -> Column:
        seen = state["seen"] + each["n"]
        found = [
            F.coalesce(
                state[name], F.when(seen >= F.ceil(state["count"] * q / 100), each["bucket"])
            ).alias(name)
            for q, name in names.items()
        ]
        return F.struct(seen.alias("seen"), state["count"].alias("count"), *found)

    def shown(state: Column) -> Column:
        values = [(F.pow(F.lit(GAMMA), state[n]) * MIDDLE).alias(n) for n in names.values()]
        return F.struct(
            state["count"].alias("count"), *values, F.map_from_entries(ordered).alias("sketch")
        )

    nothing = F.lit(None).cast("int")
    # The count is a part of the state, because an expression would be evaluated for each bucket.
    start = F.struct(
        zero.alias("seen"), total.alias("count"), *(nothing.alias(n) for n in names.values())
    )
    return F.aggregate(ordered, start, passed, shown)
