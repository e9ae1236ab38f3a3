"""The writer of a relay's deliveries on a `MemoryKafka`.

`txbroker.door.delivering` documents the methods and their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from txbroker.core.records import Record
from txbroker.door.delivering import DeliveryWriter, PositionScan, claim_record
from txbroker.door.writing import Copy, Fenced, Refused
from txbroker.errors import KafkaUnavailable
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import KafkaTransaction, LostReply

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
        self,
        home: Home,
        kafka: MemoryKafka,
        transactional_id: str,
        topic: str,
        key: str,
        *,
        take: bool = False,
    ) -> None:
        self._home = home
        self._kafka = kafka
        self._id = transactional_id
        self._at = (topic, 0)
        self._key = key.encode()
        self._take = take
        self._known: frozenset[int] = frozenset()
        """The producer of the transactional id before the claim."""
        self._follows_position = False
        """The newest claim follows a position."""
        self._pending: Sequence[Copy] = ()
        """Written with the next call."""
        self._sent = 0
        """Records of the transaction before these."""
        self._transaction: KafkaTransaction | None = None
        self._claimed = False

    async def look(self) -> bytes | None:
        def look() -> bytes | None:
            self._kafka.require_up()
            log = self._kafka.partition(*self._at)
            found = self._scan(log.stable_end, self._kafka.known_producers(self._id))[1]
            return found.value if found is not None else None

        return await self._home.run(look)

    def _scan(self, end: int, producers: frozenset[int]) -> tuple[PositionScan, Record | None]:
        """Return the position before an offset."""
        log = self._kafka.partition(*self._at)
        scan = PositionScan(self._id, self._at[0], self._key, producers)
        scan.note(log.read(log.begin, end, producers=True))
        return scan, scan.position(take=self._take)

    async def claim(self) -> bytes | None:
        self._drop()

        def fence() -> None:
            self._kafka.require_up()
            self._known = self._kafka.known_producers(self._id)
            self._kafka.fence(self._id, self)

        await self._home.run(fence)
        position = await self._home.run(self._claim)
        self._claimed = True
        return position

    def _claim(self) -> bytes | None:
        transaction = self._open()
        self._transaction = None
        claim = claim_record(self._key, position=False)
        try:
            base = self._kafka.write(*self._at, [claim], transaction)
            scan, found = self._scan(base, self._known | {transaction.producer})
            self._follows_position = found is not None
            if found is not None:
                records = [claim_record(self._key, position=True)]
                if scan.is_overwritten(found, transaction.producer):
                    records.append(Record(self._key, found.value))
                self._kafka.write(*self._at, records, transaction)
            self._kafka.end(transaction, committed=True)
        finally:
            self._kafka.end(transaction, committed=False)
        return found.value if found is not None else None

    async def write(self, copies: Sequence[Copy]) -> None:
        if self._pending:
            await self._run(self._send)
        else:
            self._check_claimed()
        self._pending = copies

    async def abort(self) -> None:
        transaction = self._transaction
        self._drop()
        if transaction is not None:
            await self._run(lambda: self._kafka.end(transaction, committed=False))

    async def commit(self, position: bytes) -> None:
        records = [Record(self._key, position)]
        if not self._follows_position:
            records.insert(0, claim_record(self._key, position=True))
        places = [Copy(*self._at, record) for record in records]

        def commit() -> None:
            lost, self.lost = self.lost, None
            try:
                self._kafka.store([*self._pending, *places], self._open(), lost)
            except Refused as error:
                mine = [self._sent + n for n in error.indexes if n < len(self._pending)]
                raise Refused(mine, error.cause) from None

        await self._run(commit)
        self._drop()
        self._follows_position = True

    def _drop(self) -> None:
        self._pending, self._sent, self._transaction = (), 0, None

    def _send(self) -> None:
        transaction = self._open()
        for index, copy in enumerate(self._pending, self._sent):
            try:
                self._kafka.write(copy.topic, copy.partition, [copy.record], transaction)
            except Refused as error:
                self._kafka.end(transaction, committed=False)
                raise Refused([index], error.cause) from None
        self._sent += len(self._pending)

    def _open(self) -> KafkaTransaction:
        """Return the open transaction, a new one if there is none."""
        self._kafka.require_up()
        if not self._kafka.holds(self._id, self):
            raise Fenced
        if self._transaction is None:
            self._transaction = self._kafka.begin(self._id)
        return self._transaction

    async def _run(self, call: Callable[[], None]) -> None:
        """Call Kafka; after any error but a refusal this writer must be claimed again."""
        self._check_claimed()
        self._claimed = False
        try:
            await self._home.run(call)
        except Refused:
            self._drop()
            self._claimed = True
            raise
        self._claimed = True

    def _check_claimed(self) -> None:
        if not self._claimed:
            raise KafkaUnavailable(f"{self._id} is not claimed")
