"""`InKafka` on a real Kafka: requests that are lost or wait, for both transaction protocols."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.kafka.relay import (
    END_TXN,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    Fate,
    Relay,
    fates,
)
from tests.kit.kafka import KafkaHarness
from tests.kit.processing import PARTITIONS, Processing, passed_on
from tests.kit.until import until
from txbroker.consumer import rounds
from txbroker.core.records import Record
from txbroker.door.writing import Copy, Refused, Unknown
from txbroker.kafka.client.producer import BatchRefused, Producer
from txbroker.kafka.protocol.codes import Code

PROTOCOLS = [1, pytest.param(2, marks=pytest.mark.second_protocol)]


@pytest.fixture
async def orders(world: KafkaHarness, monkeypatch: pytest.MonkeyPatch) -> Processing:
    monkeypatch.setattr(rounds, "_FLUSH_MIN_S", 0.2)
    return await Processing.begin(world)


@pytest.mark.rule(44)
@pytest.mark.parametrize("transactions", PROTOCOLS)
async def test_broken_requests_repeat_and_lose_no_output(
    orders: Processing, make_relay: Callable[..., Relay], transactions: int
) -> None:
    """Each kind of request breaks once before the broker has it, and once after."""
    relay = make_relay()
    doors = orders.doors(opener=relay.open, transactions=transactions)
    count = 0
    async with orders.running(orders.pass_on, doors) as consumer:
        for key in (PRODUCE, TXN_OFFSET_COMMIT, END_TXN):
            for fate in (Fate.LOSE_ANSWER, Fate.HOLD_AND_RESET):
                relay.decide = fates(key, fate)
                given = [f"a={number}" for number in range(count, count + 5)]
                await orders.produce(*given)
                count += len(given)
                await orders.done(count)
        assert consumer._engine.settlement.handled == count
    assert await orders.prices_of() == passed_on([f"a={number}" for number in range(count)])


@pytest.mark.rule(46)
@pytest.mark.parametrize("key", [TXN_OFFSET_COMMIT, END_TXN])
async def test_partitions_are_released_though_a_transaction_waits(
    orders: Processing, make_relay: Callable[..., Relay], key: int
) -> None:
    """The next owner waits until the transaction has ended, and then repeats or loses nothing."""
    relay = make_relay()
    doors = orders.doors(opener=relay.open, request_timeout_s=1.0, transaction_timeout_s=2.0)
    given = [[f"{partition}={n}" for n in range(20)] for partition in range(PARTITIONS)]
    async with orders.running(orders.pass_on, doors, drain_s=0.5):
        for partition, each in enumerate(given):
            await orders.produce(*each[:10], partition=partition)
        await orders.done(20)
        relay.decide = fates(key, *[Fate.HOLD] * 100)
        for partition, each in enumerate(given):
            await orders.produce(*each[10:], partition=partition)
        await relay.caught()
        began = time.monotonic()
        async with orders.running(orders.pass_on) as two:
            await until(lambda: any(topic == orders.orders for topic, _ in two.statistics().lag))
            assert time.monotonic() - began < 10
            relay.decide = fates(-1)
            for held in relay.held:
                held.send()
            await orders.done(40)
    assert await orders.prices_of() == passed_on([text for each in given for text in each])


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("transactions", PROTOCOLS)
@pytest.mark.parametrize("kind", ["large", "small topic", "no key", "future"])
async def test_refused_copies_are_found_quickly(
    world: KafkaHarness, transactions: int, kind: str
) -> None:
    """One of 1,000, with some requests."""
    topic = await world.create_topic(
        "out",
        cleanup_policy="compact" if kind == "no key" else "delete",
        max_message_bytes="20000" if kind == "small topic" else "1048588",
    )
    door = world.made_door(transactions=transactions)
    await door.start()
    copies = [Copy(topic, 0, Record(b"%d" % n, bytes(200), timestamp_ms=1)) for n in range(1000)]
    bad = {
        "large": Record(b"k", bytes(2 << 20)),
        "small topic": Record(b"k", bytes(30_000)),
        "no key": Record(None, b""),
        "future": Record(b"k", b"", timestamp_ms=1 << 50),
    }[kind]
    copies[700] = Copy(topic, 0, bad)
    began = time.monotonic()
    with pytest.raises(Refused) as caught:
        await door.store(world.name("g"), copies)
    took_s = time.monotonic() - began
    assert list(caught.value.indexes) == [700]
    print(f"{kind}, protocol {transactions}: {took_s:.2f} s")
    assert took_s < 5
    del copies[700]
    await door.store(world.name("g"), copies)
    assert len(await world.visible(topic)) == 999
    await door.close()


@pytest.mark.parametrize("transactions", PROTOCOLS)
@pytest.mark.parametrize(
    ("code", "lasting"),
    [
        (Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, True),
        (Code.INVALID_TXN_STATE, False),
        (Code.OUT_OF_ORDER_SEQUENCE, False),
    ],
)
async def test_copies_are_not_blamed_for_other_errors(
    world: KafkaHarness,
    monkeypatch: pytest.MonkeyPatch,
    transactions: int,
    code: Code,
    lasting: bool,
) -> None:
    topic = await world.create_topic("out")
    door = world.made_door(transactions=transactions)
    await door.start()

    async def refuse(*_arguments: Any) -> None:
        raise BatchRefused((topic, 0), code, None)

    with monkeypatch.context() as patch:
        patch.setattr(Producer, "produce", refuse)
        with pytest.raises(Unknown) as caught:
            await door.store(world.name("g"), [Copy(topic, 0, Record(b"k", b""))])
        assert caught.value.lasting is lasting
    await door.close()
