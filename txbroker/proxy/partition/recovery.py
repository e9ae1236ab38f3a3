"""Recovery of a claimed partition: snapshot, parked copies, replay of both logs, checkpoint."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from msgspec import Struct, structs

from txbroker.core.decoding import (
    HalfPart,
    KeptPart,
    Malformed,
    NewerVersion,
    decode_kept,
    decode_log,
    join_parts,
)
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import UNDECIDED
from txbroker.core.records import Anchor, Checkpoint, ParkedCopy, Record, Skip, State
from txbroker.core.snapshot import Closing, Whole, find_whole, load
from txbroker.core.transaction import Transaction, bare
from txbroker.door.own_topics import ParkedScan, foreign_why
from txbroker.door.protocols import Claimed, ForeignRecord, Log, LogTruncated, PartitionDoor
from txbroker.errors import InvariantBroken, KafkaUnavailable, NewerRecord
from txbroker.failpoints import failpoint
from txbroker.proxy.partition.appender import LogReplica
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.context import PartitionContext

PICKED_MAX = 200
"""Copies that are restored at a time, which bounds memory."""


class ParkedCopies(Struct, frozen=True):
    """The content of the parked topic.

    Attributes:
        whole: the copies, with bare messages and the offsets of their records.
        torn: ids of which some records are missing, which no proxy causes.
        foreign: number of records of other clients.
        set_aside: the newest of these.
    """

    whole: list[ParkedCopy]
    torn: frozenset[str]
    foreign: int = 0
    set_aside: tuple[ForeignRecord, ...] = ()

    def check(self, promoted: Iterable[Transaction]) -> None:
        """Raise if a transaction that counts as promoted, lacking a whole copy, has a torn one."""
        torn = [transaction.id for transaction in promoted if transaction.id in self.torn]
        if torn:
            raise InvariantBroken(
                f"the parked topic is damaged: {len(torn)} copies of committed transactions are "
                f"incomplete, such as that of {torn[0]}: it is unknown whether they were promoted"
            )


async def read_copies(door: PartitionDoor, skips: Sequence[Skip]) -> ParkedCopies:
    """Read the parked topic from its start; compaction bounds its size."""
    yielder = Yielder()
    scan = ParkedScan(door.partition, skips)
    parts: dict[str, dict[int, tuple[int, KeptPart]]] = {}
    async for records in door.parked():
        for record in records:
            part = scan.take(record)
            if part is None:
                continue
            if part.part is None:
                left = parts.get(part.id, {})
                left.pop(part.sequence, None)
                if not left:
                    parts.pop(part.id, None)
            else:
                part = structs.replace(part, part=_bare(part.part))
                parts.setdefault(part.id, {})[part.sequence] = (record.offset, part)
            await yielder.step()
    for record, why in scan.stops():
        raise NewerRecord(
            f"a record of the parked topic at offset {record.offset} was written by a newer "
            f"txbroker ({why}): upgrade this proxy. To pass it over see docs/operate/repair.md"
        )
    whole: list[ParkedCopy] = []
    torn = set()
    for id, records_of in parts.items():
        kept = _join(records_of)
        if kept is None:
            torn.add(id)
        else:
            whole.append(kept)
        await yielder.step()
    return ParkedCopies(whole, frozenset(torn), scan.foreign, tuple(scan.set_aside))


async def with_messages(door: PartitionDoor, copies: Sequence[ParkedCopy]) -> list[ParkedCopy]:
    """Read the messages of a few copies by the offsets of their records."""
    offsets = sorted({offset for copy in copies for offset in copy.at})
    records = {record.offset: record for record in await door.pick_parked(offsets)}
    return [_filled(copy, records) for copy in copies]


def batches(copies: Sequence[ParkedCopy]) -> Iterable[Sequence[ParkedCopy]]:
    for first in range(0, len(copies), PICKED_MAX):
        yield copies[first : first + PICKED_MAX]


def _decode(record: Record) -> KeptPart | None:
    try:
        return decode_kept(record)
    except (NewerVersion, Malformed):
        return None


def _bare(part: HalfPart) -> HalfPart:
    return structs.replace(part, message=bare([part.message])[0])


def _join(parts: dict[int, tuple[int, KeptPart]]) -> ParkedCopy | None:
    """Return the copy of these records; None if some are missing."""
    _, first = parts.get(0, (-1, None))
    if first is None or first.part is None or first.facts is None:
        return None
    halves: list[HalfPart] = []
    at: list[int] = []
    for sequence in range(first.part.count):
        offset, part = parts.get(sequence, (-1, None))
        if part is None or part.part is None:
            return None
        halves.append(part.part)
        at.append(offset)
    facts = first.facts
    return ParkedCopy(
        join_parts(halves),
        facts.half,
        facts.at_ms,
        State(facts.state),
        facts.cause,
        facts.decided_ms,
        tuple(at),
        facts.checks,
    )


def _filled(copy: ParkedCopy, records: dict[int, Record]) -> ParkedCopy:
    messages = []
    for sequence, offset in enumerate(copy.at):
        record = records.get(offset)
        part = None if record is None else _decode(record)
        if (
            part is None
            or part.part is None
            or (part.id, part.sequence) != (copy.half.id, sequence)
        ):
            raise KafkaUnavailable(f"the copy of {copy.half.id} moved while it was read")
        messages.append(part.part.message)
    return structs.replace(copy, half=structs.replace(copy.half, messages=tuple(messages)))


class Recovered(Struct, frozen=True):
    """The result of a recovery besides the ledger.

    Attributes:
        timestamp_ms: append time of the claim record.
        snapshots: the records of all snapshots.
        greatest: the newest complete snapshot; None without any.
        position: the sum of the offsets at which the replay of both logs began.
        half_start: the first offset of the half topic.
    """

    timestamp_ms: int
    snapshots: Sequence[Record]
    greatest: Whole | None
    position: int
    half_start: int


class _Known(Struct, frozen=True):
    """A position of a log that an earlier owner stored, and a record that identifies the log."""

    position: int
    anchor: Anchor | None
    as_of_ms: int
    """Append time of the newest record of either log that had been read by then."""

    @property
    def end(self) -> int:
        """The least end of the log: after the position, and after the last record that had been
        read by then, which may be further."""
        return self.position if self.anchor is None else max(self.position, self.anchor.offset + 1)


_VOID_WINDOWS = 2
"""An id may be a dedup window ahead of its half message, and expires a window after its own time:
a half message that was appended this many windows ago cannot be prepared again."""
_NOTHING_KNOWN = _Known(0, None, sys.maxsize)
"""An owner writes a snapshot as soon as it has read anything. Without one no owner ran long enough
for records to expire, so retention did not delete them."""


async def recover(context: PartitionContext, claimed: Claimed) -> Recovered:
    """Bring an empty ledger to the end of the logs of a partition that was just claimed.

    Args:
        context: of the partition. Records younger than its half retention that no longer exist
            were deleted by an operator or another client.
        claimed: the result of the claim.

    Raises:
        LogTruncated: a topic was truncated or recreated.
        InvariantBroken: the parked topic is damaged.
        NewerRecord: a newer version wrote a record that this one does not understand.
        KafkaUnavailable: Kafka does not answer, or retention deleted records that were being
            read: retry with a new ledger.
    """
    door, ledger, progress = context.door, context.ledger, claimed.progress
    context.claim.skips = claimed.skips
    context.report_foreign("checkpoint", claimed.foreign, claimed.set_aside)
    copies = await read_copies(door, claimed.skips)
    context.report_foreign("parked", copies.foreign, copies.set_aside)
    await _check_parked(door, progress)
    failpoint("recover.copies")
    # The operation topic's end first: each marker below it has its half message below half's end,
    # or had none when it was written.
    op_start, op_end = await door.op.bounds()
    half_start, half_end = await door.half.bounds()
    # In a thread: hashing all of it would block the event loop.
    wholes = await asyncio.to_thread(find_whole, claimed.snapshots)
    logs = _Logs(door, (half_start, half_end), (op_start, op_end))
    kept_since_ms = claimed.timestamp_ms - context.settings.half_retention_ms
    try:
        await _check_same(logs, progress, wholes, kept_since_ms)
        # One that ends before the operation topic begins misses the decisions in between.
        whole = next((one for one in wholes if one.closing.op >= op_start), None)
        if not _of_older_owner(progress, wholes):
            known_to = _covered(0 if whole is None else whole.closing.half, copies)
            void_ms = claimed.timestamp_ms - _VOID_WINDOWS * ledger.dedup_window_ms
            await _check_accounted(logs, progress, known_to, void_ms)
        position = await _catch_up(logs, context, copies, whole)
    except LogTruncated as error:
        if not await logs.begin_later():
            raise
        # Nothing was changed: the next attempt judges the records that are kept then.
        raise KafkaUnavailable(
            f"retention deleted records that were being read; the recovery restarts: {error}"
        ) from None
    failpoint("recover.replayed")
    copies.check(ledger.reconcile(progress, copies.whole))
    greatest = wholes[0] if wholes else None
    return Recovered(claimed.timestamp_ms, claimed.snapshots, greatest, position, half_start)


async def check_checkpoint(door: PartitionDoor) -> None:
    """Check, before a claim, that the checkpoint topic was not recreated after the logs.

    An owner claims before it appends. A recreated checkpoint topic does not hold the promotions,
    so all of them would be repeated. After a claim it could no longer be distinguished."""
    if await door.claimed_before():
        return
    ends = (await door.half.bounds())[1], (await door.op.bounds())[1]
    # Asked again: the very first owner may have claimed and written in between.
    if any(ends) and not await door.claimed_before() and not await _only_foreign(door):
        raise LogTruncated(
            "the checkpoint topic has no record, but half or op topic have had some: it was "
            "recreated, and the promotions are unknown"
        )


async def _only_foreign(door: PartitionDoor) -> bool:
    """Return whether both logs are kept from offset 0 and hold records of other clients only."""
    for name, log in (("half", door.half), ("op", door.op)):
        start, end = await log.bounds()
        if start > 0:
            return False  # the deleted records may have been ours
        async for records in _read(log, start, end):
            if any(_may_be_ours(name, record, door.partition) for record in records):
                return False
    return True


def _may_be_ours(log: str, record: Record, partition: int) -> bool:
    try:
        decode_log(log, record)
    except Malformed:
        return False
    except NewerVersion:
        return not foreign_why(log, record, partition)
    return True


async def _check_parked(door: PartitionDoor, progress: Checkpoint | None) -> None:
    """Check that the parked topic that holds the refused transactions was not recreated.

    Only their copies show that they were not promoted. Other copied transactions are in the half
    topic, or reported as lost."""
    if progress is not None and progress.refused and not await door.parked_before():
        raise LogTruncated(
            "the parked topic has no record, but refused transactions were copied into it: it was "
            "recreated, and it is unknown which transactions were refused"
        )


class _Logs(Struct, frozen=True):
    """Both logs of a partition, with their first and end offsets as requested once."""

    door: PartitionDoor
    half: tuple[int, int]
    op: tuple[int, int]

    async def begin_later(self) -> bool:
        """Return whether a log begins later by now, because retention deleted records."""
        half_start, _ = await self.door.half.bounds()
        op_start, _ = await self.door.op.bounds()
        return half_start > self.half[0] or op_start > self.op[0]


async def _check_same(
    logs: _Logs, progress: Checkpoint | None, wholes: Sequence[Whole], kept_since_ms: int
) -> None:
    """Compare both logs with the positions and records that earlier owners stored."""
    door, markers = logs.door, _op_known(progress, wholes)
    _check_kept(markers, logs.op[0], kept_since_ms)
    await _compare(door.op, "op", logs.op, markers, kept_since_ms)
    await _compare(door.half, "half", logs.half, _half_known(progress, wholes), kept_since_ms)


async def _catch_up(
    logs: _Logs, context: PartitionContext, copies: ParkedCopies, whole: Whole | None
) -> int:
    """Bring an empty ledger to the end of both logs; return the sum of the first offsets."""
    ledger, door = context.ledger, logs.door
    (half_start, half_end), (op_start, op_end) = logs.half, logs.op
    h0, o0 = await _begin(ledger, whole, half_start, op_start)
    await _find_again(ledger, half_start)
    await _restore(door, ledger, copies.whole, 0 if whole is None else whole.closing.half, h0)
    halves = _read(door.half, h0, half_end, ledger.skip_half)
    await _replay(halves, _read(door.op, o0, op_end, ledger.skip_op), context)
    return h0 + o0


# --- is it still the same log? ---------------------------------------------------------------


def _op_known(progress: Checkpoint | None, wholes: Iterable[Whole]) -> list[_Known]:
    return [
        _Known(one.op, one.op_anchor, _as_of_ms(one.op_anchor, one.half_anchor))
        for one in _written(progress, wholes)
    ]


def _half_known(progress: Checkpoint | None, wholes: Iterable[Whole]) -> list[_Known]:
    return [
        _Known(one.half, one.half_anchor, _as_of_ms(one.op_anchor, one.half_anchor))
        for one in _written(progress, wholes)
    ]


def _written(progress: Checkpoint | None, wholes: Iterable[Whole]) -> list[Checkpoint | Closing]:
    closings: list[Checkpoint | Closing] = [whole.closing for whole in wholes]
    return closings if progress is None else [*closings, progress]


def _as_of_ms(*anchors: Anchor | None) -> int:
    return max((anchor.timestamp_ms for anchor in anchors if anchor is not None), default=0)


async def _compare(
    log: Log, name: str, bounds: tuple[int, int], known: Sequence[_Known], kept_since_ms: int
) -> None:
    """Compare a log with the positions and records that earlier owners stored."""
    start, end = bounds
    furthest = max(known, key=lambda one: one.end, default=_NOTHING_KNOWN)
    if end < furthest.end:
        raise LogTruncated(
            f"an earlier owner has read the {name} topic to offset {furthest.end}, but it ends at "
            f"{end}: it was truncated or recreated"
        )
    # Retention deleted the records below its start, if they are old enough.
    if furthest.end < start and furthest.as_of_ms > kept_since_ms:
        raise LogTruncated(
            f"the {name} topic begins at offset {start}, but was read only to {furthest.end}: "
            "records that no owner has read were deleted"
        )
    anchors = {one.anchor for one in known if one.anchor is not None and one.anchor.offset >= start}
    offsets = sorted({anchor.offset for anchor in anchors})
    picked = {record.offset: record for record in await log.pick(offsets)}
    for anchor in sorted(anchors, key=lambda anchor: anchor.offset):
        if not anchor.matches(picked.get(anchor.offset)):
            raise LogTruncated(
                f"offset {anchor.offset} of the {name} topic holds another record than when it "
                "was read: the topic was recreated"
            )


def _check_kept(known: Iterable[_Known], start: int, kept_since_ms: int) -> None:
    """Check that no marker was deleted early: its transaction would be undecided again."""
    for one in known:
        anchor = one.anchor
        if anchor is not None and anchor.offset < start and anchor.timestamp_ms > kept_since_ms:
            raise LogTruncated(
                f"the op topic begins at offset {start}: markers younger than its retention were "
                "deleted, and their decisions are unknown"
            )


async def _check_accounted(
    logs: _Logs, progress: Checkpoint | None, known_to: int, void_ms: int
) -> None:
    """Check that the transaction of every deleted half message is accounted for.

    That an earlier owner read it is not enough: that owner's memory is lost. Snapshot and copies
    account for all below `known_to`. After that, deleted ones must be settled or copied according
    to the newest checkpoint. For those appended since `void_ms` that is not enough: a repeated
    prepare would be taken for a new one.

    Raises:
        LogTruncated: some are not accounted for.
        KafkaUnavailable: Kafka does not answer.
    """
    half_start, half_end = logs.half
    if half_start <= known_to:
        return
    if progress is not None and progress.accounted is not None:
        newest_ms = _as_of_ms(progress.op_anchor, progress.half_anchor)
        for first in await logs.door.half.pick([half_start] if half_start < half_end else []):
            newest_ms = min(newest_ms, first.timestamp_ms)  # deleted ones were appended earlier
        if half_start <= progress.accounted and newest_ms <= void_ms:
            return
    raise LogTruncated(
        f"the half topic begins at offset {half_start}, but snapshot and copies account only for "
        f"offsets below {known_to}: records were deleted, and their transactions are unknown"
    )


def _covered(known_to: int, copies: ParkedCopies) -> int:
    """Return the offset below which contiguous copies account for all half messages."""
    for copy in sorted(copies.whole, key=lambda copy: copy.half_offset):
        if copy.half_offset <= known_to:
            known_to = max(known_to, copy.half_offset + len(copy.half.messages))
    return known_to


def _of_older_owner(progress: Checkpoint | None, wholes: Sequence[Whole]) -> bool:
    """Return whether the last proxy let retention pass its snapshots, so they prove nothing."""
    if progress is not None and progress.accounted is not None:
        return False
    newest = wholes[0].closing if wholes else None
    if newest is not None and not newest.at_ms:
        return True
    return progress is not None and (newest is None or progress.half > newest.half)


# --- to the end of the logs ------------------------------------------------------------------


async def _begin(
    ledger: Ledger, whole: Whole | None, half_start: int, op_start: int
) -> tuple[int, int]:
    if whole is None:
        ledger.start_at(half_start, op_start)
        return half_start, op_start
    yielder = Yielder()
    for _ in load(whole, ledger):
        await yielder.piece()
    # Half's retention may have passed the snapshot: unsettled transactions in between have copies.
    half, op = max(whole.closing.half, half_start), whole.closing.op
    ledger.start_at(half, op)
    return half, op


async def _find_again(ledger: Ledger, half_start: int) -> None:
    """Find lost half messages that an operator has restored: they can be checked and committed.

    Committed ones were refused for their loss; an operator revives them.
    """
    yielder = Yielder()
    for transaction in ledger.index.transactions.values():
        if transaction.lost and transaction.state in UNDECIDED:
            transaction.lost = transaction.offset < half_start
        await yielder.step()


async def _restore(
    door: PartitionDoor, ledger: Ledger, copies: Sequence[ParkedCopy], known_to: int, start: int
) -> None:
    """Restore unsettled transactions whose half message was deleted from their copies.

    The snapshot is complete below `known_to`: a copy there that it does not hold is a leftover of
    a settled transaction, and must not be restored.
    """
    gone = [copy for copy in copies if known_to <= copy.half_offset < start]
    yielder = Yielder()
    for batch in batches([copy for copy in gone if copy.half.id not in ledger.index.transactions]):
        for copy in await with_messages(door, batch):
            ledger.restore(copy)
            transaction = ledger.index.transactions.get(copy.half.id)
            if transaction is not None:
                ledger.index.evict(transaction)
        await yielder.piece()


class _Cursor:
    """Reads the records of one log one by one; `record` is the current one, None at the end."""

    def __init__(self, batches: AsyncIterator[Sequence[Record]]) -> None:
        self.record: Record | None = None
        self._batches = batches
        self._batch: Sequence[Record] = ()
        self._next = 0

    async def move(self) -> None:
        while self._next >= len(self._batch):
            batch = await anext(self._batches, None)
            if batch is None:
                self.record = None
                return
            self._batch, self._next = batch, 0
        self.record = self._batch[self._next]
        self._next += 1


async def _replay(
    halves: AsyncIterator[Sequence[Record]],
    markers: AsyncIterator[Sequence[Record]],
    context: PartitionContext,
) -> None:
    """Apply both logs, the older record first.

    Any order gives the same ledger; this one settles transactions early, which bounds memory.
    """
    half, op = _Cursor(halves), _Cursor(markers)
    half_replica, op_replica = LogReplica(context, "half"), LogReplica(context, "op")
    await half.move()
    await op.move()
    since_ms = context.ledger.op_clock_ms if op.record is None else op.record.timestamp_ms
    context.proxy.actions.begin(context.partition, context.ledger.op_position, since_ms)
    yielder = Yielder()
    while half.record is not None or op.record is not None:
        if op.record is None or (
            half.record is not None and half.record.timestamp_ms <= op.record.timestamp_ms
        ):
            assert half.record is not None
            half_replica.apply(half.record)
            await half.move()
        else:
            op_replica.apply(op.record)
            await op.move()
        await yielder.step()


async def _read(
    log: Log, start: int, end: int, skipped: Callable[[range], None] | None = None
) -> AsyncIterator[Sequence[Record]]:
    if start < end:
        async for records in log.read(start, end, skipped):
            yield records
