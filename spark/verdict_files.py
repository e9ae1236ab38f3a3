"""The verdicts that runs have written, read back: the documented output of the audit."""

from collections.abc import Iterable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.spark.folders import Folders, exists
from txbroker.spark.schema import VERDICT
from txbroker.spark.spread import setting

PARTITIONED_BY = ("day", "verdict")
_DAYS_AS_THEY_COME = 3
"""Up to so many days are written as rows come: spreading costs a second shuffle."""
_WRITERS = "spark.sql.maxConcurrentOutputFileWriters"
_WRITERS_MAX = 64
"""A task has so many files open before it sorts its rows by folder: those of three days."""


def write_verdicts(rows: DataFrame, folders: Folders, run: str, days: int) -> None:
    """Write a run's verdicts, by day and verdict.

    Every task leaves a file in each folder that it has rows for. Where that would be too many,
    rows are spread anew first, so that one task has most of a folder, but none more than others.

    Args:
        rows: columns as in `schema.VERDICT`; `run` is not looked at.
        folders: where to.
        run: its name.
        days: how many days there are about.
    """
    rows = rows.drop("run")
    if days > _DAYS_AS_THEY_COME:
        rows = rows.hint("rebalance", *PARTITIONED_BY)
    with setting(rows.sparkSession, _WRITERS, str(_WRITERS_MAX)):
        rows.write.partitionBy(*PARTITIONED_BY).parquet(folders.verdicts(run))


def read_verdicts(spark: SparkSession, out: str, runs: Iterable[str]) -> DataFrame:
    """Return the verdicts of runs; columns as in `schema.VERDICT`.

    Args:
        spark: the session.
        out: the output folder, a path or URI.
        runs: names of runs that are in the journal; folders of others are half a job. Those whose
            folder somebody has removed are left out.
    """
    folders = Folders(out)
    paths = [path for path in map(folders.verdicts, runs) if exists(spark, path)]
    if not paths:
        return spark.createDataFrame([], VERDICT)
    base = paths[0].rpartition("/")[0]
    rows = spark.read.schema(VERDICT).option("basePath", base).parquet(*paths)
    return rows.select(*spark.createDataFrame([], VERDICT).columns)


def current_verdicts(spark: SparkSession, out: str, runs: Iterable[str]) -> DataFrame:
    """Return for each transaction the verdict that counts: that of the newest of these runs.

    Where that is `gone`, retention has left too little of it since: how an earlier run saw it end
    is better.
    """
    rows = read_verdicts(spark, out, runs)
    row, run = F.struct(*rows.columns), F.col("run")
    ended = ~F.col("verdict").isin("gone", "pending", "committed")
    found = rows.groupBy("id").agg(
        F.max_by(row, run).alias("newest"), F.max_by(row, F.when(ended, run)).alias("ended")
    )
    newest = F.col("newest")
    counts = F.when(newest["verdict"] != "gone", newest).otherwise(F.coalesce("ended", newest))
    return found.select(counts.alias("row")).select("row.*")
