"""A consumer's door with too few rights: sentences with the next step, and nothing half done."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.until import until
from tests.secure.secure_world import AllowedWorld, SecureKafka
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec
from txbroker.door.writing import Copy, Refused
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.acls import AclRole, Resource, Right
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.door.group_offsets import CommittedOffsets


class Outsider:
    """Commits without being in a group."""

    generation, member_id = -1, ""
    instance: str | None = None


@pytest.fixture
async def world(secure_kafka: SecureKafka) -> AsyncIterator[AllowedWorld]:
    """A user without rights."""
    made = AllowedWorld(secure_kafka)
    yield made
    await made.close()


def right(resource: Resource, name: str, *operations: str, prefixed: bool = False) -> Right:
    return Right(next(iter(AclRole)), resource, name, prefixed, operations, "a test")


async def test_missing_rights_are_named(world: AllowedWorld) -> None:
    topic_kind, group_kind, transactional_id = Resource
    orders, dead = await world.create_topic("orders"), await world.create_topic("dead")
    group = world.name("g")
    door = KafkaConsumingDoor(world.settings())
    await door.start()
    try:
        with pytest.raises(ConfigurationError, match=f"read topic {orders}: grant Read"):
            await door.topics([orders])
        assert orders not in await door.topics()
        with pytest.raises(ConfigurationError, match="Authorization failed"):
            await door.create([TopicSpec(world.name("new"), 1, -1, {})])
        await world.allow(
            [
                right(topic_kind, orders, "Read"),
                right(group_kind, group, "Read"),
                right(transactional_id, f"txbroker.{group}.", "Write", prefixed=True),
                right(topic_kind, dead, "Describe"),
            ]
        )
        await until(lambda: _sees(door, orders))
        with pytest.raises(ConfigurationError, match=f"read topic {dead}: grant Read"):
            await door.topics([orders, dead])
        offsets = CommittedOffsets(door._client, group, Outsider())
        copy = Copy(dead, 0, Record(b"k", b"v"))
        with pytest.raises(
            Refused, match="may not be written by this login: grant it Write"
        ) as caught:
            await offsets.commit({(orders, 0): StoredOffset(1, "")}, [copy])
        assert list(caught.value.indexes) == [0]
        assert await offsets.load([(orders, 0)]) == {}
        await world.allow([right(topic_kind, dead, "Write")])
        await until(lambda: _commits(offsets, orders, copy))
        assert await offsets.load([(orders, 0)]) == {(orders, 0): StoredOffset(1, "")}
        assert [record.value for record in await world.visible(dead)] == [b"v"]
        with pytest.raises(KafkaUnavailable, match="group authorization failed") as refused:
            await CommittedOffsets(door._client, group + "x", Outsider()).load([(orders, 0)])
        assert refused.value.lasting
    finally:
        await door.close()


async def _sees(door: KafkaConsumingDoor, topic: str) -> bool:
    return topic in await door.topics()


async def _commits(offsets: CommittedOffsets, topic: str, copy: Copy) -> bool:
    """Commit, unless the right granted has not reached the broker yet."""
    try:
        await offsets.commit({(topic, 0): StoredOffset(1, "")}, [copy])
    except Refused:
        return False
    return True
