"""Finds transactions that were settled too long ago to be in memory, by their id in the logs.

Append times cannot be searched: a broker's clock may have been put back, so a later record may have
an earlier time. The log clock never goes back, and a valid half message is within the dedup window
of its id's time *by the log clock*. So the search compares the ids at an offset of the half topic,
several at a time, because a void half message may carry any id.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from statistics import median_low

from msgspec import structs

from txbroker.core.decoding import Malformed, NewerVersion, decode_marker, is_content
from txbroker.core.encoding import ID_HEADER
from txbroker.core.ledger import Effect, Ledger
from txbroker.core.lifecycle import PromotionStep, advance
from txbroker.core.records import Record, State
from txbroker.core.routing import parse_id
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated
from txbroker.errors import KafkaUnavailable, NotFound, TooOld
from txbroker.proxy.partition.clock import CLOCKS_APART_MS

NEAR_MS = 5_000
"""Nearly every half message is stored within this of its id's time: searched first."""
NEIGHBOURS = 15
"""Records that one step compares: more than half would have to be void to mislead it."""


async def search(half: Log, op: Log, id: str, dedup_window_ms: int) -> Transaction:
    """Return a settled transaction from the logs, with its attempts, without target offsets.

    Only for ids that the ledger has forgotten: unsettled and recently settled ones are in memory.

    Raises:
        NotFound: the log reaches back to the id's time without such a transaction.
        TooOld: the log no longer reaches back that far.
        KafkaUnavailable: Kafka does not answer.
    """
    try:
        ledger, transaction, appended_ms = await _prepared(half, id, dedup_window_ms)
        await _decided(ledger, op, transaction, appended_ms)
    except LogTruncated:
        # Retention moved the start during the read.
        raise TooOld(id=id) from None
    return transaction


async def read_verdict(op: Log, transaction: Transaction) -> None:
    """Add the source and reason of its decision to a settled transaction.

    The ledger keeps them for the newest ones only. Nothing is added if Kafka does not answer, or no
    longer keeps the deciding marker.
    """
    verdict = transaction.verdict
    if verdict.decision is None or verdict.source is not None or verdict.op_offset < 0:
        return
    with suppress(KafkaUnavailable, Malformed, NewerVersion):
        for record in await op.pick([verdict.op_offset]):
            marker = decode_marker(record)
            if marker.id == transaction.id:
                transaction.verdict = structs.replace(
                    verdict, source=marker.source, by=marker.by, reason=marker.reason
                )


# --- the half message ------------------------------------------------------------------------


async def _prepared(half: Log, id: str, window_ms: int) -> tuple[Ledger, Transaction, int]:
    """Return a ledger that holds only this transaction, as prepared, and its append time."""
    start, end = await half.bounds()
    parts = parse_id(id)
    begin = start
    for margin_ms in (NEAR_MS, window_ms):
        begin = await _first_since(half, start, end, parts.time_ms - 2 * margin_ms)
        async for records, clock_ms in _until(half, begin, end, parts.time_ms, margin_ms):
            for number, record in enumerate(records):
                if _half_id(record) != id:
                    continue
                ledger = Ledger(parts.partition, window_ms)
                ledger.half_position = record.offset
                before = [clock_ms, *[one.timestamp_ms for one in records[:number]]]
                ledger.half_clock_ms = max(before)
                known_ms = max(ledger.half_clock_ms, record.timestamp_ms)
                if known_ms < parts.time_ms - window_ms:
                    # Far too early: a clock was put back, or the record is void. The ids around it
                    # decide; not for a record in time, because they may be days later.
                    around = records[max(0, number - NEIGHBOURS) : number + NEIGHBOURS]
                    ledger.half_clock_ms = median_low(_ids_ms(around))
                if await _apply(ledger, half, record.offset, end, id):
                    transaction = ledger.index.get(id)
                    assert transaction is not None
                    return ledger, transaction, record.timestamp_ms
    if begin == start and start > 0:
        raise TooOld(id=id)
    raise NotFound(id=id)


async def _first_since(half: Log, start: int, end: int, time_ms: int) -> int:
    """Return an offset below which all ids are earlier than `time_ms`, by binary search."""
    first = start
    while first < end:
        middle = (first + end) // 2
        ids_ms = await _ids_at(half, middle, end)
        if ids_ms and median_low(ids_ms) < time_ms:
            first = middle + 1
        else:
            end = middle
    return first


async def _ids_at(half: Log, offset: int, end: int) -> list[int]:
    times_ms: list[int] = []
    async for records in half.read(offset, min(offset + NEIGHBOURS, end)):
        times_ms.extend(_ids_ms(records))
    return times_ms


async def _until(
    half: Log, begin: int, end: int, time_ms: int, margin_ms: int
) -> AsyncIterator[tuple[Sequence[Record], int]]:
    """Yield records from `begin`, with the greatest append time before them, until they are
    certainly later than `time_ms` plus the margin."""
    clock_ms = 0
    async for records in half.read(begin, end):
        yield records, clock_ms
        clock_ms = max([clock_ms, *[record.timestamp_ms for record in records]])
        ids_ms = _ids_ms(records[-NEIGHBOURS:])
        # An append time is never later than the log clock, so one is enough.
        if clock_ms > time_ms + margin_ms:
            return
        if len(ids_ms) == NEIGHBOURS and median_low(ids_ms) > time_ms + 2 * margin_ms:
            return


async def _apply(ledger: Ledger, half: Log, begin: int, end: int, id: str) -> bool:
    """Apply the half message that begins at an offset; return whether it is valid."""
    async for records in half.read(begin, end):
        for record in records:
            if _half_id(record) != id:
                return False
            outcome = ledger.apply_half(record)
            if outcome.effect is not Effect.PARTIAL:
                return outcome.effect is Effect.APPLIED
    return False


# --- its markers -----------------------------------------------------------------------------


async def _decided(ledger: Ledger, op: Log, transaction: Transaction, since_ms: int) -> None:
    start, end = await op.bounds()
    # Checks are judged by op's log clock, which records before `begin` may have put forward.
    ledger.op_clock_ms = transaction.prepared_at_ms
    begin = await _first_marker_since(op, start, end, transaction.offset, since_ms)
    # If that was misled, from the start: there is a marker, unless retention deleted it.
    for first in dict.fromkeys((begin, start)):
        async for record in _markers_of(op, first, end, transaction.id, ledger):
            ledger.op_position = record.offset
            outcome = ledger.apply_op(record)
            if outcome.effect is Effect.APPLIED and transaction.verdict.decision is not None:
                if transaction.state is State.COMMITTED:
                    # Committed and not in the owner's ledger: it was promoted.
                    advance(transaction, PromotionStep.PROMOTE)
                return
    raise TooOld("its deciding marker was deleted by retention", id=transaction.id)


async def _first_marker_since(op: Log, start: int, end: int, half: int, since_ms: int) -> int:
    """Return an offset below which the transaction with its half message at `half` has no markers,
    by binary search.

    A record that names this half message or a later one, or was appended after it, is not before
    its markers. If a clock was put back, only the first of the two holds.
    """
    while start < end:
        middle = (start + end) // 2
        later = False
        async for records in op.read(middle, min(middle + NEIGHBOURS, end)):
            later = (
                later
                or records[0].timestamp_ms >= since_ms - CLOCKS_APART_MS
                or any(_half_offset(record) >= half for record in records)
            )
        if later:
            end = middle
        else:
            start = middle + 1
    return start


async def _markers_of(
    op: Log, begin: int, end: int, id: str, ledger: Ledger
) -> AsyncIterator[Record]:
    """Yield the records of one transaction, and advance the log clock that judges checks."""
    key = id.encode()
    async for records in op.read(begin, end):
        for record in records:
            ledger.op_clock_ms = max(ledger.op_clock_ms, record.timestamp_ms)
            if record.key == key or (is_content(record) and _half_id(record) == id):
                yield record


# --- parts of a record, without decoding all of it -------------------------------------------


def _half_id(record: Record) -> str | None:
    headers = record.headers
    if len(headers) < 2 or headers[1][0] != ID_HEADER or not is_content(record):
        return None
    return (headers[1][1] or b"").decode(errors="replace")


def _ids_ms(records: Iterable[Record]) -> list[int]:
    """Return the times of the ids in these records; the append time of one without an id."""
    return [_id_ms(record) for record in records]


def _id_ms(record: Record) -> int:
    try:
        return parse_id(_half_id(record) or "").time_ms
    except ValueError:
        return record.timestamp_ms


def _half_offset(record: Record) -> int:
    try:
        return -1 if is_content(record) else decode_marker(record).half
    except (ValueError, Malformed, NewerVersion):
        return -1
