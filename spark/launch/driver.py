"""What only Spark's driver knows: its classes and cores, and its cost.

Python asks the Java of its driver, which it has beside itself, or a server of Spark Connect.
"""

import os
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import is_remote

from txbroker.spark.launch.remote import RemoteDriver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COSTS = ("jobs", "tasks", "cpu_ms", "input_bytes", "shuffle_bytes", "spill_bytes")
_TASKS = "spark.sql.shuffle.partitions"


class Cost(Protocol):
    """What Spark spends from its creation on."""

    def so_far(self) -> dict[str, int]:
        """Return counts of Spark, by the names of `tables.layout.RUNS`; empty: unknown."""


class Driver(Protocol):
    """The driver of a session.

    Attributes:
        cores: tasks that the cluster runs at a time.
        tasks_fixed: whether Spark was started with a number of tasks for each shuffle.
    """

    @property
    def cores(self) -> int: ...
    @property
    def tasks_fixed(self) -> bool: ...

    def jars_of(self, name: str) -> list[str] | None:
        """Return the URLs of the jars of which one may have a class; None where Spark has not
        loaded it."""

    def jdbc_driver(self, url: str) -> str:
        """Return the class of the driver for a URL, "" if Spark has none."""

    def cost(self) -> Cost:
        """Return the cost from now on."""

    def loading(self, package: str, extension: str = "") -> str:
        """Return how to load a package that Spark lacks, and its extension of Spark's SQL."""


class JavaDriver:
    """The driver in Java beside this process; see `Driver`. `context`: its `SparkContext`."""

    def __init__(self, context: Any) -> None:
        self._jvm = context._jvm
        # A call of Python's copies all settings.
        self._context = context._jsc.sc()

    @cached_property
    def cores(self) -> int:
        """As Spark counts them."""
        return int(self._context.defaultParallelism())

    @cached_property
    def tasks_fixed(self) -> bool:
        """Ask the settings of its start."""
        return bool(self._context.conf().contains(_TASKS))

    def jars_of(self, name: str) -> list[str] | None:
        """Ask the class."""
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        try:
            kind = self._jvm.java.lang.Class.forName(name, False, loader)
            return [str(kind.getProtectionDomain().getCodeSource().getLocation())]
        except Exception:
            return None

    def jdbc_driver(self, url: str) -> str:
        """Ask all drivers: Java itself only knows those that were there when it started, not those
        of packages."""
        kind = self._jvm.java.lang.Class.forName("java.sql.Driver")
        loader = self._jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
        iterator = self._jvm.java.util.ServiceLoader.load(kind, loader).iterator()
        while iterator.hasNext():
            driver = iterator.next()
            if driver.acceptsURL(url):
                return str(driver.getClass().getName())
        return ""

    def cost(self) -> Cost:
        """Count from now on."""
        return RunCost(self._context)

    def loading(self, package: str, extension: str = "") -> str:
        """A session loads packages and extensions when it starts."""
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            return f"run spark-submit with --packages {package}"
        return f"add --conf spark.jars.packages={package}"


@lru_cache(maxsize=1)
def driver_of(spark: "SparkSession") -> Driver:
    """Return the driver of a session."""
    return RemoteDriver(spark) if is_remote() else JavaDriver(spark.sparkContext)


class RunCost:
    """What Spark spends from now on, from the store of its web pages; see `Cost`.

    Args:
        context: as Java has it.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._jobs, self._stages = self._so_far()

    def so_far(self) -> dict[str, int]:
        """Count.

        A session keeps its last thousand jobs and stages.
        """
        jobs, stages = self._so_far()
        store = self._context.statusStore()
        cost = dict.fromkeys(COSTS, 0) | {"jobs": jobs - self._jobs}
        for number in range(self._stages, stages):
            try:
                stage = store.lastStageAttempt(number)
            except Exception:  # the store has dropped it
                continue
            tasks = stage.numCompleteTasks()
            if not tasks:
                continue  # what it would compute was there
            cost["tasks"] += tasks
            cost["cpu_ms"] += stage.executorCpuTime() // 1_000_000
            cost["input_bytes"] += stage.inputBytes()
            cost["shuffle_bytes"] += stage.shuffleWriteBytes()
            cost["spill_bytes"] += stage.diskBytesSpilled()
        return cost

    def _so_far(self) -> tuple[int, int]:
        """Return how many jobs and stages there were in the session: both are numbered."""
        jobs = int(self._context.dagScheduler().numTotalJobs())
        if not jobs:
            return 0, 0
        # The store follows events, which Spark delivers later.
        self._context.listenerBus().waitUntilEmpty()
        of_last = self._context.statusStore().job(jobs - 1).stageIds()
        return jobs, 1 + max(of_last.apply(number) for number in range(of_last.size()))
