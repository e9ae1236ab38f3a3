"""Views of transactions: one with its messages, checks and timeline, and lists, page by page."""

import asyncio
from collections.abc import Sequence
from heapq import nlargest, nsmallest
from typing import NamedTuple

from msgspec import structs

from txbroker.contract.service import (
    LISTED_MESSAGES_MAX,
    Event,
    ListRequest,
    PlacedMessage,
    SearchRequest,
    TransactionPage,
    TransactionView,
)
from txbroker.core.index import due_ms
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Attempt, Marker, MarkerKind, Message, State
from txbroker.core.routing import parse_id
from txbroker.core.segment import SettledSummary
from txbroker.core.settled import to_transaction
from txbroker.core.transaction import Transaction, Verdict
from txbroker.principals import Patterns
from txbroker.proxy.cluster.forwarding import decode_cursor, encode_cursor
from txbroker.proxy.partition.body_cache import lost_cause, refused_as_lost
from txbroker.proxy.partition.history import Account, StoredMarker, account_of


def summary(transaction: Transaction) -> TransactionView:
    """Return the view of a transaction in a list: without checks and timeline."""
    shown = _view(account_of(transaction), bodies=False)
    return structs.replace(shown, checks=(), last_answer=transaction.last_answer)


class LogNames(NamedTuple):
    """The names of the half and the operation topic."""

    half: str
    op: str


def view_of(account: Account, logs: LogNames, *, bodies: bool = False) -> TransactionView:
    """Return the full view of a transaction; with `bodies`, message bodies still in memory."""
    whole = _view(account, bodies=bodies)
    return structs.replace(whole, timeline=_timeline(account, whole, logs))


def _view(account: Account, *, bodies: bool) -> TransactionView:
    transaction = account.transaction
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
        **structs.asdict(half.attributes),
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
        attempts_known=account.attempts_known,
        read_back=account.read_back,
        gaps=tuple(account.gaps),
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


_TURNS = (MarkerKind.PARK, MarkerKind.REVIVE)
"""What ends a round of attempts, and what begins the next one."""


def _turn(kind: str, round_: int, stored: StoredMarker | None) -> str:
    if kind == MarkerKind.PARK:
        return "undecided after the last attempt; kept whole"
    text = f"round {round_ + 1} of attempts begins"
    return text if stored is None else f"{_decider(stored.marker)}; {text}"


def _timeline(account: Account, shown: TransactionView, logs: LogNames) -> tuple[Event, ...]:
    transaction = account.transaction
    verdict, checks = transaction.verdict, transaction.checks

    def marker(kind: MarkerKind, round_: int = 0, number: int = 0) -> str:
        stored = account.markers.get((kind, round_, number))
        return "" if stored is None else f"{logs.op}/{shown.partition}@{stored.offset}"

    events = [
        Event(
            transaction.prepared_at_ms,
            "prepared",
            f"by group {shown.group}",
            f"{logs.half}/{shown.partition}@{transaction.offset}",
        )
    ]
    steps = []
    for attempt in checks.attempts:
        place = marker(MarkerKind.CHECK, attempt.round, attempt.number)
        steps.append((attempt.round, 0, Event(attempt.at_ms, "check", _attempt(attempt), place)))
    # Memory has the turn that led to its present state, the topics have all.
    turns = {key[:2]: one.at_ms for key, one in account.markers.items() if key[0] in _TURNS}
    if transaction.state is State.PENDING and checks.round > 1:
        turns.setdefault((MarkerKind.REVIVE, checks.round - 1), checks.round_started_ms)
    if transaction.state is State.PARKED and (parked_ms := transaction.park_ms()) is not None:
        turns.setdefault((MarkerKind.PARK, checks.round), parked_ms)
    for (kind, round_), at_ms in turns.items():
        text = _turn(kind, round_, account.markers.get((kind, round_, 0)))
        turn = Event(at_ms, kind, text, marker(MarkerKind(kind), round_))
        steps.append((round_, 1 + _TURNS.index(MarkerKind(kind)), turn))
    # Several may be of one millisecond.
    events += [step[2] for step in sorted(steps, key=lambda step: step[:2])]
    if verdict.decision is not None:
        place = marker(MarkerKind(verdict.decision))
        if not place and verdict.op_offset >= 0:
            place = f"{logs.op}/{shown.partition}@{verdict.op_offset}"
        events.append(Event(verdict.at_ms, verdict.decision, _decider(verdict), place))
    if transaction.cause is not None:
        event = "refused" if transaction.state is State.REFUSED else "deferred"
        events.append(Event(verdict.at_ms, event, transaction.cause.message))
    if transaction.state is State.PROMOTED:
        events.append(_promoted(transaction, shown.messages))
    return tuple(sorted(events, key=lambda event: event.at_ms))


def _decider(verdict: Verdict | Marker) -> str:
    """Return who decided, and why."""
    if verdict.source is None:
        return "the decider is not known any more"
    text = f"by {verdict.source}"
    if verdict.by:
        text += f", {verdict.by}"
    if verdict.reason:
        text += f": {verdict.reason}"
    return text


def _promoted(transaction: Transaction, messages: Sequence[PlacedMessage]) -> Event:
    places = [
        f"{placed.topic}/{placed.partition}"
        + ("" if placed.offset is None else f"@{placed.offset}")
        for placed in messages
    ]
    text = "to " + ", ".join(places)
    if not transaction.promoted_at_ms:
        text += "; when they became visible is not stored, so this is the time of the decision"
    place = places[0] if len(places) == 1 and messages[0].offset is not None else ""
    return Event(transaction.promoted_at_ms or transaction.verdict.at_ms, "promoted", text, place)


def _attempt(attempt: Attempt) -> str:
    text = f"attempt {attempt.round}.{attempt.number} ({attempt.reason}) at {attempt.endpoint}"
    if attempt.outcome:
        text += f": {attempt.outcome}"
    if not attempt.counts:
        text += " (does not count)"
    return text


def groups_of(request: ListRequest | SearchRequest) -> Patterns:
    """Return the groups that the caller of a list or a search may see."""
    allowed = ("*",) if request.groups_allowed is None else request.groups_allowed
    return Patterns(allowed, request.groups_denied)


SLICE = 256
"""Transactions that a list reads before it yields to the event loop: well below a millisecond."""


async def page_of(ledger: Ledger, request: ListRequest, now_ms: int) -> TransactionPage:
    """Return a page of one partition's transactions by time of preparation."""
    before_ms = None
    if request.older_than_s is not None:
        before_ms = now_ms - round(request.older_than_s * 1000)
    visible = groups_of(request)
    if request.state in SETTLED:
        return await _settled(ledger, request, before_ms, visible)
    at_ms, id = decode_cursor(request.cursor, newest=request.newest)
    page = _Page(request.limit)
    while True:
        part = ledger.index.by_offset.since(at_ms, SLICE, id, newest=request.newest)
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
    after = decode_cursor(request.cursor, newest=request.newest)
    first = nlargest if request.newest else nsmallest
    # One more than fits shows whether the list continues.
    best: list[tuple[int, str]] = []
    candidates: dict[str, SettledSummary] = {}
    for part in ledger.index.settled.parts():
        await asyncio.sleep(0)
        for settled in part:
            key = (settled.prepared_at_ms, settled.id)
            follows = key < after if request.newest else key > after
            if follows and _matches_summary(settled, request, before_ms, visible):
                best.append(key)
                candidates[settled.id] = settled
        if len(best) > 4 * request.limit + SLICE:
            best = first(request.limit + 1, best)
            candidates = {id: candidates[id] for _, id in best}
    page = _Page(request.limit)
    for _, id in first(request.limit + 1, best):
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
