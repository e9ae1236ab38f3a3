"""Counts the messages of a measurement as any `read_committed` consumer sees them.

Reads through the client library's own consumer, as users do, and asks no proxy: what is lost or
doubled anywhere shows here. While a measurement runs only some partitions are read along, as
reading costs the machine that is measured; the others are read when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import DeleteTopicsRequest

from txbroker.config.settings import Settings
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.admin import Admin, NewTopic
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.login import SettingsLogin
from txbroker.kafka.client.wiring import kafka_settings

TAG_CHARS, NUMBER_CHARS = 8, 12
"""Of a message's name, which is its key where it has one: what names the measurement, and the
message's number, both in hexadecimal."""
NAME_HEADER = "bench"
"""The header that names a message without a key."""
QUIET_S = 30.0
"""What has not shown after so long without any news is lost."""
_WAIT_MS = 200
_MANY = 20_000
_FETCH_BYTES = 8 << 20


class Count:
    """How often each message was seen, by number; and when, of those that were read along."""

    def __init__(self, tag: str) -> None:
        self._tag = tag.encode()
        self.copies = bytearray()
        self.seen_at = array("d")
        self.strangers = 0
        """Records that are none of this measurement's."""
        self.total = 0

    def note(self, names: Sequence[bytes | None], at: float) -> None:
        """Take the names of records that were read; `at` 0 where it does not matter when."""
        tag, size = self._tag, TAG_CHARS + NUMBER_CHARS
        copies, seen_at = self.copies, self.seen_at
        for name in names:
            if name is None or len(name) != size or not name.startswith(tag):
                self.strangers += 1
                continue
            number = int(name[TAG_CHARS:], 16)
            if number >= len(copies):
                self._grow(number + 1)
            if not copies[number]:
                seen_at[number] = at
            copies[number] = min(copies[number] + 1, 255)
            self.total += 1

    def of(self, number: int) -> int:
        """Return how often a message was seen."""
        return self.copies[number] if number < len(self.copies) else 0

    def _grow(self, wanted: int) -> None:
        more = max(wanted, 2 * len(self.copies), 1024) - len(self.copies)
        self.copies.extend(bytes(more))
        self.seen_at.frombytes(bytes(8 * more))


class Reader:
    """A `read_committed` consumer of one topic. Made by `reading`."""

    def __init__(self, consumer: Any, partitions: list[Any], count: Count, along: int) -> None:
        self.count = count
        self._consumer = consumer
        self._partitions = partitions
        self._along = frozenset(partitions[:along])
        self._next: dict[Any, int] = {}
        self._enough = False

    async def start(self) -> None:
        """Begin behind what the topic holds by now.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        with _in_words():
            await self._consumer.start()
            self._next = await self._consumer.end_offsets(self._partitions)
            self._go_to(self._along)

    async def follow(self) -> None:
        """Read along until `stop`.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        while not self._enough:
            await self._take()

    def stop(self) -> None:
        """Let `follow` end. It is not cancelled, which could lose what was just fetched."""
        self._enough = True

    async def read_rest(self, owed: Callable[[], Iterable[int]]) -> None:
        """Read on, the other partitions too, until all messages that are owed were seen or none
        came for long; and then to the end, where one that is doubled may stand.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        with _in_words():
            for partition in self._along:
                self._next[partition] = await self._consumer.position(partition)
        self._go_to(self._partitions)
        wanted = sum(1 for _ in owed())
        news_at = time.monotonic()
        while time.monotonic() - news_at < QUIET_S:
            # Looked through only where they can be all: there may be millions.
            if self.count.total >= wanted and all(map(self.count.of, owed())):
                break
            if await self._take():
                news_at = time.monotonic()
        with _in_words():
            ends = await self._consumer.end_offsets(self._partitions)
        while await self._is_before(ends):
            await self._take()

    async def _is_before(self, ends: dict[Any, int]) -> bool:
        with _in_words():
            for partition, end in ends.items():
                if await self._consumer.position(partition) < end:
                    return True
        return False

    def _go_to(self, partitions: Iterable[Any]) -> None:
        self._consumer.assign(list(partitions))
        for partition in partitions:
            self._consumer.seek(partition, self._next[partition])

    async def _take(self) -> bool:
        with _in_words():
            batches = await self._consumer.getmany(timeout_ms=_WAIT_MS, max_records=_MANY)
        now = time.monotonic()
        for partition, records in batches.items():
            at = now if partition in self._along else 0.0
            self.count.note([_name(record) for record in records], at)
        return bool(batches)


def _name(record: Any) -> bytes | None:
    name: bytes | None = record.key
    if name is None:
        name = dict(record.headers).get(NAME_HEADER)
    return name


@asynccontextmanager
async def reading(
    settings: Settings, topic: str, tag: str, along: int | None
) -> AsyncIterator[Reader]:
    """Read a topic from its end on.

    Args:
        settings: say how Kafka is reached.
        topic: there already.
        tag: what the names of the measurement's messages begin with.
        along: how many partitions are read along; None for all.

    Raises:
        KafkaUnavailable: Kafka does not answer, or has no such topic.
        ConfigurationError: a file that the settings name cannot be read.
    """
    partitions = [TopicPartition(topic, number) for number in await _partitions(settings, topic)]
    consumer: Any = AIOKafkaConsumer(  # type: ignore[no-untyped-call]
        bootstrap_servers=[part.strip() for part in settings.kafka.split(",")],
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_partition_fetch_bytes=_FETCH_BYTES,
        **SettingsLogin(settings).arguments(),
    )
    reader = Reader(consumer, partitions, Count(tag), len(partitions) if along is None else along)
    try:
        await reader.start()
        yield reader
    finally:
        await stop_consumer(consumer)


async def stop_consumer(consumer: Any) -> None:
    """Stop a consumer of the client library.

    It lets the cancellation of its own tasks out where one of them waits to repeat a request that
    went wrong, and leaves its connections open then.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        await consumer.stop()
    except asyncio.CancelledError:
        await consumer._client.close()
        if task.cancelling():
            raise


async def _partitions(settings: Settings, topic: str) -> list[int]:
    client = Client(kafka_settings(settings))
    try:
        facts = (await Admin(client).topics([topic])).get(topic)
    finally:
        await client.close()
    if facts is None or facts.error:
        raise KafkaUnavailable(f"Kafka at {settings.kafka} has no topic {topic}")
    return sorted(facts.partitions)


@asynccontextmanager
async def topic_for_a_while(settings: Settings, name: str, partitions: int) -> AsyncIterator[None]:
    """Have a topic, and remove it afterwards.

    Raises:
        KafkaUnavailable: Kafka does not answer, or does not create it.
    """
    client = Client(kafka_settings(settings))
    try:
        await client.refresh(())  # a Kafka that is not there is told at once
        await Admin(client).create([NewTopic(name, partitions, -1, {})])
        try:
            yield
        finally:
            with contextlib.suppress(KafkaUnavailable, ConfigurationError):
                await client.refresh(())
                request = DeleteTopicsRequest([name], 5000)
                await asyncio.shield(client.ask(client.controller, request, "admin"))
    finally:
        await client.close()


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except (KafkaError, OSError) as error:
        raise KafkaUnavailable(f"reading what consumers see failed: {error!r}") from None
