"""The writer of records and positions on a `MemoryKafka`.

`txbroker.door.writing` documents the methods and their errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from txbroker.core.records import Record
from txbroker.door.delivering import PositionScan, claim_record
from txbroker.door.writing import (
    Copy,
    Fenced,
    GroupOffsets,
    PositionRecord,
    Refused,
    Unknown,
    Writer,
)
from txbroker.errors import KafkaUnavailable
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import KafkaTransaction, LostReply

T = TypeVar("T")


class Home(Protocol):
    """The event loop of the Kafka."""

    async def run(self, call: Callable[[], T]) -> T: ...


class MemoryWriter(Writer):
    """A `Writer` in memory.

    Attributes:
        lost: what happens to the next commit, whose answer is lost.
    """

    lost: LostReply | None = None

    def __init__(
        self,
        home: Home,
        kafka: MemoryKafka,
        transactional_id: str,
        position: PositionRecord | None = None,
        *,
        take: bool = False,
    ) -> None:
        self._home = home
        self._kafka = kafka
        self._id = transactional_id
        self._at = ("" if position is None else position.topic, 0)
        self._key = b"" if position is None else position.key.encode()
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
        self._written: set[tuple[str, int]] = set()
        """Partitions of the transaction."""
        self._claimed = False

    # --- claim -------------------------------------------------------------------------------

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
        self._claimed = False
        self._drop()

        def fence() -> None:
            self._kafka.require_up()
            self._known = self._kafka.known_producers(self._id)
            self._kafka.fence(self._id, self)

        await self._home.run(fence)
        position = await self._home.run(self._claim) if self._key else None
        self._claimed = True
        return position

    def _claim(self) -> bytes | None:
        transaction = self._open()
        self._drop()
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

    # --- transactions ------------------------------------------------------------------------

    async def write(self, copies: Sequence[Copy]) -> None:
        if self._pending:
            await self._run(lambda: self._send(self._open()))
        else:
            self._check_claimed()
        self._pending = copies

    async def abort(self) -> None:
        transaction = self._transaction
        if transaction is not None and self._claimed:
            await self._run(lambda: self._kafka.end(self._open(), committed=False))
        elif transaction is not None:
            with contextlib.suppress(KafkaUnavailable):
                await self._home.run(lambda: self._kafka.end(transaction, committed=False))
        self._drop()

    async def commit(
        self, position: bytes | None = None, offsets: Sequence[GroupOffsets] = ()
    ) -> None:
        await self._run(lambda: self._commit(self._open(), position, offsets))

    def store(self, copies: Sequence[Copy], offsets: Sequence[GroupOffsets] = ()) -> None:
        """Claim and commit at once, in the Kafka's loop."""
        self._kafka.fence(self._id, self)
        self._drop()
        self._pending = copies
        self._commit(self._kafka.begin(self._id), None, offsets)

    def _commit(
        self,
        transaction: KafkaTransaction,
        position: bytes | None,
        offsets: Sequence[GroupOffsets],
    ) -> None:
        lost, self.lost = self.lost, None
        try:
            self._send(transaction)
            if position is not None:
                self._store_position(transaction, position)
            try:
                for each in offsets:
                    self._kafka.group(each.group).check(each)
            except Fenced:
                self._claimed = True  # another generation; the writer's id is still its own
                raise
            self._kafka.finish(transaction, lost)
        finally:
            if transaction.committed:
                for each in offsets:
                    self._kafka.group(each.group).store(each)
                self._follows_position |= position is not None
            self._kafka.end(transaction, committed=False)
            for partition in self._written:
                self._kafka.partition(*partition).mark(self._kafka.clock.now_ms())
            self._drop()

    def _store_position(self, transaction: KafkaTransaction, position: bytes) -> None:
        records = [Record(self._key, position)]
        if not self._follows_position:
            records.insert(0, claim_record(self._key, position=True))
        try:
            self._store(transaction, [Copy(*self._at, record) for record in records])
        except Refused as error:
            raise Refused((), error.cause) from None

    def _send(self, transaction: KafkaTransaction) -> None:
        try:
            self._store(transaction, self._pending)
        except Refused as error:
            self._kafka.end(transaction, committed=False)
            raise Refused([self._sent + n for n in error.indexes], error.cause) from None
        self._sent += len(self._pending)
        self._pending = ()

    def _store(self, transaction: KafkaTransaction, copies: Sequence[Copy]) -> None:
        self._kafka.write_all(copies, transaction)
        self._written.update((copy.topic, copy.partition) for copy in copies)

    def _open(self) -> KafkaTransaction:
        """Return the open transaction, a new one if there is none."""
        self._kafka.require_up()
        if not self._kafka.holds(self._id, self):
            raise Fenced(f"another process has claimed {self._id}: this one stops")
        if self._transaction is None:
            self._transaction = self._kafka.begin(self._id)
        return self._transaction

    def _drop(self) -> None:
        """Forget the records of the transaction."""
        self._pending, self._sent, self._transaction = (), 0, None
        self._written = set()

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
        except (Fenced, Unknown):
            raise
        except KafkaUnavailable as error:
            raise Unknown(str(error)) from None
        self._claimed = True

    def _check_claimed(self) -> None:
        if not self._claimed:
            raise Unknown(f"{self._id} is not claimed")
