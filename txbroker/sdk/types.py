"""What users of the SDK give and get, besides `Message`, `Decision` and `State`."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from txbroker.core.records import CheckReason, Decision, Message, State
from txbroker.errors import BadRequest, OwnerUnavailable, TxbrokerError

NOT_YET_MAX_S = 3600.0
"""A deliberate "not yet" is remembered for at most an hour."""

Wait: TypeAlias = Literal["decided", "promoted"]
"""When a commit returns: once it is durable, or once consumers can see the messages."""


class Rollback(Exception):
    """Raise it inside a transaction's block, or function, to roll back."""


class ProducerClosed(TxbrokerError):
    """The producer is closed, draining or not started yet: nothing was sent."""


class Untrusted(OwnerUnavailable):
    """TLS did not come about: one side does not trust the other's certificate, or it has expired
    or is for another host name. Nothing was sent. It is for the operator to mend, while calls of a
    producer that runs are tried again until their time is over."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a transaction stands.

    Attributes:
        id: the transaction.
        decision: what was decided; UNKNOWN where nothing is decided yet.
        state: how far it has come: `committed` is not yet visible, `promoted` is.
    """

    id: str
    decision: Decision
    state: State


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """The proxy asks: what became of this transaction?

    Attributes:
        id: the transaction, as the local transaction knew it (`tx.id`).
        group: the producer group that prepared it.
        attempt: counts from 1; the transaction is parked after `attempts_max` attempts.
        attempts_max: how often it is asked at most.
        reason: the check's time had come, or somebody asked for it.
        prepared_at: when the half message was stored, in seconds since 1970, by Kafka's clock.
        messages: the messages as they were prepared.
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
    """A check's answer: the local transaction is still under way, ask again after `after_s`
    seconds (at most 3600). No attempt is used up."""

    after_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.after_s) and 0 <= self.after_s <= NOT_YET_MAX_S):
            raise BadRequest(f"after_s is between 0 and {NOT_YET_MAX_S:g}, not {self.after_s!r}")


@dataclass(frozen=True, slots=True, init=False)
class Commit:
    """A check's answer: commit, where given with final `messages` in place of the prepared
    ones: as many, for the same topics."""

    messages: tuple[Message, ...] | None

    def __init__(self, messages: Sequence[Message] | None = None) -> None:
        object.__setattr__(self, "messages", None if messages is None else tuple(messages))


Answer: TypeAlias = Decision | Commit | NotYet
"""What a check may say."""

CheckFunction: TypeAlias = Callable[[CheckRequest], Answer | Awaitable[Answer]]
"""A coroutine function, or a plain one (which is called in a thread)."""
