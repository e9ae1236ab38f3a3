"""A run goes on from the last one, and comes to the same verdicts as one that reads everything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fact_world import NAMES, Moment, World

from txbroker.errors import ConfigurationError
from txbroker.spark.folders import Folders
from txbroker.spark.journal import Journal
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.schema import RunSummary, Terms
from txbroker.spark.verdict_files import current_verdicts, read_verdicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession


class Installation:
    """Audits of a world, in folders of their own.

    Attributes:
        summaries: of the runs so far.
    """

    def __init__(
        self, spark: SparkSession, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.spark, self.world, self.folder = spark, world, folder
        self.out = str(folder / "out")
        self.summaries: list[RunSummary] = []
        self.told: list[str] = []
        monkeypatch.setattr("txbroker.spark.run.stage", self._stage)

    def _stage(self, *args: Any) -> Any:
        return self.world.stage(*args)

    def audit(self, moment: Moment, **fields: Any) -> RunSummary:
        """Audit what was there at a moment."""
        self.world.reads = [moment]
        terms = Terms(self.world.now_at(moment))
        settings = AuditSettings(self.out, self.folder / "data", NAMES, terms, **fields)
        access: Any = Ends(self.world, moment)
        self.summaries.append(run_audit(self.spark, access, settings, self.told.append))
        return self.summaries[-1]

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Return the verdicts that count, by id."""
        return by_id(current_verdicts(self.spark, self.out, [each.run for each in self.summaries]))


class Ends:
    """What a run asks Kafka for."""

    def __init__(self, world: World, moment: Moment) -> None:
        self._world, self._moment = world, moment


def by_id(rows: DataFrame) -> dict[str, dict[str, Any]]:
    """Return rows by id, without what tells one run from another."""
    found = {}
    for row in rows.drop("run").collect():
        assert row["id"] not in found
        found[row["id"]] = row.asDict(recursive=True)
        found[row["id"]]["places"].sort(key=str)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(one.get(id), other.get(id)) for id in one.keys() | other.keys() if one.get(id) != other.get(id)]


def same_in_one(
    spark: SparkSession,
    world: World,
    moments: Sequence[Moment],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Installation, dict[str, dict[str, Any]]]:
    """Audit a world in several runs and in one, and compare."""
    many = Installation(spark, world, folder / "many", monkeypatch)
    for moment in moments:
        many.audit(moment)
    found = many.verdicts()
    one = Installation(spark, world, folder / "one", monkeypatch)
    one.audit(moments[-1])
    expected = one.verdicts()
    assert differences(found, expected) == []
    return many, expected


@pytest.mark.parametrize("seed", range(3))
def test_any_life_in_parts_gets_the_verdicts_of_one_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = World(seed)
    world.live(400)
    moments = [*world.moments(3), world.end()]
    many, expected = same_in_one(spark, world, moments, tmp_path, monkeypatch)
    assert [each.mode for each in many.summaries] == ["full"] + ["incremental"] * 3
    kinds = {finding for row in expected.values() for finding in row["findings"]}
    assert kinds >= {"visible_twice", "contrary_markers", "out_of_order", "rolled_back_visible"}
    records = [sum(each.records.values()) for each in many.summaries]
    assert sum(records) == len(world.records)
