"""Commit markers whose messages replace the prepared ones: one row from a batch of records."""

from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_LOOSE = "a replaced message without its commit marker"
_TORN = "its replaced messages are not whole"


class Joined(NamedTuple):
    """`markers`: all that count, with `contents`. `broken`: records that belong to no whole batch,
    with `why`."""

    markers: DataFrame
    broken: DataFrame


def with_contents(rows: DataFrame) -> Joined:
    """Bring markers and the messages behind them together.

    Args:
        rows: `facts.op_facts` without what does not read.
    """
    messages = rows.where(F.col("content").isNotNull())
    base = F.col("offset") - F.col("content")["seq"] - 1
    batches = (
        messages.select("partition", base.alias("base"), "id", "content_count", "content")
        .groupBy("partition", "base")
        .agg(
            F.array_sort(F.collect_list("content")).alias("contents"),
            F.min("id").alias("first_id"),
            F.max("id").alias("last_id"),
            F.min("content_count").alias("least"),
            F.max("content_count").alias("most"),
        )
    )
    markers = rows.where(F.col("content").isNull())
    announcing = markers.where("contents_count > 0").drop("contents")
    count = F.col("contents_count")
    joined = announcing.join(
        batches.withColumnRenamed("base", "offset"), ["partition", "offset"], "left"
    ).withColumn(
        "whole",
        F.coalesce(
            (F.size("contents") == count)
            & (F.col("least") == count)
            & (F.col("most") == count)
            & (F.col("first_id") == F.col("id"))
            & (F.col("last_id") == F.col("id")),
            F.lit(False),
        ),
    )
    whole = joined.where("whole")
    plain = markers.where("contents_count = 0")
    columns = [name for name in rows.columns if name != "contents"]
    torn = joined.where("NOT whole").select(*columns, F.lit(_TORN).alias("why_not"))
    bases = whole.select("partition", F.col("offset").alias("base"))
    loose = messages.withColumn("base", base).join(bases, ["partition", "base"], "left_anti")
    loose = loose.select(*columns, F.lit(_LOOSE).alias("why_not"))
    return Joined(
        plain.unionByName(whole.select(*columns, "contents"), allowMissingColumns=True),
        torn.unionByName(loose).withColumn("why", F.col("why_not")).drop("why_not"),
    )
