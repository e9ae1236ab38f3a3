"""What a run costs Spark: the counts in its record."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COSTS = ("jobs", "tasks", "cpu_ms", "input_bytes", "shuffle_bytes", "spill_bytes")


class RunCost:
    """What Spark spends from now on, from the store of its web pages."""

    def __init__(self, spark: "SparkSession") -> None:
        self._context: Any = spark.sparkContext._jsc.sc()
        self._jobs_before = {job.jobId() for job in self._jobs()}

    def so_far(self) -> dict[str, int]:
        """Return counts of Spark, by the names of `tables.layout.RUNS`.

        A session keeps its last thousand jobs and stages.
        """
        jobs = [job for job in self._jobs() if job.jobId() not in self._jobs_before]
        ids = {number for job in jobs for number in _items(job.stageIds())}
        store = self._context.statusStore()
        cost = dict.fromkeys(COSTS, 0) | {"jobs": len(jobs)}
        for number in ids:
            try:
                stage = store.lastStageAttempt(number)
            except Exception:  # the store has dropped it
                continue
            cost["tasks"] += stage.numCompleteTasks()
            cost["cpu_ms"] += stage.executorCpuTime() // 1_000_000
            cost["input_bytes"] += stage.inputBytes()
            cost["shuffle_bytes"] += stage.shuffleWriteBytes()
            cost["spill_bytes"] += stage.diskBytesSpilled()
        return cost

    def _jobs(self) -> Iterable[Any]:
        # The store follows events, which Spark delivers later.
        self._context.listenerBus().waitUntilEmpty()
        return _items(self._context.statusStore().jobsList(None))


def _items(sequence: Any) -> Iterator[Any]:
    """Yield the items of a sequence of Scala."""
    return (sequence.apply(number) for number in range(sequence.size()))
