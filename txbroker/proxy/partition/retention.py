"""The logs' edges: what retention, and whoever deletes records, does to them under an owner."""

from contextlib import ExitStack

from txbroker.core.records import Anchor
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated, PartitionDoor
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.body_cache import BATCH_MAX, BodyCache
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.promoter import Promoter
from txbroker.proxy.partition.snapshots import SnapshotWriter

log = get_logger(__name__)


class RetentionGuard:
    """Looks after what is not settled while its half messages may vanish.

    Args:
        context: what all parts of the partition share.
        door: the logs.
        bodies: reads messages again, and alarms about those that are gone.
        promoter: copies messages into the parked topic.
        snapshots: told where the half topic begins.
    """

    def __init__(
        self,
        context: PartitionContext,
        door: PartitionDoor,
        bodies: BodyCache,
        promoter: Promoter,
        snapshots: SnapshotWriter,
    ) -> None:
        self._context = context
        self._door = door
        self._ledger = context.ledger
        self._bodies = bodies
        self._promoter = promoter
        self._snapshots = snapshots
        self._half_retention_ms = context.settings.half_retention_ms
        self._reclaims = 0
        # What lies at or below these offsets was seen to.
        self._old_to = self._deleted_to = -1
        # To be copied, and no copy is committed yet: a decision takes them out of `to_keep`, and a
        # target may take what was committed long after the half message is gone.
        self._uncopied: dict[str, Transaction] = {}
        # Must stay in memory until their copies are committed.
        self._held: dict[str, tuple[Transaction, ExitStack]] = {}

    async def keep_old(self) -> None:
        """At half of half's retention the bodies of what is not settled are copied out."""
        ledger, pace = self._ledger, Yielder()
        if self._reclaims != self._context.claim.reclaims:
            # Turns were lost: what they were to copy may have to be copied again.
            self._reclaims = self._context.claim.reclaims
            self._old_to = self._deleted_to = -1
        for transaction in list(self._uncopied.values()):
            self._see_to(transaction)
            await pace.step()
        copied = await self._keep_older_than(
            self._context.clock.now_ms() - self._half_retention_ms // 2, pace
        )
        if copied:
            log.warning(
                "half retention near, bodies copied", partition=ledger.partition, count=copied
            )

    async def _keep_older_than(self, before_ms: int, pace: Yielder) -> int:
        """Have everything copied that was prepared before; return how many were not yet."""
        ledger, copied = self._ledger, 0
        while found := ledger.index.in_order(self._old_to, BATCH_MAX):
            for transaction in found:
                if transaction.prepared_at_ms >= before_ms:
                    return copied
                self._old_to = transaction.offset
                if not transaction.kept and transaction.id not in ledger.index.to_keep:
                    copied += 1
                    self._copy_out(transaction)
            await pace.piece()
        return copied

    def _copy_out(self, transaction: Transaction) -> None:
        self._uncopied[transaction.id] = self._ledger.index.to_keep[transaction.id] = transaction
        self._promoter.wake()

    def _see_to(self, transaction: Transaction) -> None:
        """Have one copied that was decided before it was."""
        id, ledger = transaction.id, self._ledger
        if transaction.kept_at or transaction.lost or id not in ledger.index.transactions:
            self._uncopied.pop(id, None)
        elif not transaction.kept and id not in ledger.index.to_keep:
            self._copy_out(transaction)

    async def look(self) -> None:
        """See whether the logs are what they were, and save what can be saved of deleted records.

        Raises:
            LogTruncated: they are not: promoting could lose or double.
            KafkaUnavailable: Kafka does not answer.
        """
        await _compare("half", self._door.half, self._ledger.half_anchor)
        await _compare("op", self._door.op, self._ledger.op_anchor)
        start, _ = await self._door.half.bounds(confirmed=False)
        await self.deleted_before(start)

    async def deleted_before(self, half_start: int) -> None:
        """The half topic begins here by now: messages that are in memory are copied out at once,
        those that are nowhere any more are lost, alarmed and counted.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        self._let_go()
        self._snapshots.deleted_before(half_start)
        pace = Yielder()
        while found := self._ledger.index.in_order(self._deleted_to, BATCH_MAX):
            below = [each for each in found if each.offset < half_start]
            bare = [each for each in below if not each.kept and not each.lost]
            with self._bodies.hold(bare):
                # What a commit has replaced is in the operation topic.
                await self._bodies.load(bare)
                for transaction in bare:
                    self._save(transaction)
            if below:
                self._deleted_to = below[-1].offset
            if len(below) < len(found):
                return
            await pace.piece()

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
    """Compare the last record that was read with what stands there now.

    Raises:
        LogTruncated: it is another one, or none though the log is kept from before it.
    """
    if anchor is None:
        return
    if await _holds(at, anchor):
        return
    start, _ = await at.bounds()
    # Now by the leader that most replicas know: one that was deposed lacks what came since.
    if anchor.offset >= start and not await _holds(at, anchor):
        raise LogTruncated(
            f"the {name} topic holds another record at offset {anchor.offset} than when it was "
            "read: it was truncated or recreated"
        )


async def _holds(at: Log, anchor: Anchor) -> bool:
    found = await at.pick([anchor.offset])
    return bool(found) and found[0].timestamp_ms == anchor.timestamp_ms
