"""Where an audit's files lie below its output folder, on any file system that Hadoop knows.

    verdicts/run=RUN/day=DAY/verdict=VERDICT   the verdicts of a run
    facts/run=RUN/TABLE                        what the run has read, narrow
    carry/run=RUN                              what it leaves to the next run
    business/run=RUN                           ids with or without a row of the business

A folder counts once the run's entry is in the journal; until then it is half a job.
"""

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from txbroker.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Folders(Struct, frozen=True):
    """The folders of runs below `out`, a path or URI."""

    out: str

    def verdicts(self, run: str) -> str:
        """Return where a run's verdicts are."""
        return self._of("verdicts", run)

    def facts(self, run: str) -> str:
        """Return where the facts are that a run has read."""
        return self._of("facts", run)

    def carry(self, run: str) -> str:
        """Return where a run has put what the next one needs."""
        return self._of("carry", run)

    def business(self, run: str) -> str:
        """Return where a run has put what it found in comparing with the business."""
        return self._of("business", run)

    def all_of(self, run: str) -> tuple[str, ...]:
        """Return all folders of a run."""
        kinds = (self.verdicts, self.facts, self.carry, self.business)
        return tuple(folder(run) for folder in kinds)

    def _of(self, kind: str, run: str) -> str:
        return f"{self.out.rstrip('/')}/{kind}/run={run}"


def remove(spark: "SparkSession", path: str) -> None:
    """Remove a folder with all that is in it, if it is there.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    where, files = _located(spark, path)
    try:
        files.delete(where, True)
    except Exception as error:
        raise _unusable(path, error) from None


def exists(spark: "SparkSession", path: str) -> bool:
    """Say whether a file or folder is there.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    where, files = _located(spark, path)
    try:
        return bool(files.exists(where))
    except Exception as error:
        raise _unusable(path, error) from None


def runs_in(spark: "SparkSession", folder: str) -> frozenset[str]:
    """Return the runs that have a folder of a kind; none where there is nothing of the kind.

    Args:
        folder: that of some run, as `Folders` gives it; it need not be there.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    names = names_in(spark, folder.rpartition("/")[0])
    return frozenset(name.removeprefix("run=") for name in names)


def names_in(spark: "SparkSession", path: str) -> list[str]:
    """Return the names of what is in a folder; none where there is no such folder.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    if not exists(spark, path):
        return []
    where, files = _located(spark, path)
    try:
        return [str(each.getPath().getName()) for each in files.listStatus(where)]
    except Exception as error:
        raise _unusable(path, error) from None


def replace(spark: "SparkSession", path: str, old: str) -> None:
    """Put a folder in the place of another one, which is removed.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    remove(spark, old)
    where, files = _located(spark, path)
    jvm: Any = spark.sparkContext._jvm
    try:
        renamed = bool(files.rename(where, jvm.org.apache.hadoop.fs.Path(old)))
    except Exception as error:
        raise _unusable(path, error) from None
    if not renamed:
        raise ConfigurationError(f"the output folder cannot be used: {path} cannot be renamed")


def write_bytes(spark: "SparkSession", path: str, content: bytes) -> None:
    """Write a small file.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    where, files = _located(spark, path)
    try:
        stream = files.create(where, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
    except Exception as error:
        raise _unusable(path, error) from None


def read_bytes(spark: "SparkSession", path: str) -> bytes | None:
    """Read a small file; None where it is not there.

    Raises:
        ConfigurationError: the file system does not answer or refuses.
    """
    if not exists(spark, path):
        return None
    where, files = _located(spark, path)
    jvm: Any = spark.sparkContext._jvm
    try:
        stream = files.open(where)
        try:
            return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()
    except Exception as error:
        raise _unusable(path, error) from None


def _located(spark: "SparkSession", path: str) -> tuple[Any, Any]:
    jvm: Any = spark.sparkContext._jvm
    hadoop: Any = spark.sparkContext._jsc
    try:
        where = jvm.org.apache.hadoop.fs.Path(path)
        return where, where.getFileSystem(hadoop.hadoopConfiguration())
    except Exception as error:
        raise _unusable(path, error) from None


def _unusable(path: str, error: Exception) -> ConfigurationError:
    said = str(getattr(error, "java_exception", None) or error).partition("\n")[0]
    return ConfigurationError(f"the output folder cannot be used: {path}: {said[:300]}")
