"""The writer of a relay's deliveries on a `MemoryKafka`.

`txbroker.door.delivering` documents the methods and their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from txbroker.core.records import Record
from txbroker.door.consuming import Copy, CopyRefused
from txbroker.door.delivering import DeliveryWriter, WriterFenced
from txbroker.errors import KafkaUnavailable
from txbroker.testing.groups import store_copies
from txbroker.testing.memory import LostReply, MemoryKafka
from txbroker.testing.topics import KafkaTransaction, RecordRefused

T = TypeVar("T")


class Home(Protocol):
    """The event loop of the Kafka."""

    async def run(self, call: Callable[[], T]) -> T: ...


class MemoryDeliveryWriter(DeliveryWriter):
    """A `DeliveryWriter` in memory.

    Attributes:
        lost: what happens to the next commit, whose answer is lost.
    """

    lost: LostReply | None = None

    def __init__(
        self, home: Home, kafka: MemoryKafka, transactional_id: str, topic: str, key: str
    ) -> None:
        self._home = home
        self._kafka = kafka
        self._id = transactional_id
        self._at = (topic, 0)
        self._key = key.encode()
        self._pending: Sequence[Copy] = ()
        """Written with the next call."""
        self._transaction: KafkaTransaction | None = None
        self._claimed = False

    async def look(self) -> bytes | None:
        return await self._home.run(self._newest)

    def _newest(self) -> bytes | None:
        self._kafka.require_up()
        log = self._kafka.partition(*self._at)
        found = [
            record.value
            for record in log.read(log.begin, log.stable_end)
            if record.key == self._key
        ]
        return found[-1] if found else None

    async def claim(self) -> bytes | None:
        self._pending, self._transaction = (), None

        def fence() -> None:
            self._kafka.require_up()
            self._kafka.fence(self._id, self)

        await self._home.run(fence)
        position = await self._home.run(self._newest)
        self._claimed = True
        return position

    async def write(self, copies: Sequence[Copy]) -> None:
        if self._pending:
            await self._run(self._send)
        else:
            self._check_claimed()
        self._pending = copies

    async def abort(self) -> None:
        transaction, self._pending, self._transaction = self._transaction, (), None
        if transaction is not None:
            await self._run(lambda: self._kafka.end(transaction, committed=False))

    async def commit(self, position: bytes) -> None:
        place = Copy(*self._at, Record(self._key, position))

        def commit() -> None:
            lost, self.lost = self.lost, None
            store_copies(self._kafka, [*self._pending, place], self._open(), lost)

        await self._run(commit)
        self._pending, self._transaction = (), None

    def _send(self) -> None:
        transaction = self._open()
        for copy in self._pending:
            try:
                self._kafka.write(copy.topic, copy.partition, [copy.record], transaction)
            except RecordRefused as error:
                self._kafka.end(transaction, committed=False)
                raise CopyRefused(error.cause.message, [copy]) from None

    def _open(self) -> KafkaTransaction:
        """Return the open transaction, a new one if there is none."""
        self._kafka.require_up()
        if not self._kafka.holds(self._id, self):
            raise WriterFenced
        if self._transaction is None:
            self._transaction = self._kafka.begin(self._id)
        return self._transaction

    async def _run(self, call: Callable[[], None]) -> None:
        """Call Kafka; after any error but a refusal this writer must be claimed again."""
        self._check_claimed()
        self._claimed = False
        try:
            await self._home.run(call)
        except CopyRefused:
            self._pending, self._transaction, self._claimed = (), None, True
            raise
        self._claimed = True

    def _check_claimed(self) -> None:
        if not self._claimed:
            raise KafkaUnavailable(f"{self._id} is not claimed")
