"""What an audit costs follows what it has to read: bounds on Spark's jobs, not on seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.planting import Planting, access_to
from txbroker.spark.journal import Journal
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.session import COSTS, ROWS_A_TASK, RunCost, spread, tasks_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka

JOBS_MAX = 10
"""Of an audit with nothing new, before its own row: to group and count, write the verdicts, add up,
and write the state. Each shuffle and each broadcast is one more."""


async def test_nothing_new_takes_few_jobs_and_no_python(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged_in_python(*_arguments: object) -> None:
        raise AssertionError("all transactions are plain")

    monkeypatch.setattr("txbroker.spark.judge.group._by_judge", judged_in_python)
    async with Planting(kafka.bootstrap) as planting:
        filled = await planting.fill_clean(40, pending=0.1)
        settings = AuditSettings(str(tmp_path / "out"), tmp_path, planting.names)
        access = access_to(kafka.bootstrap, planting.prefix)
        full = await asyncio.to_thread(run_audit, spark, access, settings)
        empty = await asyncio.to_thread(run_audit, spark, access, settings)
    assert (full.transactions, empty.mode) == (40, "incremental")
    assert empty.states == {"pending": filled.states["pending"]}
    assert not any(empty.records.values())
    assert empty.cost["jobs"] <= JOBS_MAX < full.cost["jobs"], (full.cost, empty.cost)
    assert full.cost["shuffle_bytes"] > empty.cost["shuffle_bytes"] > 0
    stored = Journal(settings.journal).get(empty.run)
    assert stored is not None
    assert stored.cost == empty.cost


def test_only_what_was_spent_since_counts(spark: SparkSession) -> None:
    def count() -> None:
        spark.range(0, 1000, 1, 3).selectExpr("id % 7 AS k").groupBy("k").count().collect()

    count()
    cost = RunCost(spark)
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


@pytest.mark.parametrize(("rows", "compiles"), [(100, "false"), (1_000_000, "true")])
def test_small_queries_are_not_compiled(spark: SparkSession, rows: int, compiles: str) -> None:
    name = "spark.sql.codegen.wholeStage"
    before = spark.conf.get(name)
    spark.conf.set(name, "true")
    try:
        with spread(spark, rows):
            assert spark.conf.get(name) == compiles
        assert spark.conf.get(name) == "true"
    finally:
        spark.conf.set(name, str(before))
