"""The writer of a relay's deliveries on a `MemoryKafka`.

A transaction is written as a whole when it is committed; `txbroker.door.delivering` documents the
methods and their errors.
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
        self._copies: list[Copy] = []
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
        self._copies = []

        def fence() -> None:
            self._kafka.require_up()
            self._kafka.fence(self._id, self)

        await self._home.run(fence)
        position = await self._home.run(self._newest)
        self._claimed = True
        return position

    async def write(self, copies: Sequence[Copy]) -> None:
        self._check_claimed()
        self._copies += copies

    async def abort(self) -> None:
        self._copies = []

    async def commit(self, position: bytes) -> None:
        self._check_claimed()
        copies = [*self._copies, Copy(*self._at, Record(self._key, position))]

        def commit() -> None:
            self._kafka.require_up()
            if not self._kafka.holds(self._id, self):
                raise WriterFenced
            lost, self.lost = self.lost, None
            store_copies(self._kafka, copies, self._kafka.begin(self._id), lost)

        self._copies, self._claimed = [], False
        try:
            await self._home.run(commit)
        except CopyRefused:
            self._claimed = True
            raise
        self._claimed = True

    def _check_claimed(self) -> None:
        if not self._claimed:
            raise KafkaUnavailable(f"{self._id} is not claimed")
