"""Views of a transaction: its messages, checks and timeline."""

from msgspec import structs

from txbroker.contract.service import Event, PlacedMessage, TransactionView
from txbroker.core.index import due_ms
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Attempt, Message, State
from txbroker.core.routing import parse_id
from txbroker.core.transaction import Transaction
from txbroker.proxy.partition.body_cache import lost_cause, refused_as_lost


def summary(transaction: Transaction) -> TransactionView:
    """Return the view of a transaction in a list: without checks and timeline."""
    return structs.replace(_view(transaction, bodies=False), checks=())


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
