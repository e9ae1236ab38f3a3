"""Lists of one half partition's transactions, page by page, yielding to the event loop."""

import asyncio
from heapq import nsmallest

from txbroker.contract.service import (
    LISTED_MESSAGES_MAX,
    ListRequest,
    TransactionPage,
    TransactionView,
)
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.segment import SettledSummary
from txbroker.core.settled import to_transaction
from txbroker.core.transaction import Transaction
from txbroker.principals import Patterns
from txbroker.proxy.cluster.forwarding import decode_cursor, encode_cursor
from txbroker.proxy.cluster.views import summary

SLICE = 256
"""Transactions that a list reads before it yields to the event loop: well below a millisecond."""


async def page_of(ledger: Ledger, request: ListRequest, now_ms: int) -> TransactionPage:
    """Return a page of one partition's transactions, oldest first.

    Args:
        now_ms: the time that `older_than_s` counts from.

    Raises:
        BadRequest: the cursor is invalid.
    """
    before_ms = None
    if request.older_than_s is not None:
        before_ms = now_ms - round(request.older_than_s * 1000)
    allowed = ("*",) if request.groups_allowed is None else request.groups_allowed
    visible = Patterns(allowed, request.groups_denied)
    if request.state in SETTLED:
        return await _settled(ledger, request, before_ms, visible)
    at_ms, id = decode_cursor(request.cursor)
    page = _Page(request.limit)
    while True:
        part = ledger.index.by_offset.since(at_ms, SLICE, id)
        for transaction in part:
            matches = _matches(transaction, request, before_ms, visible)
            if matches and not page.take(transaction):
                return page.done(more=True)
        if len(part) < SLICE:
            return page.done(more=False)
        at_ms, id = part[-1].prepared_at_ms, part[-1].id
        await asyncio.sleep(0)


class _Page:
    """A page that is being filled."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._views: list[TransactionView] = []
        self._messages = 0

    def take(self, transaction: Transaction) -> bool:
        """Add a transaction to the page; return False if it is full."""
        self._messages += len(transaction.places)
        if self._views and (
            len(self._views) >= self._limit or self._messages > LISTED_MESSAGES_MAX
        ):
            return False
        self._views.append(summary(transaction))
        return True

    def done(self, *, more: bool) -> TransactionPage:
        """Return the page."""
        return TransactionPage(tuple(self._views), encode_cursor(self._views[-1]) if more else None)


def _matches(
    transaction: Transaction, request: ListRequest, before_ms: int | None, visible: Patterns
) -> bool:
    if request.state is None:
        if transaction.state in SETTLED:
            return False
    elif transaction.state is not request.state:
        return False
    if request.group is not None and transaction.half.group != request.group:
        return False
    if transaction.half.group not in visible:
        return False
    if before_ms is not None and transaction.prepared_at_ms > before_ms:
        return False
    return request.topic is None or any(p.topic == request.topic for p in transaction.places)


async def _settled(
    ledger: Ledger, request: ListRequest, before_ms: int | None, visible: Patterns
) -> TransactionPage:
    """Return a page of the settled transactions that are still in memory.

    They are kept in the order in which they settled, so each page reads all of them.
    """
    after = decode_cursor(request.cursor)
    # One more than fits shows whether the list continues.
    best: list[tuple[int, str]] = []
    candidates: dict[str, SettledSummary] = {}
    for part in ledger.index.settled.parts():
        await asyncio.sleep(0)
        for settled in part:
            key = (settled.prepared_at_ms, settled.id)
            if key > after and _matches_summary(settled, request, before_ms, visible):
                best.append(key)
                candidates[settled.id] = settled
        if len(best) > 4 * request.limit + SLICE:
            best = nsmallest(request.limit + 1, best)
            candidates = {id: candidates[id] for _, id in best}
    page = _Page(request.limit)
    for _, id in nsmallest(request.limit + 1, best):
        if not page.take(ledger.index.get(id) or to_transaction(candidates[id])):
            return page.done(more=True)
    return page.done(more=False)


def _matches_summary(
    settled: SettledSummary, request: ListRequest, before_ms: int | None, visible: Patterns
) -> bool:
    return (
        settled.state is request.state
        and (request.group is None or settled.group == request.group)
        and settled.group in visible
        and (before_ms is None or settled.prepared_at_ms <= before_ms)
        and (request.topic is None or any(topic == request.topic for topic, _ in settled.places))
    )
