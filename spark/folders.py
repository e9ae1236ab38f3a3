"""An audit's files below its output folder, on any file system that Hadoop knows.

    verdicts/run=RUN      the verdicts of a run, until they are in the tables
    facts/run=RUN/TABLE   the run's facts
    carry/run=RUN         its state for the next run

A folder counts once the run's entry is in the journal; until then it is incomplete. Every function
raises a `ConfigurationError` where the file system does not answer or refuses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession

from txbroker.errors import ConfigurationError
from txbroker.spark.schema import BROKEN


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

    def all_of(self, run: str) -> tuple[str, ...]:
        """Return all folders of a run."""
        kinds = (self.verdicts, self.facts, self.carry)
        return tuple(folder(run) for folder in kinds)

    def _of(self, kind: str, run: str) -> str:
        return f"{self.out.rstrip('/')}/{kind}/run={run}"


def run_of(folder: str) -> str:
    """Return the run that has a folder."""
    return folder.rpartition("run=")[2]


def remove(spark: SparkSession, path: str) -> None:
    """Remove a folder with its contents, if it exists."""
    with _located(spark, path) as (where, files):
        files.delete(where, True)


def qualified(spark: SparkSession, path: str) -> str:
    """Return the whole URI of a path."""
    with _located(spark, path) as (where, files):
        return str(files.makeQualified(where).toString())


def make(spark: SparkSession, path: str) -> None:
    """Create a folder, with those above it."""
    with _located(spark, path) as (where, files):
        files.mkdirs(where)


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


def sizes_in(spark: SparkSession, path: str) -> dict[str, int]:
    """Return the data files in a folder, each with its size in bytes."""
    with _located(spark, path) as (where, files):
        found = {str(s.getPath().getName()): int(s.getLen()) for s in files.listStatus(where)}
    return {name: size for name, size in found.items() if not name.startswith((".", "_"))}


def replace(spark: SparkSession, path: str, old: str) -> None:
    """Move a folder to the place of another one, which is removed."""
    remove(spark, old)
    jvm: Any = spark.sparkContext._jvm
    with _located(spark, path) as (where, files):
        renamed = bool(files.rename(where, jvm.org.apache.hadoop.fs.Path(old)))
    if not renamed:
        raise ConfigurationError(f"the output folder cannot be used: {path} cannot be renamed")


def move(spark: SparkSession, source: str, target: str) -> None:
    """Move the files of a folder into another one, which is created."""
    jvm: Any = spark.sparkContext._jvm
    with _located(spark, target) as (into, files):
        files.mkdirs(into)
        for status in files.listStatus(jvm.org.apache.hadoop.fs.Path(source)):
            if not files.rename(status.getPath(), into):
                raise ConfigurationError(
                    f"the output folder cannot be used: {status.getPath()} cannot be renamed"
                )


def write_bytes(spark: SparkSession, path: str, content: bytes) -> None:
    """Write a small file."""
    with _located(spark, path) as (where, files):
        stream = files.create(where, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()


def write_whole(spark: SparkSession, path: str, content: bytes) -> None:
    """Write a small file, in place of an older one, so that a reader never sees a part of it."""
    jvm: Any = spark.sparkContext._jvm
    gateway: Any = spark.sparkContext._gateway
    fresh = f"{path}.new"
    write_bytes(spark, fresh, content)
    with _located(spark, path) as (where, files):
        hadoop = jvm.org.apache.hadoop.fs
        overwrite = gateway.new_array(getattr(hadoop, "Options$Rename"), 1)
        overwrite[0] = getattr(hadoop, "Options$Rename").OVERWRITE
        context = hadoop.FileContext.getFileContext(files.getUri(), files.getConf())
        context.rename(
            files.makeQualified(hadoop.Path(fresh)), files.makeQualified(where), overwrite
        )


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


def read_broken(spark: SparkSession, folders: Folders, run: str) -> DataFrame:
    """Return the unreadable records of a run; columns as in `schema.BROKEN`."""
    return spark.read.schema(BROKEN).parquet(f"{folders.facts(run)}/broken")
