"""The guard against open transactions, on a scripted client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from txbroker.core.records import Partition, Record
from txbroker.door.writing import Unknown
from txbroker.kafka.client.client import Client, KafkaRefused, NotSent, Unanswered
from txbroker.kafka.client.producer import Producer
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.open_transactions import HANGING, OpenTransactionGuard, UnconfirmedWrites
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.schemas import (
    AddPartitionsToTxnV0,
    DescribeProducersV0,
    ListOffsetsV3,
    MetadataV10,
    ProduceV7,
    describe_producers,
)
from txbroker.net.timers import Backoff

OURS, STRANGER, EPOCH = 7, 8, 4
T, U = ("t", 0), ("u", 0)


class Leaders(Client):
    """A scripted client of two brokers, each of which leads one partition; all know the same."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one"))
        self.leaders: dict[Partition, int] = {T: 1, U: 2}
        self.open: dict[Partition, dict[int, int]] = {}
        self.epochs: dict[Partition, int] = {}
        """The newest epoch of ours that is known where nothing of ours is open."""
        self.ends: dict[Partition, int] = {T: 10, U: 10}
        self.codes: dict[Partition, int] = {}
        self.silent: set[int] = set()
        self.left_out: set[Partition] = set()
        self.asked: list[Partition] = []
        self.requests: list[int] = []
        """How many partitions each question was about."""
        self.backoff: list[float | None] = []
        self.refuses: KafkaRefused | None = None
        self.taken: list[tuple[str, int, int]] = []
        self.forgotten: list[Partition] = []
        producers = [cast(Producer, SimpleNamespace(id=id, epoch=EPOCH)) for id in (OURS - 1, OURS)]
        self.guard = OpenTransactionGuard(self, "ended", producers)
        self.unseen = UnconfirmedWrites(producers[1], self.guard, StableEnds(self))

    async def verify(self, *partitions: Partition) -> list[str]:
        """Return the codes of causes why partitions must not be written."""
        return [cause.code for cause in await self.guard.verify_no_open_txn(partitions)]

    async def leader(self, topic: str, partition: int) -> int:
        if self.leaders[topic, partition] < 0:
            raise KafkaRefused(Code.LEADER_NOT_AVAILABLE)
        return self.leaders[topic, partition]

    async def ask_any(self, request: Any, *_: Any) -> Any:
        topics = [
            (0, topic, bytes(16), False, [(0, number, leader, 0, [1, 2, 3])])
            for (topic, number), leader in self.leaders.items()
        ]
        return SimpleNamespace(topics=topics)

    def forget_leader(self, topic: str, partition: int) -> None:
        self.forgotten.append((topic, partition))

    def known_leader(self, topic: str, partition: int) -> int:
        return self.leaders[topic, partition]

    async def coordinator(self, *_: Any) -> int:
        return 1

    async def ask(self, node: int, request: Any, lane: str, timeout_s: float | None = None) -> Any:
        if isinstance(request, MetadataV10):
            return await self.ask_any(request)
        if node in self.silent:
            self.backoff.append(timeout_s)
            raise Unanswered(f"broker {node} did not answer")
        if isinstance(request, ListOffsetsV3):
            return self._ends(request)
        if isinstance(request, ProduceV7):
            return self._take(node, request)
        if isinstance(request, AddPartitionsToTxnV0):
            self.taken += [(topic, n, -1) for topic, ns in request.topics for n in ns]
            return SimpleNamespace(errors=[])
        assert isinstance(request, DescribeProducersV0)
        self.backoff.append(timeout_s)
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(sum(len(numbers) for _, numbers in request.values[0]))
        topics = []
        for topic, numbers in request.values[0]:
            self.asked += [(topic, number) for number in numbers]
            states = [self._state((topic, n)) for n in numbers if (topic, n) not in self.left_out]
            topics.append((topic, states))
        return SimpleNamespace(topics=topics)

    def _state(self, partition: Partition) -> tuple[Any, ...]:
        code = self.codes.get(partition, 0)
        open_ = {} if code else self.open.get(partition, {})
        # A producer without open transaction has -1.
        found = [(STRANGER + 1, 0, 0, 0, 0, -1)]
        found += [(id, EPOCH, 0, 0, 0, first) for id, first in open_.items()]
        if OURS not in open_ and (epoch := self.epochs.get(partition, -1)) >= 0:
            found.append((OURS, epoch, 0, 0, 0, -1))
        return (partition[1], code, None, found)

    def _take(self, node: int, request: Any) -> Any:
        topics = []
        for topic, parts in request.topics:
            self.taken += [(topic, number, node) for number, _ in parts]
            topics.append((topic, [(number, 0, 10, -1) for number, _ in parts]))
        return SimpleNamespace(topics=topics)

    def _ends(self, request: Any) -> Any:
        topics = []
        for topic, parts in request.topics:
            found = []
            for number, _ in parts:
                end = self.ends[topic, number]
                if request.isolation_level == 1:
                    end = min([end, *self.open.get((topic, number), {}).values()])
                found.append((number, 0, -1, end))
            topics.append((topic, found))
        return SimpleNamespace(topics=topics)


@pytest.fixture
def leaders() -> Leaders:
    return Leaders()


@pytest.mark.rule(17)
async def test_open_own_transaction_blocks_partition(leaders: Leaders) -> None:
    leaders.open[T] = {STRANGER: 2, OURS: 4}
    (cause,) = await leaders.guard.verify_no_open_txn([T, U])
    assert (cause.code, cause.topic, cause.partition, cause.passing) == (HANGING, "t", 0, True)
    assert "t-0" in cause.message
    assert "offset 4" in cause.message
    assert leaders.guard.unverified([T, U, T]) == [T]
    del leaders.open[T][OURS]
    assert await leaders.verify(T) == []
    assert leaders.guard.unverified([T, U]) == []


async def test_verified_partition_is_not_verified_again(leaders: Leaders) -> None:
    await leaders.guard.verify_no_open_txn([T, U])
    # Open now is a turn of this very claim.
    leaders.open[T] = {OURS: 10}
    assert await leaders.verify(T, U) == []
    assert leaders.asked == [T, U]


async def test_foreign_open_transaction_blocks_nothing(leaders: Leaders) -> None:
    leaders.open[T] = {STRANGER: 0}
    assert await leaders.verify(T) == []


@pytest.mark.rule(17)
async def test_forbidden_partition_needs_stable_offset_past_its_end(leaders: Leaders) -> None:
    leaders.codes[T] = Code.TOPIC_AUTHORIZATION_FAILED
    leaders.open[T] = {OURS: 4}
    (cause,) = await leaders.guard.verify_no_open_txn([T])
    assert (cause.code, cause.passing) == ("not_known", True)
    # A busy topic has always some transaction open, but later ones.
    leaders.ends[T] = 30
    leaders.open[T] = {STRANGER: 9}
    assert await leaders.verify(T) == ["not_known"]
    leaders.open[T] = {STRANGER: 10}
    assert await leaders.verify(T) == []
    # Only that broker may take the first batch.
    leaders.leaders[T] = 2
    assert leaders.guard.unverified([T]) == [T]


async def test_recreated_topic_is_not_awaited_to_its_old_end(leaders: Leaders) -> None:
    leaders.codes[T] = Code.TOPIC_AUTHORIZATION_FAILED
    leaders.open[T] = {STRANGER: 4}
    assert await leaders.verify(T) == ["not_known"]
    leaders.ends[T] = 3
    leaders.open.clear()
    assert await leaders.verify(T) == []


async def test_kafka_without_describe_producers_is_named(leaders: Leaders) -> None:
    leaders.refuses = KafkaRefused(Code.UNSUPPORTED_VERSION)
    (cause,) = await leaders.guard.verify_no_open_txn([T])
    assert cause.code == "no_answer"
    assert "DescribeProducers" in cause.message


async def test_partitions_are_chunked_and_timed_out_leader_asked_once(leaders: Leaders) -> None:
    many = [("t", number) for number in range(20)]
    leaders.leaders |= dict.fromkeys(many, 1)
    leaders.open[many[15]] = {OURS: 3}
    assert [
        (cause.code, cause.partition) for cause in await leaders.guard.verify_no_open_txn(many)
    ] == [(HANGING, 15)]
    assert leaders.asked == many
    assert leaders.requests == [8, 8, 4]
    # It waits for a plan, so that it must not wait for long.
    assert all(seconds is not None and 0 < seconds <= 2 for seconds in leaders.backoff)
    again = [("u", number) for number in range(20)]
    leaders.leaders |= dict.fromkeys(again, 1)
    leaders.silent.add(1)
    leaders.backoff.clear()
    assert await leaders.verify(*again) == ["no_answer"] * 20
    assert len(leaders.backoff) == 1


@pytest.mark.rule(17)
@pytest.mark.parametrize("how", ["silent", "no leader", "moved", "left out"])
async def test_unanswered_partition_stays_unverified(leaders: Leaders, how: str) -> None:
    leaders.silent = {1} if how == "silent" else set()
    leaders.leaders[T] = -1 if how == "no leader" else 1
    leaders.codes = {T: Code.NOT_LEADER} if how == "moved" else {}
    leaders.left_out = {T} if how == "left out" else set()
    (cause,) = await leaders.guard.verify_no_open_txn([T, U])
    assert (cause.code, cause.topic, cause.passing) == ("no_answer", "t", True)
    assert leaders.guard.unverified([T, U]) == [T]
    assert leaders.forgotten == ([T] if how in ("silent", "moved") else [])
    leaders.silent.clear()
    leaders.codes.clear()
    leaders.left_out.clear()
    leaders.leaders[T] = 1
    assert await leaders.verify(T) == []


@pytest.mark.rule(17)
async def test_only_vouching_leader_receives_first_batch(leaders: Leaders) -> None:
    one, other = (Producer(leaders, side, side) for side in "ab")
    leaders.guard = OpenTransactionGuard(leaders, "ended", [one, other])
    assert await leaders.verify(T) == []
    batch, backoff = {T: batch_body([Record(b"k", b"")])}, Backoff(1.0, 0.01)
    # It had been deposed long ago, and did not know.
    leaders.leaders[T] = 2
    with pytest.raises(NotSent, match="leader of t-0 has changed"):
        await one.produce(batch, backoff)
    assert leaders.taken == []
    leaders.leaders[T] = 1
    await one.produce(batch, backoff)
    # From here on only we have written there.
    leaders.leaders[T] = 2
    await other.produce(batch, backoff)
    assert leaders.taken == [("t", 0, 1), ("t", 0, 2)]


@pytest.mark.rule(17)
async def test_add_fails_when_leader_is_not_vouching_one(leaders: Leaders) -> None:
    producer = Producer(leaders, "a", "a")
    leaders.guard = OpenTransactionGuard(leaders, "ended", [producer])
    assert await leaders.verify(T, U) == []
    # What aborts the transaction then reaches the one that leads in truth.
    leaders.leaders[T] = 2
    with pytest.raises(NotSent, match="leader of t-0 has changed"):
        await producer.add([U, T], Backoff(1.0, 0.01))
    assert leaders.taken == []
    # So it is found out before, where there is time to ask again.
    assert leaders.guard.unverified([T, U]) == [T]
    assert await leaders.verify(T, U) == []
    await producer.add([U, T], Backoff(1.0, 0.01))
    assert leaders.taken == [("u", 0, -1), ("t", 0, -1)]


# --- between turns -------------------------------------------------------------------------------


@pytest.mark.rule(14)
async def test_confirmed_write_needs_no_request(leaders: Leaders) -> None:
    leaders.silent |= {1, 2}
    leaders.unseen.add({T: 9, U: 3})
    leaders.unseen.add({U: 5})
    leaders.unseen.confirm({T: 9})
    await leaders.unseen.wait_until_ended([T], Backoff(0.0, 0.01))
    # The turn before that one was seen, and it was not.
    leaders.unseen.confirm({U: 3})
    with pytest.raises(Unknown, match="u-0"):
        await leaders.unseen.wait_until_ended([T, U], Backoff(0.0, 0.01))


async def test_stable_offset_past_write_needs_no_leader(leaders: Leaders) -> None:
    leaders.unseen.add({T: 9})
    leaders.open[T] = {STRANGER: 10}
    await leaders.unseen.wait_until_ended([T], Backoff(5.0, 0.01))
    assert leaders.asked == []


@pytest.mark.rule(14)
async def test_unended_write_blocks_next_transaction(leaders: Leaders) -> None:
    leaders.unseen.add({T: 8, U: 8})
    leaders.open[T] = {OURS: 7}
    with pytest.raises(Unknown, match="offset 7") as lost:
        await leaders.unseen.wait_until_ended([T, U], Backoff(0.05, 0.01))
    assert lost.value.cause is not None
    assert (lost.value.cause.code, lost.value.cause.topic) == (HANGING, "t")
    # A turn that does not write there does not end it either.
    await leaders.unseen.wait_until_ended([U], Backoff(0.0, 0.01))


async def test_slow_end_is_awaited(leaders: Leaders) -> None:
    leaders.unseen.add({T: 8})
    leaders.open[T] = {OURS: 7}
    waiting = asyncio.create_task(leaders.unseen.wait_until_ended([T], Backoff(30.0, 0.01)))
    async with asyncio.timeout(30):
        while not leaders.asked:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        leaders.open.clear()
        leaders.epochs[T] = EPOCH + 1  # that of its end
        await waiting


@pytest.mark.rule(14)
async def test_foreign_transactions_do_not_block_next_transaction(leaders: Leaders) -> None:
    leaders.unseen.add({T: 8})
    # The other producer of the claim may rightly have something open.
    leaders.open[T] = {STRANGER: 2, OURS - 1: 9}
    leaders.epochs[T] = EPOCH
    await leaders.unseen.wait_until_ended([T], Backoff(30.0, 0.01))
    assert leaders.asked == [T]
    await leaders.unseen.wait_until_ended([T], Backoff(30.0, 0.01))
    assert leaders.asked == [T]
    # If that leader was deposed, its answer is not enough.
    assert leaders.guard._producers[1].vouching_leader == {T: 1}


@pytest.mark.rule(14)
@pytest.mark.parametrize("known", [-1, EPOCH - 1], ids=["nothing", "an earlier turn"])
async def test_leader_without_our_last_epoch_is_not_trusted(leaders: Leaders, known: int) -> None:
    leaders.unseen.add({T: 8})
    leaders.open[T] = {STRANGER: 2}
    leaders.epochs[T] = known
    with pytest.raises(Unknown, match="promotion transactions in t-0 have ended"):
        await leaders.unseen.wait_until_ended([T], Backoff(0.05, 0.01))
    assert T in leaders.forgotten
    leaders.epochs[T] = EPOCH
    await leaders.unseen.wait_until_ended([T], Backoff(0.05, 0.01))


async def test_writes_of_earlier_producer_id_do_not_block(leaders: Leaders) -> None:
    leaders.unseen.add({T: 8})
    leaders.open[T] = {OURS: 7}
    leaders.guard._producers[1].id = OURS + 5
    await leaders.unseen.wait_until_ended([T], Backoff(0.0, 0.01))
    assert leaders.asked == []


@pytest.mark.parametrize("tags", [b"\x00", b"\x01\x05\x02xx"])
def test_producers_are_decoded_with_and_without_tags(tags: bytes) -> None:
    def producer(id: int, first: int, tags: bytes = b"\x00") -> bytes:
        entry = id.to_bytes(8) + bytes(4) + b"\xff" * 4 + bytes(8) + bytes(4)
        return entry + first.to_bytes(8, signed=True) + tags

    producers = b"\x04" + producer(7, -1) + producer(8, 5, tags) + producer(9, 6)
    zero_bytes = bytes(4) + bytes(2) + b"\x00" + producers + b"\x00"
    one_bytes = bytes(3) + b"\x01" + bytes(2) + b"\x00" + b"\x01" + b"\x00"
    answer = bytes(4) + b"\x02\x02t" + b"\x03" + zero_bytes + one_bytes + b"\x00" + b"\x00"
    found = describe_producers({"t": [0, 1]}).read(bytes(4) + b"\0" + answer)
    ((topic, (zero, one)),) = found.topics
    assert (topic, zero[0], one[0]) == ("t", 0, 1)
    assert [(each[0], each[2], each[5]) for each in zero[3]] == [
        (7, -1, -1),
        (8, -1, 5),
        (9, -1, 6),
    ]
    assert one[3] == []
