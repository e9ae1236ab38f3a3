"""A relay's writer whose requests are late, or get no answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.kafka.relay import END_TXN, INIT_PRODUCER_ID, PRODUCE, Fate, Relay, cancelling, fates
from tests.kit.kafka import KafkaHarness
from txbroker.core.records import Record
from txbroker.door.consuming import ConsumingDoor, TopicSpec
from txbroker.door.writing import Copy, Fenced, PositionRecord, Refused, Unknown, Writer
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.producer import BatchRefused
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.copies import cause_of

PROTOCOLS = [1, pytest.param(2, marks=pytest.mark.second_protocol)]
"""Kafka's transaction protocols."""


class Late:
    """Writers of one position, one of them through a relay that breaks on purpose."""

    def __init__(self, world: KafkaHarness, target: str) -> None:
        self.world = world
        self.target = target

    async def writer(self, relay: Relay | None = None, **settings: Any) -> Writer:
        if relay is not None:
            settings["opener"] = relay.open
        door: ConsumingDoor = await self.world.consuming_door(**settings)
        topic = self.world.name("relay")
        await door.create([TopicSpec(topic, 1, -1, {"cleanup.policy": "compact"})])
        return door.writer(self.world.name("outbox"), PositionRecord(topic, "outbox/0"))

    async def settled(self) -> None:
        """Wait until readers of both topics wait for no transaction."""
        door = await self.world.consuming_door()
        for topic in (self.target, self.world.name("relay")):
            await door.settled_end((topic, 0))

    def copy(self, value: bytes) -> list[Copy]:
        return [Copy(self.target, 0, Record(None, value))]

    async def visible(self) -> list[bytes | None]:
        return [record.value for record in await self.world.visible(self.target)]


@pytest.fixture
async def late(world: KafkaHarness) -> Late:
    return Late(world, await world.create_topic("target"))


@pytest.mark.rule(47)
async def test_position_is_read_after_the_predecessor_is_fenced(
    late: Late, make_relay: Callable[..., Relay]
) -> None:
    relay = make_relay(fates(INIT_PRODUCER_ID, Fate.HOLD))
    first, second = await late.writer(), await late.writer(relay)
    await first.claim()
    claim = asyncio.create_task(second.claim())
    held = await relay.caught()
    await first.write(late.copy(b"a"))
    await first.commit(b"1")
    held.send()
    assert await claim == b"1"


@pytest.mark.parametrize("transactions", PROTOCOLS)
async def test_writer_that_its_late_claim_fences_goes_on(
    late: Late, make_relay: Callable[..., Relay], transactions: int
) -> None:
    """Kafka may execute a request after another one was answered, and fences the writer."""
    relay = make_relay(fates(INIT_PRODUCER_ID, Fate.HOLD_AND_RESET))
    writer = await late.writer(relay, transactions=transactions)
    await writer.claim()
    await writer.write(late.copy(b"a"))
    await writer.write(late.copy(b"b"))
    await (await relay.caught()).release()
    with pytest.raises(Unknown):
        await writer.commit(b"1")
    assert await writer.claim() is None
    await writer.write(late.copy(b"a"))
    await writer.commit(b"1")
    assert await late.visible() == [b"a"]


@pytest.mark.rule(47)
@pytest.mark.parametrize("transactions", PROTOCOLS)
@pytest.mark.parametrize("key", [PRODUCE, END_TXN])
@pytest.mark.parametrize("call", ["claim", "write", "commit"])
async def test_cancelled_call_leaves_nothing_open(
    late: Late, make_relay: Callable[..., Relay], transactions: int, key: int, call: str
) -> None:
    """Readers and the claims of other positions would wait until Kafka ends it."""
    relay = make_relay()
    writer, next_owner = await late.writer(relay, transactions=transactions), await late.writer()
    if call != "claim":
        await writer.claim()
        await writer.write(late.copy(b"a"))
    calls = {
        "claim": writer.claim,
        "write": lambda: writer.write(late.copy(b"b")),
        "commit": lambda: writer.commit(b"1"),
    }
    cancelled: asyncio.Task[Any] = asyncio.ensure_future(calls[call]())
    relay.decide = cancelling(key, cancelled)
    await asyncio.wait([cancelled])
    await writer.abort()
    async with asyncio.timeout(2):
        await late.settled()
        await next_owner.claim()


async def test_end_by_kafka_after_its_timeout_is_no_other_process(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka fences the producer of a transaction that took too long, as a successor would."""
    first, second = await late.writer(), await late.writer()
    await first.claim()
    await first.write(late.copy(b"a"))
    await first.write(late.copy(b"b"))
    await second.claim()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 1000)
    with pytest.raises(KafkaUnavailable, match="too many rows: divide it") as caught:
        await first.commit(b"1")
    assert not isinstance(caught.value, Fenced)


@pytest.mark.rule(47)
@pytest.mark.parametrize("fate", [Fate.LOSE_ANSWER, Fate.HOLD_AND_RESET])
async def test_unknown_end_is_known_after_the_next_claim(
    late: Late, make_relay: Callable[..., Relay], fate: Fate
) -> None:
    relay = make_relay()
    writer = await late.writer(relay)
    assert await writer.claim() is None
    await writer.write(late.copy(b"a"))
    relay.decide = fates(END_TXN, fate)
    # A repeated end may show what became of the first one.
    try:
        await writer.commit(b"1")
    except KafkaUnavailable:
        position = await writer.claim()
    else:
        position = await (await late.writer()).claim()
    assert await late.visible() == ([b"a"] if position == b"1" else [])
    if position is None:
        await writer.write(late.copy(b"a"))
        await writer.commit(b"1")
    assert await late.visible() == [b"a"]


@pytest.mark.rule(47)
async def test_messages_and_position_have_one_end(
    late: Late, make_relay: Callable[..., Relay]
) -> None:
    requests: list[int] = []

    def passed(key: int) -> Fate:
        requests.append(key)
        return Fate.PASS

    writer = await late.writer(make_relay(passed))
    await writer.claim()
    for number in (b"1", b"2"):
        requests.clear()
        await writer.write(late.copy(b"first"))
        await writer.write(late.copy(b"second"))
        await writer.commit(number)
        assert requests.count(END_TXN) == 1


@pytest.mark.parametrize("transactions", PROTOCOLS)
async def test_refused_record_of_a_later_piece_is_named(
    world: KafkaHarness, transactions: int
) -> None:
    """Version 1 names no record of a batch, and a part of the transaction is written already."""
    topic, positions = world.name("compacted"), world.name("positions")
    door = KafkaConsumingDoor(world.settings(transactions=transactions))
    await door.start()
    compacted = {"cleanup.policy": "compact"}
    await door.create([TopicSpec(name, 1, 1, compacted) for name in (topic, positions)])
    writer = door.writer("poison", PositionRecord(positions, "poison"))
    keys, found = [b"a", b"b", None, b"c"], None
    try:
        for _attempt in range(3):
            await writer.claim()
            try:
                await writer.write([Copy(topic, 0, Record(b"first", b""))])
                await writer.write([Copy(topic, 0, Record(key, b"")) for key in keys])
                await writer.commit(b"1")
            except Unknown:
                with pytest.raises(Unknown):  # without an earlier piece it would commit the rest
                    await writer.commit(b"1")
                continue
            except Refused as error:
                found = list(error.indexes), error.cause.code
                break
        assert found == ([3], "bad_record")
        assert await writer.claim() is None
    finally:
        await door.close()


def test_reason_of_a_plugin_is_shown() -> None:
    why = "rejected by the record interceptor SchemaValidation: no schema id"
    assert why in cause_of(BatchRefused(("orders", 0), Code.INVALID_RECORD, why)).message
    assert why in cause_of(BatchRefused(("orders", 0), Code.POLICY_VIOLATION, why)).message
