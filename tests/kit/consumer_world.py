"""A Kafka in memory, its consumers, and what they stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.kit.processing import Doors
from tests.kit.until import until
from txbroker.consumer import CommitPolicy, Consumer, ReceivedMessage
from txbroker.core.consuming.aside import release_record
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    Failed,
    MessageSource,
    read_copy,
    spread,
)
from txbroker.core.consuming.position import Metadata, decode_metadata
from txbroker.core.records import Record
from txbroker.testing.memory import MemoryKafka

GROUP = "stock"
TIMING = {"heartbeat_s": 0.05, "lease_s": 0.3, "session_s": 60.0}


class World:
    """One test's Kafka with topic `orders`."""

    def __init__(self, partitions: int = 2) -> None:
        self.kafka = MemoryKafka()
        self.kafka.create_topic("orders", partitions)

    @property
    def group(self) -> Any:
        return self.kafka.group(GROUP)

    def consumer(self, **options: Any) -> Consumer:
        given: dict[str, Any] = {
            "group": GROUP,
            "topics": ["orders"],
            "retry_interval_s": 0.01,
            "commit": CommitPolicy(max_interval_s=0.02),
            "drain_s": 2.0,
            **options,
        }
        if given.get("pattern"):
            del given["topics"]
        return Consumer(Doors.to(self.kafka), **given)

    @contextlib.asynccontextmanager
    async def running(self, handler: Any, *, run: Any = None, **options: Any) -> AsyncIterator[Any]:
        """A consumer that runs; it is stopped and closed at the end."""
        async with self.consumer(**options) as consumer:
            task = asyncio.create_task(consumer.run(handler, **(run or {})))
            try:
                yield consumer
            finally:
                consumer.stop()
                await task

    def produce(
        self, *messages: str, partition: int = 0, topic: str = "orders", **fields: Any
    ) -> None:
        """Write messages: `key=value`, or `value` without a key."""
        records = []
        for message in messages:
            key, found, value = message.rpartition("=")
            records.append(Record(key.encode() if found else None, value.encode(), **fields))
        self.kafka.write(topic, partition, records, None)

    def committed(self, partition: int = 0, topic: str = "orders") -> tuple[int, Metadata]:
        """Return the stored offset and its metadata, -1 without."""
        stored = self.group.offsets.get((topic, partition))
        if stored is None:
            return -1, Metadata(-1)
        metadata = decode_metadata(stored.offset, stored.metadata)
        assert metadata is not None
        return stored.offset, metadata

    async def commits(self, offset: int, partition: int = 0, topic: str = "orders") -> None:
        """Wait until an offset is committed."""
        await until(lambda: self.group.offsets.get((topic, partition), (-1,))[0] == offset)

    def copies(self, kind: str, group: str = GROUP) -> list[tuple[Record, Failed]]:
        """The copies in a topic of the group, partition by partition."""
        records = self.records(kind, group)
        return [copy for record in records if (copy := read_copy(record)) is not None]

    def records(self, kind: str, group: str = GROUP) -> list[Record]:
        """All records of a topic of the group, partition by partition."""
        name = f"txbroker.{kind}.{group}"
        if name not in self.kafka.topics:
            return []
        numbers = range(len(self.kafka.topics[name].partitions))
        return [record for number in numbers for record in self.kafka.visible(name, number)]

    def values(self, kind: str) -> list[str]:
        return [(record.value or b"").decode() for record, _failed in self.copies(kind)]

    def release(self, key: bytes | None, offset: int = 0, partition: int = 0) -> None:
        """Release a set-aside key, as an operator does."""
        source = MessageSource("orders", partition, offset)
        number = spread(source[:2], ASIDE_PARTITIONS)
        record = release_record(source, key, "checked")
        self.kafka.write(f"txbroker.aside.{GROUP}", number, [record], None)


class Handler:
    """An async handler that records values, and fails as planned.

    Args:
        failing: errors by value, raised in turn; the last one for ever; None: no error.
    """

    def __init__(self, **failing: Any) -> None:
        self.failing: dict[str, Any] = failing
        self.seen: list[str] = []
        self.done: list[str] = []
        self.messages: list[ReceivedMessage] = []

    async def __call__(self, message: ReceivedMessage) -> None:
        value = text(message)
        self.seen.append(value)
        self.messages.append(message)
        planned = self.failing.get(value)
        if isinstance(planned, list):
            planned = planned.pop(0) if planned else None
        if planned is not None:
            raise planned
        self.done.append(value)

    async def does(self, *values: str) -> None:
        """Wait until exactly these values are done, in any order."""
        await until(lambda: len(self.done) >= len(values))
        assert sorted(self.done) == sorted(values)


def counted(consumer: Consumer, event: str) -> int:
    return consumer.statistics().counts.get(event, 0)


def text(message: ReceivedMessage) -> str:
    return (message.value or b"").decode()


def texts(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [text(message) for message in messages]
