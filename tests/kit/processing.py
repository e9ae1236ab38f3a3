"""A topic that is processed into others exactly once, on any Kafka of the contract suite."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tests.kit.consuming import TIMING
from tests.kit.until import until
from txbroker.consumer import CommitPolicy, Consumer, InKafka, Message, Outputs, ReceivedMessage
from txbroker.core.consuming.copies import DEAD_PARTITIONS, GroupTopics
from txbroker.core.records import Record
from txbroker.door.consuming import ConsumingDoor
from txbroker.testing.consuming import MemoryConsumingDoor
from txbroker.testing.memory import MemoryKafka

PARTITIONS = 2


class Doors:
    """Opens a consumer's doors; `cut` cuts them off, as if the process had ended."""

    @classmethod
    def to(cls, kafka: MemoryKafka) -> Doors:
        """Doors to a Kafka in memory."""
        return cls(lambda: MemoryConsumingDoor(kafka))

    def __init__(self, make: Callable[[], ConsumingDoor]) -> None:
        self._make = make
        self.made: list[ConsumingDoor] = []

    def consuming_door(self) -> ConsumingDoor:
        self.made.append(self._make())
        return self.made[-1]

    async def cut(self) -> None:
        for door in self.made:
            client = getattr(door, "_client", None)
            if client is not None:
                await client.close()


class Processing:
    """Topics `orders` and `prices` with two partitions each, and a group.

    Args:
        world: of the contract suite.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.group = world.name("pricing")
        self.orders, self.prices = "", ""
        self.topics = GroupTopics.of(world.name("own"), self.group)

    @classmethod
    async def begin(cls, world: Any) -> Processing:
        made = cls(world)
        made.orders = await world.create_topic("orders", PARTITIONS)
        made.prices = await world.create_topic("prices", PARTITIONS)
        return made

    def doors(self, **settings: Any) -> Doors:
        return Doors(lambda: self.world.made_door(**settings))

    def consumer(self, doors: Doors | None = None, **options: Any) -> Consumer:
        given: dict[str, Any] = {
            "group": self.group,
            "topics": [self.orders],
            "mode": "exactly-once",
            "store": InKafka(),
            "topic_prefix": self.world.name("own"),
            "commit": CommitPolicy(max_interval_s=0.02),
            "retry_interval_s": 0.01,
            "drain_s": 1.0,
            **TIMING,
            **options,
        }
        return Consumer(doors or self.doors(), **given)

    @contextlib.asynccontextmanager
    async def running(
        self, handler: Any, doors: Doors | None = None, *, run: Any = None, **options: Any
    ) -> AsyncIterator[Consumer]:
        """A consumer that runs; it is stopped and closed at the end."""
        async with self.consumer(doors, **options) as consumer:
            task = asyncio.create_task(consumer.run(handler, **(run or {})))
            try:
                yield consumer
            finally:
                consumer.stop()
                await task

    async def produce(self, *texts: str, partition: int = 0) -> None:
        """Write `key=value`, or `value` without a key."""
        pairs = [text.rpartition("=") for text in texts]
        records = [
            Record(key.encode() if found else None, value.encode()) for key, found, value in pairs
        ]
        await self.world.foreign(self.orders, partition, *records)

    async def pass_on(self, message: ReceivedMessage, out: Outputs) -> None:
        """A handler: two outputs for each message."""
        for name in "ab":
            value = (message.value or b"") + name.encode()
            out.send(Message(self.prices, key=message.key, value=value))

    async def visible(self, topic: str, partitions: int = PARTITIONS) -> list[Record]:
        return [r for number in range(partitions) for r in await self.world.visible(topic, number)]

    async def prices_of(self, topic: str = "") -> dict[str, list[str]]:
        """The outputs by key, in order."""
        found: dict[str, list[str]] = {}
        for record in await self.visible(topic or self.prices):
            found.setdefault((record.key or b"").decode(), []).append(
                (record.value or b"").decode()
            )
        return found

    async def dead_letters(self) -> list[Record]:
        return await self.visible(self.topics.dead, DEAD_PARTITIONS)

    async def dead(self) -> list[str]:
        """The values of the dead letters, sorted."""
        found = await self.dead_letters()
        return sorted((record.value or b"").decode() for record in found)

    async def committed(self) -> int:
        """The sum of the committed offsets of all partitions."""
        door = await self.world.consuming_door()
        try:
            found = await door.committed(self.group)
        finally:
            await door.close()
        return sum(stored.offset for (topic, _), stored in found.items() if topic == self.orders)

    async def done(self, count: int) -> None:
        """Wait until the positions are behind so many messages."""

        async def is_done() -> bool:
            return await self.committed() >= count

        await until(is_done)


def passed_on(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return what `Processing.pass_on` makes of `key=value` texts."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, _, value = text.partition("=")
        found.setdefault(key, []).extend([f"{value}a", f"{value}b"])
    return found
