"""How an owner comes to know its partition: claim, kept copies, replay, progress."""

from collections.abc import AsyncIterator

from txbroker.core.codec import HalfPart, KeptPart, Malformed, decode_kept
from txbroker.core.ledger import join_parts
from txbroker.core.records import Anchor, Claim, Kept, Record, State
from txbroker.door import Log, LogTruncated, PartitionDoor
from txbroker.proxy.applier import Applier
from txbroker.proxy.clock import LogTime


async def read_kept(door: PartitionDoor) -> list[Kept]:
    """Return the transactions of which the parked topic holds a whole copy."""
    parts: dict[str, dict[int, KeptPart]] = {}
    async for records in door.parked():
        for record in records:
            try:
                part = decode_kept(record)
            except Malformed:
                # A poison record is set aside: it is nobody's copy.
                continue
            if part.part is None:
                parts.pop(part.id, None)
            else:
                parts.setdefault(part.id, {})[part.sequence] = part
    return [kept for found in parts.values() if (kept := _join_kept(found)) is not None]


def _join_kept(found: dict[int, KeptPart]) -> Kept | None:
    first = found.get(0)
    if first is None or first.part is None or first.facts is None:
        return None
    halves: list[HalfPart] = []
    for sequence in range(first.part.count):
        part = found.get(sequence)
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
    )


async def claim_and_replay(door: PartitionDoor, claim: Claim, applier: Applier) -> LogTime:
    """Claim the partition, bring an empty ledger to the end of its logs, and return the time.

    Raises:
        Fenced: another owner claimed at the same time.
        LogTruncated: half or operation end before the progress that was committed.
        KafkaUnavailable: Kafka does not answer.
    """
    ledger = applier.ledger
    claimed = await door.claim(claim)
    clock = LogTime(claimed.timestamp_ms)
    kept = await read_kept(door)
    # The operation topic's end first: every marker below it has its half below half's end, or
    # had none when it was written.
    op_start, op_end = await door.op.bounds()
    half_start, half_end = await door.half.bounds()
    progress = claimed.progress
    if progress is not None and (
        op_end < _needed(progress.op, progress.op_anchor)
        or half_end < _needed(progress.half, progress.half_anchor)
    ):
        raise LogTruncated(
            f"partition {door.partition}: progress is at half {progress.half}, op {progress.op}, "
            f"but the topics end at {half_end} and {op_end}: they were truncated or recreated"
        )
    ledger.start_at(half_start, op_start)
    for copy in kept:
        if copy.half_offset < half_start:
            ledger.restore(copy)
    halves = _records(door.half, half_start, half_end, progress.half_anchor if progress else None)
    markers = _records(door.op, op_start, op_end, progress.op_anchor if progress else None)
    await _replay(halves, markers, applier)
    ledger.reconcile(progress, kept)
    return clock


def _needed(position: int, anchor: Anchor | None) -> int:
    """Return where a log ends at least: behind what progress counts, and behind the last record
    that was read when it was written, which may be further."""
    return position if anchor is None else max(position, anchor.offset + 1)


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


async def _records(log: Log, start: int, end: int, anchor: Anchor | None) -> AsyncIterator[Record]:
    """Yield a log's records; stop at one that is not the one that progress was written against.

    Raises:
        LogTruncated: the topic was recreated and has grown past the progress since.
    """
    if start >= end:
        return
    async for records in log.read(start, end):
        for record in records:
            if anchor is not None and _replaced(record, anchor):
                raise LogTruncated(
                    f"offset {record.offset} holds another record than when the progress was "
                    "written: the topic was recreated"
                )
            yield record


def _replaced(record: Record, anchor: Anchor) -> bool:
    return record.offset == anchor.offset and record.timestamp_ms != anchor.timestamp_ms
