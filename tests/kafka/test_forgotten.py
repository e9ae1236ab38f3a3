"""A Kafka that forgets idle producers within seconds, as others do after days: all goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.kafka.producer_states import producer_ids, transactional_ids
from tests.kit.kafka import KafkaHarness, now_ms
from txbroker.core.records import LOG_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import PromotionTxn, PromotionTxnLost, TargetRecord
from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka
from txbroker.kafka.client.client import Client
from txbroker.net.timers import Backoff

FORGETFUL = {
    "transactional.id.expiration.ms": "2000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
    "producer.id.expiration.ms": "2000",
    "producer.id.expiration.check.interval.ms": "200",
}
BOUND_S = 30.0


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    """A Kafka of these tests' own, which forgets."""
    version = os.environ.get("TXBROKER_TEST_KAFKA_VERSION", DEFAULT_VERSION)
    with EmbeddedKafka(version=version, properties=FORGETFUL) as server:
        yield server


@pytest.fixture
async def onlooker(world: KafkaHarness) -> AsyncIterator[Client]:
    """A connection to the broker, for its state."""
    client = Client(world.settings("onlooker"))
    yield client
    await client.close()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    backoff = Backoff(BOUND_S, 0.05)
    while not await holds():
        assert await backoff.pause(), "Kafka does not forget"


def claim(name: str) -> Claim:
    return Claim(LOG_VERSION, name, "one", "http://127.0.0.1:1")


def turn(name: str, op: int, *promoted: TargetRecord) -> PromotionTxn:
    return PromotionTxn(promoted, (), Checkpoint(LOG_VERSION, name, op, op))


@pytest.mark.rule(13)
async def test_expired_transactional_ids_lead_to_a_claim(
    world: KafkaHarness, onlooker: Client
) -> None:
    topic = await world.create_topic("target")
    partition = (await world.door()).partition(0)
    await partition.claim(claim("before"))
    for op in (1, 2):
        target = TargetRecord(topic, 0, Record(b"%d" % op, b"", (), now_ms()))
        await (await partition.write(turn("before", op, target))).visible()
    ours = {f"{world.name('half')}-0-{side}" for side in "ab"}
    assert ours <= await transactional_ids(onlooker)

    async def forgotten() -> bool:
        return not ours & await transactional_ids(onlooker)

    await until(forgotten)
    async with asyncio.timeout(BOUND_S):
        for _ in range(2):
            with pytest.raises(PromotionTxnLost):
                await partition.write(
                    turn("before", 3, TargetRecord(topic, 0, Record(b"lost", b"")))
                )
        found = await partition.claim(claim("after"))
        assert found.progress == turn("before", 2).progress
        for op in (3, 4, 5):
            target = TargetRecord(topic, 0, Record(b"%d" % op, b"", (), now_ms()))
            await (await partition.write(turn("after", op, target))).visible()
    keys = [record.key for record in await world.visible(topic)]
    assert keys == [b"1", b"2", b"3", b"4", b"5"]


async def test_later_owner_fences_owner_with_expired_ids(
    world: KafkaHarness, onlooker: Client
) -> None:
    topic = await world.create_topic("target")
    earlier = (await world.door("one")).partition(0)
    later = (await world.door("two")).partition(0)
    await earlier.claim(claim("earlier"))
    await (await earlier.write(turn("earlier", 1))).visible()

    async def forgotten() -> bool:
        return not any(id.startswith(world.prefix) for id in await transactional_ids(onlooker))

    await until(forgotten)
    await later.claim(claim("later"))
    zombie = TargetRecord(topic, 0, Record(b"zombie", b"", (), now_ms()))
    for _ in range(2):
        with pytest.raises(PromotionTxnLost):
            await earlier.write(turn("earlier", 2, zombie))
    good = TargetRecord(topic, 0, Record(b"good", b"", (), now_ms()))
    await (await later.write(turn("later", 2, good))).visible()
    assert [record.key for record in await world.visible(topic)] == [b"good"]


@pytest.mark.parametrize("before", [1, 3])
async def test_appends_continue_after_producer_id_expired(
    world: KafkaHarness, onlooker: Client, before: int
) -> None:
    partition = (await world.door()).partition(0)
    for number in range(before):
        await partition.half.append([Record(b"%d" % number, b"")])
        await partition.store([Record(b"snapshot/0/%d" % number, b"")])

    async def forgotten() -> bool:
        return not (
            await producer_ids(onlooker, world.name("half"), 0)
            or await producer_ids(onlooker, world.name("checkpoint"), 0)
        )

    assert not await forgotten()
    await until(forgotten)
    for number in range(before, before + 3):
        where = await partition.half.append([Record(b"%d" % number, b"")])
        assert where.base_offset == number
        await partition.store([Record(b"snapshot/0/%d" % number, b"")])
    keys = [record.key for record in await world.visible(world.name("half"))]
    assert keys == [b"%d" % number for number in range(before + 3)]
    assert len((await partition.claim(claim("reader"))).snapshots) == before + 3
