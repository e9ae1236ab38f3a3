"""Guards the start of the logs, where retention, an operator or another client deletes records."""

from contextlib import ExitStack

from txbroker.core.records import Anchor
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.body_cache import BATCH_MAX, BodyCache
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.promoter import Promoter
from txbroker.proxy.partition.snapshots import SnapshotWriter

log = get_logger(__name__)


class RetentionGuard:
    """Keeps unsettled transactions whose half messages may be deleted."""

    def __init__(
        self,
        context: PartitionContext,
        bodies: BodyCache,
        promoter: Promoter,
        snapshots: SnapshotWriter,
    ) -> None:
        self._context = context
        self._door = context.door
        self._ledger = context.ledger
        self._bodies = bodies
        self._promoter = promoter
        self._snapshots = snapshots
        self._half_retention_ms = context.settings.half_retention_ms
        self._reclaims = 0
        # Transactions at or below these offsets have been copied, or saved.
        self._old_to = self._deleted_to = -1
        # To be copied, without a committed copy yet: a decision removes them from `to_keep`, but a
        # target may become available long after the half message was deleted.
        self._uncopied: dict[str, Transaction] = {}
        # Held in memory until their copies are committed.
        self._held: dict[str, tuple[Transaction, ExitStack]] = {}

    async def keep_old(self) -> None:
        """Copy the bodies of unsettled transactions at half of the half topic's retention."""
        ledger, yielder = self._ledger, Yielder()
        if self._reclaims != self._context.claim.reclaims:
            # Promotion transactions were lost, perhaps with their copies: start again.
            self._reclaims = self._context.claim.reclaims
            self._old_to = self._deleted_to = -1
        for transaction in list(self._uncopied.values()):
            self._copy_again(transaction)
            await yielder.step()
        copied = await self._keep_older_than(
            self._context.clock.now_ms() - self._half_retention_ms // 2, yielder
        )
        if copied:
            log.warning(
                "half retention near, bodies copied", partition=ledger.partition, count=copied
            )

    async def _keep_older_than(self, before_ms: int, yielder: Yielder) -> int:
        """Copy all transactions prepared before a time; return how many were not copied yet."""
        ledger, copied = self._ledger, 0
        while batch := ledger.index.by_offset.after(self._old_to, BATCH_MAX):
            for transaction in batch:
                if transaction.prepared_at_ms >= before_ms:
                    return copied
                self._old_to = transaction.offset
                if not transaction.kept and transaction.id not in ledger.index.to_keep:
                    copied += 1
                    self._copy_out(transaction)
            await yielder.piece()
        return copied

    def _copy_out(self, transaction: Transaction) -> None:
        self._uncopied[transaction.id] = self._ledger.index.to_keep[transaction.id] = transaction
        self._promoter.wake()

    def _copy_again(self, transaction: Transaction) -> None:
        """Copy a transaction that was decided before its copy was committed."""
        id, ledger = transaction.id, self._ledger
        if transaction.kept_at or transaction.lost or id not in ledger.index.transactions:
            self._uncopied.pop(id, None)
        elif not transaction.kept and id not in ledger.index.to_keep:
            self._copy_out(transaction)

    async def look(self) -> None:
        """Verify the logs, and save the transactions of deleted records."""
        await _compare("half", self._door.half, self._ledger.half_anchor)
        await _compare("op", self._door.op, self._ledger.op_anchor)
        start, _ = await self._door.half.bounds(confirmed=False)
        await self.deleted_before(start)

    async def deleted_before(self, half_start: int) -> None:
        """Handle a new start of the half topic: copy messages in memory, report lost ones."""
        self._let_go()
        self._snapshots.deleted_before(half_start)
        yielder = Yielder()
        while batch := self._ledger.index.by_offset.after(self._deleted_to, BATCH_MAX):
            below = [one for one in batch if one.offset < half_start]
            bare = [one for one in below if not one.kept and not one.lost]
            with self._bodies.hold(bare):
                # Final messages are in the operation topic.
                await self._bodies.load(bare)
                for transaction in bare:
                    self._save(transaction)
            if below:
                self._deleted_to = below[-1].offset
            if len(below) < len(batch):
                return
            await yielder.piece()

    def _save(self, transaction: Transaction) -> None:
        ledger, id = self._ledger, transaction.id
        if not transaction.has_bodies or transaction.kept or id not in ledger.index.transactions:
            return
        log.error("half message deleted, body copied", id=id)
        self._copy_out(transaction)
        if id not in self._held:
            stack = ExitStack()
            stack.enter_context(self._bodies.hold([transaction]))
            self._held[id] = transaction, stack

    def _let_go(self) -> None:
        for id, (transaction, stack) in list(self._held.items()):
            if transaction.kept_at or id not in self._ledger.index.transactions:
                stack.close()
                del self._held[id]


async def _compare(name: str, at: Log, anchor: Anchor | None) -> None:
    """Compare the last applied record with the record at its offset now."""
    if anchor is None:
        return
    if await _holds(at, anchor):
        return
    start, _ = await at.bounds()
    # Now from the confirmed leader: a deposed one lacks the records since.
    if anchor.offset >= start and not await _holds(at, anchor):
        raise LogTruncated(
            f"the {name} topic holds another record at offset {anchor.offset} than when it was "
            "read: it was truncated or recreated"
        )


async def _holds(at: Log, anchor: Anchor) -> bool:
    records = await at.pick([anchor.offset])
    return anchor.matches(records[0] if records else None)
