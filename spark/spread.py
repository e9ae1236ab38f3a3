"""How many tasks a shuffle is cut into.

Spark's own 200 are far too many for a small audit, where each task costs more than its rows, and
too few for a large one. What is kept on disk for reading again is not made smaller afterwards, so
the number has to be right from the start.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

_PARTITIONS = "spark.sql.shuffle.partitions"
ROWS_A_TASK = 200_000
"""Rows of facts in one task: some 100 MB at the widest, which a task sorts without spilling."""


@contextmanager
def spread(spark: SparkSession, rows: int) -> Iterator[None]:
    """Cut shuffles meanwhile into as many tasks as suit the number of rows.

    Where `spark.sql.shuffle.partitions` was given by whoever started Spark, that stays.
    """
    if spark.sparkContext.getConf().contains(_PARTITIONS):
        yield
        return
    with setting(spark, _PARTITIONS, str(tasks_for(rows, spark.sparkContext.defaultParallelism))):
        yield


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Give one of Spark SQL's settings another value meanwhile."""
    was = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if was is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, was)


def tasks_for(rows: int, cores: int) -> int:
    """Return the number of tasks: each core has one at least."""
    return max(cores, -(-rows // ROWS_A_TASK))
