"""Views of transactions: one with its messages, checks and timeline, and lists, page by page."""

import asyncio
from heapq import nsmallest

from msgspec import structs

from txbroker.contract.service import (
    LISTED_MESSAGES_MAX,
    Event,
    ListRequest,
    PlacedMessage,
    TransactionPage,
    TransactionView,
)
from txbroker.core.index import due_ms
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Attempt, Message, State
from txbroker.core.routing import parse_id
from txbroker.core.segment import SettledSummary
from txbroker.core.settled import to_transaction
from txbroker.core.transaction import Transaction
from txbroker.principals import Patterns
from txbroker.proxy.cluster.forwarding import decode_cursor, encode_cursor
from txbroker.proxy.partition.body_cache import lost_cause, refused_as_lost


def summary(transaction: Transaction) -> TransactionView:
    """Return the view of a transaction in a list: without checks and timeline."""
    shown = _view(transaction, bodies=False)
    return structs.replace(shown, checks=(), last_answer=transaction.last_answer)


def view(transaction: Transaction, *, bodies: bool = False) -> TransactionView:
    """Return the full view of a transaction; with `bodies`, message bodies still in memory."""
    whole = _view(transaction, bodies=bodies)
    return structs.replace(whole, timeline=_timeline(transaction))


def _view(transaction: Transaction, *, bodies: bool) -> TransactionView:
    half = transaction.half
    there = transaction.has_bodies and transaction.state not in SETTLED
    decided = transaction.verdict.decision is not None
    return TransactionView(
        id=half.id,
        group=half.group,
        state=transaction.state,
        partition=parse_id(half.id).partition,
        half_offset=transaction.offset,
        prepared_at_ms=transaction.prepared_at_ms,
        messages=_messages(
            transaction, bodies=bodies and there and not refused_as_lost(transaction)
        ),
        order_key=half.order_key,
        dedup_key=half.dedup_key,
        decision=transaction.verdict.decision,
        decided_at_ms=transaction.verdict.at_ms if decided else None,
        source=transaction.verdict.source,
        by=transaction.verdict.by,
        reason=transaction.verdict.reason,
        round=transaction.checks.round,
        attempts=len(transaction.checks.counted_ms),
        attempts_max=half.policy.attempts_max,
        next_check_at_ms=due_ms(transaction),
        cause=lost_cause(transaction) if transaction.lost else transaction.cause,
        checks=tuple(transaction.checks.attempts),
    )


def _messages(transaction: Transaction, *, bodies: bool) -> tuple[PlacedMessage, ...]:
    offsets: tuple[int, ...] = transaction.offsets
    placed = []
    for sequence, message in enumerate(transaction.messages):
        offset = offsets[sequence] if sequence < len(offsets) else -1
        placed.append(
            PlacedMessage(
                message.topic,
                _partition(message),
                offset if offset >= 0 else None,
                message if bodies else None,
            )
        )
    return tuple(placed)


def _partition(message: Message) -> int:
    return -1 if message.partition is None else message.partition


def _timeline(transaction: Transaction) -> tuple[Event, ...]:
    events = [Event(transaction.prepared_at_ms, "prepared", f"by group {transaction.half.group}")]
    events.extend(_attempt(attempt) for attempt in transaction.checks.attempts)
    if transaction.state is State.PENDING and transaction.checks.round > 1:
        text = f"round {transaction.checks.round} of attempts begins"
        events.append(Event(transaction.checks.round_started_ms, "revive", text))
    if transaction.state is State.PARKED:
        parked_ms = transaction.park_ms() or transaction.prepared_at_ms
        events.append(Event(parked_ms, "park", "undecided after the last attempt; kept whole"))
    if transaction.verdict.decision is not None:
        text = f"by {transaction.verdict.source}"
        if transaction.verdict.by:
            text += f", {transaction.verdict.by}"
        if transaction.verdict.reason:
            text += f": {transaction.verdict.reason}"
        events.append(Event(transaction.verdict.at_ms, transaction.verdict.decision, text))
    if transaction.cause is not None:
        event = "refused" if transaction.state is State.REFUSED else "deferred"
        events.append(Event(transaction.verdict.at_ms, event, transaction.cause.message))
    if transaction.state is State.PROMOTED:
        places = [
            f"{placed.topic}-{placed.partition}"
            + ("" if placed.offset is None else f" at offset {placed.offset}")
            for placed in _messages(transaction, bodies=False)
        ]
        text = "to " + ", ".join(places)
        events.append(
            Event(transaction.promoted_at_ms or transaction.verdict.at_ms, "promoted", text)
        )
    return tuple(sorted(events, key=lambda event: event.at_ms))


def _attempt(attempt: Attempt) -> Event:
    text = f"attempt {attempt.round}.{attempt.number} ({attempt.reason}) at {attempt.endpoint}"
    if attempt.outcome:
        text += f": {attempt.outcome}"
    if not attempt.counts:
        text += " (does not count)"
    return Event(attempt.at_ms, "check", text)


SLICE = 256
"""Transactions that a list reads before it yields to the event loop: well below a millisecond."""


async def page_of(ledger: Ledger, request: ListRequest, now_ms: int) -> TransactionPage:
    """Return a page of one partition's transactions, oldest first."""
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
