"""The records of a relay's messages, and which of them Kafka refuses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counting

from txbroker.core.records import Message
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.delivering import DeliveryWriter
from txbroker.door.placing import MessagesRefused, Placing, Refusal, Remedy
from txbroker.door.writing import CopyRefused
from txbroker.errors import TxbrokerError

_KAFKAS_TIME = -1


class RelaySink:
    """Writes the messages of deliveries.

    Args:
        writer: of the relay's position.
        prefix: of txbroker's own topics, to which no message may go.
    """

    def __init__(self, door: ConsumingDoor, writer: DeliveryWriter, prefix: str) -> None:
        self._writer = writer
        self._placing = Placing(door.target, prefix)
        self._turns = counting()
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
        copies = await self._placing.copies(messages, next(self._turns), _KAFKAS_TIME)
        written = {id(copy.record): each for copy, each in zip(copies, messages, strict=True)}
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
        remedy = Remedy.WAITING if error.passing else Remedy.RETRIES
        refusals = [Refusal(message, str(error), remedy) for message in found if message]
        return MessagesRefused(refusals) if refusals else error
