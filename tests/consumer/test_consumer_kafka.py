"""Consumers on a real Kafka: the same promises, a few of each kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kit.consumer_world import TIMING, Handler, text
from tests.kit.kafka import KafkaHarness
from tests.kit.until import until
from txbroker.consumer import CommitPolicy, Consumer, ReceivedMessage, Reject
from txbroker.core.consuming import failure
from txbroker.core.consuming.aside import release_record
from txbroker.core.consuming.copies import ASIDE_PARTITIONS, MessageSource, spread
from txbroker.core.records import Record
from txbroker.embedded import EmbeddedKafka

BUG = ValueError("bug")


@pytest.fixture
async def harness(kafka: EmbeddedKafka) -> AsyncIterator[KafkaHarness]:
    made = KafkaHarness(kafka.bootstrap)
    yield made
    await made.close()


def consumer(harness: KafkaHarness, topic: str, **options: Any) -> Consumer:
    given: dict[str, Any] = {
        "group": harness.name("stock"),
        "topics": [topic],
        "retry_interval_s": 0.01,
        "commit": CommitPolicy(max_interval_s=0.05),
        "drain_s": 2.0,
        "topic_prefix": harness.prefix,
        **options,
    }
    return Consumer(harness.bootstrap, **given)


def records(*messages: str) -> list[Record]:
    pairs = [message.partition("=") for message in messages]
    return [Record(key.encode(), value.encode()) for key, _, value in pairs]


async def run(one: Consumer, handler: Any) -> asyncio.Task[None]:
    return asyncio.create_task(one.run(handler))


async def test_partitions_move_without_repeating_anything(harness: KafkaHarness) -> None:
    topic = await harness.create_topic("orders", 4)
    handler, total = Handler(), 0

    async def produce() -> None:
        nonlocal total
        for partition in range(4):
            await harness.foreign(
                topic, partition, *records(*(f"{n % 5}={total + n}" for n in range(50)))
            )
            total += 50

    await produce()
    async with consumer(harness, topic, order="key", **TIMING | {"lease_s": 3.0}) as one:
        tasks = [await run(one, handler)]
        await until(lambda: len(handler.done) == total)
        timing = TIMING | {"lease_s": 3.0}
        async with consumer(harness, topic, order="key", **timing) as two:
            tasks.append(await run(two, handler))
            await until(lambda: len(two.statistics().lag) == len(one.statistics().lag) == 10)
            await produce()
            await until(lambda: len(handler.done) == total)
        await produce()
        await until(lambda: len(handler.done) >= total)
    await asyncio.gather(*tasks)
    assert sorted(handler.done, key=int) == [str(number) for number in range(total)]


async def test_set_aside_and_released(harness: KafkaHarness) -> None:
    topic = await harness.create_topic("orders", 1)
    handler = Handler(bad=BUG, worst=Reject("hopeless"))
    options: dict[str, Any] = {"order": "key", "on_failure": "aside", "local_attempts_max": 1}
    async with consumer(harness, topic, **options) as one:
        task = await run(one, handler)
        await harness.foreign(topic, 0, *records("a=bad", "a=1", "b=2", "a=worst", "a=3"))
        await until(lambda: handler.done == ["2"] and one.statistics().lag[topic, 0] == 0)
        handler.failing["bad"] = None
        door = await harness.consuming_door()
        source = MessageSource(topic, 0, 0)
        number = spread(source[:2], ASIDE_PARTITIONS)
        aside = f"{harness.prefix}.aside.{harness.name('stock')}"
        await door.append(aside, number, [release_record(source, b"a", "checked")])
        await harness.foreign(topic, 0, *records("a=4"))
        await until(lambda: one.statistics().aside_keys == 0)
        await harness.foreign(topic, 0, *records("a=5"))
        await until(lambda: handler.done[-1:] == ["5"])
        one.stop()
        await task
    assert handler.done == ["2", "bad", "1", "3", "4", "5"]
    dead = [
        record
        for partition in range(4)
        for record in await harness.visible(
            f"{harness.prefix}.dead.{harness.name('stock')}", partition
        )
    ]
    assert [record.value for record in dead] == [b"worst"]


async def test_retry_starts_when_due(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "DELAYS_S", (0.5, *range(10, 25)))
    topic = await harness.create_topic("orders", 1)
    handler, times = Handler(bad=[BUG, None]), []

    async def handle(message: ReceivedMessage) -> None:
        if text(message) == "bad":
            times.append(time.monotonic())
        await handler(message)

    async with consumer(harness, topic, order="none", local_attempts_max=1) as one:
        task = await run(one, handle)
        await harness.foreign(topic, 0, *records("a=bad", "a=1"))
        await until(lambda: len(handler.done) == 2)
        one.stop()
        await task
    assert handler.done == ["1", "bad"]
    assert 0.4 <= times[1] - times[0] < 0.5 + 1 + 1


async def test_at_most_once_and_broadcasting_start(harness: KafkaHarness, tmp_path: Any) -> None:
    from txbroker.consumer import InFile

    topic = await harness.create_topic("orders", 2)
    await harness.foreign(topic, 0, *records("a=0"))
    group, file = Handler(), Handler()
    async with (
        consumer(harness, topic, mode="at-most-once") as one,
        consumer(harness, topic, group=None, store=InFile(tmp_path / "one.db")) as two,
    ):
        tasks = [await run(one, group), await run(two, file)]
        await harness.foreign(topic, 1, *records("a=1"))
        await group.does("0", "1")
        await file.does("1")
        one.stop()
        two.stop()
        await asyncio.gather(*tasks)
    async with consumer(harness, topic, mode="at-most-once") as one:
        task = await run(one, group)
        await harness.foreign(topic, 0, *records("a=2"))
        await group.does("0", "1", "2")
        one.stop()
        await task
