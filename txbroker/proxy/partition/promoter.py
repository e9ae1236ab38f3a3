"""Promotion: makes committed transactions visible, exactly once.

A promotion transaction is one Kafka transaction that holds the promoted records, copies of refused
and parked transactions, and the checkpoint (the `progress` record). Its result is known when its
commit is acknowledged, or from the checkpoint that the next claim finds; never from anything else.

It is planned from facts about messages, without their bodies. Bodies that are not in memory are
read before it begins, never inside it. `quarantine.py` holds targets and transactions that wait
for a retry.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

from msgspec import Struct, field, structs

from txbroker.core.encoding import encode_kept, headers_bytes, kept_tombstones, promoted_headers
from txbroker.core.lifecycle import SETTLED
from txbroker.core.promotion import PromotionPlan, plan_promotion, transaction_bytes
from txbroker.core.records import Cause, Checkpoint, Header, Place, Record, State
from txbroker.core.settled import ShareUse
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import NotVisible, PromotionTxn, PromotionTxnHandle, TargetFacts
from txbroker.door.writing import Copy, Refused, Unknown
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.tracing import PromotionSpans, promotion_spans
from txbroker.proxy.partition.appender import Appender
from txbroker.proxy.partition.body_cache import BODY_LOST, BodyCache, lost_cause
from txbroker.proxy.partition.clock import Slot
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.quarantine import RetryQueue, TargetQuarantine, note_invisible
from txbroker.proxy.partition.targets import takes

COPIES_MAX = 100
"""Transactions that one promotion transaction copies into the parked topic, or removes from it,
besides those that it refuses. Parking comes in waves; a promotion transaction stays small."""

log = get_logger(__name__)


class Claimer(Protocol):
    """Reclaims a partition: `txbroker.proxy.partition.owner.Claims`."""

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Reclaim after a lost promotion transaction, and reconcile the ledger with its checkpoint.

        Args:
            unseen: transactions whose promotion is known to be committed; they become visible.
        """


class _Txn(Struct, eq=False):
    """A promotion transaction in flight."""

    plan: PromotionPlan
    checkpoint: Checkpoint
    """As of the plan: records that are applied while bodies are read are not part of it."""
    keep: list[Transaction]
    """To be copied into the parked topic."""
    release: list[Transaction]
    """Copies to be removed from it."""
    since_s: float
    """When it began, by the monotonic clock."""
    slot: Slot
    copies: list[tuple[Transaction, int]] = field(default_factory=list)
    """The copies with which its parked records begin, in this order, and how many records each."""
    traced: PromotionSpans | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is known whether it was committed."""

    def written(self) -> list[Transaction]:
        return [*_decided_by(self.plan), *self.keep]

    @property
    def empty(self) -> bool:
        return self.plan.empty and not self.keep and not self.release


class Promoter:
    """Promotes the committed transactions of one half partition.

    Attributes:
        full: whether the list of deferred transactions is full, so that promotion stops.
        waiting: how many transactions of each share wait for unavailable targets.
    """

    def __init__(
        self, context: PartitionContext, bodies: BodyCache, half: Appender, claimer: Claimer
    ) -> None:
        settings = context.settings
        self.full = False
        self.waiting = ShareUse()
        self._context = context
        self._door = context.door
        self._ledger = context.ledger
        self._targets = context.targets
        self._bodies = bodies
        self._half = half
        self._claimer = claimer
        self._limiter = context.proxy.limiter
        self._limits = settings.promotion_limits
        self._installation = settings.installation
        self._overhead_bytes = headers_bytes(settings.installation)
        # The value of `commits_waited` at the last read of the half topic.
        self._half_read_for = 0
        self._quarantine = TargetQuarantine()
        self._retries = RetryQueue(context.ledger, settings.promotion_limits, self._quarantine)
        self._wake = asyncio.Event()
        self._in_flight: set[str] = set()
        # Those of them whose promotion is committed, but perhaps not visible to readers.
        self._unseen: set[str] = set()
        self._txns: set[_Txn] = set()
        # Begun, and not known to be committed; and since when none has succeeded.
        self._open: set[_Txn] = set()
        self._failing_since_s: float | None = None
        self._failure: BaseException | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._lost = False

    def wake(self) -> None:
        self._wake.set()

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these transactions: wake up if one is to be promoted or copied."""
        if self._ledger.index.to_keep or self._ledger.index.to_release:
            self._wake.set()
            return
        for transaction in transactions:
            if transaction.state is State.COMMITTED:
                self._wake.set()
                return

    def retry_refused(self, id: str) -> None:
        """Retry a refused transaction now, and forget its failures."""
        self._retries.retry_now(id)
        transaction = self._ledger.index.refused.get(id)
        if transaction is not None:
            self._bodies.try_again(transaction)
            for message in transaction.messages:
                self._targets.forget(message.topic)
        self._wake.set()

    @property
    def stuck_since(self) -> float | None:
        """Since when no promotion transaction, or reclaim, has succeeded, by the monotonic clock,
        seconds; None while there is nothing to write or all is well."""
        times_s = [txn.since_s for txn in self._open]
        if self._failing_since_s is not None:
            times_s.append(self._failing_since_s)
        return min(times_s, default=None)

    async def run(self) -> None:
        """Write promotion transactions until cancelled, or until the partition is lost."""
        self._retries.retry_all()
        # Recovery requested the end of half after the end of op.
        self._half_read_for = self._ledger.commits_waited
        try:
            while True:
                await self._pause()
                while await self._next_txn():
                    pass
        finally:
            for task in self._finishing:
                task.cancel()

    async def _pause(self) -> None:
        """Wait until woken, or until a retry is due."""
        try:
            async with asyncio.timeout(self._retries.wait_s()):
                await self._wake.wait()
        except TimeoutError:
            pass
        # First the client gets the answer to the decision that woke us: it takes two rounds of the
        # loop to leave, and planning and writing take longer than that.
        for _ in range(2):
            await asyncio.sleep(0)
        self._wake.clear()

    async def _next_txn(self) -> bool:
        """Plan and write one promotion transaction; return whether to look for another at once."""
        if self._failure is not None:
            raise self._failure
        if self._lost:
            await self._recover()
        slot = await self._limiter.begin()
        try:
            return await self._plan_and_write(slot)
        finally:
            if not any(txn.slot is slot for txn in self._txns):
                slot.release()

    async def _plan_and_write(self, slot: Slot) -> bool:
        plan = await self._plan()
        if self._ledger.commits_waited != self._half_read_for:
            # The plan lacks commits that were decided earlier, perhaps with the same order key.
            return await self._read_ahead()
        # No await from here until this plan's checkpoint is made.
        self._note_deferred(plan)
        self._in_flight.update(_ids(_decided_by(plan)))
        keep, release = self._to_keep(), self._to_release()
        if plan.empty and not keep and not release:
            if not self._open:
                self._failing_since_s = None
            return False
        began_s = time.monotonic()
        txn = _Txn(plan, self._checkpoint(plan), keep, release, began_s, slot)
        self._open.add(txn)
        with self._bodies.hold(txn.written()):
            written = await self._load(txn) and await self._write(txn)
        self._bodies.trim()
        return written

    async def _read_ahead(self) -> bool:
        """Read half messages whose commits were read before; return False if Kafka is unavailable.

        Another owner wrote both: this one writes a marker only after its half message was applied.
        """
        waited = self._ledger.commits_waited
        try:
            await self._half.catch_up()
        except KafkaUnavailable as error:
            log.warning("log not read", partition=self._door.partition, why=str(error))
            self._retries.note_deferred(waiting=True)
            return False
        self._half_read_for = waited
        return True

    async def _load(self, txn: _Txn) -> bool:
        """Load the messages to write; return False if Kafka is unavailable.

        Transactions whose messages no longer exist are refused, or not copied; the others go on.
        """
        try:
            gone = await self._bodies.load(txn.written())
        except KafkaUnavailable as error:
            log.warning("messages not read", partition=self._door.partition, why=str(error))
            self._in_flight.difference_update(_ids(_decided_by(txn.plan)))
            self._failed(txn)
            self._retries.note_deferred(waiting=True)
            return False
        to_keep = self._ledger.index.to_keep
        if gone:
            _refuse_lost(txn.plan, {transaction.id for transaction in gone})
            for transaction in gone:
                to_keep.pop(transaction.id, None)
        # Some may have been decided in the meantime.
        txn.keep = [transaction for transaction in txn.keep if transaction.id in to_keep]
        return True

    async def _write(self, txn: _Txn) -> bool:
        """Write a promotion transaction; return whether to look for another at once."""
        if txn.empty:
            self._open.discard(txn)
            return True
        plan = txn.plan
        self._ledger.op_progress = max(self._ledger.op_progress, plan.op)
        for transaction in txn.keep:
            # Kept from now on: if it is settled in the meantime, its copy must be removed.
            transaction.kept = True
        kept_as = [(each, each.state, each.checks.round) for each in txn.keep]
        failpoint("turn.planned")
        try:
            records = self._encode(txn)
            await self._context.gate.wait()
            handle = await self._door.write(records)
        except Refused as error:
            self._retries.isolate(plan.promote, error.cause)
            self._targets.forget(error.cause.topic)
            log.warning(
                "promotion refused", partition=self._door.partition, why=error.cause.message
            )
            self._lost = True
            self._failed(txn)
        except KafkaUnavailable as error:
            self._note_lost(txn, error)
            if isinstance(error, Unknown) and error.cause is not None:
                # Or every promotion transaction from now on would be lost with it.
                self._quarantine.add(error.cause)
        else:
            for transaction, *stored in kept_as:
                # If it was parked in the meantime, it needs a copy with that state and round.
                if [transaction.state, transaction.checks.round] == stored:
                    self._ledger.index.to_keep.pop(transaction.id, None)
            for transaction in txn.release:
                self._ledger.index.to_release.pop(transaction.id, None)
            task = asyncio.create_task(self._finish(txn, handle))
            self._finishing.add(task)
            self._txns.add(txn)
            task.add_done_callback(partial(self._finished, txn))
            # The commit request leaves before the next promotion transaction is planned.
            await asyncio.sleep(0)
        return True

    def _to_keep(self) -> list[Transaction]:
        """Return transactions to copy: as many as fit, and none that a promotion transaction in
        flight decides, because an older copy would outlive its records."""
        ledger, size = self._ledger, 0
        keep: list[Transaction] = []
        for transaction in list(ledger.index.to_keep.values()):
            if transaction.state in SETTLED or transaction.state is State.REFUSED:
                del ledger.index.to_keep[transaction.id]
            elif transaction.id not in self._in_flight:
                size += transaction_bytes(transaction)
                if keep and (len(keep) >= COPIES_MAX or size > self._limits.bytes_max):
                    break
                keep.append(transaction)
        return keep

    def _to_release(self) -> list[Transaction]:
        return list(islice(self._ledger.index.to_release.values(), COPIES_MAX))

    # --- planning --------------------------------------------------------------------------

    async def _plan(self) -> PromotionPlan:
        """Plan with the facts of the targets, asking Kafka about unknown ones."""
        retried = self._retries.take_due(self._in_flight)
        limits = self._retries.limits(retried)
        # Answers count until the plan is made: with many targets the first ones would expire
        # before the last is answered, and no plan would ever be made.
        facts_of: dict[str, TargetFacts | Cause] = {}
        # So does the quarantine, however long that takes: a silent leader is asked once.
        quarantined: dict[tuple[str, int | None], Cause] = {}
        while True:
            # In the order of decisions: the order of a set is not reproducible.
            unknown: dict[str, None] = {}

            def examine(place: Place, unknown: dict[str, None] = unknown) -> Cause | None:
                cause = quarantined.get((place.topic, place.partition))
                cause = cause or self._quarantine.cause(place.topic, place.partition)
                if cause is not None:
                    return cause
                facts = facts_of.get(place.topic) or self._targets.known(place.topic)
                if facts is None:
                    unknown[place.topic] = None
                    return Cause("unexamined", "", place.topic, -1, passing=True)
                return takes(place.topic, place.partition, place.size + self._overhead_bytes, facts)

            plan = plan_promotion(
                self._ledger.index.ready.values(),
                self._ledger.op_whole,
                examine,
                limits,
                in_flight=self._in_flight,
                retried=retried,
                tried=self._retries.tried,
                progressed=self._ledger.op_progress,
            )
            if not unknown:
                unverified = self._door.unverified(_places(plan))
                if not unverified:
                    return plan
                # Plan again in any case: a decision may have arrived in the meantime.
                for cause in await self._door.verify_no_open_txn(unverified):
                    log.warning(
                        "target kept off", partition=self._door.partition, why=cause.message
                    )
                    self._quarantine.add(cause)
                    quarantined[cause.topic, cause.partition] = cause
                    # It may have been deleted, or lost its leader, since it was examined.
                    self._targets.forget(cause.topic)
                continue
            answers = await asyncio.gather(*[self._examined(topic) for topic in unknown])
            facts_of.update(zip(unknown, answers, strict=True))

    async def _examined(self, topic: str) -> TargetFacts | Cause:
        """Ask Kafka about a target. A target without an answer does not delay the others."""
        try:
            return await self._targets.examine(topic)
        except KafkaUnavailable as error:
            log.warning("target unknown", partition=self._door.partition, why=str(error))
            return Cause("no_answer", str(error), topic, -1, passing=True)

    def _note_deferred(self, plan: PromotionPlan) -> None:
        for id, cause in plan.deferred.items():
            transaction = self._ledger.index.ready.get(id)
            if transaction is not None:
                transaction.cause = cause
        for transaction in plan.promote:
            if transaction.state is State.COMMITTED:
                # While its promotion is in flight it must not look as if it waited.
                transaction.cause = None
        self.full = plan.full
        self.waiting = self._ledger.index.use_of(plan.waiting())
        self._retries.note_deferred(waiting=bool(plan.deferred))

    # --- writing ---------------------------------------------------------------------------

    def _encode(self, txn: _Txn) -> PromotionTxn:
        plan = txn.plan
        promoted = _targets(plan.promote, self._installation)
        parked: list[Record] = []
        copied: list[tuple[Transaction, State, Cause | None]] = [
            *[(transaction, State.REFUSED, cause) for transaction, cause in plan.refuse],
            *[(transaction, transaction.state, None) for transaction in txn.keep],
        ]
        for transaction, state, cause in copied:
            records = encode_kept(
                transaction.copy(state, cause), self._context.proxy.record_version
            )
            parked.extend(records)
            txn.copies.append((transaction, len(records)))
        txn.traced = promotion_spans(_decided_by(plan))
        for transaction in [*[one for one in plan.promote if one.kept], *txn.release]:
            parked.extend(kept_tombstones(transaction.id, len(transaction.messages)))
        # Not as of the plan: transactions whose messages no longer exist are refused, too.
        if plan.refuse and parked:
            self._ledger.wrote_refused = True
        accounted = min(txn.checkpoint.half, self._ledger.accounted(self._in_flight))
        refused = self._ledger.wrote_refused
        checkpoint = structs.replace(txn.checkpoint, refused=refused, accounted=accounted)
        return PromotionTxn(promoted, tuple(parked), checkpoint)

    def _checkpoint(self, plan: PromotionPlan) -> Checkpoint:
        ledger = self._ledger
        return Checkpoint(
            v=self._context.proxy.record_version,
            claim=self._context.claim.id,
            op=plan.op,
            half=ledger.half_whole,
            op_anchor=ledger.op_anchor,
            half_anchor=ledger.half_anchor,
            deferred=tuple(plan.deferred),
        )

    def _finished(self, txn: _Txn, task: asyncio.Task[None]) -> None:
        self._finishing.discard(task)
        txn.slot.release()  # a task that was cancelled before it began has not released it
        if not task.cancelled() and task.exception() is not None:
            # An unexpected error stops the partition: its transactions would wait for ever.
            self._failure = task.exception()
            self._wake.set()

    async def _finish(self, txn: _Txn, handle: PromotionTxnHandle) -> None:
        """Wait until a promotion transaction is committed, then until it is visible."""
        plan, ledger = txn.plan, self._ledger
        try:
            await handle.committed()
        except KafkaUnavailable as error:
            self._note_lost(txn, error)
            self._wake.set()
            return
        finally:
            self._txns.discard(txn)
            txn.ended.set()
            txn.slot.release()
        ledger.op_committed = max(ledger.op_committed, txn.checkpoint.op)
        failpoint("turn.committed")
        self._open.discard(txn)
        self._failing_since_s = None
        promoted = _ids(plan.promote)
        self._unseen.update(promoted)
        for transaction, cause in plan.refuse:
            ledger.refuse(transaction.id, cause)
            if cause.code == BODY_LOST:
                self._retries.give_up(transaction.id)
            self._retries.retry_later(transaction.id)
            self._in_flight.discard(transaction.id)
            log.warning("refused", id=transaction.id, cause=cause.code, why=cause.message)
        if plan.refuse:
            self._context.refused([transaction for transaction, _ in plan.refuse])
        _note_copies(txn, handle)
        await self._visible(plan, handle)
        failpoint("turn.visible")
        ledger.promote_run(plan.promote, handle.offsets, self._context.clock.now_ms())
        self._in_flight.difference_update(promoted)
        self._unseen.difference_update(promoted)
        if txn.traced is not None:
            txn.traced.record({one.id: cause.code for one, cause in plan.refuse})
        if plan.promote:
            self._retries.promoted(plan.promote)
            self._context.promoted(plan.promote)
        self._wake.set()

    def _failed(self, txn: _Txn) -> None:
        self._open.discard(txn)
        if self._failing_since_s is None:
            self._failing_since_s = txn.since_s

    def _note_lost(self, txn: _Txn, error: Exception) -> None:
        self._failed(txn)
        log.warning("promotion lost", partition=self._door.partition, why=str(error))
        self._context.events.kafka_failed("turn")
        self._lost = True

    async def _visible(self, plan: PromotionPlan, handle: PromotionTxnHandle) -> None:
        """Wait without a limit: the promotion is committed, so it becomes visible."""
        while True:
            try:
                await handle.visible()
            except KafkaUnavailable as error:
                log.error("committed, not visible", partition=self._door.partition, why=str(error))
                if isinstance(error, NotVisible):
                    note_invisible(plan.promote, error)
            else:
                return

    # --- recovering ------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Reclaim. The checkpoint that the claim finds shows which promotions were committed."""
        # Until they are committed, not visible: another client's open transaction may hide them.
        for txn in list(self._txns):
            await txn.ended.wait()
        await self._claimer.reclaim(frozenset(self._unseen))
        self._in_flight = set(self._unseen)
        self._lost = False
        self._retries.retry_all()


def _places(plan: PromotionPlan) -> Collection[tuple[str, int]]:
    # In the order of decisions: the order of a set is not reproducible.
    return dict.fromkeys(
        [(place.topic, place.partition) for one in plan.promote for place in one.places]
    )


def _decided_by(plan: PromotionPlan) -> list[Transaction]:
    return [*plan.promote, *[transaction for transaction, _ in plan.refuse]]


def _ids(transactions: Iterable[Transaction]) -> list[str]:
    return [transaction.half.id for transaction in transactions]


def _targets(
    transactions: Iterable[Transaction], installation: tuple[Header, ...]
) -> tuple[Copy, ...]:
    """Return the records to promote of each transaction, in the order of its messages."""
    targets: list[Copy] = []
    for transaction in transactions:
        half, verdict = transaction.half, transaction.verdict
        messages = transaction.contents or half.messages
        decided_at_ms = 0 if verdict is None else verdict.at_ms
        for sequence, message in enumerate(messages):
            headers = promoted_headers(half.id, sequence, len(messages), message, installation)
            at_ms = decided_at_ms if message.timestamp_ms is None else message.timestamp_ms
            record = Record(message.key, message.value, headers, at_ms)
            assert message.partition is not None
            targets.append(Copy(message.topic, message.partition, record))
    return tuple(targets)


def _refuse_lost(plan: PromotionPlan, lost: set[str]) -> None:
    plan.refuse = [
        (one, lost_cause(one) if one.id in lost else cause) for one, cause in plan.refuse
    ]
    plan.refuse.extend((one, lost_cause(one)) for one in plan.promote if one.id in lost)
    plan.promote = [one for one in plan.promote if one.id not in lost]


def _note_copies(txn: _Txn, handle: PromotionTxnHandle) -> None:
    """Remember the offsets of the copies of a committed promotion, to read them again."""
    taken = 0
    for transaction, count in txn.copies:
        if transaction.state not in SETTLED:
            transaction.kept_at = tuple(handle.parked_offsets[taken : taken + count])
        taken += count
