"""Promotion: turn after turn, committed transactions become visible, exactly once.

A turn is one Kafka transaction that holds the promoted records, copies of what is refused or
parked, and the progress. What a turn did is known when its commit is acknowledged, or from the
progress that the next claim finds; never from anything else.

A turn is planned on what is known of messages without having them; those that are not in memory
are read before it is begun, never inside it.

This file tells how turns are written; `Trouble` in `targets.py` holds what is kept away from them.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

from msgspec import Struct, field, structs

from txbroker import tracing
from txbroker.core.encoding import encode_kept, headers_bytes, kept_tombstones, promoted_headers
from txbroker.core.lifecycle import SETTLED
from txbroker.core.promotion import PromotionPlan, plan_promotion, transaction_bytes
from txbroker.core.records import Cause, Checkpoint, Header, Place, Record, State
from txbroker.core.shares import ShareUse
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import (
    Fenced,
    NotVisible,
    PartitionDoor,
    PromotionTxn,
    PromotionTxnHandle,
    PromotionTxnLost,
    PromotionTxnRefused,
    TargetFacts,
    TargetRecord,
    Targets,
)
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.tracing import PromotionSpans, promotion_spans
from txbroker.proxy.partition.appender import Appender
from txbroker.proxy.partition.body_cache import BODY_LOST, BodyCache, lost_cause
from txbroker.proxy.partition.clock import Slot, TxnLimiter
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.targets import Trouble, note_invisible, takes

COPIES_MAX = 100
"""Whole transactions that one turn copies into the parked topic, or removes from it, beside those
that it refuses. Parking comes in waves; a turn stays small."""

log = get_logger(__name__)


class Claimer(Protocol):
    """Who claims a partition again: `txbroker.proxy.partition.owner.Claims`."""

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again after a lost turn, and reconcile the ledger with what the claim finds.

        Args:
            unseen: the transactions whose turn is known to be committed, and that will be visible.

        Raises:
            Fenced: the partition has another owner.
        """
        ...


class _Flight(Struct, eq=False):
    """A turn on its way: what it holds, and what has to be copied or removed with it."""

    plan: PromotionPlan
    progress: Checkpoint
    """As of the plan: what is applied while messages are read is not in the turn."""
    keep: list[Transaction]
    release: list[Transaction]
    since_s: float
    """When it was begun, by the monotonic clock."""
    slot: Slot
    copies: list[tuple[Transaction, int]] = field(default_factory=list)
    """With whose copies the turn's parked records begin, in this order, each of how many."""
    traced: PromotionSpans | None = None
    """What of it is traced, if spans can be made."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is known whether the turn was committed."""

    def whole(self) -> list[Transaction]:
        """The transactions whose messages the turn writes."""
        return [*_decided_by(self.plan), *self.keep]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return self.plan.empty and not self.keep and not self.release


class Promoter:
    """Promotes the committed transactions of one half partition.

    Args:
        context: what all parts of the partition share.
        door: where turns are written.
        targets: what is known of target topics.
        bodies: has the messages of a turn in memory.
        half: reads the half topic, where somebody else wrote a commit before its half message.
        claimer: claims the partition again after a lost turn.
        pace: lets turns begin; the same for all partitions of a proxy.
    """

    def __init__(
        self,
        context: PartitionContext,
        door: PartitionDoor,
        targets: Targets,
        bodies: BodyCache,
        half: Appender,
        claimer: Claimer,
        pace: TxnLimiter,
    ) -> None:
        settings = context.settings
        self._context = context
        self._door = door
        self._ledger = context.ledger
        self._targets = targets
        self._bodies = bodies
        self._half = half
        self._claimer = claimer
        self._pace = pace
        self._limits = settings.turns
        self._installation = settings.installation
        self._beside = headers_bytes(settings.installation)
        # Of so many commits read before their half message that has been read for since.
        self._half_read_for = 0
        self._trouble = Trouble(context.ledger, settings.turns)
        self._wake = asyncio.Event()
        self._in_flight: set[str] = set()
        # Of those the ones whose turn is committed; readers may not see it yet.
        self._unseen: set[str] = set()
        self._flights: set[_Flight] = set()
        # Begun, and not known to be committed; and since when none has come through.
        self._open: set[_Flight] = set()
        self._failing_since_s: float | None = None
        self._failure: BaseException | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._lost = False
        self.full = False
        """Whether the list of deferred ones is full, so that promotion stands still."""
        self.waiting = ShareUse()
        """Of those whose target does not take them now how many each share has."""

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def changed(self, transactions: Sequence[Transaction]) -> None:
        """Records changed these: there may be something to promote or to copy."""
        wanted = bool(self._ledger.index.to_keep or self._ledger.index.to_release)
        for transaction in transactions:
            if transaction.state is State.COMMITTED:
                wanted = True
        if wanted:
            self._wake.set()

    def retry_refused(self, id: str) -> None:
        """Try a refused transaction again now, whatever was found out about it before."""
        self._trouble.retry_now(id)
        transaction = self._ledger.index.refused.get(id)
        if transaction is not None:
            self._bodies.try_again(transaction)
            for message in transaction.messages:
                self._targets.forget(message.topic)
        self._wake.set()

    @property
    def stuck_since(self) -> float | None:
        """Since when a turn, or the claim that it needs, has not come through, by the monotonic
        clock, seconds; None while nothing is to be written or all goes well."""
        times_s = [flight.since_s for flight in self._open]
        if self._failing_since_s is not None:
            times_s.append(self._failing_since_s)
        return min(times_s, default=None)

    async def run(self) -> None:
        """Write turns until cancelled, or until the partition is lost.

        Raises:
            Fenced: the partition has another owner.
        """
        self._trouble.retry_all()
        # Recovery has asked for half's end after op's.
        self._half_read_for = self._ledger.commits_waited
        try:
            while True:
                await self._pause()
                while await self._turn():
                    pass
        finally:
            for task in self._finishing:
                task.cancel()

    async def _pause(self) -> None:
        """Wait until woken, or until something is to be tried again."""
        try:
            async with asyncio.timeout(self._trouble.wait_s()):
                await self._wake.wait()
        except TimeoutError:
            pass
        # Whoever waits for the decision that has woken us hears of it first: an answer takes two
        # rounds of the loop to leave, and a turn longer than that to be planned and written.
        for _ in range(2):
            await asyncio.sleep(0)
        self._wake.clear()

    async def _turn(self) -> bool:
        """Plan and write one turn; say whether there may be another one at once."""
        if self._failure is not None:
            raise self._failure
        if self._lost:
            await self._recover()
        slot = await self._pace.begin()
        try:
            return await self._plan_and_write(slot)
        finally:
            if not any(flight.slot is slot for flight in self._flights):
                slot.release()

    async def _plan_and_write(self, slot: Slot) -> bool:
        plan = await self._plan()
        if self._ledger.commits_waited != self._half_read_for:
            # Planned without what was decided earlier, and may be of the same order key.
            return await self._read_ahead()
        # From here to the progress of this very plan nothing is awaited.
        self._note_deferred(plan)
        self._in_flight.update(_ids(_decided_by(plan)))
        keep, release = self._to_keep(), self._to_release()
        if plan.empty and not keep and not release:
            if not self._open:
                self._failing_since_s = None
            return False
        began_s = time.monotonic()
        flight = _Flight(plan, self._progress(plan), keep, release, began_s, slot)
        self._open.add(flight)
        with self._bodies.hold(flight.whole()):
            written = await self._load(flight) and await self._write(flight)
        self._bodies.trim()
        return written

    async def _read_ahead(self) -> bool:
        """Read the half messages of commits that were read before them; False where that cannot
        be now. Somebody else wrote both: we write a marker only once its half was applied."""
        waited = self._ledger.commits_waited
        try:
            await self._half.catch_up()
        except KafkaUnavailable as error:
            log.warning("log not read", partition=self._door.partition, why=str(error))
            self._trouble.note_deferred(waiting=True)
            return False
        self._half_read_for = waited
        return True

    async def _load(self, flight: _Flight) -> bool:
        """Have the messages of a turn in memory; False where that cannot be now.

        A transaction whose messages are gone spoils nothing: it is refused for that, and what was
        to be copied of it is not.
        """
        try:
            gone = await self._bodies.load(flight.whole())
        except KafkaUnavailable as error:
            log.warning("messages not read", partition=self._door.partition, why=str(error))
            self._in_flight.difference_update(_ids(_decided_by(flight.plan)))
            self._failed(flight)
            self._trouble.note_deferred(waiting=True)
            return False
        if gone:
            _refuse_lost(flight.plan, {transaction.id for transaction in gone})
            for transaction in gone:
                self._ledger.index.to_keep.pop(transaction.id, None)
        # Some may have been decided meanwhile.
        flight.keep = [each for each in flight.keep if each.id in self._ledger.index.to_keep]
        return True

    async def _write(self, flight: _Flight) -> bool:
        """Write a turn; say whether there may be another one at once."""
        if flight.empty:
            self._open.discard(flight)
            return True
        plan = flight.plan
        self._ledger.op_progress = max(self._ledger.op_progress, plan.op)
        for transaction in flight.keep:
            # Kept from here on: whatever settles it meanwhile must remove the copy.
            transaction.kept = True
        kept_as = [(transaction, transaction.state) for transaction in flight.keep]
        failpoint("turn.planned")
        try:
            turn = self._encode(flight)
            await self._context.gate.wait()
            handle = await self._door.write(turn)
        except PromotionTxnRefused as error:
            self._trouble.isolate(plan.promote, error.cause)
            self._targets.forget(error.cause.topic)
            log.warning("turn refused", partition=self._door.partition, why=error.cause.message)
            self._lost = True
            self._failed(flight)
        except (PromotionTxnLost, Fenced, KafkaUnavailable) as error:
            self._note_lost(flight, error)
            if isinstance(error, PromotionTxnLost) and error.cause is not None:
                # Or every turn from now on would be lost with it.
                self._trouble.avoid(error.cause)
        else:
            for transaction, state in kept_as:
                # One that was parked meanwhile needs a copy that says so.
                if transaction.state is state:
                    self._ledger.index.to_keep.pop(transaction.id, None)
            for transaction in flight.release:
                self._ledger.index.to_release.pop(transaction.id, None)
            task = asyncio.create_task(self._finish(flight, handle))
            self._finishing.add(task)
            self._flights.add(flight)
            task.add_done_callback(partial(self._finished, flight))
            # The turn's commit leaves before the next one is planned.
            await asyncio.sleep(0)
        return True

    def _to_keep(self) -> list[Transaction]:
        """Return what is to be copied with the next turn: not more than fits, and nothing whose
        fate this turn or one on its way decides: an older copy would outlive what they write."""
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
        """Plan with what is known of the targets, asking Kafka about those that are not."""
        retried = self._trouble.take_due(self._in_flight)
        limits = self._trouble.limits(retried)
        # What was asked for this plan counts to its end: with many targets the facts of the first
        # would be out of date before the last was asked about, and no plan would ever be made.
        found: dict[str, TargetFacts | Cause] = {}
        # So does what is kept off, however long that took: a silent leader is asked once.
        kept_off: dict[tuple[str, int | None], Cause] = {}
        while True:
            # In the order of decisions, as a set has none that comes again.
            unknown: dict[str, None] = {}

            def examine(place: Place, unknown: dict[str, None] = unknown) -> Cause | None:
                cause = kept_off.get((place.topic, place.partition))
                cause = cause or self._trouble.avoided(place.topic, place.partition)
                if cause is not None:
                    return cause
                facts = found.get(place.topic) or self._targets.known(place.topic)
                if facts is None:
                    unknown[place.topic] = None
                    return Cause("unexamined", "", place.topic, -1, passing=True)
                return takes(place.topic, place.partition, place.size + self._beside, facts)

            plan = plan_promotion(
                self._ledger.index.ready.values(),
                self._ledger.op_whole,
                examine,
                limits,
                in_flight=self._in_flight,
                retried=retried,
                tried=self._trouble.tried,
                progressed=self._ledger.op_progress,
            )
            if not unknown:
                unverified = self._door.unverified(_places(plan))
                if not unverified:
                    return plan
                # Planned anew in any case: something may have been decided meanwhile.
                for cause in await self._door.verify_no_open_txn(unverified):
                    log.warning(
                        "target kept off", partition=self._door.partition, why=cause.message
                    )
                    self._trouble.avoid(cause)
                    kept_off[cause.topic, cause.partition] = cause
                    # It may be gone, or without a leader, since it was examined.
                    self._targets.forget(cause.topic)
                continue
            asked = await asyncio.gather(*[self._examined(topic) for topic in unknown])
            found.update(zip(unknown, asked, strict=True))

    async def _examined(self, topic: str) -> TargetFacts | Cause:
        """Ask about a target; of one that cannot be asked about the others know nothing."""
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
                # Nobody may take one whose turn is on its way for one that waits.
                transaction.cause = None
        self.full = plan.full
        self.waiting = self._ledger.index.use_of(plan.waiting())
        self._trouble.note_deferred(waiting=bool(plan.deferred))

    # --- writing ---------------------------------------------------------------------------

    def _encode(self, flight: _Flight) -> PromotionTxn:
        plan = flight.plan
        promoted = _targets(plan.promote, self._installation)
        parked: list[Record] = []
        copied: list[tuple[Transaction, State, Cause | None]] = [
            *[(transaction, State.REFUSED, cause) for transaction, cause in plan.refuse],
            *[(transaction, transaction.state, None) for transaction in flight.keep],
        ]
        for transaction, state, cause in copied:
            records = encode_kept(transaction.copy(state, cause), self._context.record_version())
            parked.extend(records)
            flight.copies.append((transaction, len(records)))
        if tracing.active:
            flight.traced = promotion_spans(_decided_by(plan))
        for transaction in [*[each for each in plan.promote if each.kept], *flight.release]:
            parked.extend(kept_tombstones(transaction.id, len(transaction.messages)))
        # Not as of the plan: refused are also those whose messages turned out to be gone.
        if plan.refuse and parked:
            self._ledger.wrote_refused = True
        accounted = min(flight.progress.half, self._ledger.accounted(self._in_flight))
        refused = self._ledger.wrote_refused
        progress = structs.replace(flight.progress, refused=refused, accounted=accounted)
        return PromotionTxn(promoted, tuple(parked), progress)

    def _progress(self, plan: PromotionPlan) -> Checkpoint:
        ledger = self._ledger
        return Checkpoint(
            v=self._context.record_version(),
            claim=self._context.claim.id,
            op=plan.op,
            half=ledger.half_whole,
            op_anchor=ledger.op_anchor,
            half_anchor=ledger.half_anchor,
            deferred=tuple(plan.deferred),
        )

    def _finished(self, flight: _Flight, task: asyncio.Task[None]) -> None:
        self._finishing.discard(task)
        flight.slot.release()  # one that was given up before it began has not said so
        if not task.cancelled() and task.exception() is not None:
            # What must not happen did: its transactions would wait for ever, and nobody knew.
            self._failure = task.exception()
            self._wake.set()

    async def _finish(self, flight: _Flight, handle: PromotionTxnHandle) -> None:
        """See a turn to its end: committed, then visible."""
        plan, ledger = flight.plan, self._ledger
        try:
            await handle.committed()
        except (PromotionTxnLost, Fenced, KafkaUnavailable) as error:
            self._note_lost(flight, error)
            self._wake.set()
            return
        finally:
            self._flights.discard(flight)
            flight.ended.set()
            flight.slot.release()
        ledger.op_committed = max(ledger.op_committed, flight.progress.op)
        failpoint("turn.committed")
        self._open.discard(flight)
        self._failing_since_s = None
        promoted = _ids(plan.promote)
        self._unseen.update(promoted)
        for transaction, cause in plan.refuse:
            ledger.refuse(transaction.id, cause)
            if cause.code == BODY_LOST:
                self._trouble.give_up(transaction.id)
            self._trouble.retry_later(transaction.id)
            self._in_flight.discard(transaction.id)
            log.warning("refused", id=transaction.id, cause=cause.code, why=cause.message)
        if plan.refuse:
            self._context.refused([transaction for transaction, _ in plan.refuse])
        _note_copies(flight, handle)
        await self._visible(plan, handle)
        failpoint("turn.visible")
        ledger.promote_run(plan.promote, handle.offsets, self._context.clock.now_ms())
        self._in_flight.difference_update(promoted)
        self._unseen.difference_update(promoted)
        if flight.traced is not None:
            flight.traced.record({each.id: cause.code for each, cause in plan.refuse})
        if plan.promote:
            self._trouble.promoted(plan.promote)
            self._context.promoted(plan.promote)
        self._wake.set()

    def _failed(self, flight: _Flight) -> None:
        """A turn has not come through."""
        self._open.discard(flight)
        if self._failing_since_s is None:
            self._failing_since_s = flight.since_s

    def _note_lost(self, flight: _Flight, error: Exception) -> None:
        self._failed(flight)
        log.warning("turn lost", partition=self._door.partition, why=str(error))
        self._context.events.kafka_failed("turn")
        self._lost = True

    async def _visible(self, plan: PromotionPlan, handle: PromotionTxnHandle) -> None:
        """Wait for as long as it takes: the turn is committed, so it will be seen."""
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
        """Claim again; what the turns on their way have done is in the progress it finds."""
        # Not until they are visible: that can take as long as a stranger's transaction in a target.
        for flight in list(self._flights):
            await flight.ended.wait()
        await self._claimer.reclaim(frozenset(self._unseen))
        self._in_flight = set(self._unseen)
        self._lost = False
        self._trouble.retry_all()


def _places(plan: PromotionPlan) -> Collection[tuple[str, int]]:
    # In the order of decisions, as a set has none that comes again.
    return dict.fromkeys([(at.topic, at.partition) for one in plan.promote for at in one.places])


def _decided_by(plan: PromotionPlan) -> list[Transaction]:
    """Return the transactions whose fate a turn decides."""
    return [*plan.promote, *[each for each, _ in plan.refuse]]


def _ids(transactions: Iterable[Transaction]) -> list[str]:
    return [transaction.half.id for transaction in transactions]


def _targets(
    transactions: Iterable[Transaction], installation: tuple[Header, ...]
) -> tuple[TargetRecord, ...]:
    """Return the records to promote of each transaction, in the order of its messages."""
    targets: list[TargetRecord] = []
    for transaction in transactions:
        half, verdict = transaction.half, transaction.verdict
        messages = transaction.contents or half.messages
        decided_at_ms = 0 if verdict is None else verdict.at_ms
        for sequence, message in enumerate(messages):
            headers = promoted_headers(half.id, sequence, len(messages), message, installation)
            at_ms = decided_at_ms if message.timestamp_ms is None else message.timestamp_ms
            record = Record(message.key, message.value, headers, at_ms)
            assert message.partition is not None
            targets.append(TargetRecord(message.topic, message.partition, record))
    return tuple(targets)


def _refuse_lost(plan: PromotionPlan, lost: set[str]) -> None:
    """Turn what a plan was to do with transactions whose messages are gone into refusing them."""
    plan.refuse = [
        (each, lost_cause(each) if each.id in lost else cause) for each, cause in plan.refuse
    ]
    plan.refuse.extend((each, lost_cause(each)) for each in plan.promote if each.id in lost)
    plan.promote = [each for each in plan.promote if each.id not in lost]


def _note_copies(flight: _Flight, handle: PromotionTxnHandle) -> None:
    """Remember where the copies of a committed turn lie, to read them again one day."""
    taken = 0
    for transaction, count in flight.copies:
        if transaction.state not in SETTLED:
            transaction.kept_at = tuple(handle.parked_offsets[taken : taken + count])
        taken += count
