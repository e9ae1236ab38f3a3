"""BodyCache: kept in memory up to a budget, and read again by offset where they are not.

Undecided transactions can be many, and nobody looks at their messages until a decision, a check or
an operator comes. So of the older ones only what planning needs stays in memory, and the messages
are read again: from the half topic, from the operation topic where a commit replaced them, from
the parked topic where half's retention took the half message. What was read is compared by id and
fingerprint before it counts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import islice

from txbroker.core.decoding import (
    HalfPart,
    KeptPart,
    Malformed,
    NewerVersion,
    decode_half,
    decode_kept,
)
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Cause, Message, Record
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import LogTruncated, PartitionDoor
from txbroker.errors import KafkaUnavailable, OwnerUnavailable
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.snapshots import SnapshotWriter

BATCH_MAX = 1000
BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Transactions, and bytes of theirs, that are read in one go; a single one may be larger."""
STEP_MAX = 10_000
"""Transactions that one `trim` looks at, so that a budget that shrank does not stop the loop."""
PAUSE_EVERY = 100
"""Transactions that are decoded and compared without a pause for everything else."""
IDS_SHOWN = 10
"""Ids that one alarm names."""
BODY_LOST = "body_lost"
"""The code of the cause for which a transaction whose messages are gone is refused."""

log = get_logger(__name__)


def lost_cause(transaction: Transaction) -> Cause:
    """Return why a transaction whose messages are gone cannot be promoted, and what to do."""
    message = transaction.half.messages[0]
    if transaction.verdict.decision is None:
        remedy = "roll it back, or commit it with its messages"
    else:
        remedy = "send them again from their source, or restore the topics and revive it"
    return Cause(
        BODY_LOST,
        "its messages were deleted from txbroker's own topics before they were promoted: " + remedy,
        message.topic,
        -1 if message.partition is None else message.partition,
    )


def refused_as_lost(transaction: Transaction) -> bool:
    """Say whether a transaction is refused because its messages are gone."""
    return transaction.cause is not None and transaction.cause.code == BODY_LOST


class _CopiesUnavailable(KafkaUnavailable):
    """Copies do not answer; what the batch needs besides was read."""


class BodyCache:
    """The messages of one half partition's transactions: which are in memory, and how they return.

    Args:
        context: what all parts of the partition share.
        door: where they are read again.
        share: how much of them this partition may hold at this moment, bytes.
        snapshots: told when messages were found to be lost: the next owner must not count them
            again.
    """

    def __init__(
        self,
        context: PartitionContext,
        door: PartitionDoor,
        share: Callable[[], int],
        snapshots: SnapshotWriter,
    ) -> None:
        self._context = context
        self._door = door
        self._ledger = context.ledger
        self._share = share
        self._snapshots = snapshots
        # What lies at or below this offset of the half topic was evicted, but for `_behind`.
        self._hand = -1
        self._behind: dict[str, Transaction] = {}
        self._held: dict[str, tuple[Transaction, int]] = {}
        self._wanted: dict[str, Transaction] = {}
        # One batch at a time, so that memory stays bounded whoever asks.
        self._reading = asyncio.Lock()
        self._gathering = asyncio.Lock()

    # --- evicting --------------------------------------------------------------------------

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these, and may have brought messages."""
        self.trim()

    def trim(self) -> None:
        """Evict, the oldest first, until no more is held than the partition's share."""
        ledger, share = self._ledger, self._share()
        while self._behind and ledger.index.body_bytes > share:
            self._evict(self._behind.pop(next(iter(self._behind))))
        looked_at = 0
        while ledger.index.body_bytes > share and looked_at < STEP_MAX:
            found = ledger.index.in_order(self._hand, 100)
            if not found:
                if self._hand < 0 or ledger.index.body_bytes - self._held_bytes() <= share:
                    return
                # Messages that replaced evicted ones came back behind the hand.
                self._hand = -1
                continue
            for transaction in found:
                self._hand = transaction.offset
                looked_at += 1
                if transaction.id not in self._held:
                    self._evict(transaction)
                    if ledger.index.body_bytes <= share:
                        return

    def _evict(self, transaction: Transaction) -> None:
        if transaction.has_bodies and transaction.state not in SETTLED:
            self._ledger.index.evict(transaction)

    def _held_bytes(self) -> int:
        return sum([transaction.body_bytes for transaction, _ in self._held.values()])

    @contextmanager
    def hold(self, transactions: Iterable[Transaction]) -> Iterator[None]:
        """Keep what is in memory of these from being evicted, and what is loaded meanwhile."""
        held = list(transactions)
        for transaction in held:
            id = transaction.half.id
            _, holders = self._held.get(id, (transaction, 0))
            self._held[id] = transaction, holders + 1
            self._behind.pop(id, None)
        try:
            yield
        finally:
            self._let_go(held)

    def _let_go(self, held: Iterable[Transaction]) -> None:
        for transaction in held:
            id = transaction.half.id
            _, holders = self._held.pop(id)
            if holders > 1:
                self._held[id] = transaction, holders - 1
            elif transaction.has_bodies and transaction.offset <= self._hand:
                self._behind[id] = transaction

    # --- loading ---------------------------------------------------------------------------

    async def load(self, transactions: Iterable[Transaction]) -> list[Transaction]:
        """Read again what is not in memory of these; return those whose messages are gone.

        They are marked as lost, alarmed and counted when they are found out. Whoever needs the
        others holds them all the while. What is settled meanwhile needs no messages any more.

        Raises:
            LogTruncated: other records stand where these were read: the partition cannot go on.
            KafkaUnavailable: Kafka does not answer; what was read so far stays.
        """
        wanted = list(transactions)
        # Once more for those whose messages were replaced by a commit while they were read.
        while missing := [each for each in wanted if not each.has_bodies and _missing(each)]:
            # Neighbours in the log are fetched together.
            missing.sort(key=_first_offset)
            for batch in _batches(missing):
                async with self._reading:
                    await self._load([each for each in batch if _missing(each)])
        return [each for each in wanted if each.lost]

    @asynccontextmanager
    async def at_hand(
        self, transactions: Sequence[Transaction]
    ) -> AsyncIterator[dict[str, OwnerUnavailable]]:
        """Have the messages of transactions in memory where they are not lost (`there`); those
        that several callers wait for are read together.

        Yields:
            Why messages that only copies hold could not be read, by the ids of their
            transactions. May name transactions of other callers, too.

        Raises:
            OwnerUnavailable: half or operation topic does not answer, or the partition was just
                stopped because the log is not what it was.
        """
        failed: dict[str, OwnerUnavailable] = {}
        with self.hold(transactions):
            missing = [each for each in transactions if _missing(each)]
            try:
                for each in missing:
                    while _missing(each) and each.id not in failed:
                        # A failed batch of another caller has taken them along.
                        left = [m for m in missing if _missing(m) and m.id not in failed]
                        self._wanted.update((m.id, m) for m in left)
                        failed.update(await self._load_together(each))
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=missing[0].id) from None
            except LogTruncated as error:
                self._context.stopped(error)
                raise OwnerUnavailable(str(error), id=missing[0].id) from None
            finally:
                for each in missing:
                    self._wanted.pop(each.half.id, None)
            yield failed

    def there(self, transaction: Transaction) -> bool:
        """Say whether the messages of a transaction are in memory."""
        return transaction.has_bodies and not refused_as_lost(transaction)

    def try_again(self, transaction: Transaction) -> None:
        """An operator revives a transaction: look for messages that were lost once more."""
        transaction.lost = False
        if refused_as_lost(transaction) and transaction.has_bodies:
            # What came out of the record that says so are no messages.
            self._ledger.index.evict(transaction)

    async def show(self, transaction: Transaction) -> None:
        """Have the messages of a transaction in memory where they can be, to be shown at once.

        Raises:
            OwnerUnavailable: its copies do not answer, or as `at_hand`.
        """
        async with self.at_hand((transaction,)) as failed:
            if transaction.id in failed:
                raise failed[transaction.id]

    async def _load_together(self, transaction: Transaction) -> dict[str, OwnerUnavailable]:
        """Load a transaction and others that are waited for; return why some were not read.

        Raises:
            KafkaUnavailable: half or operation topic does not answer.
        """
        async with self._gathering:
            if _missing(transaction):
                waiting = islice(self._wanted.values(), BATCH_MAX)
                others = [each for each in waiting if each is not transaction]
                batch = next(_batches([transaction, *others]))
                for each in batch:
                    self._wanted.pop(each.id, None)
                try:
                    await self.load(batch)
                except _CopiesUnavailable as error:
                    left = [each.id for each in batch if _missing(each)]
                    return {id: OwnerUnavailable(str(error), id=id) for id in left}
        return {}

    async def _load(self, batch: Sequence[Transaction]) -> None:
        marks = [each.verdict.contents_fingerprint for each in batch]
        half = await self._read(batch, replaced=False)
        op = await self._read(batch, replaced=True)
        gone = []
        for number, (transaction, mark) in enumerate(zip(batch, marks, strict=True), 1):
            if number % PAUSE_EVERY == 0:
                await asyncio.sleep(0)
            if not _missing(transaction) or transaction.verdict.contents_fingerprint != mark:
                continue
            messages = _messages(transaction, op if mark else half)
            if messages is None:
                gone.append(transaction)
                continue
            try:
                self._ledger.index.fill(transaction, messages)
            except ValueError as error:
                raise LogTruncated(_other_record(transaction, str(error))) from None
        if gone:
            try:
                await self._load_copies(gone)
            except KafkaUnavailable as error:
                raise _CopiesUnavailable(str(error)) from None

    async def _read(self, batch: Sequence[Transaction], *, replaced: bool) -> dict[int, Record]:
        """Return the records of those whose messages a commit has replaced, or of the others."""
        those = [each for each in batch if bool(each.verdict.contents_fingerprint) is replaced]
        offsets = sorted({offset for each in those for offset in _at(each)})
        if not offsets:
            return {}
        log = self._door.op if replaced else self._door.half
        return {record.offset: record for record in await log.pick(offsets)}

    async def _load_copies(self, batch: Sequence[Transaction]) -> None:
        """Load those that neither half nor operation topic holds from their copies, if they have
        any; mark the others as lost."""
        marks = {each.id: each.verdict.contents_fingerprint for each in batch}
        left = {each.id: each for each in batch if each.kept and not refused_as_lost(each)}
        offsets = sorted({at for each in left.values() for at in each.kept_at if at >= 0})
        if offsets:
            self._take_copies(left, marks, await self._door.pick_parked(offsets))
        if left:
            # Compaction has moved on to newer copies, or the broker did not say where they are.
            found: list[Record] = []
            async for records in self._door.parked():
                found.extend(each for each in records if _key_id(each) in left)
            self._take_copies(left, marks, found)
        gone = [e for e in batch if _missing(e) and e.verdict.contents_fingerprint == marks[e.id]]
        if gone:
            self._mark_lost(gone)

    def _take_copies(
        self, left: dict[str, Transaction], marks: dict[str, bytes], records: Iterable[Record]
    ) -> None:
        """Fill from the records of copies, in the order of their offsets; take out of `left`
        those that need nothing more."""
        parts: dict[str, dict[int, KeptPart]] = {}
        for record in records:
            try:
                part = decode_kept(record)
            except (Malformed, NewerVersion):
                continue
            if part.part is None:
                parts.pop(part.id, None)
            else:
                parts.setdefault(part.id, {})[part.sequence] = part
        for id, transaction in list(left.items()):
            if _missing(transaction) and transaction.verdict.contents_fingerprint == marks[id]:
                messages = _copied(transaction, parts.get(id, {}))
                if messages is None:
                    continue
                try:
                    self._ledger.index.fill(transaction, messages)
                except ValueError:
                    # Made before a commit replaced the messages: not what is to be promoted.
                    continue
            del left[id]

    def _mark_lost(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            transaction.lost = True
        log.error(
            "bodies lost",
            partition=self._door.partition,
            count=len(transactions),
            ids=[transaction.id for transaction in transactions[:IDS_SHOWN]],
            why="their records are kept neither in the half topic nor as copies",
        )
        self._context.events.lost(len(transactions))
        self._snapshots.want()


def _missing(transaction: Transaction) -> bool:
    """Say whether there is something to be read of a transaction."""
    return not transaction.has_bodies and not transaction.lost and transaction.state not in SETTLED


def _at(transaction: Transaction) -> range:
    """Return the offsets of its messages: in the operation topic behind the marker that replaced
    them, else in the half topic."""
    first = (
        transaction.verdict.op_offset + 1
        if transaction.verdict.contents_fingerprint
        else transaction.offset
    )
    return range(first, first + len(transaction.half.messages))


def _first_offset(transaction: Transaction) -> tuple[bool, int]:
    return bool(transaction.verdict.contents_fingerprint), _at(transaction).start


def _batches(transactions: Iterable[Transaction]) -> Iterator[list[Transaction]]:
    """Yield them in their order, as many at a time as may be read in one go."""
    batch: list[Transaction] = []
    size = 0
    for transaction in transactions:
        bytes_more = sum([place.size for place in transaction.places])
        if batch and (len(batch) >= BATCH_MAX or size + bytes_more > BATCH_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(transaction)
        size += bytes_more
    if batch:
        yield batch


def _messages(transaction: Transaction, records: dict[int, Record]) -> tuple[Message, ...] | None:
    """Return what these records say of a transaction; None if one is not there any more.

    Raises:
        LogTruncated: another record stands there.
    """
    messages = []
    for sequence, offset in enumerate(_at(transaction)):
        record = records.get(offset)
        if record is None:
            return None
        try:
            part: HalfPart | None = decode_half(record)
        except (Malformed, NewerVersion):
            part = None
        if part is None or (part.id, part.sequence) != (transaction.id, sequence):
            raise LogTruncated(_other_record(transaction, f"offset {offset} is another's"))
        messages.append(part.message)
    return tuple(messages)


def _other_record(transaction: Transaction, why: str) -> str:
    return (
        f"{transaction.id}: the log holds another record than when it was read first ({why}): "
        "the topic was truncated or recreated"
    )


def _copied(transaction: Transaction, parts: dict[int, KeptPart]) -> tuple[Message, ...] | None:
    """Return the messages of a whole copy; None for one that says itself that they are gone."""
    first = parts.get(0)
    if first is None or first.facts is None:
        return None
    if first.facts.cause is not None and first.facts.cause.code == BODY_LOST:
        return None
    messages = []
    for sequence in range(len(transaction.half.messages)):
        part = parts.get(sequence)
        if part is None or part.part is None:
            return None
        messages.append(part.part.message)
    return tuple(messages)


def _key_id(record: Record) -> str:
    return (record.key or b"").partition(b"/")[0].decode(errors="replace")
