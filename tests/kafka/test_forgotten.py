"""A Kafka that forgets idle producers within seconds, as others do after days: all goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator

import pytest

from tests.kafka.small_turns import claim, keys, progress, write
from tests.kit.kafka import KafkaHarness
from txbroker.core.records import Record
from txbroker.door.writing import Unknown
from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka
from txbroker.kafka.client.client import Client
from txbroker.kafka.protocol.schemas import ListTransactionsV0, describe_producers
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


async def producer_ids(client: Client, topic: str, partition: int) -> set[int]:
    """Return the producers whose last sequence the only broker still knows."""
    answer = await client.ask_any(describe_producers({topic: [partition]}), "states")
    ((_name, partitions),) = answer.topics
    ((_number, code, _message, producers),) = partitions
    assert code == 0
    return {producer[0] for producer in producers}


async def transactional_ids(client: Client) -> set[str]:
    """Return the transactional ids that the only broker still knows."""
    answer = await client.ask_any(ListTransactionsV0([], []), "states")
    assert answer.error_code == 0
    return {each[0] for each in answer.transaction_states}


async def until_forgotten(known: Callable[[], Awaitable[Collection[object]]]) -> None:
    """Wait until Kafka knows none of these any more."""
    backoff = Backoff(BOUND_S, 0.05)
    while await known():
        assert await backoff.pause(), "Kafka does not forget"


@pytest.mark.rule(13)
async def test_expired_transactional_ids_lead_to_a_claim(
    world: KafkaHarness, onlooker: Client
) -> None:
    topic = await world.create_topic("target")
    partition = (await world.door()).partition(0)
    await partition.claim(claim("before"))
    for op in (1, 2):
        await (await write(partition, "before", op, topic)).visible()
    ours = {f"{world.name('half')}-0-{side}" for side in "ab"}
    assert ours <= await transactional_ids(onlooker)

    async def known() -> set[str]:
        return ours & await transactional_ids(onlooker)

    await until_forgotten(known)
    async with asyncio.timeout(BOUND_S):
        for _ in range(2):
            with pytest.raises(Unknown):
                await write(partition, "before", 3, topic)
        found = await partition.claim(claim("after"))
        assert found.progress == progress("before", 2)
        for op in (3, 4, 5):
            await (await write(partition, "after", op, topic)).visible()
    written = [b"before-1", b"before-2", b"after-3", b"after-4", b"after-5"]
    assert await keys(world, topic) == written


async def test_later_owner_fences_owner_with_expired_ids(
    world: KafkaHarness, onlooker: Client
) -> None:
    topic = await world.create_topic("target")
    earlier = (await world.door("one")).partition(0)
    later = (await world.door("two")).partition(0)
    await earlier.claim(claim("earlier"))
    await (await write(earlier, "earlier", 1)).visible()

    async def known() -> list[str]:
        return [id for id in await transactional_ids(onlooker) if id.startswith(world.prefix)]

    await until_forgotten(known)
    await later.claim(claim("later"))
    for _ in range(2):
        with pytest.raises(Unknown):
            await write(earlier, "earlier", 2, topic)
    await (await write(later, "later", 2, topic)).visible()
    assert await keys(world, topic) == [b"later-2"]


@pytest.mark.parametrize("before", [1, 3])
async def test_appends_continue_after_producer_id_expired(
    world: KafkaHarness, onlooker: Client, before: int
) -> None:
    partition = (await world.door()).partition(0)

    async def append(number: int) -> None:
        where = await partition.half.append([Record(b"%d" % number, b"")])
        assert where.base_offset == number
        await partition.store([Record(b"snapshot/0/%d" % number, b"")])

    async def known() -> set[int]:
        half = await producer_ids(onlooker, world.name("half"), 0)
        return half or await producer_ids(onlooker, world.name("checkpoint"), 0)

    for number in range(before):
        await append(number)
    assert await known()
    await until_forgotten(known)
    for number in range(before, before + 3):
        await append(number)
    stored = [b"%d" % number for number in range(before + 3)]
    assert await keys(world, world.name("half")) == stored
    assert len((await partition.claim(claim("reader"))).snapshots) == before + 3
