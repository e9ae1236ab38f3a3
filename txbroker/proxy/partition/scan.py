"""Scans one half partition for a search: its unsettled transactions, then the half topic.

The half topic is read in blocks, from its end to its start, because the newest transactions are
asked about most. A page reads a bounded part, and its cursor is where the next one begins, so a
client can stop at any time, and a scan holds nothing in between.
"""

import asyncio
import time
from contextlib import suppress
from typing import NamedTuple

from txbroker.core.decoding import Malformed, NewerVersion, decode_half
from txbroker.core.index import OffsetIndex
from txbroker.core.routing import TIME_MAX_MS
from txbroker.core.terms import Terms
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
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.history import NEAR_MS, READ_BACK_S, first_since, read_settled

MATCHES_MAX = 20
"""Transactions on one page."""
PAGE_S, PAGE_BYTES = 0.5, 16 << 20
"""The time and the bytes of keys and values that one page takes, about."""
RESOLVE_S = 4.0
"""The time after which a page reads back no further settled transaction, seconds."""
BLOCK = 20_000
"""Records of a block."""
_SLICE = 1000
_OFFSET_MAX = 1 << 63


class Cursor(NamedTuple):
    """Where the next page of a half partition begins.

    Attributes:
        seen: the half offset up to which memory was searched; -1: it begins; `DONE`: all of it.
        begin, end: the offsets of the half topic that are searched.
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
        """The part of the half topic that is read, from 0 to 1."""
        length = self.end - self.begin
        if self.begin < 0 or length <= 0:
            return 0.0
        in_block = max(0, self.at - max(self.begin, self.before - BLOCK))
        return min(1.0, (self.end - self.before + in_block) / length)


DONE = _OFFSET_MAX
MEMORY_DONE = Cursor(DONE)
"""Memory is searched."""


def decode_cursor(text: str) -> Cursor:
    """Return a cursor from its text; "" is where a partition begins.

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
    """A matching record.

    Attributes:
        id: of its transaction.
        half: the offsets of its half message.
        at: the offset of the record.
    """

    id: str
    half: range
    at: int


class ScanPage(NamedTuple):
    """One match of each transaction, how many records were read, where that was, and where the next
    page begins."""

    matches: list[Match]
    records: int = 0
    place: Cursor = Cursor()
    next: Cursor | None = None


class Found(NamedTuple):
    """The transactions of a page, newest first, and how many more match and could not be read."""

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

    async def page(self, terms: Terms, cursor: Cursor) -> Found:
        """Return a page of a search.

        Raises:
            OwnerUnavailable: Kafka does not answer, or lost the end of the half topic.
        """
        async with self._scanning:
            try:
                if cursor.seen < DONE:
                    start, _ = await self._half.bounds(confirmed=False)
                    index = self._index.by_offset
                    page = await search_memory(index, self._bodies, terms, cursor.seen, start)
                else:
                    page = await search_half(self._half, terms, cursor)
                return await self._found(terms, page)
            except (KafkaUnavailable, LogTruncated, InvariantBroken) as error:
                raise OwnerUnavailable(f"cannot search: {error}") from None

    async def _found(self, terms: Terms, page: ScanPage) -> Found:
        found: list[Transaction] = []
        unread, following, deadline_s = 0, page.next, time.monotonic() + RESOLVE_S
        for number, match in enumerate(page.matches):
            if number and time.monotonic() > deadline_s:
                # The next page begins at this match.
                following = page.place._replace(at=match.at)
                break
            transaction = self._index.get(match.id)
            if transaction is not None and transaction.offset != match.half.start:
                continue  # a void record under an id in use
            if terms.needs_first_record and not await self._match_first(terms, match):
                continue
            if transaction is None:
                try:
                    async with asyncio.timeout(READ_BACK_S):
                        transaction = await read_settled(
                            self._half, self._op, match.id, match.half, self._window_ms
                        )
                except NotFound:
                    continue  # the half message is void
                except (TooOld, TimeoutError):
                    unread += 1
                    continue
            found.append(transaction)
        return Found(found[::-1], unread, page.records, following)

    async def _match_first(self, terms: Terms, match: Match) -> bool:
        """Return whether the first record of a half message has the order and dedup key."""
        for record in await self._half.pick(match.half[:1]):
            with suppress(Malformed, NewerVersion):
                return terms.match_first(decode_half(record))
        return True  # not in the topic any more: memory has matched it


async def search_memory(
    index: OffsetIndex, bodies: BodyCache, terms: Terms, seen: int, start: int
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
            if terms.match(transaction, keys=not gone) and await _match_messages(
                transaction, bodies, terms, read=gone or terms.key is not None
            ):
                half = range(at, at + len(transaction.places))
                matches.append(Match(transaction.id, half, at))
            if len(matches) == MATCHES_MAX or time.monotonic() > deadline_s:
                return ScanPage(matches, next=Cursor(seen))
        await yielder.step()
    return ScanPage(matches, next=MEMORY_DONE)


async def _match_messages(
    transaction: Transaction, bodies: BodyCache, terms: Terms, *, read: bool
) -> bool:
    """Return whether the messages match; with `read`, which few need, also if Kafka has to be
    asked for them."""
    if not terms.needs_messages:
        return True
    if not transaction.has_bodies and read:
        await bodies.show(transaction)
    # The half topic, which is read afterwards, has the others.
    return transaction.has_bodies and terms.match_messages(transaction.messages)


async def search_half(half: Log, terms: Terms, cursor: Cursor) -> ScanPage:
    """Return a page of matching transactions of the half topic, settled ones too.

    Raises:
        KafkaUnavailable: Kafka does not answer.
    """
    begin, end, before, at = cursor[1:]
    if begin < 0:
        begin, end = await _bounds(half, terms)
        before, at = end, -1
    start, stop = await half.bounds(confirmed=False)
    if stop < before:
        # A broker that does not lead any more, or an end that is lost: `read` shows it.
        start, stop = await half.bounds()
    begin = max(begin, start)
    block = max(begin, before - BLOCK)
    at = min(max(at, block), before)
    place = Cursor(DONE, begin, end, before, at)
    needed = terms.needed_headers()
    matches: dict[str, Match] = {}
    count = size = 0
    deadline_s = time.monotonic() + PAGE_S
    try:
        async for records in half.read(at, before):
            for record in records:
                at, count = record.offset + 1, count + 1
                size += len(record.key or b"") + len(record.value or b"")
                part = terms.match_record(record, needed)
                if part is not None:
                    first = record.offset - part.sequence
                    half_message = range(first, first + part.count)
                    matches.setdefault(part.id, Match(part.id, half_message, record.offset))
                    if len(matches) == MATCHES_MAX:
                        break
            full = len(matches) == MATCHES_MAX or size > PAGE_BYTES
            if full or time.monotonic() > deadline_s:
                break
        else:
            at = before
    except LogTruncated:
        start, _ = await half.bounds()
        if start <= at:
            raise
        at = min(start, before)  # retention has deleted the records before it
    if at >= before:
        before, at = block, -1
    following = Cursor(DONE, begin, end, before, at) if before > begin else None
    return ScanPage(list(matches.values()), count, place, following)


async def _bounds(half: Log, terms: Terms) -> tuple[int, int]:
    """Return the offsets between which the transactions of these terms are."""
    start, end = await half.bounds()
    first_ms, last_ms = terms.times(NEAR_MS)
    if first_ms > 0:
        start = await first_since(half, start, end, first_ms)
    if last_ms < TIME_MAX_MS:
        end = await first_since(half, start, end, last_ms)
    return start, end
