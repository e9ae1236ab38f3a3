"""Audits that are killed in every phase, and repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.fact_world import World
from tests.spark.test_audit_incremental import COMPARED, Installation, differences
from txbroker.spark import run
from txbroker.spark.journal import Journal
from txbroker.spark.storage import lease
from txbroker.spark.storage.hadoop import HadoopStorage
from txbroker.spark.storage.lease import StoreLock
from txbroker.spark.storage.local import LocalStorage
from txbroker.spark.tables.layout import RUNS, TABLES
from txbroker.spark.tables.parquet import ParquetTables
from txbroker.spark.tables.store import TableStore, open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Killed(BaseException):
    """The process was killed."""


class Death:
    """Kills an audit when it reaches a point; a dead one cleans up nothing.

    Attributes:
        point: where; empty: nowhere.
        reached: the points so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.point = ""
        self.reached: list[str] = []
        after: dict[Any, tuple[str, Callable[..., str]]] = {
            TableStore: ("stage", lambda self, run, table, *rest: f"staged {table.name}"),
            ParquetTables: ("apply", lambda self, staged, table: f"applied {table.name}"),
            Journal: ("add", lambda self, summary: "recorded"),
        }
        for owner, (name, label) in after.items():
            monkeypatch.setattr(owner, name, self._then(getattr(owner, name), label))
        tidy_up = run.tidy_up

        def removing(remove: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
            def called(storage: Any, path: str) -> None:
                if "/run=" not in path.rpartition("/")[0]:
                    self.at(f"removing {Path(path).parent.name}")
                remove(storage, path)

            return called

        def tidying(*given: Any) -> str:
            if self.reached and self.reached[-1] == self.point:
                raise Killed
            return tidy_up(*given)

        for storage in (LocalStorage, HadoopStorage):
            monkeypatch.setattr(storage, "remove", removing(storage.remove))
        monkeypatch.setattr(run, "tidy_up", tidying)
        check = StoreLock.check

        def checking(lease: StoreLock) -> None:
            if self.reached and self.reached[-1] == self.point:
                raise Killed  # nor does a dead one release its locks
            check(lease)

        monkeypatch.setattr(StoreLock, "check", checking)

    def _then(self, call: Callable[..., Any], label: Callable[..., str]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            result = call(*given)
            self.at(label(*given))
            return result

        return called

    def at(self, point: str) -> None:
        self.reached.append(point)
        if point == self.point:
            raise Killed


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("on_store", [False, True], ids=["folder", "store"])
def test_killed_and_repeated_audits_leave_the_tables_of_one_that_was_not(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_store: bool
) -> None:
    monkeypatch.setattr(lease, "EXPIRY_S", 0.0)
    world = World(7)
    world.live(120)
    (moment,) = world.moments(1)
    world.prepare()
    first = Installation(spark, world, tmp_path / "first", monkeypatch)
    if on_store:
        first.move_to_store()
    first.audit(moment)
    death = Death(monkeypatch)

    def go_on(name: str) -> Installation:
        shutil.copytree(tmp_path / "first", tmp_path / name)
        runs = Installation(spark, world, tmp_path / name, monkeypatch)
        if on_store:
            runs.move_to_store()
        runs.on_stage = death.at
        return runs

    whole = go_on("whole")
    whole.audit(world.end())
    points = list(dict.fromkeys(death.reached))
    assert {f"staged {table.name}" for table in TABLES} <= set(points)
    assert {f"applied {table.name}" for table in TABLES} <= set(points)
    assert {"reading the topics", "judging", "recorded", "removing carry"} <= set(points)
    recorded = points.index("recorded")
    for number, point in enumerate(points):
        runs, death.point, death.reached = go_on(f"{number}"), point, []
        with pytest.raises(Killed):
            runs.audit(world.end())
        death.point = ""
        runs.audit(world.end())
        for table in COMPARED:
            found = differences(runs.rows(table), whole.rows(table))
            assert found == {}, f"{point}: {table.name}"
        last = Journal(runs.settings.journal).last()
        assert last is not None
        assert runs.kept("carry") == [last.run]
        assert runs.kept("verdicts") == runs.kept("staged") == []
        runs_made = open_store(spark, runs.settings.out).read(RUNS).count()
        assert runs_made == (3 if number >= recorded else 2), point
        shutil.rmtree(runs.folder)
