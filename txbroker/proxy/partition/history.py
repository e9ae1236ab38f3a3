"""Reads settled transactions back from the topics: decision, attempts, places of their records.

Append times cannot be searched: a broker's clock may have been put back, so a later record may have
an earlier time. The log clock never goes back, and a valid half message is within the dedup window
of its id's time *by the log clock*. So the search compares the ids at an offset of the half topic,
several at a time, because a void half message may carry any id.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from statistics import median_low
from typing import NamedTuple

from msgspec import Struct, field, structs

from txbroker.core.decoding import (
    Malformed,
    NewerVersion,
    decode_marker,
    decode_promoted,
    is_content,
)
from txbroker.core.encoding import ID_HEADER
from txbroker.core.ledger import Effect, Ledger
from txbroker.core.lifecycle import PromotionStep, advance
from txbroker.core.records import Marker, MarkerKind, Record, State
from txbroker.core.routing import parse_id
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated, Targets
from txbroker.errors import InvariantBroken, KafkaUnavailable, NotFound, TooOld
from txbroker.proxy.partition.clock import CLOCKS_APART_MS

NEAR_MS = 5_000
"""Nearly every half message is stored within this of its id's time: searched first."""
READ_BACK_S = 1.0
"""Maximum time to read one settled transaction back, seconds."""
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


async def read_settled(
    half: Log, op: Log, id: str, offsets: range, dedup_window_ms: int
) -> Transaction:
    """Return a settled transaction whose half message is at these offsets, as `search` does.

    Raises:
        NotFound: the records there are no valid half message of it.
        TooOld: its deciding marker, or its half message, was deleted.
        KafkaUnavailable: Kafka does not answer.
    """
    records = await half.pick(offsets)
    if [record.offset for record in records] != list(offsets):
        raise TooOld(id=id)
    ledger = Ledger(parse_id(id).partition, dedup_window_ms)
    ledger.half_position, ledger.half_clock_ms = offsets.start, records[0].timestamp_ms
    for record in records:
        outcome = ledger.apply_half(record)
    transaction = outcome.transaction
    if outcome.effect is not Effect.APPLIED or transaction is None or transaction.id != id:
        raise NotFound(id=id)
    try:
        await _decided(ledger, op, transaction, records[-1].timestamp_ms)
    except LogTruncated:
        raise TooOld(id=id) from None
    return transaction


# --- one that is known ------------------------------------------------------------------------


class StoredMarker(NamedTuple):
    """A marker, its offset and append time (ms)."""

    offset: int
    at_ms: int
    marker: Marker


class Account(Struct):
    """A transaction, and what the topics show of it.

    Attributes:
        transaction: as remembered, or as its records show it.
        markers: its markers in the operation topic, by kind, round and number; those of one round
            have no number, decisions neither.
        attempts_known: whether it has its attempts; a summary of a settled one has none.
        read_back: whether facts were read from the topics because memory had lost them.
        gaps: which facts cannot be shown, and why, as sentences.
        stamps_ms: the timestamps that its messages asked for, once read; empty before.
    """

    transaction: Transaction
    attempts_known: bool
    markers: dict[tuple[str, int, int], StoredMarker] = field(default_factory=dict)
    read_back: bool = False
    gaps: list[str] = field(default_factory=list)
    stamps_ms: tuple[int | None, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing can be added, except the offsets of its markers."""
        transaction = self.transaction
        return self.attempts_known and (
            transaction.state is not State.PROMOTED or not _unplaced(transaction)
        )


def account_of(transaction: Transaction) -> Account:
    """Return a transaction as it is remembered."""
    known = transaction.verdict.decision is None or transaction.verdict.source is not None
    return Account(transaction, known)


async def read_markers(account: Account, half: Log, op: Log, window_ms: int) -> None:
    """Add decision, attempts and the places of all markers, as the logs show them.

    Raises:
        KafkaUnavailable: Kafka does not answer.
    """
    known = account.transaction
    await _read_verdict(account, op)
    offsets = range(known.offset, known.offset + len(known.places))
    records = await half.pick(offsets)
    ledger = Ledger(parse_id(known.id).partition, window_ms)
    ledger.half_position, ledger.half_clock_ms = known.offset, known.prepared_at_ms
    if [record.offset for record in records] != list(offsets):
        lost = "attempts, order key and check policy"
        if account.attempts_known:
            lost = "places of its markers"
        account.gaps.append(f"{lost}: retention has deleted its half message")
        return
    for record in records:
        outcome = ledger.apply_half(record)
    transaction = outcome.transaction
    if transaction is None or transaction.id != known.id:
        account.gaps.append("attempts: another record is in the place of its half message")
        return
    try:
        markers = await _read_attempts(ledger, op, transaction, records[-1].timestamp_ms, known)
    except LogTruncated:
        account.gaps.append("attempts: retention has deleted markers of it")
        return
    account.markers.update(markers)
    account.stamps_ms = tuple([message.timestamp_ms for message in transaction.messages])
    if not account.attempts_known and transaction.verdict.decision is known.verdict.decision:
        # Its places have the partitions that were written, its offsets are this owner's.
        transaction.offsets, transaction.promoted_at_ms = known.offsets, known.promoted_at_ms
        transaction.instance = known.instance
        account.transaction, account.attempts_known, account.read_back = transaction, True, True


async def _read_verdict(account: Account, op: Log) -> None:
    """Add the source and reason of the decision, from its marker."""
    transaction = account.transaction
    verdict = transaction.verdict
    if verdict.decision is None:
        return
    for record in await op.pick([verdict.op_offset]) if verdict.op_offset >= 0 else ():
        try:
            marker = decode_marker(record)
        except (Malformed, NewerVersion):
            continue
        if marker.id == transaction.id:
            account.markers[_place_of(marker)] = StoredMarker(
                record.offset, record.timestamp_ms, marker
            )
            if verdict.source is None:
                account.read_back = True
                transaction.verdict = structs.replace(
                    verdict, source=marker.source, by=marker.by, reason=marker.reason
                )
            return
    if verdict.source is None:
        account.gaps.append("decider and reason: retention has deleted the deciding marker")


async def _read_attempts(
    ledger: Ledger, op: Log, transaction: Transaction, since_ms: int, known: Transaction
) -> dict[tuple[str, int, int], StoredMarker]:
    """Apply the markers up to the decision, or all; return them."""
    start, end = await op.bounds()
    if known.verdict.op_offset >= 0:
        end = min(end, known.verdict.op_offset + 1 + len(known.places))
    ledger.op_clock_ms = transaction.prepared_at_ms
    begin = await first_marker_since(op, start, end, transaction.offset, since_ms)
    markers: dict[tuple[str, int, int], StoredMarker] = {}
    async for record in _markers_of(op, begin, end, transaction.id, ledger):
        decided = _apply_marker(ledger, record, transaction)
        with suppress(Malformed, NewerVersion):
            if not is_content(record):
                marker = decode_marker(record)
                markers[_place_of(marker)] = StoredMarker(
                    record.offset, record.timestamp_ms, marker
                )
        if decided:
            break
    return markers


def _place_of(marker: Marker) -> tuple[str, int, int]:
    if marker.kind in (MarkerKind.COMMIT, MarkerKind.ROLLBACK):
        return marker.kind, 0, 0
    alone = marker.kind in (MarkerKind.PARK, MarkerKind.REVIVE)
    return marker.kind, marker.round, 0 if alone else marker.number


def _unplaced(transaction: Transaction) -> set[int]:
    """Return the numbers of its messages whose offsets are unknown."""
    known = transaction.offsets
    return {
        number
        for number in range(len(transaction.places))
        if number >= len(known) or known[number] < 0
    }


async def read_targets(account: Account, targets: Targets, bytes_max: int) -> None:
    """Add the offsets of a promoted transaction's messages in their targets.

    Args:
        bytes_max: of keys and values that are read for it.
    """
    transaction = account.transaction
    left = _unplaced(transaction)
    offsets = [-1 if n in left else transaction.offsets[n] for n in range(len(transaction.places))]
    by_place: dict[tuple[str, int], set[int]] = {}
    for number in left:
        place = transaction.places[number]
        by_place.setdefault((place.topic, place.partition), set()).add(number)
    for (topic, partition), numbers in by_place.items():
        times_ms = [transaction.verdict.at_ms]
        if account.stamps_ms:
            stamps_ms = [account.stamps_ms[number] for number in numbers]
            times_ms += [at_ms for at_ms in stamps_ms if at_ms is not None]
        # The clocks of two brokers differ a little, where a target has the append time.
        since_ms = max(0, min(times_ms) - CLOCKS_APART_MS)
        records = targets.records(topic, partition, since_ms=since_ms)
        try:
            bytes_max, why = await _find_promoted(
                records, transaction.id, numbers, offsets, bytes_max
            )
        except (KafkaUnavailable, LogTruncated, InvariantBroken) as error:
            why = str(error)
        if why:
            account.gaps.append(f"offset in {topic}/{partition}: {why}")
    account.read_back = account.read_back or any(offsets[number] >= 0 for number in left)
    transaction.offsets = tuple(offsets)


async def _find_promoted(
    records: AsyncIterator[Sequence[Record]],
    id: str,
    numbers: set[int],
    offsets: list[int],
    bytes_left: int,
) -> tuple[int, str]:
    """Set the offsets of these messages; return the bytes left, and why some were not found."""
    left, count = set(numbers), 0
    async for piece in records:
        for record in piece:
            count += 1
            bytes_left -= len(record.key or b"") + len(record.value or b"")
            promoted = decode_promoted(record)
            if promoted is not None and promoted.id == id and promoted.sequence in left:
                offsets[promoted.sequence] = record.offset
                left.discard(promoted.sequence)
        if not left:
            return bytes_left, ""
        if bytes_left < 0:
            return bytes_left, (
                f"not among the first {count} records since its decision; `txbroker tx trace` "
                "reads further"
            )
    return bytes_left, (
        f"not among the {count} records since its decision: retention or compaction has deleted "
        "it, or its timestamp is not known"
    )


# --- the half message ------------------------------------------------------------------------


async def _prepared(half: Log, id: str, window_ms: int) -> tuple[Ledger, Transaction, int]:
    """Return a ledger that holds only this transaction, as prepared, and its append time."""
    start, end = await half.bounds()
    parts = parse_id(id)
    begin = start
    for margin_ms in (NEAR_MS, window_ms):
        begin = await first_since(half, start, end, parts.time_ms - 2 * margin_ms)
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


async def first_since(half: Log, start: int, end: int, time_ms: int) -> int:
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
    # Not `read`, which fetches 8 MiB for these few.
    return _ids_ms(await half.pick(range(offset, min(offset + NEIGHBOURS, end))))


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
    begin = await first_marker_since(op, start, end, transaction.offset, since_ms)
    # If that was misled, from the start: there is a marker, unless retention deleted it.
    for first in dict.fromkeys((begin, start)):
        async for record in _markers_of(op, first, end, transaction.id, ledger):
            if _apply_marker(ledger, record, transaction):
                return
    raise TooOld("its deciding marker was deleted by retention", id=transaction.id)


def _apply_marker(ledger: Ledger, record: Record, transaction: Transaction) -> bool:
    """Apply a record of the operation topic; return whether the transaction is decided now."""
    ledger.op_position = record.offset
    outcome = ledger.apply_op(record)
    if outcome.effect is not Effect.APPLIED or transaction.verdict.decision is None:
        return False
    if transaction.state is State.COMMITTED:
        # Committed and not in the owner's ledger: it was promoted.
        advance(transaction, PromotionStep.PROMOTE)
    return True


async def first_marker_since(op: Log, start: int, end: int, half: int, since_ms: int) -> int:
    """Return an offset below which the transaction with its half message at `half` has no markers,
    by binary search.

    A record that names this half message or a later one, or was appended after it, is not before
    its markers. If a clock was put back, only the first of the two holds.
    """
    while start < end:
        middle = (start + end) // 2
        records = await op.pick(range(middle, min(middle + NEIGHBOURS, end)))
        if records and (
            records[0].timestamp_ms >= since_ms - CLOCKS_APART_MS
            or any(_half_offset(record) >= half for record in records)
        ):
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
