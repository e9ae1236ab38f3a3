"""The rules of consumers, one by one, on a Kafka in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, TIMING, World
from tests.kit.until import until
from txbroker.consumer import (
    CommitPolicy,
    Consumer,
    ReceivedMessage,
    RecordsDeleted,
    Reject,
)
from txbroker.testing.consuming import MemoryMember
from txbroker.testing.topics import LostReply


class Orders(World):
    """Consumers by key, and topic `orders` with one partition."""

    def __init__(self) -> None:
        super().__init__(partitions=1)

    def consumer(self, **options: Any) -> Consumer:
        given: dict[str, Any] = {"order": "key", "local_attempts_max": 1, "drain_s": 5.0}
        return super().consumer(**given | TIMING | options)

    def keys(self, kind: str) -> list[str]:
        """The keys of the copies in a topic of the group."""
        return [(record.key or b"").decode() for record, _failed in self.copies(kind)]


class Recorded:
    """A handler that records calls, waits for `gates` by key, and fails for keys in `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing = set(failing)
        self.gates: dict[str, asyncio.Event] = {}
        self.begun: list[tuple[str, int]] = []
        self.done: list[tuple[str, int]] = []
        self.tokens: list[int] = []

    async def __call__(self, message: ReceivedMessage) -> None:
        key = (message.key or b"").decode()
        self.begun.append((key, message.offset))
        self.tokens.append(message.token)
        if key in self.gates:
            await self.gates[key].wait()
        if key in self.failing:
            raise ValueError("not now")
        self.done.append((key, message.offset))

    def shut(self, key: str) -> asyncio.Event:
        self.gates[key] = asyncio.Event()
        return self.gates[key]


@pytest.fixture
def orders() -> Orders:
    return Orders()


# --- positions -------------------------------------------------------------------------------


@pytest.mark.rule(30)
async def test_stored_offset_is_that_of_the_next_message(orders: Orders) -> None:
    handler = Recorded()
    orders.produce("a=", "b=")
    async with orders.running(handler):
        await until(lambda: len(handler.done) == 2)
        await until(lambda: orders.committed()[0] > 0)
    assert orders.committed()[0] == 2


@pytest.mark.rule(30)
async def test_positions_of_topics_are_separate(orders: Orders) -> None:
    handler = Recorded()
    orders.kafka.create_topic("returns", 1)
    orders.produce("a=", "b=", "c=")
    orders.produce("a=", topic="returns")
    async with orders.running(handler, topics=["orders", "returns"]):
        await until(lambda: len(handler.done) == 4)
    assert orders.committed()[0] == 3
    assert orders.committed(topic="returns")[0] == 1


@pytest.mark.rule(30)
async def test_done_out_of_order_is_not_repeated(orders: Orders) -> None:
    handler = Recorded()
    gate = handler.shut("slow")
    orders.produce("slow=", "a=", "b=")
    async with orders.running(handler, drain_s=0.05):
        await until(lambda: len(handler.done) == 2)
        await until(lambda: orders.committed()[1].ranges)
    assert orders.committed()[0] == 0
    gate.set()
    async with orders.running(handler):
        await orders.commits(3)
    assert sorted(handler.done) == [("a", 1), ("b", 2), ("slow", 0)]


@pytest.mark.rule(30)
async def test_unread_records_that_were_deleted_stop(orders: Orders) -> None:
    handler = Recorded()
    orders.produce("a=", "b=")
    async with orders.running(handler):
        await orders.commits(2)
    orders.produce("c=", "d=", "e=")
    orders.kafka.truncate("orders", 0, before=4)
    with pytest.raises(RecordsDeleted, match="offsets 2 to 4 were deleted"):
        async with orders.running(handler):
            await until(lambda: False, 2)
    async with orders.running(handler, on_gap="skip"):
        await orders.commits(5)
    assert handler.done[2:] == [("e", 4)]


# --- owners ----------------------------------------------------------------------------------


@pytest.mark.rule(31)
async def test_each_owner_has_a_higher_token(orders: Orders) -> None:
    handler = Recorded()
    for number in range(3):
        orders.produce("a=")
        async with orders.running(handler):
            await orders.commits(number + 1)
    assert handler.tokens[0] < handler.tokens[1] < handler.tokens[2]


@pytest.mark.rule(31)
async def test_token_is_stored_before_anything_is_handled(orders: Orders) -> None:
    stored: list[int] = []

    async def handle(message: ReceivedMessage) -> None:
        stored.append(orders.committed()[1].token - message.token)

    orders.produce("a=")
    async with orders.running(handle):
        await until(lambda: stored)
    assert stored == [0]


@pytest.mark.rule(31)
async def test_nothing_begins_after_the_lease(orders: Orders) -> None:
    handler = Recorded()
    orders.produce("a=")
    async with orders.running(handler) as consumer:
        await orders.commits(1)
        (name,) = orders.group.seats
        orders.group.silence(name)
        await until(lambda: consumer.statistics().counts.get("fenced"))
        orders.produce("b=")
        await until(lambda: consumer.statistics().lag["orders", 0] == 1)
        assert handler.begun == [("a", 0)]
        orders.group.reconnect(name)
        await orders.commits(2)


@pytest.mark.rule(31)
async def test_nothing_begins_after_the_process_was_stopped(orders: Orders) -> None:
    """The whole process stood still: no timer has run since, and a handler ends first."""
    begun: list[tuple[int, float]] = []
    go_on = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        begun.append((message.offset, message.lease.left_s))
        if message.offset == 0:
            await go_on.wait()
            time.sleep(2 * TIMING["lease_s"])  # as by SIGSTOP

    orders.produce("a=", "a=")
    async with orders.running(handle):
        await until(lambda: begun)
        (name,) = orders.group.seats
        orders.group.silence(name)
        go_on.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        orders.group.reconnect(name)
        await until(lambda: len(begun) == 2)
    assert begun[1][1] > 0


@pytest.mark.rule(31)
async def test_nothing_is_stored_after_the_lease(orders: Orders) -> None:
    handler = Recorded()
    orders.produce("a=")
    async with orders.running(handler, commit=CommitPolicy(max_interval_s=60)) as consumer:
        await until(lambda: handler.done)
        (name,) = orders.group.seats
        orders.group.silence(name)
        await until(lambda: consumer.statistics().counts.get("fenced"))
        with contextlib.suppress(Exception):
            await consumer._readers[0][0]._rounds._round()
        assert orders.committed()[0] == 0
        orders.group.reconnect(name)


# --- handover --------------------------------------------------------------------------------


@pytest.mark.rule(32)
async def test_revoked_partition_is_stored_before_its_release(orders: Orders) -> None:
    first, second = Recorded(), Recorded()
    orders.kafka.create_topic("pairs", 2)
    for number in (0, 1):
        orders.produce("a=", "b=", topic="pairs", partition=number)
    lazy = CommitPolicy(max_interval_s=60)
    async with orders.running(first, topics=["pairs"], commit=lazy):
        await until(lambda: len(first.done) == 4)
        async with orders.running(second, topics=["pairs"]) as joined:
            await until(lambda: joined.statistics().lag)
            for number in (0, 1):
                orders.produce("c=", topic="pairs", partition=number)
            await until(lambda: len(first.done) + len(second.done) == 6)
    assert sorted(first.done + second.done) == sorted(
        [(key, number) for number, key in enumerate("abc")] * 2
    )


@pytest.mark.rule(32)
async def test_commit_in_flight_is_waited_for_at_the_end(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, slow = Recorded(), asyncio.Event()
    commit = MemoryMember.commit

    async def slowly(self: MemoryMember, offsets: Any, copies: Any = ()) -> None:
        if handler.done:
            slow.set()
            await asyncio.sleep(0.2)
        await commit(self, offsets, copies)

    monkeypatch.setattr(MemoryMember, "commit", slowly)
    orders.produce("a=")
    async with orders.running(handler):
        await slow.wait()
    assert orders.committed()[0] == 1


@pytest.mark.rule(32)
async def test_revoked_partition_is_released_after_its_handlers(orders: Orders) -> None:
    begun: list[int] = []
    done: list[int] = []

    async def handle(message: ReceivedMessage) -> None:
        begun.append(message.partition)
        await asyncio.sleep(0.5)
        done.append(message.partition)

    orders.kafka.create_topic("pairs", 2)
    for number in (0, 1):
        orders.produce("a=", topic="pairs", partition=number)
    async with orders.running(handle, topics=["pairs"]):
        await until(lambda: len(begun) == 2)
        async with orders.running(handle, topics=["pairs"]) as joined:
            await until(lambda: joined.statistics().lag)
            assert (sorted(begun), sorted(done)) == ([0, 1], [0, 1])


# --- lanes -----------------------------------------------------------------------------------


@pytest.mark.rule(33)
async def test_messages_of_a_key_are_handled_one_after_another(orders: Orders) -> None:
    handler = Recorded()
    gate = handler.shut("a")
    orders.produce("a=", "a=", "b=")
    async with orders.running(handler):
        await until(lambda: handler.done)
        assert handler.begun == [("a", 0), ("b", 2)]
        gate.set()
        await orders.commits(3)


@pytest.mark.rule(33)
async def test_retried_message_waits_until_it_is_due(orders: Orders) -> None:
    handler = Recorded("a")
    orders.produce("a=")
    async with orders.running(handler, order="none", on_failure="retry") as consumer:
        await until(lambda: orders.keys("retry"))
        place = (f"txbroker.retry.{GROUP}", 0)
        await until(lambda: consumer.statistics().lag.get(place))
        orders.produce("b=")
        await until(lambda: ("b", 1) in handler.done)
        assert handler.begun == [("a", 0), ("b", 1)]


# --- copies ----------------------------------------------------------------------------------


@pytest.mark.rule(34)
@pytest.mark.parametrize("outcome", list(LostReply))
async def test_copy_without_answer_is_written_once(orders: Orders, outcome: LostReply) -> None:
    async def reject(message: ReceivedMessage) -> None:
        if not message.offset:
            orders.group.lose_answer_of_next_commit(outcome)
        raise Reject("never")

    orders.produce("a=", "b=")
    async with orders.running(reject, on_failure="skip", in_flight_max=1, order="partition"):
        await orders.commits(2)
    assert orders.keys("dead") == ["a", "b"]


# --- set-aside keys --------------------------------------------------------------------------


@pytest.mark.rule(35)
async def test_next_owner_knows_set_aside_keys(orders: Orders) -> None:
    handler = Recorded("bad")
    orders.produce("bad=", "good=")
    async with orders.running(handler, on_failure="aside"):
        await orders.commits(2)
    handler.failing.clear()
    orders.produce("bad=", "good=")
    async with orders.running(handler, on_failure="aside"):
        await orders.commits(4)
    assert handler.done == [("good", 1), ("good", 3)]
    assert orders.keys("aside") == ["bad", "bad"]


@pytest.mark.rule(35)
async def test_released_key_is_handled_in_order(orders: Orders) -> None:
    """Also the messages that arrive while its copies are handled."""
    handler = Recorded("bad")
    orders.produce("bad=", "bad=", "bad=")
    async with orders.running(handler, on_failure="aside"):
        await orders.commits(3)
        handler.failing.clear()
        gate = handler.shut("bad")
        begun = len(handler.begun)
        orders.release(b"bad")
        await until(lambda: len(handler.begun) > begun)
        orders.produce("bad=", "good=")
        await until(lambda: ("good", 4) in handler.done)
        assert len(handler.begun) == begun + 2
        gate.set()
        await until(lambda: len(handler.done) == 5)
    assert [offset for key, offset in handler.done if key == "bad"] == [0, 1, 2, 3]


# --- at most once ----------------------------------------------------------------------------


@pytest.mark.rule(36)
async def test_at_most_once_stores_before_the_handler(orders: Orders) -> None:
    stored: list[int] = []

    async def handle(message: ReceivedMessage) -> None:
        stored.append(orders.committed()[0] - message.offset)

    orders.produce("a=", "b=")
    async with orders.running(handle, mode="at-most-once"):
        await until(lambda: len(stored) == 2)
    assert min(stored) > 0
