"""What the audit reads from a real Kafka, in which order, and what it makes of the whole of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from msgspec import structs

from tests.kit.topic_reader import create_topic, delete_topic
from tests.kit.until import until
from tests.spark.planting import FAR_MS, Planting, partition_of, write_stamped
from txbroker.core.encoding import encode_contents, encode_half, encode_marker
from txbroker.core.ledger import Effect, Ledger
from txbroker.core.records import (
    RECORD_VERSION,
    Attributes,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    State,
)
from txbroker.core.routing import make_id
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.batch import (
    HEADER_BYTES,
    RECORD_BYTES,
    batch_body,
    encode_batch,
)
from txbroker.kafka.protocol.codecs import BatchUndecodable
from txbroker.kafka.tools import audit_access
from txbroker.spark.access import AuditError, AuditKafka, TopicEnds
from txbroker.spark.schema import Extract, Terms, TopicRead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


TERMS = Terms(now_ms=0)
_COMMITTER = "mapreduce.fileoutputcommitter.algorithm.version"


class Watched(AuditKafka):
    def __init__(self, bootstrap: str, before: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(KafkaSettings(bootstrap_servers=(bootstrap,), instance_id="audit"))
        self.asked: list[tuple[str, ...]] = []
        self._before = before

    def ends(self, topics: Iterable[str]) -> dict[str, TopicEnds]:
        """Ask as ever, after the work that precedes this question."""
        names = tuple(topics)
        self._before(len(self.asked))
        self.asked.append(names)
        return super().ends(names)


async def staged(
    spark: SparkSession, planting: Planting, folder: Path, access: AuditKafka, **more: Any
) -> Extract:
    """Stage while the event loop goes on."""
    from txbroker.spark.facts.extract import extract

    args = (spark, access, planting.names, more.pop("terms", TERMS), str(folder), "secret")
    return await asyncio.to_thread(lambda: extract(*args, **more))


def by_id(table: DataFrame) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.orderBy("partition", "offset").collect():
        rows.setdefault(row["id"], []).append(row.asDict(recursive=True))
    return rows


def rows_but(id: str, *tables: DataFrame) -> Counter[Any]:
    """Return how often each row is there, without those of one transaction."""
    return Counter(row for table in tables for row in table.where(f"id != '{id}'").collect())


async def test_each_record_is_read_once_void_and_unreadable_named(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        one = await planting.prepare()
        planting.promote(one, await planting.commit(one))
        two = await planting.prepare(planting.message(), planting.message(planting.stamped))
        at_ms = await planting.commit(
            two, changed := [planting.message(value=None), two.messages[1]]
        )
        planting.promote(two, at_ms, changed)
        kept = await planting.prepare(age_ms=100_000)
        planting.keep(kept, (0, 0), State.PARKED)
        planting.put_parked(0, [Record(b"nonsense", b"")])
        await planting.turn()
        planting.put(one.messages[0], [*planting.installation, ("txb-id", b"aborted")], 0)
        await planting.turn(abort=True)
        old = await planting.prepare(age_ms=130_000)
        ahead = await planting.prepare(age_ms=-130_000)
        astray = planting.make(partition=0)
        await planting.append_half(1, encode_half(astray))
        await planting.append_half(0, [Record(b"k", b"no half message")])
        await planting.append_op(0, [Record(b"k", b"no marker")])
        loose = encode_contents(two, two.messages)
        await planting.append_op(partition_of(two), loose)
        announced = Marker(RECORD_VERSION, MarkerKind.COMMIT, kept.id, contents=2)
        await planting.append_op(partition_of(kept), [encode_marker(announced)])
        read = await staged(spark, planting, tmp_path / "work", Watched(kafka.bootstrap))

        half, op, visible = by_id(read.facts.half), by_id(read.facts.op), by_id(read.facts.visible)
        counting, void = (one, two, kept), {old.id: "expired", ahead.id: "expired", astray.id: "id"}
        assert {id: len(rows) for id, rows in half.items()} == {
            **{each.id: len(each.messages) for each in counting},
            **dict.fromkeys(void, 1),
        }
        found = {id: {row["void"] for row in rows} for id, rows in half.items()}
        assert found == {
            **{each.id: {None} for each in counting},
            **{id: {why} for id, why in void.items()},
        }
        assert {id: [row["kind"] for row in rows] for id, rows in op.items()} == {
            one.id: ["commit"],
            two.id: ["commit"],
        }
        assert op[one.id][0]["contents"] is None
        contents = op[two.id][0]["contents"]
        assert [each["seq"] for each in contents] == [0, 1]
        assert visible.keys() == {one.id, two.id}
        by_seq = {row["seq"]: row for row in visible[two.id]}
        assert [by_seq[n]["body"] for n in (0, 1)] == [each["body"] for each in contents]
        assert [by_seq[n]["append_time"] for n in (0, 1)] == [False, True]
        assert by_seq[0]["at_ms"] == at_ms
        assert visible[one.id][0]["body"] == half[one.id][0]["body"]
        assert [row["state"] for row in by_id(read.facts.parked)[kept.id]] == ["parked"]
        whys = Counter((row["topic"], row["why"]) for row in read.broken.collect())
        names = planting.names
        assert whys == {
            (names.half, "the first header is not txb-v"): 1,
            (names.op, "it is not a marker"): 1,
            (names.op, "a replaced message without its commit marker"): 2,
            (names.op, "its replaced messages are incomplete"): 1,
            (names.parked, "its key is not ID/NUMBER"): 1,
        }
        assert all(row["early"] for rows in (*half.values(), *op.values()) for row in rows)


async def test_records_arriving_during_a_run_are_read_but_not_early(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from txbroker.spark.facts import extract as extract

    clock_s = [1.0]
    monkeypatch.setattr(extract, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    async with Planting(kafka.bootstrap) as planting:
        loop = asyncio.get_running_loop()
        names, orders, bills = planting.names, planting.orders, planting.bills
        first, late = await planting.prepare(), planting.make()
        # Its second target is deleted.
        half = await planting.prepare(planting.message(), planting.message(bills))
        planting.promote(half, await planting.commit(half))
        await planting.turn()
        await asyncio.to_thread(delete_topic, kafka.bootstrap, bills)

        async def come() -> None:
            await planting.store(late)
            planting.promote(first, await planting.commit(first))
            planting.promote(late, await planting.commit(late))
            await planting.turn()

        def before(question: int) -> None:
            if question == 2:  # the early ends of op and half are known
                clock_s[0] += 7200  # to read half took as long
                asyncio.run_coroutine_threadsafe(come(), loop).result(60)

        access = Watched(kafka.bootstrap, before)
        read = await staged(spark, planting, tmp_path / "work", access)
        assert [sorted(topics) for topics in access.asked] == [
            [names.op], [names.half], [bills, orders], [names.parked], [names.op], [names.half],
            [orders, names.parked],
        ]  # fmt: skip
        early = {id: rows[0]["early"] for id, rows in by_id(read.facts.half).items()}
        assert early == {half.id: True, first.id: True, late.id: False}
        early = {id: rows[0]["early"] for id, rows in by_id(read.facts.op).items()}
        assert early == {half.id: True, first.id: False, late.id: False}
        seen = {id: [row["seq"] for row in rows] for id, rows in by_id(read.facts.visible).items()}
        assert seen == {half.id: [0], first.id: [0], late.id: [0]}
        partitions = {target.topic: len(target.ends) for target in read.cut.targets}
        assert partitions == {orders: 4, bills: 0}
        assert (sum(read.cut.half_early), sum(read.cut.half.ends)) == (3, 4)
        assert (sum(read.cut.op_early), sum(read.cut.op.ends)) == (1, 3)
        assert read.cut.asked_ms == TERMS.now_ms + 7_200_000


async def test_a_second_run_goes_on_where_the_first_has_ended(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        loop = asyncio.get_running_loop()
        await planting.fill_clean(40)
        held = await planting.prepare(dedup_key="k", group="g", partition=0)
        late = planting.make(planting.message(planting.bills))

        async def come() -> None:
            await planting.store(late)
            planting.promote(late, await planting.commit(late))
            await planting.turn()

        def before(question: int) -> None:
            if question == 2:  # half was read, and tells which targets there are
                asyncio.run_coroutine_threadsafe(come(), loop).result(60)

        first = await staged(spark, planting, tmp_path / "one", Watched(kafka.bootstrap, before))
        await planting.fill_clean(30)
        # The same key again, in another run: the first one holds it.
        again = await planting.prepare(dedup_key="k", group="g", partition=0)
        access = Watched(kafka.bootstrap)
        second = await staged(
            spark, planting, tmp_path / "two", access,
            before=first.cut, keys_before=first.facts.half.where("dedup IS NOT NULL"),
        )  # fmt: skip
        whole = await staged(spark, planting, tmp_path / "whole", access)
        for name in ("half", "op", "visible", "parked"):
            parts = rows_but(late.id, *(getattr(run.facts, name) for run in (first, second)))
            assert parts == rows_but(late.id, getattr(whole.facts, name)), name
        assert second.cut.half.begins == first.cut.half.ends
        assert second.cut.half_clock_ms == whole.cut.half_clock_ms
        void = {id: rows[0]["void"] for id, rows in by_id(second.facts.half).items()}
        assert void[again.id] == "dedup"
        assert {why for id, why in void.items() if id != again.id} == {None}
        halves = by_id(first.facts.half)
        assert halves[held.id][0]["void"] is None
        assert halves[held.id][0]["dedup"] not in (None, "k")
        assert halves[late.id][0]["early"] is False
        assert by_id(whole.facts.half)[late.id][0]["early"] is True

        # A target that was first named meanwhile is read by the second run, though nothing that
        # comes later names it.
        assert late.id in halves
        assert late.id not in by_id(first.facts.visible)
        assert [target.topic for target in first.cut.targets] == [planting.orders]
        assert first.cut.named_late == (planting.bills,)
        assert late.id in by_id(second.facts.visible)
        assert second.cut.named_late == ()
        targets = sorted((planting.bills, planting.orders))
        assert [target.topic for target in second.cut.targets] == targets


@pytest.mark.long
async def test_messages_hidden_by_another_producer_are_reported(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        half = await planting.prepare(planting.message(planting.orders, 1))
        other = Producer(
            {"bootstrap.servers": kafka.bootstrap, "transactional.id": f"{planting.prefix}-other"}
        )
        await asyncio.to_thread(other.init_transactions, 60)
        other.begin_transaction()
        other.produce(planting.orders, b"theirs", partition=1)
        assert await asyncio.to_thread(other.flush, 60) == 0
        planting.promote(half, await planting.commit(half))
        await planting.turn(hidden=True)
        before = await staged(spark, planting, tmp_path / "before", Watched(kafka.bootstrap))
        assert before.cut.held == (f"{planting.orders}-1",)
        assert [target.open for target in before.cut.targets] == [(1,)]
        assert before.facts.visible.count() == 0
        await asyncio.to_thread(other.abort_transaction, 60)

        async def there() -> bool:
            return not Watched(kafka.bootstrap).ends((planting.orders,))[planting.orders].open

        await until(there)
        after = await staged(
            spark, planting, tmp_path / "after", Watched(kafka.bootstrap), before=before.cut
        )
        assert (after.cut.held, set(by_id(after.facts.visible))) == ((), {half.id})


async def test_retention_during_a_read_is_one_sentence(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        for _ in range(6):
            half = await planting.prepare(partition=0)
            await planting.commit(half)

        class Losing(Watched):
            """Deletes records just after returning their bounds."""

            def ends(self, topics: Iterable[str]) -> dict[str, TopicEnds]:
                found = super().ends(topics)
                if len(self.asked) == 2:
                    place = TopicPartition(planting.names.half, 0, 3)
                    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
                    admin.delete_records([place])[place].result(30)
                return found

        with pytest.raises(AuditError, match="retention removed records while the audit read them"):
            await staged(spark, planting, tmp_path / "work", Losing(kafka.bootstrap))


async def test_missing_topic_is_one_sentence(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        planting.names = msgspec.structs.replace(planting.names, op="nowhere.op")
        with pytest.raises(AuditError, match=r"topic nowhere\.op does not exist"):
            await staged(spark, planting, tmp_path / "work", Watched(kafka.bootstrap))


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_no_timestamp_ends_a_run(
    spark: SparkSession,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
) -> None:
    monkeypatch.setattr(audit_access, "_SOME_RECORDS", 2)
    async with Planting(kafka.bootstrap) as planting:
        far = f"{planting.prefix}-far"
        bounds = ("message_timestamp_after_max_ms", "message_timestamp_before_max_ms")
        # Retention goes by these timestamps, too.
        settings = dict.fromkeys(bounds, str((1 << 63) - 1)) | {"retention_ms": "-1"}
        await asyncio.to_thread(create_topic, kafka.bootstrap, far, 2, **settings)
        message = planting.message(far)
        other = await planting.prepare(planting.message(far, 1))
        planting.promote(other, await planting.commit(other))
        await planting.turn()
        ids = []
        stamps = (FAR_MS, -FAR_MS, (1 << 63) - 1)
        for stamp_ms in (5, *stamps):
            half = await planting.prepare(message)
            ids.append(half.id)
            planting.put(message, planting.headers(half, 0, 1, message), 5)
            await planting.turn()
            write = partial(write_stamped, kafka.bootstrap, far, codec)
            await asyncio.to_thread(write, [stamp_ms, 7, stamp_ms])
        half = await planting.prepare(message)
        planting.put(message, planting.headers(half, 0, 1, message), FAR_MS)
        await planting.turn()
        planting.put(message, planting.headers(half, 0, 1, message), 6)
        await planting.turn(abort=True)
        access = Watched(kafka.bootstrap)
        # What it finished of a write that failed, this committer leaves in the table.
        hadoop: Any = spark.sparkContext._jsc
        hadoop.hadoopConfiguration().set(_COMMITTER, "2")
        try:
            found = await staged(spark, planting, tmp_path / "all", access)
        finally:
            hadoop.hadoopConfiguration().unset(_COMMITTER)
        visible = found.facts.visible.orderBy("partition", "offset").collect()
        assert visible.pop()["id"] == other.id
        rows = [(row["id"], row["at_ms"]) for row in visible]
        assert rows == [*((id, 5) for id in ids), (half.id, FAR_MS)]
        assert found.facts.visible.where("append_time").isEmpty()
        assert found.broken.isEmpty()
        before = structs.replace(found.cut, targets=(_half_read(found.cut.targets[0]),))
        more = await staged(spark, planting, tmp_path / "more", access, before=before)
        visible = more.facts.visible.orderBy("partition", "offset").collect()
        assert [row["id"] for row in visible] == [*ids[1:], half.id, other.id]


@pytest.mark.parametrize("missing", [0, 1])
def test_blocks_of_snappy_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    from pyarrow import Codec

    batch = encode_batch(batch_body([Record(b"k", b"v" * 180)]), producer_id=1, epoch=0, sequence=0)
    plain = batch[HEADER_BYTES:]
    limit = len(plain) + RECORD_BYTES - missing
    monkeypatch.setattr(audit_access, "_INFLATED_BYTES_MAX", limit)
    blocks = [Codec("snappy").compress(part, asbytes=True) for part in (plain[:60], plain[60:])]
    body = b"".join(len(each).to_bytes(4, "big") + each for each in blocks)
    packed = batch[:22] + b"\x02" + batch[23:HEADER_BYTES] + b"\x82SNAPPY\x00" + bytes(8) + body
    with pytest.raises(BatchUndecodable, match="MiB") if missing else nullcontext():
        (found,) = audit_access._decode(DefaultRecordBatch(packed), packed, range(9), 1)
        assert found.value == b"v" * 180


def _half_read(read: TopicRead) -> TopicRead:
    """Return a read that ended in the middle of the first far batch."""
    return structs.replace(read, ends=(3, 0))


# --- without Kafka ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, 40])
def test_the_log_clock_is_the_running_maximum(spark: SparkSession, step: int) -> None:
    from txbroker.spark.facts.extract import LogClock, survey, with_clock

    rng = random.Random(step)
    rows, expected, ends = [], {}, []
    begins = (0, 1000, 5)
    for partition, begin in enumerate(begins[:2]):
        at_ms, clock = 990, begin
        for offset in range(7, 200):
            at_ms += rng.randrange(0, 5)
            # Once in a while another broker leads, whose clock is behind.
            stamp = at_ms - (rng.randrange(step) if step and rng.random() < 0.1 else 0)
            clock = max(clock, stamp)
            expected[partition, offset] = clock
            rows.append((partition, offset, stamp))
        ends.append(clock)
    rng.shuffle(rows)
    frame = spark.createDataFrame(rows, "partition int, offset bigint, at_ms bigint")
    surveyed = survey({"half": (frame, LogClock(begins))}, bucket=16)["half"]
    assert surveyed.ends == (*ends, 5)
    # The second partition's clock begins ahead of its first records.
    found = with_clock(frame, surveyed, bucket=16)
    assert {(r["partition"], r["offset"]): r["clock_ms"] for r in found.collect()} == expected
    alone = frame.where("partition = 0")
    forward = survey({"op": (alone, LogClock(begins))}, bucket=16)["op"]
    stamps = [at for partition, _, at in sorted(rows) if partition == 0]
    assert forward.goes_back is (stamps != sorted(stamps))


WINDOW_MS = 100


@pytest.mark.parametrize("seed", range(3))
def test_whose_key_counts_is_as_the_ledger_has_it(spark: SparkSession, seed: int) -> None:
    from pyspark.sql import functions as F

    from txbroker.spark.facts.extract import dedup_voids
    from txbroker.spark.facts.history import keys_in_window

    rng = random.Random(seed)
    ledger = Ledger(0, WINDOW_MS)
    rows, void, counted, clock_ms, offset = [], set(), [], 10_000, 0
    halves: list[Half] = []
    for _ in range(150):
        clock_ms += rng.randrange(0, 60)
        half = _keyed(rng, clock_ms)
        if halves and rng.random() < 0.1:
            half = rng.choice(halves)
        halves.append(half)
        records = encode_half(half)
        if len(records) > 1 and rng.random() < 0.2:
            records = records[:-1]
        base, known = offset, ledger.index.get(half.id) is not None
        for sequence, record in enumerate(records):
            stored = msgspec.structs.replace(record, timestamp_ms=clock_ms, offset=offset)
            outcome = ledger.apply_half(stored)
            expired = abs(clock_ms - int(half.attributes.order_key)) > WINDOW_MS
            first = sequence == 0
            rows.append(
                (half.id, 0, offset, clock_ms, "expired" if expired else None, half.group, sequence,
                 len(half.messages), half.attributes.dedup_key if first else None)
            )  # fmt: skip
            offset += 1
        if outcome.effect in (Effect.REPEATED, Effect.CONFLICT) and not known and not expired:
            void.add(base)
        elif outcome.effect is Effect.APPLIED:
            counted.append(base)
    assert void
    frame = spark.createDataFrame(
        rows,
        "id string, partition int, offset bigint, clock_ms bigint, void string, grp string, "
        "seq int, count int, dedup string",
    )
    found = {row["offset"] for row in dedup_voids(frame, None, WINDOW_MS).collect()}
    assert found == void
    # Cut in two, the second part decides the same from what the first part holds.
    cut = counted[len(counted) // 2]
    by_key = F.when(F.col("offset").isin(void), "dedup").otherwise(F.col("void"))
    first = frame.withColumn("void", by_key).where(f"offset < {cut}")
    held = keys_in_window(first, None, (), WINDOW_MS)
    newer = dedup_voids(frame.where(f"offset >= {cut}"), held, WINDOW_MS)
    assert {row["offset"] for row in newer.collect()} == {base for base in void if base >= cut}


def _keyed(rng: random.Random, clock_ms: int) -> Half:
    time_ms = clock_ms + rng.randrange(-130, 130)
    messages = tuple(Message("t", partition=0) for _ in range(rng.choice((1, 1, 2))))
    return Half(
        make_id(0, time_ms, rng.getrandbits(64)),
        rng.choice("gh"),
        messages,
        Attributes(str(time_ms), rng.choice(("k", "l", None))),
    )
