"""Messages as records: their partitions, and which of them Kafka refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from itertools import count as counting

from txbroker.core.records import NO_HEADERS, Message, Record
from txbroker.core.routing import murmur2
from txbroker.door.consuming import ConsumingDoor, Copy, CopyRefused
from txbroker.door.delivering import DeliveryWriter
from txbroker.errors import TxbrokerError
from txbroker.relay.source import Refusal

_KNOWN_S = 30.0
"""How long the number of a topic's partitions is used."""
_MISSING_S = 1.0
_hash_of = lru_cache(maxsize=10_000)(murmur2)


class MessagesRefused(TxbrokerError):
    """Kafka refuses messages; nothing of their delivery may be committed.

    Attributes:
        refusals: of at least one message. Of the others some may be refused next time.
    """

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__(refusals[0].cause)
        self.refusals = refusals


class RelaySink:
    """Writes the messages of deliveries.

    Args:
        writer: of the relay's position.
        positions: the topic of positions, to which no message may go.
    """

    def __init__(self, door: ConsumingDoor, writer: DeliveryWriter, positions: str) -> None:
        self._door = door
        self._positions = positions
        self._writer = writer
        self._counts: dict[str, tuple[float, int]] = {}
        self._turns = counting()
        self._now_s = asyncio.get_running_loop().time
        self._written: dict[int, Message] = {}
        """The last messages by the identity of their record: the writer may still refuse them."""

    async def claim(self) -> bytes | None:
        """Fence earlier writers and return the stored position; see `DeliveryWriter.claim`."""
        self._written.clear()
        return await self._writer.claim()

    async def write(self, messages: Sequence[Message]) -> None:
        """Add messages to the open transaction.

        Raises:
            MessagesRefused: abort the transaction.
            KafkaUnavailable: see `DeliveryWriter.write`.
        """
        counts = {topic: await self._count(topic) for topic in {m.topic for m in messages}}
        turn = next(self._turns)
        copies, refusals = [], []
        written: dict[int, Message] = {}
        for message in messages:
            total, partition = counts[message.topic], message.partition
            if message.topic == self._positions:
                cause = f"topic {message.topic} holds the positions of relays: use another one"
                refusals.append(Refusal(message, cause))
                continue
            if not total:
                cause = f"topic {message.topic} does not exist, or this login may not describe it"
                refusals.append(Refusal(message, cause))
                continue
            if partition is None:
                partition = (turn if message.key is None else _hash_of(message.key)) % total
            elif not 0 <= partition < total:
                cause = f"topic {message.topic} has {total} partitions, and no {partition}"
                refusals.append(Refusal(message, cause))
                continue
            timestamp_ms = -1 if message.timestamp_ms is None else message.timestamp_ms
            record = Record(message.key, message.value, message.headers or NO_HEADERS, timestamp_ms)
            written[id(record)] = message
            copies.append(Copy(message.topic, partition, record))
        if refusals:
            raise MessagesRefused(refusals)
        try:
            await self._writer.write(copies)
        except CopyRefused as error:
            self._written |= written
            raise self._refused(error) from None
        # The earlier ones are in Kafka. A delivery may be larger than the memory.
        self._written = written

    async def abort(self) -> None:
        """Drop the written messages of a delivery; see `DeliveryWriter.abort`."""
        self._written.clear()
        await self._writer.abort()

    async def commit(self, position: bytes) -> None:
        """Commit the messages with a position; see `DeliveryWriter.commit`.

        Raises:
            MessagesRefused: the transaction is aborted.
            KafkaUnavailable: whether it is committed is unknown until the next claim.
        """
        try:
            await self._writer.commit(position)
        except CopyRefused as error:
            raise self._refused(error) from None
        self._written.clear()

    def _refused(self, error: CopyRefused) -> TxbrokerError:
        found = [self._written.get(id(copy.record)) for copy in error.copies]
        self._written.clear()
        refusals = [Refusal(message, str(error)) for message in found if message is not None]
        return MessagesRefused(refusals) if refusals else error

    async def _count(self, topic: str) -> int:
        """Return the number of a topic's partitions, 0 if it cannot be written."""
        until_s, total = self._counts.get(topic, (0.0, 0))
        if self._now_s() >= until_s:
            total = await self._door.partition_count(topic)
            self._counts[topic] = self._now_s() + (_KNOWN_S if total else _MISSING_S), total
        return total
