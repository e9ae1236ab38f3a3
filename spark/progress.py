"""Spark's progress as one bar on stderr: stage, tasks done, rows and rate; nothing without a
terminal."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from rich import progress as bars
from rich.console import Console

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.3
"""Spark updates the figures of running stages ten times a second."""


class StageProgress(NamedTuple):
    """Progress of a Spark stage: its id, its tasks and those done, and the records that they have
    read, from Kafka, files or a shuffle."""

    id: int
    tasks: int
    done: int
    rows: int


class StageTotals:
    """Totals of the Spark stages in one stage of the audit."""

    def __init__(self, words: str, now_s: float) -> None:
        self.words = words
        self._began_s = now_s
        self._seen: dict[int, StageProgress] = {}

    def note(self, stages: Iterable[StageProgress]) -> None:
        """Add stages; a newer value replaces an older one."""
        self._seen.update((stage.id, stage) for stage in stages)

    @property
    def tasks(self) -> int:
        """Number of tasks known so far."""
        return sum(stage.tasks for stage in self._seen.values())

    @property
    def done(self) -> int:
        """Number of tasks done."""
        return sum(stage.done for stage in self._seen.values())

    @property
    def rows(self) -> int:
        """Number of records read."""
        return sum(stage.rows for stage in self._seen.values())

    def rate(self, now_s: float) -> float:
        """Return records read a second."""
        return self.rows / max(now_s - self._began_s, POLL_S)

    def shown(self, now_s: float) -> str:
        """Return rows and rate for the bar."""
        if not self.rows:
            return ""
        return f"{short(self.rows)} rows · {short(self.rate(now_s))}/s"


def short(number: float) -> str:
    """Return a number in at most four characters and a unit: `950`, `12.3 k`, `2.04 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


class SparkProgress:
    """The bar, on stderr by default, inside a `with` block. Any thread may call `stage`."""

    def __init__(self, spark: "SparkSession", console: Console | None = None) -> None:
        self._watch = _watch_of(spark)
        self._console = console or Console(stderr=True)
        self._bar = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=30),
            bars.TextColumn("{task.fields[rows]}"),
            bars.TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, rows="")
        self._tally = StageTotals("starting", time.monotonic())
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def stage(self, words: str) -> None:
        """Start a stage of the audit, described in a few words."""
        self._watch.forget()
        self._tally = StageTotals(words, time.monotonic())
        self._bar.reset(self._task, total=None, description=words, rows="")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
            self._thread = threading.Thread(target=self._follow, name="spark-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._bar.stop()

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            tally = self._tally
            # Spark may be stopping, or the stage may be gone since it was listed.
            with contextlib.suppress(Exception):
                tally.note(self._watch.stages())
            if tally is self._tally:
                self._bar.update(
                    self._task,
                    total=tally.tasks or None,
                    completed=tally.done,
                    rows=tally.shown(time.monotonic()),
                )


def _watch_of(spark: "SparkSession") -> "StageWatch | ReportedStages":
    from pyspark.sql import is_remote

    return ReportedStages(spark) if is_remote() else StageWatch(spark)


class ReportedStages:
    """Spark stages as a server of Spark Connect reports them, without records."""

    def __init__(self, spark: "SparkSession") -> None:
        self._known: dict[int, StageProgress] = {}
        spark.registerProgressHandler(cast(Any, self._note))

    def forget(self) -> None:
        """Forget all stages so far."""
        self._known = {}

    def stages(self) -> list[StageProgress]:
        """Return the stages that were reported."""
        return list(self._known.values())

    def _note(self, stages: Iterable[Any] | None, *_rest: Any, **_more: Any) -> None:
        for stage in stages or ():
            done = stage.num_completed_tasks
            self._known[stage.stage_id] = StageProgress(stage.stage_id, stage.num_tasks, done, 0)


class StageWatch:
    """Spark stages of running jobs, and of jobs that ran at an earlier poll.
    Reads the store of Spark's web pages, which exists without them too: unlike the status tracker,
    it counts the records read."""

    def __init__(self, spark: "SparkSession") -> None:
        context = spark.sparkContext
        self._tracker = context.statusTracker()
        self._store: Any = context._jsc.sc().statusStore()
        self._ids: set[int] = set()

    def forget(self) -> None:
        """Forget all stages so far."""
        self._ids = set()

    def stages(self) -> list[StageProgress]:
        """Return the stages that have not ended before the last poll."""
        for job in self._tracker.getActiveJobsIds():
            info = self._tracker.getJobInfo(job)
            if info is not None:
                self._ids.update(info.stageIds)
        stages = []
        for id in sorted(self._ids):
            data = _or_none(lambda id=id: self._store.lastStageAttempt(id))  # type: ignore[misc]
            if data is None:
                continue
            status = data.status().toString()
            if status in ("COMPLETE", "FAILED", "SKIPPED"):
                self._ids.discard(id)
            if status != "SKIPPED":
                rows = data.inputRecords() + data.shuffleReadRecords()
                stages.append(StageProgress(id, data.numTasks(), data.numCompleteTasks(), rows))
        return stages


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # py4j's errors can only be named where pyspark is installed
        return None
