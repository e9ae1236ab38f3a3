"""What an audit costs follows what it has to read: bounds on jobs and calls, not on seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.spark.calls import Calls
from tests.spark.planted_cases import Planted
from tests.spark.planting import Planting, access_to
from txbroker.spark.access import AuditKafka
from txbroker.spark.journal import Journal
from txbroker.spark.launch.driver import COSTS, driver_of
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.schema import RunSummary
from txbroker.spark.session import ROWS_A_TASK, spread, tasks_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka


class Budget(NamedTuple):
    """The most of a run, however few its rows are.

    Attributes:
        jobs: of Spark.
        calls: of Java: each is some ten microseconds, and a hundred in a new process.
        characters: of these calls, most of them SQL, which Java parses and plans.
    """

    jobs: int
    calls: int
    characters: int


CLEAN = Budget(12, 3500, 190_000)
NOTHING_NEW = Budget(5, 1500, 70_000)
DRIFT = Budget(25, 5000, 430_000)


async def spent(
    spark: SparkSession, access: AuditKafka, settings: AuditSettings, calls: Calls
) -> tuple[RunSummary, Budget]:
    """Audit once; return what it has cost, with its own row."""
    jobs, before, written = driver_of(spark).cost(), calls.total(), calls.characters
    summary = await asyncio.to_thread(run_audit, spark, access, settings)
    made, characters = calls.total() - before, calls.characters - written
    return summary, Budget(jobs.so_far()["jobs"], made, characters)


def within(cost: Budget, most: Budget) -> bool:
    return all(value <= limit for value, limit in zip(cost, most, strict=True))


async def test_a_run_without_drift_takes_few_jobs_and_calls_and_no_python(
    spark: SparkSession,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
) -> None:
    def judged_in_python(*_arguments: object) -> None:
        raise AssertionError("all transactions are plain")

    monkeypatch.setattr("txbroker.spark.judge.group._by_judge", judged_in_python)
    async with Planting(kafka.bootstrap) as planting:
        filled = await planting.fill_clean(30, pending=0.1)
        settings = AuditSettings(str(tmp_path / "out"), tmp_path, planting.names)
        access = access_to(kafka.bootstrap, planting.prefix)
        full, cost = await spent(spark, access, settings, calls)
        empty, less = await spent(spark, access, settings, calls)
    assert (full.states, empty.mode) == (filled.states, "incremental")
    assert empty.states == {"pending": filled.states["pending"]}
    assert not full.drift
    assert not any(empty.records.values())
    assert within(cost, CLEAN), (cost, full.cost)
    assert within(less, NOTHING_NEW), (less, empty.cost)
    assert full.cost["shuffle_bytes"] > 0
    stored = Journal(settings.journal).get(empty.run)
    assert stored is not None
    assert stored.cost == empty.cost


async def test_a_run_with_drift_takes_few_jobs_and_calls(
    spark: SparkSession, planted: Planted, tmp_path: Path, calls: Calls
) -> None:
    planting = planted.planting
    settings = AuditSettings(str(tmp_path / "out"), tmp_path, planting.names, planted.terms)
    access = access_to(planting.bootstrap, planting.prefix)
    full, cost = await spent(spark, access, settings, calls)
    again, less = await spent(spark, access, settings, calls)
    assert len(full.drift) > len(again.drift) > 10
    assert within(cost, DRIFT), (cost, full.cost)
    assert within(less, DRIFT), (less, again.cost)


def test_only_what_was_spent_since_counts(spark: SparkSession) -> None:
    def count() -> None:
        spark.range(0, 1000, 1, 3).selectExpr("id % 7 AS k").groupBy("k").count().collect()

    count()
    cost = driver_of(spark).cost()
    assert cost.so_far() == dict.fromkeys(COSTS, 0)
    count()
    once = cost.so_far()
    assert once["jobs"] >= 1
    assert once["tasks"] >= 4
    assert once["shuffle_bytes"] > 0
    count()
    twice = cost.so_far()
    assert twice["jobs"] == 2 * once["jobs"]
    assert twice["shuffle_bytes"] > once["shuffle_bytes"]


@pytest.mark.parametrize(
    ("rows", "cores", "tasks"),
    [(0, 8, 1), (50_000, 8, 3), (1_000_000, 8, 8), (10 * ROWS_A_TASK + 1, 8, 11), (None, 8, 8)],
)
def test_tasks_follow_rows(rows: int | None, cores: int, tasks: int) -> None:
    assert tasks_for(rows, cores) == tasks


@pytest.mark.parametrize(
    ("rows", "stored", "compiles"),
    [(100, 0, "false"), (100, 1_000_000, "true"), (1_000_000, 0, "true"), (None, 0, "true")],
)
def test_small_queries_are_not_compiled(
    spark: SparkSession, rows: int | None, stored: int, compiles: str
) -> None:
    name = "spark.sql.codegen.wholeStage"
    before = spark.conf.get(name)
    spark.conf.set(name, "true")
    try:
        with spread(spark, rows, stored):
            assert spark.conf.get(name) == compiles
        assert spark.conf.get(name) == "true"
    finally:
        spark.conf.set(name, str(before))
