"""Which topics are no targets of proxies, relays and consumers, in memory and on a real Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kit.service import Service
from txbroker.consumer.settings import group_topics
from txbroker.core.records import Cause, Message, Record
from txbroker.door.consuming import ConsumingDoor, TopicSpec
from txbroker.door.owners import own_by_name
from txbroker.door.writing import PositionRecord
from txbroker.errors import BadTarget

PREFIX = "ours"
COMPACTED = {"cleanup.policy": "compact"}


@pytest.fixture
async def door(world: Any) -> AsyncIterator[ConsumingDoor]:
    made = await world.consuming_door()
    yield made
    await made.close()


async def make_owners(world: Any, door: ConsumingDoor) -> None:
    """Let relays and a group of consumers of another prefix use their topics."""
    positions = world.name("relay")
    await door.create([TopicSpec(positions, 1, -1, COMPACTED)])
    await door.create(group_topics(world.name("x"), "orders", aside=True))
    await door.writer(world.name("id"), PositionRecord(positions, "orders/0")).claim()


@pytest.mark.rule(17)
@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("relay", "to the relays of prefix"),
        ("x.retry.orders", "to the consumers of group 'orders'"),
        ("x.dead.orders", "to the consumers of group 'orders'"),
        ("x.aside.orders", "to the consumers of group 'orders'"),
    ],
)
async def test_topics_of_relays_and_consumers_are_no_targets(
    world: Any, door: ConsumingDoor, name: str, whose: str
) -> None:
    await make_owners(world, door)
    cause = await door.target(world.name(name), PREFIX)
    assert isinstance(cause, Cause)
    assert cause.code == "reserved"
    assert whose in cause.message


@pytest.mark.rule(17)
async def test_proxies_refuse_topics_of_relays_and_consumers(
    service: Service,
) -> None:
    world = service.world
    door = await world.consuming_door()
    await make_owners(world, door)
    await door.close()
    for name in ("relay", "x.retry.orders"):
        with pytest.raises(BadTarget, match=r"belongs to the (relays|consumers)"):
            await service.prepare(Message(world.name(name), b"k", b"v"))


@pytest.mark.rule(17)
@pytest.mark.parametrize("name", ["half", "op", "checkpoint", "parked", "groups", "audit"])
async def test_consumers_and_relays_refuse_topics_of_an_installation(
    world: Any, door: ConsumingDoor, name: str
) -> None:
    await world.door()
    cause = await door.target(world.name(name), PREFIX)
    assert isinstance(cause, Cause)
    assert "belongs to the txbroker installation" in cause.message


@pytest.mark.parametrize(
    ("partitions", "key", "committed"),
    [
        (1, b"orders", True),  # not as relays write
        (1, b"orders/0", None),  # outside of a Kafka transaction
        (2, b"orders/0", True),
    ],
)
async def test_other_topics_with_such_names_are_targets(
    world: Any, door: ConsumingDoor, partitions: int, key: bytes, committed: bool | None
) -> None:
    like = await world.create_topic("like.relay", partitions, cleanup_policy="compact")
    await world.foreign(like, 0, Record(key, b"v"), committed=committed)
    assert await door.target(like, PREFIX) == partitions
    for name in ("like.retry.orders", "like.dead.orders"):
        await world.create_topic(name, 3)
        assert await door.target(world.name(name), PREFIX) == 3


@pytest.mark.parametrize(
    ("topic", "own"),
    [
        ("txbroker.op", True),
        ("txbroker.relay", True),
        ("txbroker.audit.drift", True),
        ("txbroker.dead.a.retry.b", True),
        ("__consumer_offsets", True),
        ("TXBROKER.op", False),
        ("txbroker_op", False),
        ("txbroker.orders", False),
        ("other.op", False),
        (".op", False),
        ("txbroker.retry.", False),
    ],
)
def test_own_topics_by_name(topic: str, own: bool) -> None:
    assert (own_by_name(topic, "txbroker") is not None) == own
