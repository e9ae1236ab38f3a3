"""A run goes on from the last one, and comes to the same verdicts as one that reads everything."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.spark.audit_tables import rows_in
from tests.spark.fact_world import NAMES, Moment, World, tables_held
from tests.spark.planted_cases import plant_all, plant_clean
from tests.spark.planting import Planting, access_to
from tests.spark.stores import STORE
from txbroker.core.records import Half
from txbroker.errors import ConfigurationError
from txbroker.spark.business import BusinessTable
from txbroker.spark.journal import Journal
from txbroker.spark.run import AuditSettings, check_window, run_audit, run_name
from txbroker.spark.schema import RunSummary, Terms
from txbroker.spark.secret import SECRET_FILE
from txbroker.spark.storage.folder import data_folder
from txbroker.spark.tables.layout import DRIFT, RUNS, TABLES, TRANSACTIONS, Table
from txbroker.spark.tables.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka


COMPARED = tuple(table for table in TABLES if table is not RUNS)


class Installation:
    """Audits of a world, in separate folders.

    Attributes:
        summaries, notices: of the runs so far.
        on_stage: called with each stage.
    """

    def __init__(
        self, spark: SparkSession, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.spark, self.world, self.folder = spark, world, folder
        self.settings = AuditSettings(str(folder / "out"), folder / "data", NAMES)
        self.summaries: list[RunSummary] = []
        self.on_stage: Callable[[str], None] = lambda stage: None
        self.notices: list[str] = []
        monkeypatch.setattr("txbroker.spark.facts.history.extract", world.stage)

    def move_to_store(self) -> None:
        """Reach all files as those of a store, in the same folder."""
        out, folder = f"{STORE}{self.settings.out}", f"{STORE}{self.folder}/data"
        data_dir = data_folder(folder, self.spark)
        self.settings = msgspec.structs.replace(self.settings, out=out, data_dir=data_dir)

    def audit(self, moment: Moment, **fields: Any) -> RunSummary:
        """Audit the records of a moment. `brokers`: the access that returns the time."""
        self.world.reads = [moment]
        brokers: Any = fields.pop("brokers", None)  # the world is asked itself
        now_ms = self.world.now_at(moment) if brokers is None else 0
        overdue_ms = 600_000 if brokers is None else Terms(0).overdue_after_ms
        given = {"terms": Terms(now_ms, overdue_after_ms=overdue_ms), **fields}
        settings = msgspec.structs.replace(self.settings, **given)
        held = tables_held(self.spark)
        notice = self.notices.append
        self.summaries.append(run_audit(self.spark, brokers, settings, self.on_stage, notice))
        assert tables_held(self.spark) <= held
        return self.summaries[-1]

    def rows(self, table: Table = TRANSACTIONS) -> dict[Any, Any]:
        return rows_in(self.spark, self.settings.out, table)

    def standing(self, table: Table) -> dict[Any, Any]:
        """Return the rows, but no healed findings: which there are depends on the times of runs."""
        return {key: row for key, row in self.rows(table).items() if row.get("state") != "healed"}

    def kept(self, kind: str) -> list[str]:
        found = (self.folder / "out" / kind).glob("run=*")
        return sorted(path.name.removeprefix("run=") for path in found)


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return in which columns verdicts are not the same, by id; None for one that is not there."""
    missing = dict.fromkeys(one.keys() ^ other.keys())
    found = {
        id: {
            name: (one[id][name], other[id][name])
            for name in one[id]
            if one[id][name] != other[id][name]
        }
        for id in one.keys() & other.keys()
    }
    return missing | {id: columns for id, columns in found.items() if columns}


# --- on random installations, without Kafka ----------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
def test_any_life_in_parts_gets_the_verdicts_of_one_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = World(seed)
    world.prepare()
    world.live(400)
    world.now_ms += 700_000
    world.prepare()  # by now records that are not visible are lost
    many = Installation(spark, world, tmp_path / "many", monkeypatch)
    late = world.naming_late("rare")
    moments = sorted((late, *(each for each in world.moments(2) if each.early > late.rest)))
    for moment in (*moments, world.end()):
        many.audit(moment)
    cuts = [each.cut for each in many.summaries if each.cut is not None]
    assert "rare" in cuts[0].named_late
    assert any(target.open for cut in cuts for target in cut.targets)
    assert {each.mode for each in many.summaries[1:]} == {"incremental"}
    records = [sum(each.records.values()) for each in many.summaries]
    assert sum(records) == len(world.records)
    # Facts of all are kept for those to whom something comes late, the rest only for the next.
    assert many.kept("facts") == [each.run for each in many.summaries]
    assert many.kept("carry") == [many.summaries[-1].run]
    in_parts = {table: many.standing(table) for table in COMPARED}

    whole = Installation(spark, world, tmp_path / "whole", monkeypatch)
    whole.audit(world.end())
    for table in COMPARED:
        assert differences(in_parts[table], whole.standing(table)) == {}, table.name
    expected = whole.rows()
    at_once = many.audit(world.end(), mode="full")
    assert (at_once.mode, sum(at_once.records.values())) == ("full", len(world.records))
    for table in COMPARED:
        assert differences(many.standing(table), whole.standing(table)) == {}, table.name
    kinds = {finding for row in expected.values() for finding in row["findings"]}
    kinds |= at_once.drift.keys()
    assert kinds >= {"visible_twice", "contrary_markers", "out_of_order", "rolled_back_visible"}
    assert "overdue" in kinds
    # Nor is anything gone where others' records were taken before.
    drift = open_store(spark, many.settings.out).read(DRIFT)
    lost = drift.where("kind = 'lost' AND state = 'open'")
    assert not lost.where("why LIKE '%for rare-%'").isEmpty()
    assert many.kept("facts") == many.kept("carry") == [at_once.run]
    assert many.kept("verdicts") == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_run_that_dies_leaves_nothing_and_changes_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(7)
    world.live(60)
    (moment,) = world.moments(1)
    runs = Installation(spark, world, tmp_path, monkeypatch)
    first = runs.audit(moment)

    def full(self: Journal, summary: RunSummary) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "add", full)
        with pytest.raises(OSError, match="no space"):
            runs.audit(world.end())
    for kind in ("facts", "carry"):
        assert runs.kept(kind) == [first.run]
    assert runs.kept("verdicts") == runs.kept("staged") == []
    again = runs.audit(world.end())
    assert again.mode == "incremental"
    records = sum(sum(each.records.values()) for each in (first, again))
    assert records == len(world.records)
    assert Journal(runs.settings.journal).last() == again

    elsewhere = msgspec.structs.replace(runs.settings, out=str(tmp_path / "elsewhere"))
    nobody: Any = None
    with pytest.raises(ConfigurationError, match=f"state that the last run .{again.run}. left"):
        run_audit(spark, nobody, elsewhere)
    names = msgspec.structs.replace(NAMES, op="other.op")
    lower = msgspec.structs.replace(runs.settings, terms=Terms(1, dedup_window_ms=60_000))
    with pytest.raises(ConfigurationError, match="dedup window of 120 s, not 60 s"):
        run_audit(spark, nobody, lower)
    other = msgspec.structs.replace(runs.settings, names=names)
    with pytest.raises(ConfigurationError, match=r"audited op, not other\.op"):
        run_audit(spark, nobody, other)


@pytest.mark.timeout(600)
def test_run_uses_broker_clock_and_skips_unrelated_history(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(8)
    for _ in range(20):
        half = world.prepare()
        world.promote(half, world.mark(half, "commit"))
    # By the clock here the one that is committed would be late, and lost.
    world.mark(world.prepare(), "commit")
    open_still = world.prepare()
    runs = Installation(spark, world, tmp_path, monkeypatch)
    now_ms = world.now_ms + 2000
    here_ms = now_ms + 3_600_000
    here = SimpleNamespace(time=lambda: here_ms / 1000, monotonic=time.monotonic)
    brokers = SimpleNamespace(now_ms=lambda names: now_ms if names == NAMES else 0)
    with monkeypatch.context() as another_time:
        another_time.setattr("txbroker.spark.run.time", here)
        first = runs.audit(world.end(), brokers=brokers)
    assert first.run.startswith(run_name(here_ms)[:18])  # a name decides nothing
    assert first.terms == Terms(now_ms)
    assert first.states == {"committed": 1, "pending": 1, "promoted": 20}
    assert (first.carried, first.drift) == (2, {})
    shutil.rmtree(tmp_path / "out/facts")
    world.now_ms += 1000
    for half in (open_still, world.prepare()):
        world.promote(half, world.mark(half, "commit"))
    half = world.prepare()
    marker = world.mark(half, "commit")
    world.promote(half, marker, append_time=True, at_ms=marker["at_ms"] - 2001)
    second = runs.audit(world.end())
    assert (second.states, second.carried) == ({"committed": 1, "promoted": 3}, 1)
    assert second.drift == {"visible_without_commit": 1}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_deleted_facts_and_expired_rows_cause_no_finding(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(10)
    settled = world.prepare()
    world.promote(settled, world.mark(settled, "commit"))
    runs = Installation(spark, world, tmp_path, monkeypatch)
    assert runs.audit(world.end()).states == {"promoted": 1}
    shutil.rmtree(tmp_path / "out/facts")
    world.now_ms += 3_600_000
    fresh = world.prepare()
    world.promote(fresh, world.mark(fresh, "commit"))
    # A late record for a transaction of the removed files.
    world.mark(settled, "check", number=1, reason="due", source="schedule")
    rows = [(half[0]["id"],) for half in (settled, fresh)]
    spark.createDataFrame(rows, "tx string").write.parquet(str(tmp_path / "rows"))
    business = BusinessTable(f"parquet:{tmp_path}", "rows", "tx")
    again = runs.audit(world.end(), business=business)
    assert (again.mode, again.states, again.drift) == (
        "incremental",
        {"gone": 1, "promoted": 1},
        {},
    )
    assert {row["verdict"] for row in runs.rows().values()} == {"settled"}
    store = open_store(spark, runs.settings.out)
    last_day = max(row["day"] for row in runs.rows().values())
    store.note_expiry((last_day + timedelta(1)).isoformat())
    shutil.rmtree(tmp_path / "out/transactions")
    world.now_ms += 86_400_000
    last = runs.audit(world.end(), business=business)
    assert (last.drift, last.business["rows"], last.business["rows_gone"]) == ({}, 2, 2)


@pytest.mark.timeout(600)
def test_state_of_an_earlier_version_is_read_again_with_a_notice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(11)
    half = world.prepare()
    world.promote(half, world.mark(half, "commit"))
    runs = Installation(spark, world, tmp_path, monkeypatch)
    first = runs.audit(world.end())
    (state,) = (tmp_path / "out/carry").glob("*/chain.json")
    chain = msgspec.json.decode(state.read_bytes())
    state.write_bytes(msgspec.json.encode(chain | {"version": 2}))
    brokers = SimpleNamespace(now_ms=lambda names: world.now_at(world.end()) - 5000)
    again = runs.audit(world.end(), brokers=brokers)
    assert (again.mode, again.records) == ("full", first.records)
    old, clock = runs.notices
    assert old.startswith("An earlier version of txbroker wrote the state")
    assert clock.startswith("The brokers' clocks are 5 s earlier than at the last run")
    assert runs.kept("facts") == runs.kept("carry") == [again.run]
    (row,) = runs.rows().values()
    assert row["verdict"] == "settled"
    secret = tmp_path / "data" / SECRET_FILE
    assert secret.stat().st_mode & 0o777 == 0o600
    text = secret.read_text()
    secret.unlink()
    with pytest.raises(ConfigurationError, match=r"restore the file, or run a full audit"):
        runs.audit(world.end())
    secret.write_text(text[:-1])
    with pytest.raises(ConfigurationError, match=r"audit\.secret is damaged: restore it"):
        runs.audit(world.end())
    secret.write_text(text)
    (state,) = (tmp_path / "out/carry").glob("*/chain.json")
    state.write_bytes(msgspec.json.encode(chain | {"version": 99}))
    with pytest.raises(ConfigurationError, match="a newer version of txbroker wrote"):
        runs.audit(world.end())


def test_another_dedup_window_asks_for_a_full_audit() -> None:
    was = Terms(1, dedup_window_ms=120_000)
    check_window(was, Terms(2, dedup_window_ms=120_000))
    check_window(None, Terms(2, dedup_window_ms=600_000))
    with pytest.raises(ConfigurationError, match=r"window of 120 s, not 600 s.* \(--full\)"):
        check_window(was, Terms(2, dedup_window_ms=600_000))


# --- on Kafka ----------------------------------------------------------------------------------


async def _first_part(p: Planting) -> dict[str, Half]:
    """Plant what ends well, or is open, when the first run reads."""
    names = ("twice", "contrary", "open", "early", "overtaking", "keyed")
    front = {"order_key": "in order", "partition": 0}
    fields: dict[str, dict[str, Any]] = {
        "early": front, "overtaking": front,
        "keyed": {"dedup_key": "once", "group": "g", "partition": 1},
    }  # fmt: skip
    halves = {name: await p.prepare(**fields.get(name, {})) for name in names}
    for name in ("twice", "contrary", "early", "overtaking"):
        at_ms = await p.commit(halves[name])
        if name != "early":
            p.promote(halves[name], at_ms)
    await p.turn()
    return halves


async def _second_part(p: Planting, halves: dict[str, Half]) -> dict[str, Half]:
    """Go on with them, not always well."""
    p.promote(halves["twice"], 1)
    await p.roll_back(halves["contrary"])
    p.promote(halves["open"], await p.commit(halves["open"]))
    p.promote(halves["early"], 1)
    again = await p.prepare(dedup_key="once", group="g", partition=1)
    await p.turn()
    return {**halves, "again": again}


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_on_kafka_a_second_run_finds_what_one_run_finds(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as p:
        terms = await plant_clean(p)
        halves = await _first_part(p)
        access = access_to(p.bootstrap, p.prefix)
        settings = AuditSettings(str(tmp_path / "out"), tmp_path / "data", p.names, terms)
        first = run_audit(spark, access, settings)
        assert (first.mode, first.drift) == ("full", {}), first.examples
        halves = await _second_part(p, halves)
        settings = msgspec.structs.replace(settings, terms=await plant_all(p))
        second = run_audit(spark, access, settings)
        assert second.mode == "incremental"
        in_parts = rows_in(spark, settings.out)
        whole = msgspec.structs.replace(settings, out=str(tmp_path / "2"), data_dir=tmp_path / "3")
        third = run_audit(spark, access, whole)
    assert third.mode == "full"
    for name, count in third.records.items():
        assert first.records[name] + second.records[name] == count, name
    assert differences(in_parts, rows_in(spark, whole.out)) == {}
    # One may still be decided, the other is void, and its window is not over.
    for name in ("keyed", "again"):
        assert halves.pop(name).id not in in_parts
    found = {name: in_parts[half.id] for name, half in halves.items()}
    assert "contrary markers" in found["contrary"]["why"]
    assert {name: (row["state"], set(row["findings"])) for name, row in found.items()} == {
        "twice": ("promoted", {"visible_twice", "timestamp_changed"}),
        "contrary": ("promoted", set()),
        "open": ("promoted", set()),
        "early": ("promoted", {"out_of_order", "timestamp_changed"}),
        "overtaking": ("promoted", set()),
    }
