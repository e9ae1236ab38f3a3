"""Read topics as any `read_committed` consumer does: a benchmark's messages, or all records.

Uses the client library's consumer, like users, and asks no proxy, so that lost and duplicate
messages show. During the measurement only some partitions are read, because reading costs the
machine under test; the others are read afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from txbroker.config.addresses import parse_servers
from txbroker.config.settings import Settings
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.login import SettingsLogin
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.schemas import DeleteTopicsV3

TAG_CHARS, NUMBER_CHARS = 8, 12
"""Parts of a message's name, which is its key if it has one: tag of the measurement and number of
the message, both in hexadecimal."""
NAME_HEADER = "bench"
"""The header with the name of a message without key."""
QUIET_S = 30.0
"""Messages count as lost after this time without any new message."""
_WAIT_MS = 200
_MANY = 20_000
_FETCH_BYTES = 8 << 20


class Count:
    """Number of copies of each message, and when it was first seen during the measurement."""

    def __init__(self, tag: str) -> None:
        self._tag = tag.encode()
        self.copies = bytearray()
        self.seen_at = array("d")
        self.strangers = 0
        """Records that are not of this measurement."""
        self.total = 0

    def note(self, names: Sequence[bytes | None], at: float) -> None:
        """Count records by their names; `at` is 0 after the measurement."""
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
        """Return the number of copies of a message."""
        return self.copies[number] if number < len(self.copies) else 0

    def _grow(self, size: int) -> None:
        more = max(size, 2 * len(self.copies), 1024) - len(self.copies)
        self.copies.extend(bytes(more))
        self.seen_at.frombytes(bytes(8 * more))


class TopicConsumer:
    """A `read_committed` consumer of one topic. Created by `reading`."""

    def __init__(self, consumer: Any, partitions: list[Any], count: Count, along: int) -> None:
        self.count = count
        self._consumer = consumer
        self._partitions = partitions
        self._along = frozenset(partitions[:along])
        self._next: dict[Any, int] = {}
        self._enough = False

    async def start(self) -> None:
        """Start at the topic's current end."""
        with _translate_errors():
            await self._consumer.start()
            self._next = await self._consumer.end_offsets(self._partitions)
            self._go_to(self._along)

    async def follow(self) -> None:
        """Read until `stop`."""
        while not self._enough:
            await self._take()

    def stop(self) -> None:
        """Make `follow` return. Cancelling it could lose fetched records."""
        self._enough = True

    async def read_rest(self, owed: Callable[[], Iterable[int]]) -> None:
        """Read all partitions until every owed message was seen, or none came for `QUIET_S`.

        Then read to the end, where duplicates may be.
        """
        with _translate_errors():
            for partition in self._along:
                self._next[partition] = await self._consumer.position(partition)
        self._go_to(self._partitions)
        expected = sum(1 for _ in owed())
        last_at = time.monotonic()
        while time.monotonic() - last_at < QUIET_S:
            # The full check only if it can succeed: there may be millions.
            if self.count.total >= expected and all(map(self.count.of, owed())):
                break
            if await self._take():
                last_at = time.monotonic()
        with _translate_errors():
            ends = await self._consumer.end_offsets(self._partitions)
        while await self._is_before(ends):
            await self._take()

    async def _is_before(self, ends: dict[Any, int]) -> bool:
        with _translate_errors():
            for partition, end in ends.items():
                if await self._consumer.position(partition) < end:
                    return True
        return False

    def _go_to(self, partitions: Iterable[Any]) -> None:
        self._consumer.assign(list(partitions))
        for partition in partitions:
            self._consumer.seek(partition, self._next[partition])

    async def _take(self) -> bool:
        with _translate_errors():
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
) -> AsyncIterator[TopicConsumer]:
    """Read a topic from its current end on.

    Args:
        tag: prefix of the messages' names.
        along: number of partitions to read during the measurement; None for all.

    Raises:
        ConfigurationError: a file that the settings name cannot be read.
    """
    partitions = [TopicPartition(topic, number) for number in await _partitions(settings, topic)]
    consumer = _consumer(
        bootstrap_servers=[str(server) for server in parse_servers(settings.kafka)],
        max_partition_fetch_bytes=_FETCH_BYTES,
        **SettingsLogin(settings).arguments(),
    )
    reader = TopicConsumer(
        consumer, partitions, Count(tag), len(partitions) if along is None else along
    )
    try:
        await reader.start()
        yield reader
    finally:
        await stop_consumer(consumer)


def _consumer(*topics: str, **options: Any) -> Any:
    return AIOKafkaConsumer(  # type: ignore[no-untyped-call]
        *topics,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        **options,
    )


async def stop_consumer(consumer: Any) -> None:
    """Stop a consumer of the client library.

    Its `stop` leaks the cancellation of its own tasks if one of them waits for a retry, and then
    leaves the connections open.
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
    client = Client(KafkaSettings.from_configuration(settings))
    try:
        facts = (await Admin(client).topics([topic])).get(topic)
    finally:
        await client.close()
    if facts is None or facts.error:
        raise KafkaUnavailable(f"topic {topic} does not exist on Kafka at {settings.kafka}")
    return sorted(facts.partitions)


@asynccontextmanager
async def topic_for_a_while(settings: Settings, name: str, partitions: int) -> AsyncIterator[None]:
    """Create a topic, and delete it afterwards."""
    client = Client(KafkaSettings.from_configuration(settings))
    try:
        await client.refresh(())  # fails at once if Kafka is unreachable
        await Admin(client).create([TopicSpec(name, partitions, -1, {})])
        try:
            yield
        finally:
            with contextlib.suppress(KafkaUnavailable, ConfigurationError):
                await client.refresh(())
                request = DeleteTopicsV3([name], 5000)
                await asyncio.shield(client.ask(client.controller, request, "admin"))
    finally:
        await client.close()


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (KafkaError, OSError) as error:
        raise KafkaUnavailable(f"the consumer that counts messages failed: {error!r}") from None


# --- all records of topics -----------------------------------------------------------------------

_READ_BACK_WAIT_MS = 500


class Seen(NamedTuple):
    """A record and its place."""

    topic: str
    partition: int
    record: Record


async def read_back(bootstrap: str, topics: tuple[str, ...]) -> list[Seen]:
    """Return all visible records of topics; a missing topic has none."""
    consumer = _consumer(*topics, bootstrap_servers=bootstrap)
    try:
        await consumer.start()
        return await _read(consumer)
    except (KafkaError, OSError) as error:
        raise KafkaUnavailable(f"cannot read topics back from {bootstrap}: {error}") from None
    finally:
        await stop_consumer(consumer)


async def _read(consumer: Any) -> list[Seen]:
    records: list[Seen] = []
    partitions = sorted(consumer.assignment())
    ends = await consumer.end_offsets(partitions) if partitions else {}
    for partition in partitions:
        while await consumer.position(partition) < ends[partition]:
            batches = await consumer.getmany(partition, timeout_ms=_READ_BACK_WAIT_MS)
            for r in batches.get(partition, ()):
                record = Record(r.key, r.value, tuple(r.headers), r.timestamp, r.offset)
                records.append(Seen(partition.topic, partition.partition, record))
    return records
