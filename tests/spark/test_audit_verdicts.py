"""A whole audit over topics in which every state and every finding was planted: found exactly,
and printed by the command as operators call it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.kit.topic_reader import read_topics
from tests.spark.audit_process import REPORT, Commanded, drift_of, summary_of
from tests.spark.audit_tables import Audited, rows_in
from tests.spark.audit_tables import audited as audited_once
from tests.spark.conftest import KNOWN
from tests.spark.fact_world import tables_held
from tests.spark.planted_cases import Planted, plant_clean
from tests.spark.planting import Expected, Planting, access_to
from txbroker.contract.audit import BATCH_KEY, BATCH_TICK_KEY, decode_news
from txbroker.contract.drift import DriftEvent
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.judge.kinds import ALL_KINDS, KIND_NAMES
from txbroker.spark.run import AuditSettings
from txbroker.spark.schema import Terms
from txbroker.spark.tables.layout import DRIFT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_ID = "no id at all"
"""What a foreign record has in place of an id."""


def audit(spark: SparkSession, planting: Planting, terms: Terms, folder: Path) -> Audited:
    """Audit everything from the start of the logs; no id has two rows."""
    settings = AuditSettings(str(folder / "out"), folder, planting.names, terms, "full")
    held = tables_held(spark)
    found = audited_once(spark, access_to(planting.bootstrap, planting.prefix), settings)
    assert tables_held(spark) <= held
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def audited(spark: SparkSession, planted: Planted, folder: Path) -> Audited:
    return audit(spark, *planted, folder)


def differences(expected: Iterable[Expected], found: Mapping[str, Any]) -> list[str]:
    wrong = []
    for each in expected:
        row = found.get(each.id)
        if row is None:
            wrong.append(f"{each.label}: no verdict")
            continue
        reported = (row["state"], frozenset(row["findings"]))
        if reported != (each.state, each.findings):
            wrong.append(
                f"{each.label}: {reported[0]} {sorted(reported[1])}, not {each.state} "
                f"{sorted(each.findings)} ({row['why']})"
            )
    return wrong


def test_every_kind_is_planted(planted: Planted) -> None:
    kinds = {kind for each in planted.planting.expected.values() for kind in each.findings}
    assert kinds == set(KIND_NAMES)


@pytest.mark.quick
def test_planted_drift_is_found_exactly(planted: Planted, audited: Audited) -> None:
    expected = planted.planting.expected
    assert not differences(expected.values(), audited.rows)
    strangers = audited.rows.keys() - expected.keys() - {NO_ID}
    assert not strangers
    assert NO_ID not in audited.rows or not audited.rows[NO_ID]["findings"]


def test_tables_hold_all_that_was_planted(
    spark: SparkSession, planted: Planted, audited: Audited, folder: Path
) -> None:
    expected, out = planted.planting.expected.values(), str(folder / "out")
    ended = rows_in(spark, out)
    carried = {id for id, row in audited.rows.items() if row["carry"]}
    assert ended.keys() == audited.rows.keys() - carried
    assert not differences([each for each in expected if each.id not in carried], ended)
    open_now = {key: row["severity"] for key, row in rows_in(spark, out, DRIFT).items()}
    severities = {kind.name: kind.severity for kind in ALL_KINDS}
    found = {(each.id, kind): severities[kind] for each in expected for kind in each.findings}
    unreadable = {key for key in open_now if key[1] == "unreadable"}
    assert {key: open_now[key] for key in open_now.keys() - unreadable} == found
    assert len(unreadable) == planted.planting.own_broken.total()


def test_a_rows_verdict_is_its_gravest_finding(planted: Planted, audited: Audited) -> None:
    for row in audited.rows.values():
        findings = sorted(row["findings"], key=KIND_NAMES.index)
        ended = "settled" if row["state"] in ("promoted", "rolled_back") else row["state"]
        assert row["verdict"] == (findings[0] if findings else ended)
        reported = row["why"] is None or row["why"].startswith("contrary markers, and the first")
        assert reported == (not findings)


def test_the_summary_adds_up(planted: Planted, audited: Audited) -> None:
    planting, summary = planted.planting, audited.summary
    expected = planting.expected.values()
    drift = Counter(kind for each in expected for kind in each.findings)
    drift["unreadable"] = planting.own_broken.total()
    states = Counter(each.state for each in expected)
    if NO_ID in audited.rows:
        states[audited.rows[NO_ID]["state"]] += 1
    assert summary.drift == drift
    assert summary.has_drift
    assert summary.states == states
    assert summary.transactions == states.total()
    assert summary.quarantined == planting.broken.total()
    assert {example.id for example in summary.examples} <= {
        each.id for each in expected if each.findings
    }
    assert summary.examples


@pytest.mark.timeout(300)
def test_command_publishes_its_result(planted: Planted, commanded: Commanded) -> None:
    planting, ended, folder = planted.planting, commanded.ended(), commanded.folder
    assert ended.code == 4, ended.err
    summary = summary_of(ended)
    assert summary.drift == drift_of(planting)
    assert ended.err.splitlines()[-1].startswith(f"Run {summary.run} (full): ")
    assert "Drift! Rolled back but visible: " in ended.err
    assert len(ended.err.splitlines()) == 2  # and where the report is
    assert summary.acknowledged == {KNOWN: 1}
    assert "Failed checks: parked (warning), " in ended.err
    results = {check.name: (check.ok, check.of != "") for check in summary.checks}
    assert results == {"slow": (True, True), "parked": (False, False), "fresh": (None, False)}
    page = (folder / REPORT).read_text()
    assert page.startswith("<!doctype html>")
    assert "1 more finding is acknowledged." in page
    assert "Latency by group" in page
    assert Journal(folder / JOURNAL_FILE).last() == summary
    assert Journal(folder / JOURNAL_FILE).unpublished() == []
    assert not list(folder.glob("txbroker-spark-*"))
    assert not (folder / "artifacts").exists()  # Spark's own
    reported = read_topics(planting.bootstrap, [planting.names.audit])
    keys = (BATCH_TICK_KEY, BATCH_KEY, "batch-events")
    assert [record.key for record in reported] == [key.encode() for key in keys]
    news = decode_news(reported[1].value or b"")
    assert (news.run, news.transactions) == (summary.run, summary.transactions)
    assert {kind: count for kind, count in news.drift.items() if count} == summary.open_drift
    assert news.acknowledged == {KNOWN: 1}
    assert [check.name for check in news.checks if not check.ok] == ["parked"]
    records = read_topics(planting.bootstrap, [planting.names.drift])
    events = [msgspec.json.decode(record.value or b"", type=DriftEvent) for record in records]
    opened = [event for event in events if event.state == "opened"]
    assert Counter(event.kind for event in opened) == summary.drift
    assert len({event.event for event in opened}) == len(opened)
    (known,) = (event for event in events if event.state != "opened")
    assert (known.state, known.kind, known.by) == ("acknowledged", KNOWN, "ada")
    assert {event.source for event in events} == {summary.run}
    assert all(event.why for event in events)
    nowhere = {event.kind for event in events if event.topic is None}
    assert nowhere <= {"half_incomplete", "marker_without_half"}


@pytest.mark.timeout(600)
@pytest.mark.long
async def test_installations_that_share_targets_do_not_see_one_another(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    from txbroker.spark.facts.extract import extract

    async with Planting(kafka.bootstrap) as one, Planting(kafka.bootstrap) as two:
        for mine, others in ((one, two), (two, one)):
            alone = await mine.prepare(mine.message(mine.orders))
            several = await mine.prepare(mine.message(mine.orders), mine.message(others.bills))
            for half in (alone, several):
                mine.promote(half, await mine.commit(half))
                mine.expect(half.id, "promoted where another one promotes", "promoted")
            back = await mine.prepare(mine.message(others.orders))
            await mine.roll_back(back)
            mine.expect(back.id, "rolled back", "rolled_back")
            # One of the default prefix has passed, and it says nothing of itself.
            mine.put(mine.message(), [("txb-id", mine.make().id.encode())], 1)
            await mine.turn()
    reported = await asyncio.to_thread(audit, spark, one, Terms(0), tmp_path / "one")
    assert reported.summary.drift == {}
    assert reported.rows.keys() == one.expected.keys()
    assert not differences(one.expected.values(), reported.rows)
    # What the other one's audit is given; its verdicts follow from that alone.
    access = access_to(kafka.bootstrap, two.prefix)
    args = (spark, access, two.names, Terms(0), str(tmp_path / "two"), "secret")
    read = await asyncio.to_thread(lambda: extract(*args))
    promoted = {each.id for each in two.expected.values() if each.state == "promoted"}
    assert {target.topic for target in read.cut.targets} == {one.orders, one.bills, two.orders}
    assert {row["id"] for row in read.facts.visible.collect()} == promoted


@pytest.mark.long
async def test_a_clean_history_has_no_findings(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap, partitions=4) as planting:
        filled = await planting.fill_clean(4000, pending=0.01)
        terms = await plant_clean(planting)
    reported = await asyncio.to_thread(audit, spark, planting, terms, tmp_path)
    assert reported.summary.drift == {}
    assert not reported.summary.has_drift
    assert not differences(planting.expected.values(), reported.rows)
    pending = {id for id, row in reported.rows.items() if row["state"] == "pending"}
    assert pending >= set(filled.pending)
    known = planting.expected.keys() | {NO_ID}
    assert Counter(row["state"] for id, row in reported.rows.items() if id not in known) == {
        state: count for state, count in filled.states.items() if count
    }
