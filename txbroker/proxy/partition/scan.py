"""Scans one half partition for a search: its unsettled transactions, then the half topic.

The half topic is read in blocks, from its end to its start, because the newest transactions are
asked about most. A page reads a bounded part, and its cursor is where the next one begins, so a
client can stop at any time, and a scan holds nothing in between.
"""

import asyncio
import time
from contextlib import suppress
from typing import NamedTuple

from txbroker.core.index import OffsetIndex
from txbroker.core.routing import TIME_MAX_MS
from txbroker.core.terms import Terms
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated
from txbroker.errors import BadRequest, KafkaUnavailable, NotFound, OwnerUnavailable, TooOld
from txbroker.proxy.partition.body_cache import BodyCache
from txbroker.proxy.partition.clock import Yielder
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.history import NEAR_MS, first_since
from txbroker.proxy.partition.partition_api import PartitionApi

MATCHES_MAX = 20
"""Transactions on one page."""
PAGE_S, PAGE_BYTES = 0.5, 16 << 20
"""The time and the bytes of keys and values that one page takes, about."""
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


class ScanPage(NamedTuple):
    """The ids found, newest first, how many records were read, and where the next page begins."""

    ids: list[str]
    records: int = 0
    next: Cursor | None = None


class Scanner:
    """Searches one half partition."""

    def __init__(self, context: PartitionContext, bodies: BodyCache, api: PartitionApi) -> None:
        self._index = context.ledger.index
        self._half = context.door.half
        self._bodies = bodies
        self._api = api
        # One page at a time: all searches share a bounded part of the event loop.
        self._scanning = asyncio.Semaphore()

    async def page(self, terms: Terms, cursor: Cursor) -> tuple[ScanPage, list[Transaction]]:
        """Return a page of a search, and its transactions.

        Raises:
            OwnerUnavailable: Kafka does not answer.
        """
        async with self._scanning:
            try:
                if cursor.seen < DONE:
                    start, _ = await self._half.bounds(confirmed=False)
                    page = await search_memory(
                        self._index.by_offset, self._bodies, terms, cursor.seen, start
                    )
                else:
                    page = await search_half(self._half, terms, cursor)
            except KafkaUnavailable as error:
                raise OwnerUnavailable(str(error)) from None
            found: list[Transaction] = []
            for id in page.ids:
                # A record whose transaction is void, or cannot be judged any more, is none.
                with suppress(NotFound, TooOld):
                    transaction = self._index.get(id)
                    transaction = transaction or await self._api.settled_before(id, wait=True)
                    if terms.needs_first_record and cursor.seen == DONE:
                        transaction = (await self._api.find(id)).transaction
                        if not terms.match(transaction, keys=False):
                            continue
                    found.append(transaction)
            return page, found


async def search_memory(
    index: OffsetIndex, bodies: BodyCache, terms: Terms, seen: int, start: int
) -> ScanPage:
    """Return a page of matching unsettled transactions.

    Args:
        seen: the half offset up to which the pages before went.
        start: where the half topic begins: earlier transactions are in memory only, and may have
            no marks of their keys.
    """
    ids: list[str] = []
    yielder = Yielder()
    while rows := index.after(seen, _SLICE):
        for transaction in rows:
            seen, gone = transaction.offset, transaction.offset < start
            if terms.match(transaction, keys=not gone) and await _match_messages(
                transaction, bodies, terms, read=gone or terms.key is not None
            ):
                ids.append(transaction.id)
                if len(ids) == MATCHES_MAX:
                    return ScanPage(ids, 0, Cursor(seen))
        await yielder.step()
    return ScanPage(ids, 0, MEMORY_DONE)


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
    begin, before = max(begin, start), min(before, stop)
    block = max(begin, before - BLOCK)
    at = min(max(at, block), before)
    needed = terms.needed_headers()
    found: dict[str, None] = {}
    count = size = 0
    deadline_s = time.monotonic() + PAGE_S
    try:
        async for records in half.read(at, before):
            for record in records:
                at, count = record.offset + 1, count + 1
                size += len(record.key or b"") + len(record.value or b"")
                id = terms.match_record(record, needed)
                if id is not None:
                    found[id] = None
                    if len(found) == MATCHES_MAX:
                        break
            if len(found) == MATCHES_MAX or size > PAGE_BYTES or time.monotonic() > deadline_s:
                break
        else:
            at = before
    except LogTruncated:
        begin = before  # retention has deleted this part, and all before it
    if at >= before:
        before, at = block, -1
    following = Cursor(DONE, begin, end, before, at) if before > begin else None
    return ScanPage(list(reversed(found)), count, following)


async def _bounds(half: Log, terms: Terms) -> tuple[int, int]:
    """Return the offsets between which the transactions of these terms are."""
    start, end = await half.bounds()
    first_ms, last_ms = terms.times(NEAR_MS)
    if first_ms > 0:
        start = await first_since(half, start, end, first_ms)
    if last_ms < TIME_MAX_MS:
        end = await first_since(half, start, end, last_ms)
    return start, end
