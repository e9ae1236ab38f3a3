"""Moving to another number of half partitions, as in docs/operate/partition-count.md."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.kafka import KafkaHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.core.records import Message
from txbroker.core.routing import parse_id
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import ConfigurationError, RequestError

OLD, NEW = 2, 3


@pytest.fixture
async def both(kafka: EmbeddedKafka) -> AsyncIterator[tuple[Service, Service]]:
    """The installation that there is, and one with more half partitions on the same Kafka."""
    async with FakeEndpoint().serve() as desk:
        made = [
            Service(KafkaHarness(kafka.bootstrap), desk, partitions=count) for count in (OLD, NEW)
        ]
        for service in made:
            await service.start()
        yield made[0], made[1]
        for service in made:
            await service.stop()
            await service.world.close()


async def test_old_installation_drains_while_new_one_works(both: tuple[Service, Service]) -> None:
    old, new = both
    topic = await old.topic()
    left = await old.prepare(Message(topic, None, b"1"), order_key="a")
    # To keep the order of a key, wait until the old installation holds none of it.
    await old.commit(left)
    ids = [await new.prepare(Message(topic, None, b"2"), order_key="a")]
    ids += [await new.prepare(Message(topic, None, b"x"), order_key=str(n)) for n in range(20)]
    assert {parse_id(id).partition for id in ids} == set(range(NEW))
    await new.commit(ids[0])
    assert await old.values(topic) == [b"1", b"2"]
    # Neither knows what the other holds: a transaction is decided where it was prepared.
    with pytest.raises(RequestError):
        await new.act(left, "commit")
    # A prepare that is sent again to the new one is another transaction.
    for service in both:
        status, _ = await service.send(Message(topic, None, b"y"), dedup_key="order-17")
        assert status == 201
    assert len(await old.listed()) == 1
    await old.act((await old.listed())[0]["id"], "rollback")
    assert await old.listed() == []
    await old.stop()
    assert len(await new.listed()) == 21
    await new.commit(ids[1])


async def test_added_half_partitions_are_undone_by_moving(both: tuple[Service, Service]) -> None:
    """After an alteration of the topics the running proxies drain the installation."""
    old, _ = both
    topic = await old.topic()
    id = await old.prepare(Message(topic, None, b"v"))
    for name in ("half", "op", "checkpoint", "parked"):
        await old.world.add_partitions(old.world.name(name), NEW)
    await old.proxy.broker.partitions.look_at_topics()
    ready = await old.get("/readyz")
    assert ready["ready"]
    (problem,) = ready["problems"]
    assert f"made with {OLD}" in problem
    # It goes on with as many as before.
    more = [await old.prepare(Message(topic, None, b"w"), order_key=str(n)) for n in range(20)]
    assert {parse_id(each).partition for each in more} == set(range(OLD))
    for each in (id, *more):
        await old.commit(each)
    await until(lambda: _empty(old))
    await old.stop()
    with pytest.raises(ConfigurationError, match=f"made with {OLD}"):
        await old.start()


async def _empty(service: Service) -> bool:
    return await service.listed() == []
