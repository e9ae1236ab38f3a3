"""One half partition's share of a list, page by page, while everybody else gets turns."""

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
"""Transactions that a list looks at before everybody else gets a turn: well below a
millisecond."""


async def page_of(ledger: Ledger, request: ListRequest, now_ms: int) -> TransactionPage:
    """Return a page of one partition's transactions, oldest first.

    Args:
        now_ms: the time by which `older_than_s` is judged.

    Raises:
        BadRequest: the cursor is none of ours.
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
        part = ledger.since(at_ms, SLICE, id)
        for transaction in part:
            wanted = _wanted(transaction, request, before_ms, visible)
            if wanted and not page.take(transaction):
                return page.done(more=True)
        if len(part) < SLICE:
            return page.done(more=False)
        at_ms, id = part[-1].prepared_at_ms, part[-1].id
        await asyncio.sleep(0)


class _Page:
    """A page while it is filled."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._views: list[TransactionView] = []
        self._messages = 0

    def take(self, transaction: Transaction) -> bool:
        """Put a transaction on the page; False where it is full."""
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


def _wanted(
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
    """Return a page of what is settled and still remembered.

    It lies in the order in which it was settled, so each page looks at all of it.
    """
    after = decode_cursor(request.cursor)
    # One more than fits tells whether there are more.
    best: list[tuple[int, str]] = []
    briefs: dict[str, SettledSummary] = {}
    for part in ledger.settled.parts():
        await asyncio.sleep(0)
        for brief in part:
            key = (brief.prepared_at_ms, brief.id)
            if key > after and _wanted_brief(brief, request, before_ms, visible):
                best.append(key)
                briefs[brief.id] = brief
        if len(best) > 4 * request.limit + SLICE:
            best = nsmallest(request.limit + 1, best)
            briefs = {id: briefs[id] for _, id in best}
    page = _Page(request.limit)
    for _, id in nsmallest(request.limit + 1, best):
        if not page.take(ledger.get(id) or to_transaction(briefs[id])):
            return page.done(more=True)
    return page.done(more=False)


def _wanted_brief(
    brief: SettledSummary, request: ListRequest, before_ms: int | None, visible: Patterns
) -> bool:
    return (
        brief.state is request.state
        and (request.group is None or brief.group == request.group)
        and brief.group in visible
        and (before_ms is None or brief.prepared_at_ms <= before_ms)
        and (request.topic is None or any(topic == request.topic for topic, _ in brief.places))
    )
