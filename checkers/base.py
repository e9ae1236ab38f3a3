"""What a check-back is, whoever is asked and however."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from txbroker.core.records import CheckReason, Decision, Message
from txbroker.core.trace_context import TraceContext
from txbroker.errors import TxbrokerError

ASK_AGAIN_S_MIN = 1.0
"""A "not yet" for less than this is taken as this, so that no group is asked in a tight loop."""
ASK_AGAIN_S_MAX = 3600.0
"""A "not yet" for longer than this is taken as this: one hour."""
DETAIL_CHARS_MAX = 200
"""An answer's `detail` goes into markers and timelines, so it stays short."""


class CheckCall(Struct, frozen=True):
    """The question: what became of this transaction?

    Attributes:
        attempt: how many attempts count with this one, from 1; `attempts_max` is the last.
        prepared_at_ms: when the half message was appended.
        round: attempts are numbered anew in each round; a revived transaction begins one.
        number: of this attempt's marker, never used twice in a round, while `attempt` is, after
            one was given back.
        timeout_s: how long to wait for an answer; the transaction parks that long after its
            last attempt, so nobody may wait longer.
        trace: the trace that the question belongs to, where it is known.
    """

    id: str
    group: str
    attempt: int
    attempts_max: int
    reason: CheckReason
    prepared_at_ms: int
    messages: tuple[Message, ...]
    round: int = 1
    number: int = 1
    timeout_s: float = 5.0
    trace: TraceContext | None = None


class Answered(Struct, frozen=True):
    """Somebody answered. `unknown` with `ask_again_s` is a deliberate "not yet".

    `detail` is the answer in a few words, for the next marker and the transaction's timeline.
    """

    decision: Decision
    ask_again_s: float | None = None
    messages: tuple[Message, ...] | None = None
    detail: str = ""


class Unreached(Struct, frozen=True):
    """Certainly nobody took the question: the attempt is given back."""

    detail: str


class Unclear(Struct, frozen=True):
    """Nobody knows whether the question arrived: the attempt counts."""

    detail: str


CheckResult: TypeAlias = Answered | Unreached | Unclear


class AttemptRequest(Struct, frozen=True, gc=False):
    """An attempt that is to be made: of which transaction, why now, and whom it will ask."""

    id: str
    reason: CheckReason
    endpoint: str


class AttemptResult(Struct, frozen=True):
    """What came of an attempt, and from whom."""

    call: CheckCall
    endpoint: str
    result: CheckResult


def ask_again_within_bounds(seconds: float) -> float:
    """Return how long a "not yet" holds: what was answered, but 1 s at least and 1 h at most.

    Takes whole numbers of any size; what is no number counts as the shortest time.
    """
    if seconds > ASK_AGAIN_S_MAX:
        return ASK_AGAIN_S_MAX
    return float(seconds) if seconds > ASK_AGAIN_S_MIN else ASK_AGAIN_S_MIN


def shortened(detail: str) -> str:
    """Return a detail that is safe to store and show: one line, printable, at most 200 long."""
    if len(detail) <= DETAIL_CHARS_MAX and detail.isprintable():
        return detail
    line = "".join(c if c.isprintable() else " " for c in detail[: DETAIL_CHARS_MAX * 2])
    return line if len(line) <= DETAIL_CHARS_MAX else line[: DETAIL_CHARS_MAX - 1] + "…"


def already(result: CheckResult) -> "asyncio.Future[CheckResult]":
    """Return a future of what is known already."""
    future: asyncio.Future[CheckResult] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


class Channel(Protocol):
    """A connection to an instance of a group, in hand: asking it needs no further look-up."""

    endpoint: str
    """Whom it asks, for the marker and the timeline: a URL, or `session INSTANCE`."""
    instance: str
    """The SDK instance that it asks, "" where it asks no one instance that could be avoided."""

    def ask(self, call: CheckCall, timeout_s: float) -> "asyncio.Future[CheckResult]":
        """Ask, once. The question has been handed to the socket when this returns.

        Nothing is raised for what the other side does: every outcome is a CheckResult, known
        within `timeout_s`.
        """
        ...

    def release(self) -> None:
        """Give the connection back; once, also where nothing was asked."""
        ...


class Finder(Protocol):
    """Finds somebody of a group to ask."""

    def at_hand(self, group: str, prefer: str) -> Channel | None:
        """Return the channel that `acquire` would return without waiting for anything, if any."""
        ...

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """Return a channel to the group, to the instance `prefer` if it is there, or why there
        is none. Takes at most a few seconds; sends nothing of a question yet.

        Args:
            avoid: instances that did not take the question; somebody else is wanted.
        """
        ...


class CheckOwner(Protocol):
    """The owner of the half partition that a transaction lives in. Compared by identity."""

    def in_memory(self, id: str) -> bool:
        """Say whether the transaction's messages are in memory: others do not wait for those
        that are to be read first."""
        ...

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> "list[CheckCall | TxbrokerError | None]":
        """Write the numbered markers of attempts.

        Return of each the question once the marker is durable and the ledger has accepted it, None
        where there is nothing to ask (any more): decided, too early, not ours; or why its marker
        was not written.
        """
        ...

    def still_pending(self, id: str) -> bool:
        """Say whether the transaction is undecided, by all markers that the ledger knows."""
        ...

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        """Take what came of attempts: a decision, "not yet", nobody reached, or nothing."""
        ...
