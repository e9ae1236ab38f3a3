"""Rules 13 and 14, 17 to 20, and 25: what a turn holds, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.rules.fakes import Held, raising
from tests.rules.harness import (
    DAY_MS,
    Harness,
    commit,
    known,
    message,
    prepare,
    roll_back,
    settled,
    until,
)
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, Checkpoint, Message, Partition, Record, State
from txbroker.door.protocols import (
    Appended,
    AppendRefused,
    Log,
    NotVisible,
    PromotionTxn,
    PromotionTxnHandle,
)
from txbroker.door.writing import Copy, Fenced, Unknown
from txbroker.errors import BadTarget, KafkaUnavailable, Overloaded, TooLarge
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import Producer, ProducerFenced, StoredBatch
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.open_transactions import OpenTransactionGuard
from txbroker.kafka.door.pipelined_writer import (
    PipelinedTxnWriter,
    promotion_writers,
)
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.batch import Body
from txbroker.kafka.protocol.copies import default_bytes
from txbroker.net.timers import Backoff
from txbroker.proxy.partition.targets import TIMESTAMP_AHEAD_MAX_MS, check_timestamps
from txbroker.testing.door import MemoryPartitionDoor

HOUR_MS = 3_600_000


@pytest.mark.rule(13)
def test_transactional_ids_name_installation_and_time_out() -> None:
    settings = KafkaSettings(
        bootstrap_servers=("127.0.0.1:1",), instance_id="one", half_topic="shop.half"
    )
    writers = promotion_writers(Client(settings), 7, "p7/", default_bytes)
    ids = [one.producer._transactional_id for one in writers]
    assert ids == ["shop.half-7-a", "shop.half-7-b"]
    assert settings.transaction_timeout_s == 15.0
    assert settings.request_timeout_s <= 5.0


@pytest.mark.rule(13)
async def test_transaction_is_promoted_in_one_txn(harness: Harness) -> None:
    owner = await harness.owner(promotion_limits=PromotionLimits(transactions_max=1, bytes_max=1))
    ids = [
        await harness.committed(owner, message("a"), message("b", at=1), message("c", topic="u"))
        for _ in range(3)
    ]
    await until(lambda: harness.events.promotions == ids)
    turns = [turn for turn in harness.partition.turns if turn.promoted]
    assert [[t.record.value for t in turn.promoted] for turn in turns] == [[b"a", b"b", b"c"]] * 3
    assert [turn.progress.op for turn in turns] == [1, 2, 3]


@pytest.mark.rule(13)
async def test_promotion_is_visible_whole_or_not(harness: Harness) -> None:
    owner = await harness.owner()
    harness.partition.writes.append(raising(Unknown()))
    id = await harness.committed(owner, message("a"), message("b", topic="u"))
    await until(lambda: harness.events.promotions == [id])
    assert (harness.visible("t"), harness.visible("u")) == (["a"], ["b"])
    assert harness.events.failures == ["turn"]
    refused, kept = await _batch(harness, owner)
    assert harness.visible("u") == ["b", kept]
    assert known(owner, refused).state is State.REFUSED


async def _batch(harness: Harness, owner: object) -> tuple[str, str]:
    """Commit one that is refused for one of its two topics, and one that is well."""
    bad = await harness.prepared(owner, message("x", topic="u"), message("x" * 500))  # type: ignore[arg-type]
    good = harness.half()
    await prepare(
        owner,  # type: ignore[attr-defined]
        harness.half(message(good.id, topic="u"), id=good.id),
    )
    harness.kafka.set_message_bytes_max("t", 300)
    await commit(owner, bad)  # type: ignore[arg-type]
    await commit(owner, good.id)  # type: ignore[arg-type]
    await until(lambda: good.id in harness.events.promotions)
    await until(lambda: bad in harness.events.refusals)
    return bad, good.id


@pytest.fixture
async def writers() -> AsyncIterator[WriterHarness]:
    made = WriterHarness()
    yield made
    await made.writer.close()


@pytest.mark.rule(14)
async def test_promotion_writes_after_previous_writes(writers: WriterHarness) -> None:
    writers.a.produce_now.clear()
    first = asyncio.create_task(writers.write(1))
    await settled()
    with pytest.raises(AssertionError):
        await writers.write(2)
    assert writers.log == ["a begins", "a writes"]
    writers.a.produce_now.set()
    await (await first).committed()


@pytest.mark.rule(14)
async def test_promotion_ends_after_previous_commit(writers: WriterHarness) -> None:
    writers.a.end_now.clear()
    await writers.write(1)
    second = await writers.write(2)
    await settled()
    assert "b written" in writers.log
    assert "b commits" not in writers.log
    writers.a.end_now.set()
    await second.committed()
    assert writers.log.index("a commit acknowledged") < writers.log.index("b commits")


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("error", "raised"),
    [(ProducerFenced(), Fenced), (KafkaUnavailable("no answer"), Unknown)],
)
async def test_promotion_after_failed_one_is_not_committed(
    writers: WriterHarness, error: Exception, raised: type[Exception]
) -> None:
    writers.a.end_now.clear()
    first, second = await writers.write(1), await writers.write(2)
    writers.a.end_error = error
    writers.a.end_now.set()
    for handle in (first, second):
        with pytest.raises(raised):
            await handle.committed()
    with pytest.raises(raised):
        await writers.write(3)
    assert "b commits" not in writers.log


@pytest.mark.rule(14)
async def test_promotion_after_aborted_one_is_not_committed(writers: WriterHarness) -> None:
    writers.a.end_now.clear()
    await writers.write(1)
    writers.b.produce_error = KafkaUnavailable("no answer")
    with pytest.raises(Unknown):
        await writers.write(2)
    writers.b.produce_error = None
    with pytest.raises(Unknown):
        await writers.write(3)
    assert writers.log.count("a begins") == 1
    writers.a.end_now.set()


@pytest.mark.rule(14)
@pytest.mark.parametrize("at", [("t", 0), ("txbroker.checkpoint", 0)])
async def test_promotion_waits_for_open_txn_of_its_producer(
    writers: WriterHarness, at: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.kafka.door.pipelined_writer._ENDS_TIMEOUT_S", 0.05)
    writers.open["a"] = {at: Cause("hanging", f"{at[0]} has no end marker", *at, True)}
    first = await writers.write(1)
    await first.committed()
    # The other producer's records end with its own transactions.
    await writers.write(2)
    with pytest.raises(Unknown, match="has no end marker") as lost:
        await writers.write(3)
    assert lost.value.cause == writers.open["a"][at]
    assert writers.log.count("a begins") == 1
    assert "a aborts" not in writers.log
    writers.open.clear()
    with pytest.raises(Unknown):
        await writers.write(3)


@pytest.mark.rule(14)
async def test_visible_offsets_are_not_verified_again(writers: WriterHarness) -> None:
    writers.stable = 1
    for number in range(1, 5):
        turn = await writers.write(number)
        await turn.visible()
    assert writers.asked == []
    assert [each for each in writers.log if each.endswith("seen")] == ["a seen", "b seen"] * 2
    writers.stable = 0
    await (await writers.write(5)).committed()
    await writers.write(6)
    await writers.write(7)
    assert writers.asked == [("a", ("t", 0)), ("a", ("txbroker.checkpoint", 0))]


@pytest.mark.rule(17)
async def test_targets_are_examined_before_promotion(harness: Harness) -> None:
    owner, gone = await harness.new_pending(message("gone"), message("with it", topic="u"))
    large = await harness.prepared(owner, message("x" * 1000, topic="u"))
    range_ = await harness.prepared(owner, message("far", topic="u", at=5))
    harness.kafka.delete_topic("t")
    harness.kafka.set_message_bytes_max("u", 500)
    for id in (gone, large, range_):
        await commit(owner, id)
    well = await harness.committed(owner, message("well", topic="u"))
    await until(lambda: harness.events.promotions == [well])
    await until(lambda: sorted(harness.events.refusals) == sorted([gone, large, range_]))
    assert harness.visible("u") == ["well"]
    written = [target.record.value for turn in harness.partition.turns for target in turn.promoted]
    assert written == [b"well"]
    causes = [known(owner, id).cause for id in (gone, large, range_)]
    assert [cause.code for cause in causes if cause] == [
        "unknown_topic",
        "too_large",
        "bad_partition",
    ]


@pytest.mark.rule(17)
async def test_leaderless_target_defers_order_key(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.set_leaderless("t", 0)
    order = {"order_key": "k"}
    first = await harness.committed(owner, message("1"), message("1", topic="u"), **order)
    second = await harness.committed(owner, message("2", topic="u"), message("2", at=1), **order)
    third = await harness.committed(owner, message("3", at=1), **order)
    free = await harness.committed(owner, message("4", at=1), order_key="other")
    alone = await harness.committed(owner, Message("t", None, b"5", partition=1))
    await until(lambda: harness.events.promotions == [free, alone])
    assert harness.visible("t", 1) == ["4", "5"]
    assert harness.visible("u") == []
    await until(lambda: set(harness.progress().deferred) == {first, second, third})
    assert harness.progress().op == 5
    harness.kafka.set_leaderless("t")
    await until(lambda: len(harness.events.promotions) == 5)
    assert harness.events.promotions[2:] == [first, second, third]
    assert (harness.visible("t"), harness.visible("u")) == (["1"], ["1", "2"])
    assert harness.visible("t", 1) == ["4", "5", "2", "3"]


@pytest.mark.rule(17)
async def test_next_owner_promotes_deferred_once(harness: Harness) -> None:
    owner = await harness.owner()
    harness.kafka.set_leaderless("t", 0)
    waits = await harness.committed(owner)
    goes = await harness.committed(owner, message("goes", at=1, key=b"other"))
    await until(lambda: harness.events.promotions == [goes])
    assert (harness.progress().op, harness.progress().deferred) == (2, (waits,))
    await owner.close()
    harness.kafka.set_leaderless("t")
    again = await harness.owner()
    await until(lambda: harness.events.promotions == [goes, waits])
    await again.close()
    last = await harness.committed(await harness.owner())
    await until(lambda: last in harness.events.promotions)
    assert harness.visible() == [waits, last]


@pytest.mark.rule(17)
async def test_full_deferred_list_stops_promotion_and_prepares(harness: Harness) -> None:
    owner = await harness.owner(promotion_limits=PromotionLimits(deferred_max=2))
    harness.kafka.set_leaderless("t", 0)
    ids = [await harness.prepared(owner) for _ in range(4)]
    beside = await harness.prepared(owner, message("beside", at=1, key=b"other"))
    for id in ids:
        await commit(owner, id)
    await commit(owner, beside)
    await until(lambda: owner._promoter.full)
    with pytest.raises(Overloaded):
        await prepare(owner, harness.half(group="another"))
    assert harness.visible("t", 1) == []
    harness.kafka.set_leaderless("t")
    await until(lambda: len(harness.events.promotions) == 5)
    assert harness.visible() == ids
    await until(lambda: not owner._promoter.full)
    await prepare(owner, harness.half())


@pytest.mark.rule(18)
@pytest.mark.parametrize("place", [0, 3, 7])
async def test_poison_message_is_isolated_and_refused(harness: Harness, place: int) -> None:
    owner = await harness.owner()
    ids = []
    for number in range(8):
        poison = harness.clock.now_ms() + 2 * HOUR_MS if number == place else None
        each = Message("t", b"k", str(number).encode(), partition=0, timestamp_ms=poison)
        ids.append(await harness.prepared(owner, each))
    held = Held(committed=False)
    harness.partition.writes.append(held.write)
    before = await harness.committed(owner, message("before"))
    await held.at_commit.reached.wait()
    await asyncio.gather(*[commit(owner, id) for id in ids])
    held.at_commit.open()
    await until(lambda: harness.events.refusals == [ids[place]])
    rest = [str(number) for number in range(8) if number != place]
    await until(lambda: harness.visible() == ["before", *rest])
    cause = known(owner, ids[place]).cause
    assert cause is not None
    assert cause.code == "bad_timestamp"
    assert harness.partition.calls.count("claim") <= 7
    assert harness.events.promotions[0] == before
    assert (f"{ids[place]}/0".encode(), True) in harness.parked()


@pytest.mark.rule(18)
async def test_poison_among_refused_delays_no_other(harness: Harness) -> None:
    owner = await harness.owner()
    late = harness.clock.now_ms() + 2 * HOUR_MS
    poison = await harness.prepared(owner, Message("t", b"k", b"p", partition=0, timestamp_ms=late))
    good = await harness.prepared(owner, message("good"))
    facts = harness.kafka.topics["t"]
    harness.kafka.delete_topic("t")
    await asyncio.gather(commit(owner, poison), commit(owner, good))
    await until(lambda: set(harness.events.refusals) == {poison, good})
    for id in (poison, good):
        owner._promoter._retries.retry_now(id)
    harness.kafka.topics["t"] = facts
    owner._promoter.wake()
    await until(lambda: harness.visible() == ["good"])
    assert harness.partition.calls.count("claim") <= 6
    await until(lambda: known(owner, good).state is State.PROMOTED)
    assert known(owner, poison).state is State.REFUSED


@pytest.mark.rule(18)
async def test_refused_batch_is_split_per_transaction(harness: Harness) -> None:
    owner = await harness.owner()
    gate = asyncio.Event()

    async def hold(log: Log, records: Sequence[Record]) -> Appended:
        await gate.wait()
        return await log.append(records)

    async def picky(log: Log, records: Sequence[Record]) -> Appended:
        harness.partition.half.script.append(picky)
        if any(record.value == b"poison" for record in records):
            raise AppendRefused("not this one")
        return await log.append(records)

    harness.partition.half.script.extend([hold, picky])
    first = asyncio.create_task(harness.prepared(owner, message("first")))
    await settled()
    others = [
        asyncio.create_task(harness.prepared(owner, message(value), message(value)))
        for value in ("a", "poison", "b")
    ]
    await settled()
    gate.set()
    results = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(result) for result in results] == [str, str, TooLarge, str]
    values = [record.value for record in harness.kafka.visible("txbroker.half")]
    assert values == [b"first", b"a", b"a", b"b", b"b"]
    await harness.prepared(owner)
    harness.partition.half.script.clear()


@pytest.mark.rule(18)
async def test_oversized_transaction_is_refused_before_send(harness: Harness) -> None:
    owner = await harness.owner()
    log = harness.partition.half
    with pytest.raises(TooLarge):
        await prepare(owner, harness.half(message("x" * (log.batch_bytes_max + 1))))
    assert "half.append" not in harness.partition.calls


@pytest.mark.rule(19)
@pytest.mark.parametrize("step", ["committed", "visible"])
async def test_promoted_is_reported_when_visible(harness: Harness, step: str) -> None:
    owner = await harness.owner()
    held = Held(committed=step != "committed", visible=step != "visible")
    harness.partition.writes.append(held.write)
    id = await harness.prepared(owner)
    waiting = asyncio.create_task(commit(owner, id, wait=True))
    await (held.at_commit if step == "committed" else held.at_visible).reached.wait()
    await settled()
    assert known(owner, id).state is State.COMMITTED
    assert (waiting.done(), harness.events.promotions) == (False, [])
    assert (await commit(owner, id)).state is State.COMMITTED
    held.at_commit.open()
    held.at_visible.open()
    assert (await waiting).state is State.PROMOTED
    assert harness.events.promotions == [id]


@pytest.mark.rule(19)
async def test_committed_invisible_promotion_is_not_rewritten(harness: Harness) -> None:
    owner = await harness.owner()
    tries = 0

    class Unseen(Held):
        async def visible(self) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise NotVisible("committed, but not visible", [("u", 0), ("t", 0)])
            cause = known(owner, id).cause
            assert cause is not None
            assert (cause.code, cause.topic, cause.partition) == ("not_visible", "t", 0)

    harness.partition.writes.append(Unseen().write)
    id = await harness.committed(owner)
    await until(lambda: harness.events.promotions == [id])
    assert tries == 3
    assert known(owner, id).cause is None
    assert harness.visible() == [id]
    assert harness.partition.calls.count("claim") == 1


@pytest.mark.rule(20)
async def test_promoted_records_have_user_or_marker_timestamp(harness: Harness) -> None:
    owner = await harness.owner()
    mine = Message("t", b"k", b"mine", partition=0, timestamp_ms=123)
    first = await harness.prepared(owner, mine, message("theirs"))
    harness.advance(50.0)
    await commit(owner, first)
    await until(lambda: harness.events.promotions == [first])
    stamps = [record.timestamp_ms for record in harness.kafka.visible("t")]
    assert stamps == [123, harness.kafka.visible("txbroker.op")[0].timestamp_ms]
    assert known(owner, first).prepared_at_ms < stamps[1]


@pytest.mark.rule(20)
async def test_decision_time_survives_half_and_marker(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("x" * 500))
    harness.kafka.set_message_bytes_max("t", 300)
    harness.advance(50.0)
    await commit(owner, id)
    decided_at_ms = known(owner, id).verdict.at_ms
    await until(lambda: harness.events.refusals == [id])
    await harness.delete(owner, half=1)
    harness.kafka.truncate("txbroker.op", before=1)
    harness.advance(20 * DAY_MS / 1000)
    harness.kafka.set_message_bytes_max("t", 3000)
    await harness.owner()
    await until(lambda: id in harness.events.promotions)
    assert [record.timestamp_ms for record in harness.kafka.visible("t")] == [decided_at_ms]


@pytest.mark.rule(20)
def test_timestamp_over_one_hour_ahead_is_refused() -> None:
    now_ms = 10 * DAY_MS
    check_timestamps([Message("t", timestamp_ms=now_ms + TIMESTAMP_AHEAD_MAX_MS)], now_ms)
    with pytest.raises(BadTarget):
        check_timestamps([Message("t", timestamp_ms=now_ms + HOUR_MS + 1)], now_ms)


RETENTION_MS = 100_000


@pytest.mark.rule(25)
async def test_pending_body_is_copied_at_half_retention(harness: Harness) -> None:
    owner = await harness.owner(half_retention_ms=RETENTION_MS)
    id = await harness.prepared(owner, message("kept"), message("kept too", topic="u"))
    await settled()
    assert harness.parked() == []
    harness.advance(0.4 * RETENTION_MS / 1000)
    young = await harness.prepared(owner)
    harness.advance(0.2 * RETENTION_MS / 1000)
    await until(lambda: len(harness.parked()) == 2)
    assert harness.parked() == [(f"{id}/0".encode(), True), (f"{id}/1".encode(), True)]
    assert known(owner, id).state is State.PENDING
    assert [len(turn.parked) for turn in harness.partition.turns] == [2]
    assert not known(owner, young).kept


@pytest.mark.rule(25)
async def test_pending_transaction_outlives_half_message(harness: Harness) -> None:
    owner = await harness.owner(half_retention_ms=RETENTION_MS)
    id = await harness.prepared(owner, message("kept"), message("kept too", topic="u"))
    harness.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: len(harness.parked()) == 2)
    await harness.delete(owner, half=2)
    again = await harness.owner(half_retention_ms=RETENTION_MS)
    assert known(again, id).state is State.PENDING
    assert (await commit(again, id)).decision == "commit"
    await until(lambda: harness.events.promotions == [id])
    assert (harness.visible("t"), harness.visible("u")) == (["kept"], ["kept too"])
    await until(lambda: [copy for _, copy in harness.parked()] == [True, True, False, False])
    await harness.delete(again, op=1, days=20)
    await harness.owner()
    await settled()
    assert (harness.visible("t"), harness.visible("u")) == (["kept"], ["kept too"])


@pytest.mark.rule(25)
async def test_deferred_transaction_outlives_half_message(harness: Harness) -> None:
    owner = await harness.owner(half_retention_ms=RETENTION_MS)
    harness.kafka.set_leaderless("t", 0)
    id = await harness.committed(owner, message("kept"))
    harness.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: len(harness.parked()) == 1)
    await harness.delete(owner, half=1)
    harness.kafka.set_leaderless("t")
    again = await harness.owner(half_retention_ms=RETENTION_MS)
    await until(lambda: harness.events.promotions == [id])
    assert known(again, id).state is State.PROMOTED
    assert harness.visible() == ["kept"]


@pytest.mark.rule(25)
async def test_rollback_removes_copy(harness: Harness) -> None:
    owner = await harness.owner(half_retention_ms=RETENTION_MS)
    id = await harness.prepared(owner)
    harness.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: len(harness.parked()) == 1)
    await roll_back(owner, id)
    await until(lambda: harness.parked()[-1] == (f"{id}/0".encode(), False))
    assert harness.visible() == []


@pytest.mark.rule(25)
async def test_copy_of_lost_promotion_is_written_again(harness: Harness) -> None:
    owner = await harness.owner(half_retention_ms=RETENTION_MS)
    id = await harness.prepared(owner)
    harness.partition.writes.append(raising(Unknown()))
    harness.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: harness.parked() == [(f"{id}/0".encode(), True)])
    assert harness.partition.calls.count("claim") == 2


@pytest.mark.rule(25)
async def test_copy_of_refused_promotion_is_written_again(harness: Harness) -> None:
    owner = await harness.owner()
    held = Held(committed=False)

    async def fails(door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        handle = await held.write(door, turn)
        held.committed = _lost  # type: ignore[method-assign]
        return handle

    async def _lost() -> None:
        await held.at_commit.wait()
        raise Unknown

    id = await harness.prepared(owner, message("x" * 500))
    harness.kafka.set_message_bytes_max("t", 300)
    harness.partition.writes.append(fails)
    await commit(owner, id)
    await held.at_commit.reached.wait()
    assert known(owner, id).state is State.COMMITTED
    held.at_commit.open()
    await until(lambda: known(owner, id).state is State.REFUSED)
    assert harness.parked()[0] == (f"{id}/0".encode(), True)


# --- the writer on two producers whose answers a test releases -----------------------------------


class FakeProducer:
    """A producer whose answers a test releases."""

    id, epoch = 7, 0
    transaction_timeout_s = 15.0
    late_until_s = 0.0

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.produce_now = asyncio.Event()
        self.produce_now.set()
        self.end_now = asyncio.Event()
        self.end_now.set()
        self.end_error: Exception | None = None
        self.produce_error: Exception | None = None

    async def add(self, partitions: Sequence[Partition], backoff: Backoff) -> None:
        self.log.append(f"{self.name} begins")

    async def produce(
        self, batches: Mapping[Partition, Body], backoff: Backoff
    ) -> dict[Partition, StoredBatch]:
        self.log.append(f"{self.name} writes")
        await self.produce_now.wait()
        if self.produce_error is not None:
            raise self.produce_error
        self.log.append(f"{self.name} written")
        return {partition: StoredBatch(0, 0) for partition in batches}

    async def end(self, *, commit: bool, backoff: Backoff) -> None:
        what = "commit" if commit else "abort"
        self.log.append(f"{self.name} {what}s")
        if not commit:
            return
        await self.end_now.wait()
        if self.end_error is not None:
            raise self.end_error
        self.log.append(f"{self.name} {what} acknowledged")

    def note_visible(self) -> None:
        self.log.append(f"{self.name} seen")


class WriterHarness:
    """A pipelined writer on two fake producers, with the log of their steps."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stable = 0
        """How far readers come, in every partition."""
        self.open: dict[str, dict[Partition, Cause]] = {}
        """Where which producer has something open."""
        self.asked: list[tuple[str, Partition]] = []
        self.a, self.b = FakeProducer("a", self.log), FakeProducer("b", self.log)
        settings = KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one")
        client = SimpleNamespace(
            settings=settings, leader=self._leader, known_leader=lambda *_: 1, ask=self._ask
        )
        ended = SimpleNamespace(left_open=self._left_open)
        writers = promotion_writers(cast(Client, client), 0, "p0/", lambda _: 1000)
        for each, producer in zip(writers, (self.a, self.b), strict=True):
            each.producer, each.claimed = cast(Producer, producer), True
        self.writer = PipelinedTxnWriter(
            settings,
            0,
            writers,
            cast(OpenTransactionGuard, ended),
            StableEnds(cast(Client, client)),
        )

    async def write(self, number: int) -> PromotionTxnHandle:
        promoted = (Copy("t", 0, Record(b"k", b"v", (), 1)),)
        return await self.writer.write(
            PromotionTxn(promoted, (), Checkpoint(1, "c", number, number))
        )

    async def _leader(self, topic: str, partition: int) -> int:
        return 1

    async def _ask(self, node: int, request: Any, lane: str) -> Any:
        topics = [
            (topic, [(number, 0, -1, self.stable) for number, _ in parts])
            for topic, parts in request.topics
        ]
        return SimpleNamespace(topics=topics)

    async def _left_open(
        self, producer: Producer, partitions: Mapping[Partition, int]
    ) -> dict[Partition, Cause]:
        name = cast(FakeProducer, producer).name
        self.asked += [(name, partition) for partition in partitions]
        found = self.open.get(name, {})
        return {partition: found[partition] for partition in partitions if partition in found}
