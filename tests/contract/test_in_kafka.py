"""`InKafka`: outputs and positions together, on a Kafka in memory and on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import pytest
from aiokafka.partitioner import DefaultPartitioner

from tests.kit.kafka import KafkaHarness
from tests.kit.memory import MemoryHarness
from tests.kit.processing import PARTITIONS, Doors, Processing, passed_on
from tests.kit.until import until
from txbroker import failpoints
from txbroker.consumer import Consumer, Message, Outputs, ReceivedMessage, rounds

CRASHES = (
    "consumer.outputs_collected",
    "consumer.copied",
    "consumer.ending",
    "consumer.committing",
    "consumer.committed",
)
# A commit in memory is one step; moments outside of it are the same on both.
_INSIDE = ("consumer.copied", "consumer.ending")
KEYS = 5


class Crash(BaseException):
    """The process ends."""


@pytest.fixture
async def orders(world: Any, monkeypatch: pytest.MonkeyPatch) -> Processing:
    monkeypatch.setattr(rounds, "_FLUSH_MIN_S", 0.2)
    monkeypatch.setattr(rounds, "_PAUSE_MAX_S", 0.2)
    return await Processing.begin(world)


def texts(count: int, first: int = 0) -> list[str]:
    return [f"k{number % KEYS}={number}" for number in range(first, first + count)]


async def produce_by_key(orders: Processing, *each: str) -> None:
    """Write `key=value`: a key has one partition."""
    for partition in range(PARTITIONS):
        mine = [text for text in each if int(text[1]) % PARTITIONS == partition]
        await orders.produce(*mine, partition=partition)


# --- stored outputs --------------------------------------------------------------------------


async def test_outputs_keep_everything(world: Any, orders: Processing) -> None:
    keys = [b"", b"k", b"some-key", bytes(range(200)), *(b"%d" % n for n in range(20))]

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        out.send(Message(orders.prices, b"given", None, partition=1))
        headers = (("one", b"1"), ("none", None), ("one", b""))
        out.send(Message(orders.prices, b"k", b"v", headers, 0, timestamp_ms=1_700_000_000_000))
        out.send(Message(orders.prices, None, b"without key"))
        for key in keys:
            out.send(Message(orders.prices, key, b"by key"))

    await orders.produce("message", partition=1)
    async with orders.running(handle):
        await orders.done(1)
    (source,) = await world.visible(orders.orders, 1)
    found = [(n, r) for n in range(PARTITIONS) for r in await world.visible(orders.prices, n)]
    (tombstone,) = [(n, r.value) for n, r in found if r.key == b"given"]
    assert tombstone == (1, None)
    (whole,) = [(n, r) for n, r in found if r.value == b"v"]
    assert (whole[0], whole[1].timestamp_ms) == (0, 1_700_000_000_000)
    assert tuple(whole[1].headers) == (("one", b"1"), ("none", None), ("one", b""))
    # As all others it has the time of its source.
    (keyless,) = [(n, r.timestamp_ms) for n, r in found if r.key is None]
    assert keyless == (1, source.timestamp_ms)
    numbers, choose = list(range(PARTITIONS)), DefaultPartitioner()
    assert sorted((n, r.key) for n, r in found if r.value == b"by key") == sorted(
        (choose(key, numbers, numbers), key) for key in keys
    )


@pytest.mark.parametrize("order", ["none", "partition", "key"])
async def test_processed_once_and_in_order(orders: Processing, order: Any) -> None:
    given = texts(300)
    await produce_by_key(orders, *given)
    async with orders.running(orders.pass_on, order=order, in_flight_max=8) as consumer:
        await until(lambda: consumer._engine.settlement.handled == len(given))
        await orders.done(len(given))
        assert set(consumer.statistics().lag.values()) == {0}
    found, expected = await orders.prices_of(), passed_on(given)
    if order == "none":
        found = {key: sorted(values) for key, values in found.items()}
        expected = {key: sorted(values) for key, values in expected.items()}
    assert found == expected


# --- crashes ---------------------------------------------------------------------------------


async def crashed(orders: Processing, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a consumer until its process ends at a moment, when it has processed 20 messages."""
    over, count = asyncio.Event(), 0

    def crash(name: str) -> None:
        nonlocal count
        count += name == moment
        if count == (15 if moment == CRASHES[0] else 1):
            over.set()
        if over.is_set():
            raise Crash

    doors = orders.doors()
    consumer = orders.consumer(doors, in_flight_max=4, drain_s=0.2)
    await consumer.start()
    task = asyncio.create_task(consumer.run(orders.pass_on))
    await produce_by_key(orders, *texts(20))
    await orders.done(20)
    monkeypatch.setattr(failpoints, "hook", crash)
    await produce_by_key(orders, *texts(40, 20))
    await over.wait()
    await gone(orders, doors, consumer)
    with contextlib.suppress(Crash):
        await consumer.aclose()
    await asyncio.gather(task, return_exceptions=True)
    monkeypatch.setattr(failpoints, "hook", None)


async def gone(orders: Processing, doors: Doors, consumer: Consumer) -> None:
    """Cut a consumer off, remove it from its group, and end its transaction, as time does."""
    await doors.cut()
    door = await orders.world.consuming_door()
    for name, _host, _partitions in (await door.describe(orders.group)).members:
        await orders.world.remove_member(orders.group, name)
    await door.close()
    if isinstance(orders.world, KafkaHarness):
        member: Any = consumer._readers[0][1]
        await orders.world.end_transaction(member._offsets._writer._transactional_id)


@pytest.mark.rule(44)
@pytest.mark.parametrize(
    ("world", "moment"),
    [("kafka" if moment in _INSIDE else "memory", moment) for moment in CRASHES],
    indirect=["world"],
)
async def test_crash_repeats_and_loses_no_output(
    orders: Processing, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await crashed(orders, moment, monkeypatch)
    async with orders.running(orders.pass_on):
        await orders.done(60)
    assert await orders.prices_of() == passed_on(texts(60))


# --- answers that are lost, owners that change -----------------------------------------------


@pytest.mark.rule(44)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_lost_answer_repeats_and_loses_no_output(
    world: Any, orders: Processing, stored: bool
) -> None:
    called: list[str] = []

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        called.append(message.id)
        await orders.pass_on(message, out)

    losing = await world.losing_door(orders.group, stored=stored, copies=True)
    if isinstance(world, MemoryHarness):  # not the answer to the claim
        world.kafka.group(orders.group).lost_commit = None
    async with orders.running(handle, Doors(lambda: losing)):
        if isinstance(world, MemoryHarness):
            await world.losing_door(orders.group, stored=stored, copies=True)
        await produce_by_key(orders, *texts(30))
        await orders.done(30)
        assert len(called) == 30
    assert await orders.prices_of() == passed_on(texts(30))


@pytest.mark.rule(45)
async def test_replaced_member_stores_no_output(world: Any, orders: Processing) -> None:
    """Its handlers end after another member has processed their messages."""
    gate, seen = asyncio.Event(), 0

    async def late(message: ReceivedMessage, out: Outputs) -> None:
        nonlocal seen
        seen += 1
        with contextlib.suppress(asyncio.CancelledError):
            await gate.wait()
        await orders.pass_on(message, out)

    await produce_by_key(orders, *texts(10))
    async with orders.running(late, in_flight_max=10, order="none", drain_s=0.1):
        await until(lambda: seen == 10)
        door = await world.consuming_door()
        ((name, _host, _),) = (await door.describe(orders.group)).members
        await world.remove_member(orders.group, name)
        await door.close()
        async with orders.running(orders.pass_on):
            gate.set()
            await orders.done(10)
    found = await orders.prices_of()
    assert {key: sorted(values) for key, values in found.items()} == passed_on(texts(10))


async def test_rebalance_repeats_and_loses_no_output(orders: Processing) -> None:
    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        await asyncio.sleep(0.002)
        await orders.pass_on(message, out)

    async with orders.running(handle, in_flight_max=4) as one:
        await produce_by_key(orders, *texts(100))
        async with orders.running(handle, in_flight_max=4) as two:
            await until(lambda: any(topic == orders.orders for topic, _ in two.statistics().lag))
            await produce_by_key(orders, *texts(100, 100))
            await until(
                lambda: one._engine.settlement.handled + two._engine.settlement.handled > 150
            )
        await produce_by_key(orders, *texts(100, 200))
        await orders.done(300)
    assert await orders.prices_of() == passed_on(texts(300))


# --- outputs that are refused ----------------------------------------------------------------


async def refused_output(world: Any, orders: Processing, why: str) -> tuple[Message, str]:
    """Return an output that Kafka refuses, and why it says so."""
    if why == "too large":
        return Message(orders.prices, b"k1", bytes(2 << 20)), "large"
    if why == "larger than the topic takes":
        small = await world.create_topic("small", PARTITIONS, max_message_bytes="2000")
        return Message(small, b"k1", bytes(5000)), "large"
    if why == "no topic":
        return Message(world.name("missing"), b"k1", b""), "does not exist"
    if why == "no partition":
        return Message(orders.prices, b"k1", b"", partition=PARTITIONS), "no partition 2"
    if why == "no such name":
        return Message("no/topic", b"k1", b""), "does not exist"
    if why == "in the future":
        return Message(orders.prices, b"k1", b"", timestamp_ms=1 << 50), "timestamp"
    compacted = await world.create_topic("compacted", PARTITIONS, cleanup_policy="compact")
    return Message(compacted, None, b"without key", partition=0), "rejects the message"


REFUSED = (
    "too large",
    "larger than the topic takes",
    "no topic",
    "no partition",
    "no such name",
    "in the future",
    "without key",
)


@pytest.mark.rule(44)
@pytest.mark.parametrize(
    ("world", "why"),
    [
        *(("kafka", why) for why in REFUSED),
        # The Kafka in memory compacts on demand.
        *(("memory", why) for why in REFUSED if why != "without key"),
    ],
    indirect=["world"],
)
async def test_refused_output_is_a_dead_letter_alone(
    world: Any, orders: Processing, why: str
) -> None:
    refused, reason = await refused_output(world, orders, why)
    others = why in ("larger than the topic takes", "without key")

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        await orders.pass_on(message, out)
        if others:
            out.send(Message(refused.topic, b"k", message.value))
        if message.value in (b"7", b"11"):
            out.send(refused)

    given = texts(30)
    await produce_by_key(orders, *given)
    async with orders.running(handle, in_flight_max=16) as consumer:
        await orders.done(len(given))
        await until(lambda: consumer.statistics().counts.get("dead") == 2)
    kept = [text for text in given if text.partition("=")[2] not in ("7", "11")]
    assert await orders.prices_of() == passed_on(kept)
    assert await orders.dead() == ["11", "7"]
    causes = [
        value for name, value in (await orders.dead_letters())[0].headers if name == "txb-cause"
    ]
    assert re.search(reason, (causes[0] or b"").decode())
    if others:
        assert len(await orders.visible(refused.topic)) == len(kept)


async def test_topic_that_is_deleted_refuses_only_its_outputs(
    world: Any, orders: Processing
) -> None:
    gone = await world.create_topic("gone")

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        await orders.pass_on(message, out)
        if message.key == b"k1":
            out.send(Message(gone, message.key, message.value))

    async with orders.running(handle) as consumer:
        await produce_by_key(orders, *texts(10))
        await orders.done(10)
        await world.delete_topic(gone)
        await produce_by_key(orders, *texts(10, 10))
        await orders.done(20)
        assert consumer.statistics().counts["dead"] == 2
    kept = [text for text in texts(20) if text not in ("k1=11", "k1=16")]
    assert await orders.prices_of() == passed_on(kept)
    assert await orders.dead() == ["11", "16"]
