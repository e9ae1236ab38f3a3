"""Claims and promotion transactions of one message, for tests of what becomes of them."""

from __future__ import annotations

from typing import Any

from tests.kafka.relay import Relay, fates
from tests.kit.kafka import KafkaHarness, now_ms
from txbroker.core.records import LOG_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import PromotionTxn, PromotionTxnHandle
from txbroker.door.writing import Copy
from txbroker.kafka.door.partition import KafkaPartitionDoor

FENCED_CODES = (47, 90)


def claim(name: str) -> Claim:
    """A claim by its name."""
    return Claim(LOG_VERSION, name, "one", "http://127.0.0.1:1")


def progress(name: str, op: int) -> Checkpoint:
    """The checkpoint of a claim's transaction up to `op`."""
    return Checkpoint(LOG_VERSION, name, op, op)


def turn(name: str, op: int, topic: str = "") -> PromotionTxn:
    """The transaction of a claim up to `op`, which holds one message if it has a topic."""
    message = Record(b"%s-%d" % (name.encode(), op), b"", (), now_ms())
    promoted = (Copy(topic, 0, message),) if topic else ()
    return PromotionTxn(promoted, (), progress(name, op))


async def write(
    partition: KafkaPartitionDoor, name: str, op: int, topic: str = ""
) -> PromotionTxnHandle:
    """Write the transaction of a claim up to `op`."""
    return await partition.write(turn(name, op, topic))


async def keys(world: KafkaHarness, topic: str) -> list[bytes | None]:
    """Return the keys of what consumers see."""
    return [record.key for record in await world.visible(topic)]


class Relayed:
    """Half partition 0 of a door reached through a relay, and a target topic."""

    def __init__(self, world: KafkaHarness, relay: Relay) -> None:
        self.world = world
        self.relay = relay
        self.topic = ""
        self.partition: Any = None

    async def first(self, **settings: Any) -> Relayed:
        """Claim it as "first", through a door with these settings."""
        self.topic = await self.world.create_topic("target")
        self.partition = (await self.world.door("one", self.relay.open, **settings)).partition(0)
        await self.partition.claim(claim("first"))
        return self

    def decide(self, key: int, *fate: Any) -> None:
        """Let requests of one kind meet these fates; none: all pass."""
        self.relay.decide = fates(key, *fate)

    async def write(self, op: int, name: str = "first") -> PromotionTxnHandle:
        """Write the transaction of a claim up to `op`."""
        return await write(self.partition, name, op, self.topic)

    async def taken_over(self, name: str = "second") -> Checkpoint | None:
        """Claim it again; return the progress."""
        return (await self.partition.claim(claim(name))).progress

    async def keys(self) -> list[bytes | None]:
        """Return the keys of what consumers see."""
        return await keys(self.world, self.topic)
