"""The question of a check-back, and the answers of a group's check function."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from txbroker.core.records import LATER_S_MAX, CheckReason, Decision, Message
from txbroker.errors import BadRequest


class Rollback(Exception):
    """Raise it inside a transaction's block, or function, to roll back."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """The proxy's question for the decision about a transaction.

    Attributes:
        id: the transaction, as the local transaction knew it (`tx.id`).
        group: the producer group that prepared it.
        attempt: counts from 1; the transaction is parked after `attempts_max` attempts.
        attempts_max: the maximum number of attempts.
        reason: the check was due, or it was requested.
        prepared_at: when the half message was stored, in seconds since 1970, by Kafka's clock.
        messages: the prepared messages.
    """

    id: str
    group: str
    attempt: int
    attempts_max: int
    reason: CheckReason
    prepared_at: float
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class NotYet:
    """A check's answer: the local transaction is still in progress; ask again after `after_s`
    seconds (at most 3600). Uses no attempt."""

    after_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.after_s) and 0 <= self.after_s <= LATER_S_MAX):
            raise BadRequest(f"after_s is between 0 and {LATER_S_MAX:g}, not {self.after_s!r}")


@dataclass(frozen=True, slots=True, init=False)
class Commit:
    """A check's answer: commit, optionally with final `messages` that replace the prepared ones:
    the same number, for the same topics."""

    messages: tuple[Message, ...] | None

    def __init__(self, messages: Sequence[Message] | None = None) -> None:
        object.__setattr__(self, "messages", None if messages is None else tuple(messages))


Answer: TypeAlias = Decision | Commit | NotYet
"""The possible answers to a check."""

CheckFunction: TypeAlias = Callable[[CheckRequest], Answer | Awaitable[Answer]]
"""A coroutine function, or a plain one (which is called in a thread)."""
