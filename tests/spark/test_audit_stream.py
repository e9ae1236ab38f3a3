"""The streaming audit reports planted drift once, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyspark
import pytest

from tests.kit.topic_reader import create_topic, delete_topic, read_topics
from tests.spark.planted_cases import plant_all
from tests.spark.planting import FAR_MS, Planting, now_by, partition_of, write_stamped
from tests.spark.stream_world import TERMS, StreamWorld, confirmed, judged, reached
from txbroker.contract.audit import decode_news
from txbroker.core.records import Half, Message
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import KafkaUnavailable, TxbrokerError
from txbroker.kafka.tools.audit_results import KafkaDrift
from txbroker.spark.judge.kinds import COMPARED
from txbroker.spark.launch.versions import series

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.spark.stream.stream import AuditStream

# For `make spark-matrix`: the audit refuses a stream there.
pytestmark = pytest.mark.skipif(
    series(pyspark.__version__) == "4.1", reason="Spark 4.1 continues no stream"
)


class Power:
    """Breaks a stream off where its findings are being stored, before it is done or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: list[str] = []
        self._write = KafkaDrift.write
        monkeypatch.setattr(KafkaDrift, "write", lambda *args: self._broken(*args))

    async def _broken(self, drift: KafkaDrift, findings: Any, *rest: Any) -> None:
        records = list(findings)
        when = self.fails[0] if records and self.fails else ""
        if when == "before":
            self._fail()
        await self._write(drift, iter(records), *rest)
        if when == "after":
            self._fail()

    def _fail(self) -> None:
        raise RuntimeError(f"power cut {self.fails.pop(0)} the findings were stored")


def expected(planting: Planting) -> set[tuple[str, str]]:
    """Return what a stream has to tell: nothing gets old enough to be lost, and all is late.

    Nor has a parked one gone without its copy for long enough.
    """
    found = {
        (each.id, "late" if kind == "lost" else kind)
        for each in planting.expected.values()
        for kind in each.findings
        if kind not in ("out_of_order", "overdue")
        if (each.state, kind) != ("parked", "not_kept")
    }
    young = {
        (each.id, "late")
        for each in planting.expected.values()
        if each.state == "committed" and not each.findings
    }
    return found | young


OVER = {"promoted", "rolled_back", "void", "gone"}


async def broken_off(stream: Any) -> None:
    with pytest.raises(TxbrokerError, match="power cut"):
        await asyncio.to_thread(stream.wait, 200)


class Followed(NamedTuple):
    """A stream that has reported all planted drift and was stopped."""

    planting: Planting
    world: StreamWorld
    stream: AuditStream
    slow: Half
    """A transaction that was late and became visible."""


async def followed(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, power: Power, cuts: Sequence[str]
) -> Followed:
    """Plant everything, and follow it with a stream that is broken off in between: after its first
    findings were stored, then before anything else is."""
    async with Planting(kafka.bootstrap) as planting:
        await plant_all(planting)
        planted_ms = time.time() * 1000
        world = StreamWorld(spark, kafka.bootstrap, planting.prefix, tmp_path)
        power.fails = list(cuts)
        once: set[tuple[str, str]] = set()
        for _ in cuts:
            await broken_off(await world.start())
            found = await world.kinds()
            assert found, "the first findings were stored before the power went"
            assert found == (once or found)
            once = found

        # Meanwhile one is promoted twice and one is lost, and a topic comes that nobody read.
        half = await planting.prepare()
        at_ms = await planting.commit(half)
        planting.promote(half, at_ms)
        await planting.turn()
        stream = await world.start()
        try:
            await judged(stream, planted_ms + TERMS.dedup_window_ms + 2000)
            planting.promote(half, at_ms)
            await planting.turn()
            planting.expect(half.id, "visible again", "promoted", "visible_twice")
            gone, slow = [await planting.prepare() for _ in range(2)]
            await planting.commit(gone)
            planting.expect(gone.id, "committed, not visible", "committed", "late")
            at_ms = await planting.commit(slow)
            planting.expect(slow.id, "visible late", "promoted")
            late = {(each.id, "late") for each in (gone, slow)}
            await reached(stream, lambda: stream.summary().drift.get("late", 0) >= 10)
            while not late <= await world.kinds():
                await confirmed(stream)
            planting.promote(slow, at_ms)
            await planting.turn()
            await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        return Followed(planting, world, stream, slow)


@pytest.mark.timeout(600)
async def test_planted_findings_are_reported_once_after_any_crash(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planting, world, stream, slow = await followed(
        spark, kafka, tmp_path, Power(monkeypatch), ("after",)
    )
    found = await world.kinds()
    unread = {each for each in found if each[1] == "unreadable"}
    assert len(unread) == planting.own_broken.total() == stream.summary().drift["unreadable"]
    found -= unread
    assert named(found - expected(planting), planting) == []
    assert named(expected(planting) - found, planting) == []
    summary = stream.summary()
    assert summary.strangers == 0
    # A marker and contents that do not find each other can be read separately.
    assert summary.quarantined == planting.broken.total() - 2
    assert {each.topic for each in summary.set_aside if each.own} == planting.own_broken.keys()
    assert {each.own for each in summary.set_aside} == {True, False}
    records = await asyncio.to_thread(read_topics, world.bootstrap, [world.names.audit])
    news = [decode_news(each.value or b"") for each in records if each.key == b"stream"]
    assert news[-1].mode == "stream"
    assert news[-1].stream is not None
    # The newest batch has read all, and its changes are stored.
    assert news[-1].stream.unread == 0
    assert news[-1].stream.open == sum(
        number for state, number in summary.states.items() if state not in OVER
    )
    assert news[-1].stream.state_bytes > 0
    late, healed = [each for each in await world.reported() if each["event"] == f"{slow.id}:late"]
    assert (late["state"], healed["state"]) == ("opened", "healed")
    assert late["first_seen"] == healed["first_seen"] <= healed["last_seen"] <= healed["at"]
    assert late["severity"] == "warning"
    assert late["why"] == healed["why"]
    place = {"topic": world.names.op, "partition": partition_of(slow)}
    for name, value in {**place, "installation": planting.prefix, "v": 2}.items():
        assert late[name] == healed[name] == value
    assert late["source"] == healed["source"] == summary.run


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_batch_over_the_same_topics_comes_to_the_same(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planting, world, stream, _ = await followed(
        spark, kafka, tmp_path, Power(monkeypatch), ("after", "before")
    )
    found = {each for each in await world.kinds() if each[1] != "unreadable"}
    batch = await asyncio.to_thread(world.batch, stream.judged_ms, tmp_path / "batch")
    comparable = {each for each in batch.findings if each[1] not in COMPARED}
    assert named(found ^ comparable, planting) == []
    assert stream.summary().states == batch.summary.states
    assert stream.summary().drift["unreadable"] == batch.summary.drift["unreadable"]


@pytest.mark.timeout(400)
async def test_a_stream_since_a_time_skips_earlier_transactions(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The history is seconds old.
    monkeypatch.setattr("txbroker.spark.stream.targets._CLOCKS_APART_MS", 0)
    async with Planting(kafka.bootstrap) as planting:
        await plant_all(planting)
        waiting, back, twice = [await planting.prepare() for _ in range(3)]
        since_ms = max([await now_by(planting, half) for half in (waiting, back)]) + 1
        await until_past(planting, waiting, since_ms)
        # Prepared before, decided after: without its half message only one shows a fault.
        planting.promote(waiting, await planting.commit(waiting))
        planting.promote(back, await planting.roll_back(back))
        at_ms = await planting.commit(twice)
        for _ in range(2):
            planting.promote(twice, at_ms)
            await planting.turn()
        # A record that is older by its timestamp than the stream begins.
        stamped = await planting.prepare(planting.message(timestamp_ms=1_700_000_000_000))
        planting.promote(stamped, await planting.commit(stamped))
        await planting.turn()
        good, hidden, shown = [await planting.prepare() for _ in range(3)]
        planting.promote(good, await planting.commit(good))
        await planting.commit(hidden)
        planting.promote(shown, await planting.roll_back(shown))
        await planting.turn()
        world = StreamWorld(spark, kafka.bootstrap, planting.prefix, tmp_path)
        stream = await world.start(since_ms=since_ms)
        try:
            await judged(stream, time.time() * 1000 + TERMS.dedup_window_ms)
            await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        assert await world.kinds() == {
            (twice.id, "visible_twice"),
            (hidden.id, "late"),
            (shown.id, "rolled_back_visible"),
        }
        summary = stream.summary()
        assert summary.transactions == 7
        assert summary.strangers == 0


async def until_past(planting: Planting, half: Half, at_ms: int) -> None:
    while await now_by(planting, half) <= at_ms:
        await asyncio.sleep(0.001)


def named(found: set[tuple[str, str]], planting: Planting) -> list[str]:
    labels = {id: each.label for id, each in planting.expected.items()}
    return sorted(f"{labels.get(id, id)}: {kind}" for id, kind in found)


@pytest.mark.timeout(400)
async def test_a_stream_reads_around_records_that_spark_cannot_read(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writes = KafkaDrift.write, itertools.count()

    async def unanswered(*args: Any) -> None:
        await write(*args)
        if next(writes) % 2 == 0:
            raise KafkaUnavailable("the answer was lost")

    monkeypatch.setattr(KafkaDrift, "write", unanswered)
    async with Planting(kafka.bootstrap) as planting:
        far = f"{planting.prefix}-far"
        settings = {"message_timestamp_after_max_ms": str((1 << 63) - 1), "retention_ms": "-1"}
        await asyncio.to_thread(create_topic, kafka.bootstrap, far, 1, **settings)
        await asyncio.to_thread(write_stamped, kafka.bootstrap, far, "none", [FAR_MS, FAR_MS, 7])
        world = StreamWorld(spark, kafka.bootstrap, planting.prefix, tmp_path)
        stream = await world.start()
        try:
            for _ in range(2):
                half = await planting.prepare(planting.message(far))
                planting.promote(half, await planting.commit(half))
                await planting.turn()
                await asyncio.to_thread(write_stamped, kafka.bootstrap, far, "lz4", [7, -FAR_MS])
                await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        assert await world.reported() == []
        summary = stream.summary()
        assert (summary.states, summary.drift, summary.quarantined) == ({"promoted": 2}, {}, 4)
        places = {(each.topic, each.partition, each.own) for each in summary.set_aside}
        assert places == {(far, 0, False)}
        assert {each.offset for each in summary.set_aside} >= {0, 1}


@pytest.mark.timeout(400)
async def test_a_stream_goes_on_where_a_target_is_created_again(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:

        async def written(*messages: Message) -> Half:
            half = await planting.prepare(*messages)
            planting.promote(half, await planting.commit(half))
            await planting.turn()
            return half

        for _ in range(3):
            await written(planting.message(planting.bills, 1))
        world = StreamWorld(spark, kafka.bootstrap, planting.prefix, tmp_path)
        stream = await world.start()
        try:
            await confirmed(stream)
            await asyncio.to_thread(delete_topic, kafka.bootstrap, planting.bills)
            shown = await planting.prepare()
            planting.promote(shown, await planting.roll_back(shown))
            await planting.turn()
            await confirmed(stream)
            found = {(planting.bills, "target_missing"), (shown.id, "rolled_back_visible")}
            assert await world.kinds() == found
            # With fewer partitions.
            await asyncio.to_thread(create_topic, kafka.bootstrap, planting.bills, 1)
            await confirmed(stream)
            await written(planting.message(planting.bills))
            late = await planting.prepare(planting.message(planting.bills))
            late_ms = await planting.commit(late) + TERMS.late_after_ms
            await judged(stream, late_ms)
            await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        assert await world.kinds() == {*found, (late.id, "late")}
        assert stream.summary().states == {"promoted": 4, "rolled_back": 1, "committed": 1}
        assert stream.summary().drift == dict.fromkeys((kind for _, kind in found), 1) | {"late": 1}
