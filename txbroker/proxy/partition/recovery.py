"""How an owner comes to know its partition: claim, snapshot, kept copies, replay, progress."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from msgspec import Struct

from txbroker.core.decoding import Malformed, NewerVersion, decode_log
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import UNDECIDED
from txbroker.core.records import Anchor, Checkpoint, Claim, ParkedCopy, Record
from txbroker.core.snapshot import Closing, Whole, find_whole, load
from txbroker.door.own_topics import foreign_why
from txbroker.door.protocols import Claimed, Log, LogTruncated, PartitionDoor
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.proxy.partition.applier import Applier, HalfReplica, OpReplica
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.parked_copies import ParkedCopies, batches, read_copies, with_messages


class Recovered(Struct, frozen=True):
    """What a recovery found beside the ledger.

    Attributes:
        timestamp_ms: the claim record's append time.
        snapshots: the records of all snapshots.
        greatest: the greatest whole one; None without any.
        position: the sum of the offsets from which on the logs were replayed.
        half_start: where the half topic began.
    """

    timestamp_ms: int
    snapshots: Sequence[Record]
    greatest: Whole | None
    position: int
    half_start: int


class _Known(Struct, frozen=True):
    """A position of a log that an earlier owner has written down, and a record by which the log
    is recognised."""

    position: int
    anchor: Anchor | None
    as_of_ms: int
    """When the newest record of either log was appended that was read when this was written."""

    @property
    def end(self) -> int:
        """Where the log ends at least: behind what is counted, and behind the last record that
        was read when this was written, which may be further."""
        return self.position if self.anchor is None else max(self.position, self.anchor.offset + 1)


_VOID_WINDOWS = 2
"""An id may be a dedup window ahead of its half message, and is void a window after its own time:
whatever was appended so many windows ago can be prepared again by nobody."""
_NOTHING_KNOWN = _Known(0, None, sys.maxsize)
"""An owner writes a snapshot as soon as it has read anything. Where there is none, nobody lived to
see records grow old, so it was not retention that took them."""


async def claim_first(door: PartitionDoor, claim: Claim) -> Claimed:
    """Claim a partition that is to be recovered.

    Raises:
        Fenced: another owner claimed at the same time; nothing was changed.
        LogTruncated: the checkpoint topic is not what it was.
        KafkaUnavailable: Kafka does not answer.
    """
    await _check_claimed(door)
    return await door.claim(claim)


async def recover(
    door: PartitionDoor, found: Claimed, applier: Applier, half_retention_ms: int
) -> Recovered:
    """Bring an empty ledger to the end of the logs of a partition that was just claimed.

    Args:
        door: the partition.
        found: what the claim has found.
        applier: applies records to the ledger.
        half_retention_ms: how long records are kept at least: younger ones that are gone were
            deleted by somebody.

    Raises:
        LogTruncated: one of our topics is not what it was.
        InvariantBroken: the parked topic is damaged.
        NewerRecord: a newer version wrote what this one does not understand.
        KafkaUnavailable: Kafka does not answer, or retention deleted what was being read: begin
            anew, with another ledger.
    """
    applier.claimed(found)
    ledger, progress = applier.ledger, found.progress
    copies = await read_copies(door, found.skips)
    applier.copied(copies)
    await _check_parked(door, progress)
    failpoint("recover.copies")
    # The operation topic's end first: every marker below it has its half below half's end, or
    # had none when it was written.
    op_start, op_end = await door.op.bounds()
    half_start, half_end = await door.half.bounds()
    # Hashing all of it holds nobody up in a thread.
    wholes = await asyncio.to_thread(find_whole, found.snapshots)
    logs = _Logs(door, (half_start, half_end), (op_start, op_end))
    kept_since_ms = found.timestamp_ms - half_retention_ms
    try:
        await _check_same(logs, progress, wholes, kept_since_ms)
        # Of one that is older than the operation topic nobody knows what was decided since.
        whole = next((each for each in wholes if each.closing.op >= op_start), None)
        if not _of_older_owner(progress, wholes):
            known_to = _covered(0 if whole is None else whole.closing.half, copies)
            void_ms = found.timestamp_ms - _VOID_WINDOWS * ledger.dedup_window_ms
            await _check_accounted(logs, progress, known_to, void_ms)
        position = await _catch_up(logs, applier, copies, whole)
    except LogTruncated as error:
        if not await logs.begin_later():
            raise
        # Nobody has changed anything: what is kept now is judged anew.
        raise KafkaUnavailable(f"retention deleted what was being read: {error}") from None
    failpoint("recover.replayed")
    copies.check(ledger.reconcile(progress, copies.whole))
    greatest = wholes[0] if wholes else None
    return Recovered(found.timestamp_ms, found.snapshots, greatest, position, half_start)


async def _check_claimed(door: PartitionDoor) -> None:
    """Check that the checkpoint topic is the one that was there when the logs were written.

    Whoever appends has claimed before. A checkpoint topic that was made anew knows nothing of what
    was promoted, and all of it would be promoted again. Nothing is written, as after a claim it
    could not be told apart any more.

    Raises:
        LogTruncated: it is another one.
        KafkaUnavailable: Kafka does not answer.
    """
    if await door.claimed_before():
        return
    ends = (await door.half.bounds())[1], (await door.op.bounds())[1]
    # Asked again, as the first owner of all may have claimed and written in between.
    if any(ends) and not await door.claimed_before() and not await _only_foreign(door):
        raise LogTruncated(
            "the checkpoint topic has no record, but half or op topic have had some: it was "
            "recreated, and nobody can tell any more what was promoted"
        )


async def _only_foreign(door: PartitionDoor) -> bool:
    """Say whether both logs are kept from their begin, and no record in them is one of ours."""
    for name, log in (("half", door.half), ("op", door.op)):
        start, end = await log.bounds()
        if start > 0:
            return False  # what retention has taken may have been ours
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
    """Check that the parked topic is the one in which refused ones were set aside.

    Of these only their copies say that they were not promoted. Others that were copied are in the
    half topic, or told to be lost.

    Raises:
        LogTruncated: it is another one.
        KafkaUnavailable: Kafka does not answer.
    """
    if progress is not None and progress.refused and not await door.parked_before():
        raise LogTruncated(
            "the parked topic has no record, but a turn has set refused ones aside in it: it was "
            "recreated, and nobody can tell any more what was refused"
        )


class _Logs(Struct, frozen=True):
    """Both logs of a partition, and their first and last offsets as they were asked for once."""

    door: PartitionDoor
    half: tuple[int, int]
    op: tuple[int, int]

    async def begin_later(self) -> bool:
        """Say whether a log begins later by now, as after retention has deleted from it."""
        half_start, _ = await self.door.half.bounds()
        op_start, _ = await self.door.op.bounds()
        return half_start > self.half[0] or op_start > self.op[0]


async def _check_same(
    logs: _Logs, progress: Checkpoint | None, wholes: Sequence[Whole], kept_since_ms: int
) -> None:
    """Compare both logs with what earlier owners have written down of them.

    Raises:
        LogTruncated: they are not what they were.
    """
    door, markers = logs.door, _op_known(progress, wholes)
    _check_kept(markers, logs.op[0], kept_since_ms)
    await _compare(door.op, "op", logs.op, markers, kept_since_ms)
    await _compare(door.half, "half", logs.half, _half_known(progress, wholes), kept_since_ms)


async def _catch_up(
    logs: _Logs, applier: Applier, copies: ParkedCopies, whole: Whole | None
) -> int:
    """Bring an empty ledger to the end of both logs; return the sum of the offsets from which on
    they were replayed."""
    ledger, door = applier.ledger, logs.door
    (half_start, half_end), (op_start, op_end) = logs.half, logs.op
    h0, o0 = await _begin(ledger, whole, half_start, op_start)
    await _find_again(ledger, half_start)
    await _restore(door, ledger, copies.whole, 0 if whole is None else whole.closing.half, h0)
    halves = _read(door.half, h0, half_end, ledger.skip_half)
    await _replay(halves, _read(door.op, o0, op_end, ledger.skip_op), applier)
    return h0 + o0


# --- is it still the same log? ---------------------------------------------------------------


def _op_known(progress: Checkpoint | None, wholes: Iterable[Whole]) -> list[_Known]:
    return [
        _Known(each.op, each.op_anchor, _as_of_ms(each.op_anchor, each.half_anchor))
        for each in _written(progress, wholes)
    ]


def _half_known(progress: Checkpoint | None, wholes: Iterable[Whole]) -> list[_Known]:
    return [
        _Known(each.half, each.half_anchor, _as_of_ms(each.op_anchor, each.half_anchor))
        for each in _written(progress, wholes)
    ]


def _written(progress: Checkpoint | None, wholes: Iterable[Whole]) -> list[Checkpoint | Closing]:
    closings: list[Checkpoint | Closing] = [each.closing for each in wholes]
    return closings if progress is None else [*closings, progress]


def _as_of_ms(*anchors: Anchor | None) -> int:
    return max((each.timestamp_ms for each in anchors if each is not None), default=0)


async def _compare(
    log: Log, name: str, bounds: tuple[int, int], known: Sequence[_Known], kept_since_ms: int
) -> None:
    """Compare a log with what earlier owners have written down of it.

    Raises:
        LogTruncated: it is another one, or ends before it was read, or what nobody had read was
            deleted before its time.
    """
    start, end = bounds
    furthest = max(known, key=lambda each: each.end, default=_NOTHING_KNOWN)
    if end < furthest.end:
        raise LogTruncated(
            f"an earlier owner has read the {name} topic to offset {furthest.end}, but it ends at "
            f"{end}: it was truncated or recreated"
        )
    # Retention has taken what lies below its start, if it is old enough for that.
    if furthest.end < start and furthest.as_of_ms > kept_since_ms:
        raise LogTruncated(
            f"the {name} topic begins at offset {start}, but was read only to {furthest.end}: "
            "records that nobody has read were deleted"
        )
    anchors = {each.anchor for each in known if each.anchor is not None}
    there = sorted([each for each in anchors if each.offset >= start], key=lambda each: each.offset)
    picked = {
        record.offset: record
        for record in await log.pick(sorted({anchor.offset for anchor in there}))
    }
    for anchor in there:
        if not _same(picked.get(anchor.offset), anchor):
            raise LogTruncated(
                f"offset {anchor.offset} of the {name} topic holds another record than when it "
                "was read: the topic was recreated"
            )


def _check_kept(known: Iterable[_Known], start: int, kept_since_ms: int) -> None:
    """Check that nobody has deleted markers: what they decided would be open again.

    Raises:
        LogTruncated: some that retention cannot have taken yet are gone.
    """
    for each in known:
        anchor = each.anchor
        if anchor is not None and anchor.offset < start and anchor.timestamp_ms > kept_since_ms:
            raise LogTruncated(
                f"the op topic begins at offset {start}: markers were deleted that are younger "
                "than its retention, and nobody can tell any more what they decided"
            )


async def _check_accounted(
    logs: _Logs, progress: Checkpoint | None, known_to: int, void_ms: int
) -> None:
    """Check that it is known of every deleted half message what became of its transaction.

    That an earlier owner has read it is not enough: what it knew is gone with it. The snapshot that
    is loaded and the copies know all below `known_to`. Behind that, what is gone has to be settled
    or copied, by the newest progress. Of those appended since `void_ms` that is not enough: a
    repeated prepare of theirs would be taken for a new one.

    Raises:
        LogTruncated: nobody knows it.
        KafkaUnavailable: Kafka does not answer.
    """
    half_start, half_end = logs.half
    if half_start <= known_to:
        return
    if progress is not None and progress.accounted is not None:
        newest_ms = _as_of_ms(progress.op_anchor, progress.half_anchor)
        for first in await logs.door.half.pick([half_start] if half_start < half_end else []):
            newest_ms = min(newest_ms, first.timestamp_ms)  # what is gone was appended before it
        if half_start <= progress.accounted and newest_ms <= void_ms:
            return
    raise LogTruncated(
        f"the half topic begins at offset {half_start}, but snapshot and copies tell only of what "
        f"lies below {known_to}: records were deleted, and nothing tells of which transactions"
    )


def _covered(known_to: int, copies: ParkedCopies) -> int:
    """Return how far copies tell of all half messages from an offset on."""
    for copy in sorted(copies.whole, key=lambda copy: copy.half_offset):
        if copy.half_offset <= known_to:
            known_to = max(known_to, copy.half_offset + len(copy.half.messages))
    return known_to


def _of_older_owner(progress: Checkpoint | None, wholes: Sequence[Whole]) -> bool:
    """Say whether a proxy wrote last that let retention pass its snapshots, so that nothing can be
    concluded from them."""
    if progress is not None and progress.accounted is not None:
        return False
    newest = wholes[0].closing if wholes else None
    if newest is not None and not newest.at_ms:
        return True
    return progress is not None and (newest is None or progress.half > newest.half)


def _same(record: Record | None, anchor: Anchor) -> bool:
    return record is not None and record.timestamp_ms == anchor.timestamp_ms


# --- to the end of the logs ------------------------------------------------------------------


async def _begin(
    ledger: Ledger, whole: Whole | None, half_start: int, op_start: int
) -> tuple[int, int]:
    """Load a snapshot, if there is one, and return where both logs are replayed from."""
    if whole is None:
        ledger.start_at(half_start, op_start)
        return half_start, op_start
    pace = Yielder()
    for _ in load(whole, ledger):
        await pace.piece()
    # Half's retention may have passed the snapshot meanwhile: of what lay between, whatever is
    # not settled has a copy.
    half, op = max(whole.closing.half, half_start), whole.closing.op
    ledger.start_at(half, op)
    return half, op


async def _find_again(ledger: Ledger, half_start: int) -> None:
    """Somebody may have brought back what was lost: then it can be asked about and committed. What
    is committed was refused for it, and is revived by hand."""
    pace = Yielder()
    for transaction in ledger.index.transactions.values():
        if transaction.lost and transaction.state in UNDECIDED:
            transaction.lost = transaction.offset < half_start
        await pace.step()


async def _restore(
    door: PartitionDoor, ledger: Ledger, copies: Sequence[ParkedCopy], known_to: int, start: int
) -> None:
    """Take back what is not settled and whose half message is gone.

    A snapshot knows all of what lies below `known_to`: a copy of something that it does not hold
    was left over, and would come back to life.
    """
    gone = [copy for copy in copies if known_to <= copy.half_offset < start]
    pace = Yielder()
    for batch in batches([copy for copy in gone if copy.half.id not in ledger.index.transactions]):
        for copy in await with_messages(door, batch):
            ledger.restore(copy)
            transaction = ledger.index.transactions.get(copy.half.id)
            if transaction is not None:
                ledger.index.evict(transaction)
        await pace.piece()


class _Feed:
    """The records of one log, one after another, the next one in view."""

    def __init__(self, batches: AsyncIterator[Sequence[Record]]) -> None:
        self.record: Record | None = None
        self._batches = batches
        self._batch: Sequence[Record] = ()
        self._next = 0

    async def move(self) -> None:
        """Bring the next record into view."""
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
    applier: Applier,
) -> None:
    """Apply both logs, the older record first.

    The ledger comes out the same in any order; this one settles transactions early, so that not
    all of the past are in memory at once.
    """
    half, op = _Feed(halves), _Feed(markers)
    half_replica, op_replica = HalfReplica(applier), OpReplica(applier)
    await half.move()
    await op.move()
    pace = Yielder()
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
        await pace.step()


async def _read(
    log: Log, start: int, end: int, skipped: Callable[[range], None] | None = None
) -> AsyncIterator[Sequence[Record]]:
    if start < end:
        async for records in log.read(start, end, skipped):
            yield records
