"""Spark's progress as one bar: what it adds up to, and where it is drawn."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from txbroker.spark.progress import SparkProgress, StageProgress, StageTotals, StageWatch, short

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (12_345, "12.3 k"), (2.04e6, "2.04 M"), (3e9, "3 G")],
)
def test_numbers_are_short(number: float, shown: str) -> None:
    assert short(number) == shown


def test_the_newest_of_each_stage_counts() -> None:
    tally = StageTotals("reading", 100.0)
    assert tally.shown(101.0) == ""
    tally.note([StageProgress(1, 4, 1, 1000), StageProgress(2, 8, 0, 0)])
    tally.note([StageProgress(1, 4, 4, 5000)])
    assert (tally.tasks, tally.done, tally.rows) == (12, 4, 5000)
    assert tally.rate(102.0) == 2500
    assert tally.shown(102.0) == "5 k rows · 2.5 k/s"
    assert tally.rate(100.0) > 0  # at once: no division by nothing


def test_watch_returns_running_stages(spark: SparkSession) -> None:
    from threading import Thread

    from pyspark import inheritable_thread_target

    watch = StageWatch(spark)
    rows = spark.range(0, 60_000, 1, 6).selectExpr("id", "id % 5 as k").groupBy("k").count()
    seen: list[StageProgress] = []

    @inheritable_thread_target(spark)
    def work() -> None:
        for _ in range(5):
            rows.collect()

    thread = Thread(target=work)
    thread.start()
    while thread.is_alive():
        seen += watch.stages()
    thread.join()
    assert seen
    assert all(0 <= stage.done <= stage.tasks for stage in seen)
    assert max(stage.rows for stage in seen) > 0  # what the shuffle has read, at least
    watch.forget()
    assert watch.stages() == []


def test_a_bar_is_drawn_on_a_terminal_and_gone_after(spark: SparkSession) -> None:
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    with SparkProgress(spark, terminal) as bar:
        bar.stage("judging all")
        deadline = time.monotonic() + DEADLINE_S
        while "judging all" not in drawn.getvalue():
            spark.range(10).count()
            assert time.monotonic() < deadline
    assert drawn.getvalue().endswith("\x1b[2K")  # the line is empty again


def test_nothing_is_drawn_elsewhere(spark: SparkSession) -> None:
    drawn = io.StringIO()
    with SparkProgress(spark, Console(file=drawn)) as bar:
        bar.stage("judging all")
        spark.range(10).count()
    assert drawn.getvalue() == ""
