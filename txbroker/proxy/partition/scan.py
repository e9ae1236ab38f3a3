"""Scans one half partition for a search: its unsettled transactions, the half and operation topics.

A topic is read in blocks, from its end to its start, because the newest transactions are asked
about most. A page reads a bounded part, and its cursor is where the next one begins, so a client
can stop at any time, and a scan holds nothing in between.
"""

import asyncio
import time
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from msgspec import structs

from txbroker.contract.service import LISTED_MESSAGES_MAX
from txbroker.core.decoding import Malformed, NewerVersion, decode_half, decode_marker
from txbroker.core.index import OffsetIndex
from txbroker.core.lifecycle import SETTLED
from txbroker.core.routing import TIME_MAX_MS
from txbroker.core.terms import SearchTerms
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated
from txbroker.errors import (
    BadRequest,
    InvariantBroken,
    KafkaUnavailable,
    NotFound,
    OwnerUnavailable,
    TooOld,
)
from txbroker.principals import Patterns
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.history import (
    NEAR_MS,
    NEIGHBOURS,
    READ_BACK_S,
    first_marker_since,
    first_since,
    read_settled,
)

MATCHES_MAX = 20
"""Transactions on one page."""
PAGE_S, PAGE_BYTES = 0.5, 16 << 20
"""The time and the bytes of keys and values that one page takes, about."""
RESOLVE_S = 4.0
"""The time after which a page reads back no further settled transaction, seconds."""
BLOCK = 20_000
"""Records of a block."""
_SLICE = 1000
_RECORD_BYTES_MIN = 50
"""A record of ours takes more in its batch, which holds all of its transaction."""
_OFFSET_MAX = 1 << 63


class Layer(StrEnum):
    """What a page of a search reads of a half partition."""

    MEMORY = "memory"
    HALF = "half"
    OP = "op"
    """Only the operation topic holds messages that a commit brought."""


class Cursor(NamedTuple):
    """Where the next page of a layer begins; -1: at its start.

    Attributes:
        seen: the half offset up to which memory was searched.
        begin, end: the offsets of the topic that are searched.
        before: the end of the block that is read.
        at: the next offset in it.
    """

    seen: int = -1
    begin: int = -1
    end: int = -1
    before: int = -1
    at: int = -1

    def encode(self) -> str:
        """Return it as text."""
        return ".".join(map(str, self))

    @property
    def done(self) -> float:
        """The part of the topic that is read, from 0 to 1."""
        length = self.end - self.begin
        if self.begin < 0 or length <= 0:
            return 0.0
        in_block = max(0, self.at - max(self.begin, self.before - BLOCK))
        return min(1.0, (self.end - self.before + in_block) / length)


def decode_cursor(text: str) -> Cursor:
    """Return a cursor from its text; "" is the start of a layer.

    Raises:
        BadRequest: it is none.
    """
    if not text:
        return Cursor()
    try:
        cursor = Cursor(*map(int, text.split(".")))
        valid = text == cursor.encode() and all(-1 <= part <= _OFFSET_MAX for part in cursor)
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise BadRequest(
            "cursor is invalid: pass next_cursor of the last page unchanged, or leave it out",
            path="cursor",
        )
    return cursor


class Match(NamedTuple):
    """A match.

    Attributes:
        id: of its transaction.
        group: of its transaction.
        records: the offsets of its half message; in the operation topic those of its marker and
            the replacing messages.
        cursor: of a page that begins with it.
    """

    id: str
    group: str
    records: range
    cursor: Cursor


class ScanPage(NamedTuple):
    """One match of each transaction, how many records were read, and where the next page begins:
    None at the end of the layer."""

    matches: list[Match]
    records: int = 0
    next: Cursor | None = None


class MatchPage(NamedTuple):
    """The transactions of a page, newest first, and how many more may match and cannot be read."""

    transactions: list[Transaction]
    unread: int
    records: int
    next: Cursor | None


class Scanner:
    """Searches one half partition."""

    def __init__(self, context: PartitionContext, bodies: BodyCache) -> None:
        self._index = context.ledger.index
        self._half, self._op = context.door.half, context.door.op
        self._window_ms = context.settings.dedup_window_ms
        self._bodies = bodies
        # One page at a time: all searches share a bounded part of the event loop.
        self._scanning = asyncio.Semaphore()

    async def page(
        self, layer: Layer, terms: SearchTerms, cursor: Cursor, visible: Patterns
    ) -> MatchPage:
        """Return a page of a search.

        Args:
            visible: the groups that the caller may see; of others nothing is read back or counted.

        Raises:
            OwnerUnavailable: Kafka does not answer, or lost the end of a topic.
        """
        async with self._scanning:
            try:
                if layer is Layer.MEMORY:
                    start, _ = await self._half.bounds(confirmed=False)
                    index = self._index.by_offset
                    page = await search_memory(index, self._bodies, terms, cursor.seen, start)
                else:
                    page = await search_topic(self._half, self._op, layer, terms, cursor)
                matches = [match for match in page.matches if match.group in visible]
                return await self._resolve(layer, terms, page._replace(matches=matches))
            except (KafkaUnavailable, LogTruncated, InvariantBroken) as error:
                raise OwnerUnavailable(f"cannot search: {error}") from None

    async def _resolve(self, layer: Layer, terms: SearchTerms, page: ScanPage) -> MatchPage:
        found: list[Transaction] = []
        unread, messages, following = 0, 0, page.next
        deadline_s = time.monotonic() + RESOLVE_S
        for number, match in enumerate(page.matches):
            messages += len(match.records)
            if number and (messages > LISTED_MESSAGES_MAX or time.monotonic() > deadline_s):
                following = match.cursor
                break
            try:
                async with asyncio.timeout(READ_BACK_S):
                    transaction = await self._transaction(layer, terms, match)
            except NotFound:
                continue
            except (TooOld, TimeoutError):
                unread += 1
                continue
            found.append(transaction)
        return MatchPage(found[::-1], unread, page.records, following)

    async def _transaction(self, layer: Layer, terms: SearchTerms, match: Match) -> Transaction:
        """Return the transaction of a match.

        Raises:
            NotFound: its records are void, or other terms do not match.
            TooOld: its messages, its deciding marker or its half message were deleted.
        """
        half = match.records
        if layer is Layer.OP:
            half = await self._half_of(match)
        transaction = self._index.get(match.id)
        if transaction is not None and transaction.offset != half.start:
            raise NotFound(id=match.id)  # a void record under an id in use
        if transaction is not None and layer is Layer.MEMORY and _is_unknown(transaction, terms):
            raise TooOld(id=match.id)
        if terms.needs_first_record and not await self._match_first(terms, transaction, half):
            raise NotFound(id=match.id)
        if transaction is None:
            logs = self._half, self._op
            transaction = await read_settled(*logs, match.id, half, self._window_ms)
        if layer is Layer.OP and not (
            transaction.verdict.op_offset == match.records.start
            and terms.match_time(transaction.prepared_at_ms)
        ):
            raise NotFound(id=match.id)  # the marker did not decide
        return transaction

    async def _half_of(self, match: Match) -> range:
        """Return the offsets of the half message that a marker names."""
        for record in await self._op.pick(match.records[:1]):
            with suppress(Malformed, NewerVersion):
                marker = decode_marker(record)
                if marker.id == match.id and marker.half <= _OFFSET_MAX // 2:
                    return range(marker.half, marker.half + len(match.records) - 1)
        raise NotFound(id=match.id)

    async def _match_first(
        self, terms: SearchTerms, transaction: Transaction | None, half: range
    ) -> bool:
        """Return whether a half message has the order and dedup key, which its first record has."""
        if transaction is not None and transaction.state not in SETTLED:
            return terms.match_first(transaction.half)
        for record in await self._half.pick(half[:1]):
            with suppress(Malformed, NewerVersion):
                return terms.match_first(decode_half(record))
        raise TooOld


async def search_memory(
    index: OffsetIndex, bodies: BodyCache, terms: SearchTerms, seen: int, start: int
) -> ScanPage:
    """Return a page of matching unsettled transactions.

    Args:
        seen: the half offset up to which the pages before went.
        start: where the half topic begins: earlier transactions are in memory only, and may have
            no marks of their keys.
    """
    matches: list[Match] = []
    yielder, deadline_s = Yielder(), time.monotonic() + PAGE_S
    while rows := index.after(seen, _SLICE):
        for transaction in rows:
            at, gone = transaction.offset, transaction.offset < start
            seen = at
            if not terms.match(transaction, keys=not gone):
                continue
            read = gone or terms.key is not None
            if await _match_messages(transaction, bodies, terms, read=read):
                half = range(at, at + len(transaction.places))
                match = Match(transaction.id, transaction.half.group, half, Cursor(at - 1))
                matches.append(match)
            if len(matches) == MATCHES_MAX or time.monotonic() > deadline_s:
                return ScanPage(matches, next=Cursor(seen))
        if time.monotonic() > deadline_s:
            return ScanPage(matches, next=Cursor(seen))
        await yielder.piece()
    return ScanPage(matches)


async def _match_messages(
    transaction: Transaction, bodies: BodyCache, terms: SearchTerms, *, read: bool
) -> bool:
    """Return whether the messages match, or may match as they are lost; with `read`, which few
    need, also if Kafka has to be asked for them."""
    if not terms.needs_messages:
        return True
    if not transaction.has_bodies and read:
        await bodies.show(transaction)
    if transaction.has_bodies:
        return terms.match_messages(transaction.messages)
    # The topics, which are read afterwards, have the others.
    return _is_unknown(transaction, terms)


def _is_unknown(transaction: Transaction, terms: SearchTerms) -> bool:
    """Return whether the terms are about messages that were deleted."""
    return terms.needs_messages and transaction.lost and not transaction.has_bodies


async def search_topic(
    half: Log, op: Log, layer: Layer, terms: SearchTerms, cursor: Cursor
) -> ScanPage:
    """Return a page of matching transactions of the half or operation topic, settled ones too.

    Raises:
        KafkaUnavailable: Kafka does not answer.
    """
    begin, end, before, at = cursor[1:]
    if begin < 0:
        begin, end = await _bounds(half, op, layer, terms)
        before, at = end, -1
    log, markers = half, 0
    if layer is Layer.OP:
        # Its records have the time of the decision.
        log, markers, terms = op, 1, structs.replace(terms, from_ms=None, to_ms=None)
    start, stop = await log.bounds(confirmed=False)
    if stop < before:
        # A broker that does not lead any more, or an end that is lost: `read` shows it.
        start, stop = await log.bounds()
    begin = max(begin, start)
    block = max(begin, before - BLOCK)
    at = min(max(at, block), before)
    place = Cursor(-1, begin, end, before, at)
    needed = terms.needed_headers()
    matches: dict[str, Match] = {}
    count = size = 0
    deadline_s = time.monotonic() + PAGE_S
    try:
        async for records in log.read(at, before):
            for record in records:
                at, count = record.offset + 1, count + 1
                size += len(record.key or b"") + len(record.value or b"")
                part = terms.match_record(record, needed)
                if part is not None and part.count * _RECORD_BYTES_MIN <= log.batch_bytes_max:
                    first = record.offset - part.sequence
                    found = range(first - markers, first + part.count)
                    match = Match(part.id, part.group, found, place._replace(at=record.offset))
                    matches.setdefault(part.id, match)
                    if len(matches) == MATCHES_MAX:
                        break
            full = len(matches) == MATCHES_MAX or size > PAGE_BYTES
            if full or time.monotonic() > deadline_s:
                break
        else:
            at = before
    except LogTruncated:
        start, _ = await log.bounds()
        if start <= at:
            raise
        at = min(start, before)  # retention has deleted the records before it
    if at >= before:
        before, at = block, -1
    following = Cursor(-1, begin, end, before, at) if before > begin else None
    return ScanPage(list(matches.values()), count, following)


async def _bounds(half: Log, op: Log, layer: Layer, terms: SearchTerms) -> tuple[int, int]:
    """Return the offsets between which the records of the transactions of these terms are."""
    start, end = await half.bounds()
    first_ms, last_ms = terms.times(NEAR_MS)
    begin = start if first_ms == 0 else await first_since(half, start, end, first_ms)
    if last_ms < TIME_MAX_MS:
        end = await first_since(half, begin, end, last_ms)
    if layer is Layer.OP:
        op_start, op_end = await op.bounds()
        if begin == end:
            return op_end, op_end
        first = await half.pick(range(begin, min(begin + NEIGHBOURS, end)))
        if begin > start and first:
            since_ms = min(record.timestamp_ms for record in first)
            op_start = await first_marker_since(op, op_start, op_end, begin, since_ms)
        return op_start, op_end
    return begin, end
