"""An audit's files below its output folder, on any file system that Hadoop knows.

    verdicts/run=RUN/day=DAY/verdict=VERDICT   the verdicts of a run
    facts/run=RUN/TABLE                        the run's facts
    carry/run=RUN                              its state for the next run
    business/run=RUN                           ids with or without a row of the business

A folder counts once the run's entry is in the journal; until then it is incomplete. Every function
raises a `ConfigurationError` where the file system does not answer or refuses.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from txbroker.errors import ConfigurationError
from txbroker.spark.schema import VERDICT
from txbroker.spark.session import setting


class Folders(Struct, frozen=True):
    """The folders of runs below `out`, a path or URI."""

    out: str

    def verdicts(self, run: str) -> str:
        """Return the folder of a run's verdicts."""
        return self._of("verdicts", run)

    def facts(self, run: str) -> str:
        """Return the folder of a run's facts."""
        return self._of("facts", run)

    def carry(self, run: str) -> str:
        """Return the folder of a run's state for the next run."""
        return self._of("carry", run)

    def business(self, run: str) -> str:
        """Return the folder of a run's findings about the business."""
        return self._of("business", run)

    def all_of(self, run: str) -> tuple[str, ...]:
        """Return all folders of a run."""
        kinds = (self.verdicts, self.facts, self.carry, self.business)
        return tuple(folder(run) for folder in kinds)

    def _of(self, kind: str, run: str) -> str:
        return f"{self.out.rstrip('/')}/{kind}/run={run}"


def remove(spark: SparkSession, path: str) -> None:
    """Remove a folder with its contents, if it exists."""
    with _located(spark, path) as (where, files):
        files.delete(where, True)


def exists(spark: SparkSession, path: str) -> bool:
    """Return whether a file or folder exists."""
    with _located(spark, path) as (where, files):
        return bool(files.exists(where))


def runs_in(spark: SparkSession, folder: str) -> frozenset[str]:
    """Return the runs that have a folder of a kind; none where there is no such folder.

    `folder`: that of any run, as `Folders` returns it; it need not exist.
    """
    names = names_in(spark, folder.rpartition("/")[0])
    return frozenset(name.removeprefix("run=") for name in names)


def names_in(spark: SparkSession, path: str) -> list[str]:
    """Return the names in a folder; none where it does not exist."""
    with _located(spark, path) as (where, files):
        found = files.listStatus(where) if files.exists(where) else ()
        return [str(status.getPath().getName()) for status in found]


def replace(spark: SparkSession, path: str, old: str) -> None:
    """Move a folder to the place of another one, which is removed."""
    remove(spark, old)
    jvm: Any = spark.sparkContext._jvm
    with _located(spark, path) as (where, files):
        renamed = bool(files.rename(where, jvm.org.apache.hadoop.fs.Path(old)))
    if not renamed:
        raise ConfigurationError(f"the output folder cannot be used: {path} cannot be renamed")


def write_bytes(spark: SparkSession, path: str, content: bytes) -> None:
    """Write a small file."""
    with _located(spark, path) as (where, files):
        stream = files.create(where, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()


def read_bytes(spark: SparkSession, path: str) -> bytes | None:
    """Read a small file; None where it does not exist."""
    jvm: Any = spark.sparkContext._jvm
    with _located(spark, path) as (where, files):
        if not files.exists(where):
            return None
        stream = files.open(where)
        try:
            return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()


@contextmanager
def _located(spark: SparkSession, path: str) -> Iterator[tuple[Any, Any]]:
    """Yield Hadoop's path and file system; turn their errors into a `ConfigurationError`."""
    jvm: Any = spark.sparkContext._jvm
    hadoop: Any = spark.sparkContext._jsc
    try:
        where = jvm.org.apache.hadoop.fs.Path(path)
        yield where, where.getFileSystem(hadoop.hadoopConfiguration())
    except Exception as error:
        reason = str(getattr(error, "java_exception", None) or error).partition("\n")[0]
        raise ConfigurationError(
            f"the output folder cannot be used: {path}: {reason[:300]}"
        ) from None


PARTITIONED_BY = ("day", "verdict")
_DAYS_AS_THEY_COME = 3
"""Up to this number of days are written without a second shuffle."""
_WRITERS = "spark.sql.maxConcurrentOutputFileWriters"
_WRITERS_MAX = 64
"""Files that a task keeps open before it sorts its rows by folder: those of three days."""


def write_verdicts(rows: DataFrame, folders: Folders, run: str, days: int) -> None:
    """Write a run's verdicts, by day and verdict.
    Every task writes a file into each folder that it has rows for. Where that would be too many,
    rows are redistributed first, so that one task has most of a folder but no more rows than
    others.

    Args:
        rows: columns as in `schema.VERDICT`; `run` is ignored.
        days: approximate number of days.
    """
    rows = rows.drop("run")
    if days > _DAYS_AS_THEY_COME:
        rows = rows.hint("rebalance", *PARTITIONED_BY)
    with setting(rows.sparkSession, _WRITERS, str(_WRITERS_MAX)):
        rows.write.partitionBy(*PARTITIONED_BY).parquet(folders.verdicts(run))


def read_verdicts(spark: SparkSession, out: str, runs: Iterable[str]) -> DataFrame:
    """Return the verdicts of runs; columns as in `schema.VERDICT`.

    Args:
        out: the output folder, a path or URI.
        runs: names of runs in the journal; folders of other runs are incomplete. Runs with a
            deleted folder are left out.
    """
    folders = Folders(out)
    paths = [path for path in map(folders.verdicts, runs) if exists(spark, path)]
    if not paths:
        return spark.createDataFrame([], VERDICT)
    base = paths[0].rpartition("/")[0]
    rows = spark.read.schema(VERDICT).option("basePath", base).parquet(*paths)
    return rows.select(*spark.createDataFrame([], VERDICT).columns)


def current_verdicts(spark: SparkSession, out: str, runs: Iterable[str]) -> DataFrame:
    """Return the valid verdict of each transaction: that of the newest of these runs.
    Where that is `gone`, retention has removed the evidence since, and an earlier run's verdict
    wins."""
    rows = read_verdicts(spark, out, runs)
    row, run = F.struct(*rows.columns), F.col("run")
    ended = ~F.col("verdict").isin("gone", "pending", "committed")
    candidates = rows.groupBy("id").agg(
        F.max_by(row, run).alias("newest"), F.max_by(row, F.when(ended, run)).alias("ended")
    )
    newest = F.col("newest")
    counts = F.when(newest["verdict"] != "gone", newest).otherwise(F.coalesce("ended", newest))
    return candidates.select(counts.alias("row")).select("row.*")
