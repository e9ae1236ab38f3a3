"""Events of the drift topic: written by batches, each once, and read by the example of the docs."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jsonschema_rs
import pytest

from tests.kit.kafka import KafkaHarness
from tests.kit.topic_reader import read_topics
from tests.spark.planting import Planting, access_to
from tests.spark.table_runs import START_MS, Tables, id_at, now_ms, verdict
from txbroker.cli.api_reference import drift_event_schema
from txbroker.consumer import Consumer
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.schema import Acknowledgement, RunSummary, Terms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs/how-to/drift-incidents.md"
LOST, LATE = id_at(1), id_at(2)


@pytest.fixture
async def world(kafka: EmbeddedKafka) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka.bootstrap)
    yield harness
    await harness.close()


async def written(world: KafkaHarness, tables: Tables, *runs: RunSummary) -> list[dict[str, Any]]:
    """Write the events of runs; return all that are in the topic then."""
    from txbroker.spark.tables.events import write_events
    from txbroker.spark.tables.layout import DRIFT

    await write_events(world.settings(), tables.read(DRIFT), runs)
    return read(world)


def read(world: KafkaHarness) -> list[dict[str, Any]]:
    records = read_topics(world.bootstrap, [world.name("audit.drift")])
    events = [json.loads(record.value or b"") for record in records]
    assert [record.key for record in records] == [event["event"].encode() for event in events]
    return events


def shown(events: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [(event["id"], event["kind"], event["state"], event["source"]) for event in events]


async def test_a_finding_from_open_to_healed(
    spark: SparkSession, world: KafkaHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await world.door()
    tables = Tables(spark)

    def run(number: int, *verdicts: dict[str, Any], **given: Any) -> RunSummary:
        tables.run(number, verdicts, **given)
        return cast(RunSummary, tables.before)

    place = [{"topic": "orders", "partition": 2, "offset": 17, "seq": 0}]
    late = verdict(LATE, "committed", findings=["late"], op_offset=5)
    first = run(1, verdict(LOST, "committed", findings=["lost"], places=place), late)
    killed(monkeypatch)
    with pytest.raises(Killed):
        await written(world, tables, first)
    monkeypatch.undo()
    assert not read(world)
    opened = [(LOST, "lost", "opened", "run1"), (LATE, "late", "opened", "run1")]
    assert sorted(shown(await written(world, tables, first))) == opened
    known = Acknowledgement(LATE, "", "late", "ann", "backlog", START_MS, now_ms(9))
    # Kafka did not answer after this run, so the next one writes its events.
    second = run(2, verdict(LOST), late, acknowledged=[known])
    third = run(3, verdict(LATE, "gone"), acknowledged=[known])
    events = await written(world, tables, second, third)
    assert events == await written(world, tables, first, second, third), "repeated after a crash"
    assert sorted(shown(events)[2:]) == [
        (LOST, "lost", "healed", "run2"),
        (LATE, "late", "acknowledged", "run2"),
        (LATE, "late", "expired", "run3"),
        (LATE, "late", "seen", "run2"),
    ]
    assert [event["state"] for event in events if event["id"] == LATE] == [
        "opened", "seen", "acknowledged", "expired"
    ]  # fmt: skip
    schema = json.loads(drift_event_schema())
    check = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for event in events:
        check.validate(event)
        assert event.keys() == schema["properties"].keys()
    healed = next(event for event in events if event["state"] == "healed")
    assert healed == {
        "v": 2, "event": f"{LOST}:lost", "state": "healed", "kind": "lost", "severity": "critical",
        "id": LOST, "group": "g", "topic": "orders", "partition": 2, "offset": 17, "why": "lost",
        "at": iso(2), "first_seen": iso(1), "last_seen": iso(1), "installation": "shop",
        "source": "run2", "by": None, "reason": None, "until": None,
    }  # fmt: skip
    await example_keeps_incidents(world, len(events), monkeypatch, tmp_path)


async def test_audits_follow_a_lost_transaction(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    from txbroker.spark.run import AuditSettings, run_audit
    from txbroker.spark.tables.events import write_events
    from txbroker.spark.tables.layout import DRIFT, LATENCY
    from txbroker.spark.tables.store import open_store

    terms = Terms(0, late_after_ms=0, lost_after_ms=0)
    async with Planting(kafka.bootstrap) as planting:
        access = access_to(planting.bootstrap, planting.prefix)
        settings = AuditSettings(str(tmp_path / "out"), tmp_path, planting.names, terms)
        half = await planting.prepare(planting.message())
        other = await planting.prepare(planting.message())
        decided_ms = await planting.commit(half)
        summaries = []
        for number in range(3):
            if number == 2:
                planting.promote(half, decided_ms)
                await planting.turn()
            summary = await asyncio.to_thread(run_audit, spark, access, settings)
            findings = open_store(spark, settings.out).read(DRIFT)
            await write_events(access.settings, findings, [summary])
            summaries.append(summary)
        records = read_topics(planting.bootstrap, [planting.names.drift])
    events = [json.loads(record.value or b"") for record in records]
    found = [(event["id"], event["kind"], event["state"], event["source"]) for event in events]
    assert found == [
        (half.id, "lost", state, summary.run)
        for state, summary in zip(("opened", "seen", "healed"), summaries, strict=True)
    ]
    assert [run.open_findings for run in summaries] == [{"lost": 1}, {"lost": 1}, {}]
    (row,) = findings.collect()
    runs = [row[f"{name}_run"] for name in ("opened", "seen", "closed")]
    assert runs == [summary.run for summary in summaries]
    minutes = open_store(spark, settings.out).read(LATENCY).collect()
    assert sum(row["transactions"] for row in minutes) == 1
    assert sum(row["undecided"] for row in minutes) == 1, other.id


def iso(number: int) -> str:
    minute = START_MS // 60_000 + number
    assert START_MS == 1_700_000_000_000, "2023-11-14T22:13:20Z"
    return f"2023-11-14T22:{13 + minute - START_MS // 60_000}:20.000Z"


class Killed(Exception):
    pass


def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the next writer after its first event."""
    from txbroker.spark.tables import events

    make = events.drift_event
    made: list[Any] = []

    def failing(*names: Any, **given: Any) -> tuple[str, bytes]:
        if made:
            raise Killed
        made.append(names)
        return make(*names, **given)

    monkeypatch.setattr(events, "drift_event", failing)


async def example_keeps_incidents(
    world: KafkaHarness, events: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run the script of the docs until it has handled all events; check its incidents."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code.count("\n") <= 60
    calls: list[tuple[str, str]] = []

    class Sample(Consumer):
        def __init__(self, kafka: str, **options: Any) -> None:
            assert (kafka, options["topics"]) == ("kafka:9092", ["txbroker.audit.drift"])
            super().__init__(
                world.bootstrap,
                **{**options, "topics": [world.name("audit.drift")], "group": world.name("i")},
                after=self._handled,
            )
            self._left = events

        def _handled(self, message: object, error: BaseException | None) -> None:
            assert error is None
            self._left -= 1
            if not self._left:
                self.stop()

    async def alarm(event: dict[str, Any]) -> None:
        calls.append(("alarm", event["event"]))

    async def all_clear(event: dict[str, Any]) -> None:
        calls.append(("all clear", event["event"]))

    monkeypatch.setattr("txbroker.consumer.Consumer", Sample)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example", "alarm": alarm, "all_clear": all_clear}
    script = code.removesuffix("asyncio.run(main())\n")
    assert script != code
    exec(compile(script, "example", "exec"), names)
    await cast(Any, names["main"])()
    assert sorted(calls) == sorted(
        (call, f"{id}:{kind}")
        for call in ("alarm", "all clear")
        for id, kind in ((LOST, "lost"), (LATE, "late"))
    )
    with closing(sqlite3.connect("incidents.db")) as db:
        rows = db.execute("SELECT event, state, place, muted_until FROM incident ORDER BY event")
        assert rows.fetchall() == [
            (f"{LOST}:lost", "healed", "orders-2@17", None),
            (f"{LATE}:late", "expired", "shop.op-0@5", "2023-11-14T22:22:20.000Z"),
        ]
