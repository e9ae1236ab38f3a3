"""Bodies: kept in memory up to a limit, and read again by offset when they are needed.

There may be many undecided transactions, and their messages are needed only for a decision, a check
or an operator. So older ones keep only the facts for planning in memory. Their messages are read
again: from the half topic, from the operation topic if a commit replaced them, from the parked
topic if retention deleted the half message. They are verified by id and fingerprint.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
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
from txbroker.door.protocols import LogTruncated
from txbroker.errors import KafkaUnavailable, OwnerUnavailable
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.snapshots import SnapshotWriter

BATCH_MAX = 1000
BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Transactions, and their bytes, that one read loads; a single one may be larger."""
STEP_MAX = 10_000
"""Transactions that one `trim` visits: a smaller limit must not block the event loop."""
PAUSE_EVERY = 100
"""Transactions that are decoded before the event loop gets control again."""
IDS_SHOWN = 10
"""Ids in one log line."""
BODY_LOST = "body_lost"
"""Cause of a transaction that is refused because its messages no longer exist."""

log = get_logger(__name__)


def lost_cause(transaction: Transaction) -> Cause:
    """Return why a transaction without messages cannot be promoted, with the remedy."""
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
    """Return whether a transaction is refused because its messages no longer exist."""
    return transaction.cause is not None and transaction.cause.code == BODY_LOST


class _CopiesUnavailable(KafkaUnavailable):
    """The parked topic does not answer; everything else of the batch was read."""


class BodyCache:
    """The messages of one half partition's transactions: evicts and loads them.

    Args:
        context: shared by the parts of the partition.
        snapshots: must store losses at once: the next owner must not count them again.
    """

    def __init__(self, context: PartitionContext, snapshots: SnapshotWriter) -> None:
        self._context = context
        self._door = context.door
        self._ledger = context.ledger
        self._share = context.proxy.bodies_share
        self._snapshots = snapshots
        # Transactions at or below this offset of the half topic were evicted, except `_loaded`.
        self._hand = -1
        self._loaded: dict[str, Transaction] = {}
        self._held: dict[str, tuple[Transaction, int]] = {}
        self._requested: dict[str, Transaction] = {}
        # One batch at a time, which bounds memory.
        self._reading = asyncio.Lock()
        self._gathering = asyncio.Lock()

    # --- evicting --------------------------------------------------------------------------

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these transactions, and may have added messages."""
        self.trim()

    def trim(self) -> None:
        """Evict bodies, the oldest first, down to the partition's share."""
        ledger, share = self._ledger, self._share()
        while self._loaded and ledger.index.body_bytes > share:
            self._evict(self._loaded.pop(next(iter(self._loaded))))
        looked_at = 0
        while ledger.index.body_bytes > share and looked_at < STEP_MAX:
            batch = ledger.index.by_offset.after(self._hand, 100)
            if not batch:
                if self._hand < 0 or ledger.index.body_bytes - self._held_bytes() <= share:
                    return
                # Final messages arrived for transactions that the hand has passed.
                self._hand = -1
                continue
            for transaction in batch:
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
        """Protect the bodies of these transactions from eviction, also those loaded later."""
        held = list(transactions)
        for transaction in held:
            id = transaction.half.id
            _, holders = self._held.get(id, (transaction, 0))
            self._held[id] = transaction, holders + 1
            self._loaded.pop(id, None)
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
                self._loaded[id] = transaction

    # --- loading ---------------------------------------------------------------------------

    async def load(self, transactions: Iterable[Transaction]) -> list[Transaction]:
        """Load bodies that are not in memory; return transactions whose messages no longer exist.

        Those are marked as lost, logged and counted at the first time. The caller must hold the
        others. Transactions that are settled in the meantime need no messages.

        Raises:
            LogTruncated: the log holds other records at their offsets: the partition cannot go on.
            KafkaUnavailable: Kafka does not answer; bodies read so far stay.
        """
        transactions = list(transactions)
        # Again for those whose messages a commit replaced during the read.
        while missing := [one for one in transactions if not one.has_bodies and _missing(one)]:
            # Neighbours in the log are fetched together.
            missing.sort(key=_first_offset)
            for batch in _batches(missing):
                async with self._reading:
                    await self._load([one for one in batch if _missing(one)])
        return [one for one in transactions if one.lost]

    @asynccontextmanager
    async def at_hand(
        self, transactions: Sequence[Transaction]
    ) -> AsyncIterator[dict[str, OwnerUnavailable]]:
        """Hold and load the bodies of transactions that are not lost (see `there`).

        Reads of concurrent callers are combined.

        Yields:
            Errors by transaction id, for bodies that only the parked topic holds. May include
            transactions of other callers.

        Raises:
            OwnerUnavailable: half or operation topic does not answer, or the log was recreated,
                which stops the partition.
        """
        failed: dict[str, OwnerUnavailable] = {}
        with self.hold(transactions):
            missing = [one for one in transactions if _missing(one)]
            try:
                for one in missing:
                    while _missing(one) and one.id not in failed:
                        # Requested again: a failed batch of another caller has removed them.
                        left = [m for m in missing if _missing(m) and m.id not in failed]
                        self._requested.update((m.id, m) for m in left)
                        failed.update(await self._load_together(one))
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error), id=missing[0].id) from None
            except LogTruncated as error:
                self._context.stopped(error)
                raise OwnerUnavailable(str(error), id=missing[0].id) from None
            finally:
                for one in missing:
                    self._requested.pop(one.half.id, None)
            yield failed

    def there(self, transaction: Transaction) -> bool:
        """Return whether the messages of a transaction are in memory."""
        return transaction.has_bodies and not refused_as_lost(transaction)

    def try_again(self, transaction: Transaction) -> None:
        """Look again for lost messages: an operator revives the transaction."""
        transaction.lost = False
        if refused_as_lost(transaction) and transaction.has_bodies:
            # The record of the refusal holds no messages.
            self._ledger.index.evict(transaction)

    async def show(self, transaction: Transaction) -> None:
        """Load the messages of a transaction, to be shown at once."""
        async with self.at_hand((transaction,)) as failed:
            if transaction.id in failed:
                raise failed[transaction.id]

    async def _load_together(self, transaction: Transaction) -> dict[str, OwnerUnavailable]:
        """Load a transaction and other requested ones; return the errors of those not read."""
        async with self._gathering:
            if _missing(transaction):
                waiting = islice(self._requested.values(), BATCH_MAX)
                others = [one for one in waiting if one is not transaction]
                batch = next(_batches([transaction, *others]))
                for one in batch:
                    self._requested.pop(one.id, None)
                try:
                    await self.load(batch)
                except _CopiesUnavailable as error:
                    left = [one.id for one in batch if _missing(one)]
                    return {id: OwnerUnavailable(str(error), id=id) for id in left}
        return {}

    async def _load(self, batch: Sequence[Transaction]) -> None:
        marks = [one.verdict.contents_fingerprint for one in batch]
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
        """Return the records of transactions with replaced messages, or of the others."""
        chosen = [one for one in batch if bool(one.verdict.contents_fingerprint) is replaced]
        offsets = sorted({offset for one in chosen for offset in _at(one)})
        if not offsets:
            return {}
        log = self._door.op if replaced else self._door.half
        return {record.offset: record for record in await log.pick(offsets)}

    async def _load_copies(self, batch: Sequence[Transaction]) -> None:
        """Load from the parked topic; mark transactions without a copy as lost."""
        marks = {one.id: one.verdict.contents_fingerprint for one in batch}
        left = {one.id: one for one in batch if one.kept and not refused_as_lost(one)}
        offsets = sorted({at for one in left.values() for at in one.kept_at if at >= 0})
        if offsets:
            self._take_copies(left, marks, await self._door.pick_parked(offsets))
        if left:
            # Compaction removed these copies for newer ones, or their offsets are unknown.
            copies: list[Record] = []
            async for records in self._door.parked():
                copies.extend(record for record in records if _key_id(record) in left)
            self._take_copies(left, marks, copies)
        gone = [t for t in batch if _missing(t) and t.verdict.contents_fingerprint == marks[t.id]]
        if gone:
            self._mark_lost(gone)

    def _take_copies(
        self, left: dict[str, Transaction], marks: dict[str, bytes], records: Iterable[Record]
    ) -> None:
        """Fill transactions from copies, in offset order; remove those from `left`."""
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
                    # Copied before a commit replaced the messages: not to be promoted.
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
            why="their records are neither in the half topic nor in the parked topic",
        )
        self._context.events.lost(len(transactions))
        self._context.rates.lost += len(transactions)
        self._snapshots.want()


def _missing(transaction: Transaction) -> bool:
    """Return whether the messages of a transaction must be read."""
    return not transaction.has_bodies and not transaction.lost and transaction.state not in SETTLED


def _at(transaction: Transaction) -> range:
    """Return the offsets of its messages: after the marker with final messages in the operation
    topic, or in the half topic."""
    first = (
        transaction.verdict.op_offset + 1
        if transaction.verdict.contents_fingerprint
        else transaction.offset
    )
    return range(first, first + len(transaction.half.messages))


def _first_offset(transaction: Transaction) -> tuple[bool, int]:
    return bool(transaction.verdict.contents_fingerprint), _at(transaction).start


def _batches(transactions: Iterable[Transaction]) -> Iterator[list[Transaction]]:
    """Split transactions into batches for one read, in their order."""
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
    """Return the messages of a transaction from its records; None if one was deleted."""
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
        f"{transaction.id}: the log holds another record than when it was first read ({why}): "
        "the topic was truncated or recreated"
    )


def _copied(transaction: Transaction, parts: dict[int, KeptPart]) -> tuple[Message, ...] | None:
    """Return the messages of a complete copy; None if it records that they are lost."""
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
