"""The lifecycle of a transaction: its states, the steps between them, their guards and effects.

`RULES` holds every change of state: (state, step) -> (state after, guard, effect). A step that is
not in the table, or that its guard refuses, is illegal and changes nothing.

A transaction is a function of its half message and of its markers in offset order, so every
replay gives the same result.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct, structs

from txbroker.core.records import (
    Attempt,
    CheckReason,
    Checks,
    Decision,
    Marker,
    MarkerKind,
    Message,
    State,
    bounded_later_s,
    intern,
)
from txbroker.core.transaction import (
    ATTEMPTS_KEPT,
    Transaction,
    Verdict,
    bare,
    fingerprint,
    fits,
    places,
)

ASK_SPACING_MS = 1000
"""The shortest time between the last attempt and one that a client asked for."""

UNDECIDED = frozenset({State.PENDING, State.PARKED})
SETTLED = frozenset({State.PROMOTED, State.ROLLED_BACK})
DECISIONS = {MarkerKind.COMMIT: Decision.COMMIT, MarkerKind.ROLLBACK: Decision.ROLLBACK}


class PromotionStep(StrEnum):
    """What a promotion transaction does to a committed transaction."""

    PROMOTE = "promote"
    REFUSE = "refuse"


Step: TypeAlias = MarkerKind | PromotionStep
STEPS: tuple[Step, ...] = (*MarkerKind, *PromotionStep)


class MarkerEntry(Struct, frozen=True):
    """A marker as read from the operation topic.

    Attributes:
        at_ms: the log clock, by which checks are judged.
        stamp_ms: the append time itself; unlike the log clock it never lies in brokers' future.
        contents: the messages that replace the prepared ones.
    """

    marker: Marker
    offset: int
    at_ms: int
    stamp_ms: int
    contents: tuple[Message, ...] | None = None


class IllegalStep(ValueError):
    """A step that the state or its guard does not allow; nothing was changed."""

    def __init__(self, state: State, step: Step, why: str = "") -> None:
        super().__init__(f"{step} in state {state}{': ' + why if why else ''}")
        self.state = state
        self.step = step


class Rule(NamedTuple):
    """One legal step.

    Attributes:
        after: the state after it.
        guard: returns why the step is illegal, "" if it is legal.
        effect: changes the transaction beyond its state.
    """

    after: State
    guard: Callable[[Transaction, Any], str] | None = None
    effect: Callable[[Transaction, Any], None] | None = None


def advance(transaction: Transaction, step: Step, event: MarkerEntry | None = None) -> None:
    """Apply a step, with the marker that causes it; an IllegalStep changes nothing."""
    rule = RULES.get((transaction.state, step))
    if rule is None:
        raise IllegalStep(transaction.state, step)
    after, guard, effect = rule
    if guard is not None and (why := guard(transaction, event)):
        raise IllegalStep(transaction.state, step, why)
    transaction.state = after
    if effect is not None:
        effect(transaction, event)


# --- decisions -------------------------------------------------------------------------------


def wrong_group(transaction: Transaction, entry: MarkerEntry) -> str:
    """Return why the marker's group may not decide, "" if it may."""
    group = entry.marker.group
    return f"group {group!r} does not own it" if group and group != transaction.half.group else ""


def _may_commit(transaction: Transaction, entry: MarkerEntry) -> str:
    if entry.contents is not None and not fits(transaction.half, entry.contents):
        return wrong_group(transaction, entry) or "replaced content for other topics"
    return wrong_group(transaction, entry)


def _decide(transaction: Transaction, entry: MarkerEntry) -> None:
    marker, contents, mark = entry.marker, entry.contents, b""
    if contents is not None:
        mark = fingerprint(contents)
        transaction.half = structs.replace(
            transaction.half, messages=bare(transaction.half.messages)
        )
        transaction.contents = contents
        transaction.places = places(contents)
        transaction.has_bodies, transaction.lost = True, False
    transaction.verdict = Verdict(
        DECISIONS[marker.kind],
        entry.offset,
        entry.stamp_ms,
        marker.source,
        marker.by,
        marker.reason,
        mark,
    )


# --- checks ----------------------------------------------------------------------------------


def _may_check(transaction: Transaction, entry: MarkerEntry) -> str:
    """The next number of this round, in time, and attempts are left."""
    marker, at_ms, checks = entry.marker, entry.at_ms, transaction.checks
    made, allowed = len(checks.counted_ms), transaction.half.policy.attempts_max
    number = checks.number + 1
    if marker.round != checks.round or marker.number != number:
        return f"attempt {marker.round}.{marker.number} is not {checks.round}.{number}"
    if made >= allowed:
        return f"{made} attempts were made already"
    if marker.reason == CheckReason.ASKED:
        if made + 1 >= allowed:
            return "the last attempt of a round is never pulled forward"
        if at_ms < checks.last_check_ms + ASK_SPACING_MS:
            return "less than a second after the last attempt"
    elif marker.reason != CheckReason.DUE:
        return f"unknown reason {marker.reason!r}"
    elif at_ms < transaction.next_check_ms():
        return f"{transaction.next_check_ms() - at_ms} ms before its time"
    return ""


def _record_attempt(transaction: Transaction, entry: MarkerEntry) -> None:
    marker, at_ms = entry.marker, entry.at_ms
    if marker.previous:
        transaction.note_outcome(marker.previous)
    checks = transaction.checks
    reason = CheckReason(marker.reason)
    attempt = Attempt(checks.round, marker.number, at_ms, reason, intern(marker.endpoint))
    transaction.checks = structs.replace(
        checks,
        round_started_ms=checks.round_started_ms or transaction.prepared_at_ms,
        number=marker.number,
        counted_ms=(*checks.counted_ms, at_ms),
        last_check_ms=at_ms,
        not_before_ms=0,
        attempts=(*checks.attempts[1 - ATTEMPTS_KEPT :], attempt),
    )


def _may_give_back(transaction: Transaction, entry: MarkerEntry) -> str:
    """The marker names the last attempt, and that one still counts."""
    marker, checks = entry.marker, transaction.checks
    last = checks.attempts[-1] if checks.attempts else None
    if (
        last is None
        or not last.counts
        or (marker.round, marker.number) != (checks.round, checks.number)
        or last.round != checks.round
    ):
        return f"attempt {marker.round}.{marker.number} cannot be given back"
    return ""


def _give_back(transaction: Transaction, entry: MarkerEntry) -> None:
    """The last attempt does not count."""
    checks = transaction.checks
    given_back = structs.replace(checks.attempts[-1], counts=False, outcome=entry.marker.previous)
    transaction.checks = structs.replace(
        checks, counted_ms=checks.counted_ms[:-1], attempts=(*checks.attempts[:-1], given_back)
    )


def _postpone(transaction: Transaction, entry: MarkerEntry) -> None:
    _give_back(transaction, entry)
    delay_s = bounded_later_s(entry.marker.later_s)
    until_ms = entry.at_ms + round(delay_s * 1000)
    transaction.checks = structs.replace(transaction.checks, not_before_ms=until_ms)


# --- parking ---------------------------------------------------------------------------------


def _may_park(transaction: Transaction, entry: MarkerEntry) -> str:
    """This round has no attempt left, and the last one can no longer be answered."""
    from_ms = transaction.park_ms()
    if entry.marker.round != transaction.checks.round or from_ms is None or entry.at_ms < from_ms:
        return "the last attempt is not over"
    return ""


def _end_round(transaction: Transaction, entry: MarkerEntry) -> None:
    transaction.note_outcome(entry.marker.previous)


def _may_revive(transaction: Transaction, entry: MarkerEntry) -> str:
    named, current = entry.marker.round, transaction.checks.round
    return "" if named == current else f"round {named} is not {current}"


def _begin_round(transaction: Transaction, entry: MarkerEntry) -> None:
    checks = transaction.checks
    transaction.checks = Checks(checks.round + 1, entry.at_ms, attempts=checks.attempts)


# --- promotion -------------------------------------------------------------------------------


def _promote(transaction: Transaction, _: None) -> None:
    transaction.cause = None
    transaction.kept = False


def _refuse(transaction: Transaction, _: None) -> None:
    transaction.kept = True


RULES: dict[tuple[State, Step], Rule] = {
    (State.PENDING, MarkerKind.COMMIT): Rule(State.COMMITTED, _may_commit, _decide),
    (State.PENDING, MarkerKind.ROLLBACK): Rule(State.ROLLED_BACK, wrong_group, _decide),
    (State.PENDING, MarkerKind.CHECK): Rule(State.PENDING, _may_check, _record_attempt),
    (State.PENDING, MarkerKind.RETURNED): Rule(State.PENDING, _may_give_back, _give_back),
    (State.PENDING, MarkerKind.LATER): Rule(State.PENDING, _may_give_back, _postpone),
    (State.PENDING, MarkerKind.PARK): Rule(State.PARKED, _may_park, _end_round),
    (State.PARKED, MarkerKind.COMMIT): Rule(State.COMMITTED, _may_commit, _decide),
    (State.PARKED, MarkerKind.ROLLBACK): Rule(State.ROLLED_BACK, wrong_group, _decide),
    (State.PARKED, MarkerKind.REVIVE): Rule(State.PENDING, _may_revive, _begin_round),
    (State.COMMITTED, PromotionStep.PROMOTE): Rule(State.PROMOTED, None, _promote),
    (State.COMMITTED, PromotionStep.REFUSE): Rule(State.REFUSED, None, _refuse),
    # Reviving only wakes the retry: a promotion transaction has to change the state.
    (State.REFUSED, MarkerKind.REVIVE): Rule(State.REFUSED, _may_revive),
    (State.REFUSED, PromotionStep.PROMOTE): Rule(State.PROMOTED, None, _promote),
    # Retried, and refused for another cause.
    (State.REFUSED, PromotionStep.REFUSE): Rule(State.REFUSED, None, _refuse),
}
