"""How an owner comes to know its partition: claim, snapshot, kept copies, replay, progress."""

import asyncio
from collections.abc import AsyncIterator, Callable

import structlog
from msgspec import Struct, structs

from txbroker.core.codec import HalfPart, KeptPart, Malformed, decode_kept
from txbroker.core.ledger import Ledger, join_parts
from txbroker.core.records import Anchor, Claim, Kept, Message, Progress, Record, State
from txbroker.core.snapshot import SLOTS, Whole, chunks_in, find_whole, load
from txbroker.door import Log, LogTruncated, PartitionDoor
from txbroker.proxy.applier import Applier
from txbroker.proxy.clock import LogTime

log = structlog.get_logger()


class Recovered(Struct, frozen=True):
    """What recovery found out beside the ledger.

    Attributes:
        clock: the time by the claim record.
        replayed_from: records applied before these counts are in a snapshot; 0 without one.
        slot: where the next snapshot goes, so that the greatest whole one stays.
        chunks: how many chunks each slot may hold.
    """

    clock: LogTime
    replayed_from: int
    slot: int
    chunks: tuple[int, ...]


class _Bounds(Struct, frozen=True):
    """The first offset that is kept and the offset that the next record gets, of both logs."""

    half_start: int
    half_end: int
    op_start: int
    op_end: int


# --- copies ----------------------------------------------------------------------------------


class _Copy(Struct):
    """A copy in the parked topic, as its records are read."""

    parts: dict[int, KeptPart]
    offsets: dict[int, int]
    whole: bool
    """Whether its messages are wanted too; else they are dropped as soon as they are read."""


def _nobody(_half_offset: int) -> bool:
    return False


async def read_kept(
    door: PartitionDoor, with_messages: Callable[[int], bool] = _nobody
) -> list[Kept]:
    """Return the transactions of which the parked topic holds a whole copy.

    The topic is compacted and read from its start, so that no tombstone can have been missed.

    Args:
        with_messages: says by the offset of its half message whether a copy's messages are
            wanted; those of the others are bare.
    """
    copies: dict[str, _Copy] = {}
    async for records in door.parked():
        for record in records:
            try:
                part = decode_kept(record)
            except Malformed:
                # A poison record is set aside: it is nobody's copy.
                continue
            if part.part is None:
                copies.pop(part.id, None)
            else:
                _take(copies, part, record.offset, with_messages)
    return [kept for copy in copies.values() if (kept := _join(copy)) is not None]


def _take(
    copies: dict[str, _Copy], part: KeptPart, offset: int, with_messages: Callable[[int], bool]
) -> None:
    copy = copies.get(part.id)
    if part.facts is not None:
        # The first record of a copy; what was read before belongs to an older one.
        copy = copies[part.id] = _Copy({}, {}, with_messages(part.facts.half))
    if copy is None:
        return
    if part.part is not None and not copy.whole:
        message = part.part.message
        bare = Message(message.topic, partition=message.partition)
        part = structs.replace(part, part=structs.replace(part.part, message=bare))
    copy.parts[part.sequence] = part
    copy.offsets[part.sequence] = offset


def _join(copy: _Copy) -> Kept | None:
    first = copy.parts.get(0)
    if first is None or first.part is None or first.facts is None:
        return None
    halves: list[HalfPart] = []
    for sequence in range(first.part.count):
        part = copy.parts.get(sequence)
        if part is None or part.part is None:
            return None
        halves.append(part.part)
    facts = first.facts
    return Kept(
        join_parts(halves),
        facts.half,
        facts.at_ms,
        State(facts.state),
        facts.cause,
        facts.decided_ms,
        tuple([copy.offsets[sequence] for sequence in range(len(halves))]),
    )


# --- claim and replay ------------------------------------------------------------------------


async def claim_and_replay(
    door: PartitionDoor, claim: Claim, applier: Applier, claimed_by_us: Callable[[], None]
) -> Recovered:
    """Claim the partition, bring an empty ledger to the end of its logs, and say what was found.

    Args:
        claimed_by_us: called once the claim has succeeded.

    Raises:
        Fenced: another owner claimed at the same time.
        LogTruncated: half or operation topic are not those that progress or snapshot were
            written against.
        KafkaUnavailable: Kafka does not answer.
    """
    ledger = applier.ledger
    claimed = await door.claim(claim)
    clock = LogTime(claimed.timestamp_ms)
    claimed_by_us()
    # The operation topic's end first: every marker below it has its half below half's end, or
    # had none when it was written.
    op_start, op_end = await door.op.bounds()
    half_start, half_end = await door.half.bounds()
    bounds = _Bounds(half_start, half_end, op_start, op_end)
    progress = claimed.progress
    if progress is not None:
        _check_ends(door.partition, progress, bounds)
    wholes = await asyncio.to_thread(find_whole, claimed.snapshots)
    whole = await _usable(door, wholes[0], bounds) if wholes else None
    if whole is None:
        ledger.start_at(half_start, op_start)
    else:
        await _load(whole, ledger)
    from_half, from_op = max(ledger.half_position, half_start), ledger.op_position
    kept = await read_kept(door, lambda offset: ledger.half_position <= offset < half_start)
    for copy in kept:
        # Below the snapshot's position everything that is not settled is in the snapshot: the
        # copy of another one was only left over.
        if ledger.half_position <= copy.half_offset < half_start:
            ledger.restore(copy)
    _skip_vanished(door.partition, ledger, half_start)
    halves = _records(door.half, from_half, half_end, progress.half_anchor if progress else None)
    markers = _records(door.op, from_op, op_end, progress.op_anchor if progress else None)
    await _replay(halves, markers, applier)
    ledger.reconcile(progress, kept)
    used = SLOTS - 1 if whole is None else whole.slot
    return Recovered(
        clock,
        0 if whole is None else from_half + from_op,
        (used + 1) % SLOTS,
        tuple([chunks_in(slot, claimed.snapshots) for slot in range(SLOTS)]),
    )


def _check_ends(partition: int, progress: Progress, bounds: _Bounds) -> None:
    if bounds.op_end < _needed(progress.op, progress.op_anchor) or bounds.half_end < _needed(
        progress.half, progress.half_anchor
    ):
        raise LogTruncated(
            f"partition {partition}: progress is at half {progress.half}, op {progress.op}, but "
            f"the topics end at {bounds.half_end} and {bounds.op_end}: they were truncated or "
            "recreated"
        )


def _needed(position: int, anchor: Anchor | None) -> int:
    """Return where a log ends at least: behind what progress counts, and behind the last record
    that was read when it was written, which may be further."""
    return position if anchor is None else max(position, anchor.offset + 1)


# --- snapshot --------------------------------------------------------------------------------


async def _usable(door: PartitionDoor, whole: Whole, bounds: _Bounds) -> Whole | None:
    """Return a snapshot if the logs go on from it; None where both were left to retention since.

    Raises:
        LogTruncated: the logs are not those that it was taken of.
    """
    closing = whole.closing
    if closing.half > bounds.half_end or closing.op > bounds.op_end:
        raise LogTruncated(
            f"partition {door.partition}: a snapshot was taken at half {closing.half}, op "
            f"{closing.op}, but the topics end at {bounds.half_end} and {bounds.op_end}: they were "
            "truncated or recreated"
        )
    if closing.op < bounds.op_start:
        if closing.half <= bounds.half_start:
            # Down for longer than markers are kept: half messages of that time are gone too, and
            # what was undecided is in the copies.
            log.warning("snapshot too old", partition=door.partition, op=closing.op)
            return None
        raise LogTruncated(
            f"partition {door.partition}: markers from offset {closing.op} to {bounds.op_start} "
            "were deleted, half messages of their time were not: what was decided is not known"
        )
    await _check_anchor(door.half, closing.half_anchor, bounds.half_start)
    await _check_anchor(door.op, closing.op_anchor, bounds.op_start)
    return whole


async def _check_anchor(records: Log, anchor: Anchor | None, start: int) -> None:
    if anchor is None or anchor.offset < start:
        return
    found = await records.pick([anchor.offset])
    if not found or found[0].timestamp_ms != anchor.timestamp_ms:
        raise LogTruncated(
            f"offset {anchor.offset} holds another record than when the snapshot was taken: the "
            "topic was recreated"
        )


async def _load(whole: Whole, ledger: Ledger) -> None:
    for _ in load(whole, ledger):
        # Other partitions' turns and the group's heartbeat go on meanwhile.
        await asyncio.sleep(0)


def _skip_vanished(partition: int, ledger: Ledger, half_start: int) -> None:
    """Go on where half begins, though it ended before that when the snapshot was taken."""
    if ledger.half_position < half_start:
        log.error(
            "half messages vanished",
            partition=partition,
            count=half_start - ledger.half_position,
            why="they were deleted before anybody had read them",
        )
        ledger.start_at(half_start, ledger.op_position)


# --- replay ----------------------------------------------------------------------------------


async def _replay(
    halves: AsyncIterator[Record], markers: AsyncIterator[Record], applier: Applier
) -> None:
    """Apply both logs, the older record first.

    The ledger comes out the same in any order; this one settles transactions early, so that not
    all bodies of the past are in memory at once.
    """
    record = await anext(halves, None)
    marker = await anext(markers, None)
    while record is not None or marker is not None:
        if marker is None or (record is not None and record.timestamp_ms <= marker.timestamp_ms):
            assert record is not None
            applier.half(record)
            record = await anext(halves, None)
        else:
            applier.op(marker)
            marker = await anext(markers, None)


async def _records(
    records: Log, start: int, end: int, anchor: Anchor | None
) -> AsyncIterator[Record]:
    """Yield a log's records; stop at one that is not the one that progress was written against.

    Raises:
        LogTruncated: the topic was recreated and has grown past the progress since.
    """
    if start >= end:
        return
    async for some in records.read(start, end):
        for record in some:
            if anchor is not None and _replaced(record, anchor):
                raise LogTruncated(
                    f"offset {record.offset} holds another record than when the progress was "
                    "written: the topic was recreated"
                )
            yield record


def _replaced(record: Record, anchor: Anchor) -> bool:
    return record.offset == anchor.offset and record.timestamp_ms != anchor.timestamp_ms
