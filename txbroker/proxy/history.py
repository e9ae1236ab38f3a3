"""Transactions that were settled too long ago to be in memory, found in the logs by their id."""

from txbroker.core.codec import Malformed, NewerVersion, decode_half, decode_marker, is_content
from txbroker.core.ids import parse_id
from txbroker.core.ledger import Effect, Ledger
from txbroker.core.records import Record, State
from txbroker.core.transaction import Transaction
from txbroker.door import Log, LogTruncated
from txbroker.errors import NotFound, TooOld
from txbroker.proxy.clock import CLOCKS_APART_MS


async def search(half: Log, op: Log, id: str, dedup_window_ms: int) -> Transaction:
    """Return a settled transaction as the logs tell it.

    Only for ids that the ledger has forgotten: whatever is not settled, and whatever was settled
    lately, is in the ledger.

    Raises:
        NotFound: the log reaches back to the id's time, and there is no such transaction.
        TooOld: the log does not reach back that far.
        KafkaUnavailable: Kafka does not answer.
    """
    parts = parse_id(id)
    start, end = await half.bounds()
    first_ms = parts.time_ms - dedup_window_ms
    try:
        begin = await first_since(half, start, end, first_ms)
        ledger = Ledger(parts.partition, dedup_window_ms)
        at = await _apply_half(ledger, half, begin, end, id, parts.time_ms + dedup_window_ms)
        transaction = ledger.get(id)
        if transaction is None:
            if begin == start and start > 0:
                raise TooOld(id=id)
            raise NotFound(id=id)
        await _apply_op(ledger, op, transaction, at)
    except LogTruncated:
        # Retention moved the start while we read.
        raise TooOld(id=id) from None
    return transaction


async def first_since(log: Log, start: int, end: int, time_ms: int) -> int:
    """Return the first offset whose append time is not before `time_ms`, by halving."""
    while start < end:
        middle = (start + end) // 2
        async for records in log.read(middle, middle + 1):
            stamp_ms = records[0].timestamp_ms
        if stamp_ms < time_ms:
            start = middle + 1
        else:
            end = middle
    return start


async def _apply_half(
    ledger: Ledger, log: Log, begin: int, end: int, id: str, until_ms: int
) -> int:
    """Apply the half message of `id`, if it is there; return the append time reached."""
    reached_ms = 0
    async for records in log.read(begin, end):
        for record in records:
            reached_ms = record.timestamp_ms
            if _half_id(record) == id:
                ledger.half_position = record.offset
                ledger.apply_half(record)
                if ledger.get(id) is not None:
                    return reached_ms
            if reached_ms > until_ms:
                return reached_ms
    return reached_ms


async def _apply_op(ledger: Ledger, log: Log, transaction: Transaction, since_ms: int) -> None:
    """Apply the markers of a transaction until it is decided."""
    start, end = await log.bounds()
    begin = await first_since(log, start, end, since_ms - CLOCKS_APART_MS)
    async for records in log.read(begin, end):
        for record in records:
            if _op_id(record) != transaction.id:
                continue
            ledger.op_position = record.offset
            outcome = ledger.apply_op(record)
            if outcome.effect is Effect.APPLIED and transaction.decision is not None:
                if transaction.state is State.COMMITTED:
                    # Committed and not in the owner's ledger: a turn has promoted it.
                    ledger.promote(transaction.id)
                return
    raise TooOld("its deciding marker is not kept any more", id=transaction.id)


def _half_id(record: Record) -> str | None:
    try:
        return decode_half(record).id
    except (Malformed, NewerVersion):
        return None


def _op_id(record: Record) -> str | None:
    if is_content(record):
        return _half_id(record)
    try:
        return decode_marker(record).id
    except (ValueError, Malformed, NewerVersion):
        return None
