"""The records of a relay's messages, and which of them Kafka refuses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counting

from txbroker.core.records import Message
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.placing import MessagesRefused, Placing, Refusal, Remedy
from txbroker.door.writing import Refused, Writer
from txbroker.errors import TxbrokerError

_KAFKAS_TIME = -1


class RelaySink:
    """Writes the messages of deliveries.

    Args:
        writer: of the relay's position.
        prefix: of txbroker's own topics, to which no message may go.
    """

    def __init__(self, door: ConsumingDoor, writer: Writer, prefix: str) -> None:
        self._writer = writer
        self._placing = Placing(door.target, prefix)
        self._turns = counting()
        self._count = 0
        """Messages of the delivery, up to now."""
        self._written: dict[int, Message] = {}
        """The last messages by their index: the writer may still refuse them."""

    async def claim(self) -> bytes | None:
        """Fence earlier writers and return the stored position; see `Writer.claim`."""
        self._begin()
        return await self._writer.claim()

    def _begin(self) -> None:
        self._count, self._written = 0, {}

    async def write(self, messages: Sequence[Message]) -> None:
        """Add messages to the open transaction.

        Raises:
            MessagesRefused: abort the transaction.
            KafkaUnavailable: see `Writer.write`.
        """
        first = self._count
        try:
            copies = await self._placing.copies(messages, next(self._turns), _KAFKAS_TIME)
        except MessagesRefused as error:
            raise error.after(first) from None
        written = dict(enumerate(messages, first))
        self._count += len(messages)
        try:
            await self._writer.write(copies)
        except Refused as error:
            self._written |= written
            raise self._refused(error) from None
        # The earlier ones are in Kafka. A delivery may be larger than the memory.
        self._written = written

    async def abort(self) -> None:
        """Drop the written messages of a delivery; see `Writer.abort`."""
        self._begin()
        await self._writer.abort()

    async def commit(self, position: bytes) -> None:
        """Commit the messages with a position; see `Writer.commit`.

        Raises:
            MessagesRefused: the transaction is aborted.
            KafkaUnavailable: whether it is committed is unknown until the next claim.
        """
        try:
            await self._writer.commit(position)
        except Refused as error:
            raise self._refused(error) from None
        self._begin()

    def _refused(self, error: Refused) -> TxbrokerError:
        remedy = Remedy.WAITING if error.of_topic else Remedy.RETRIES
        refusals = [Refusal(n, self._written[n], str(error), remedy) for n in error.indexes]
        self._begin()
        return MessagesRefused(refusals) if refusals else error
