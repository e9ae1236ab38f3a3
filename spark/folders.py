"""The folders of an audit's runs below its output folder.

    verdicts/run=RUN      the verdicts of a run, until they are in the tables
    facts/run=RUN/TABLE   the run's facts
    carry/run=RUN         its state for the next run

A folder counts once the run's entry is in the journal; until then it is incomplete.
"""

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession

from txbroker.spark.schema import BROKEN
from txbroker.spark.storage.storage import storage_of


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


def runs_in(spark: SparkSession, folder: str) -> frozenset[str]:
    """Return the runs that have a folder of a kind; none where there is no such folder.

    `folder`: that of any run, as `Folders` returns it; it need not exist.
    """
    kind = folder.rpartition("/")[0]
    names = storage_of(spark, kind).names(kind)
    return frozenset(name.removeprefix("run=") for name in names)


def read_broken(spark: SparkSession, folders: Folders, run: str) -> DataFrame:
    """Return the unreadable records of a run; columns as in `schema.BROKEN`."""
    return spark.read.schema(BROKEN).parquet(f"{folders.facts(run)}/broken")
