"""The types of a check-back: the question, its result, and who asks, answers and decides."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from txbroker.core.records import CheckReason, Decision, Message
from txbroker.errors import TxbrokerError
from txbroker.tracing import TraceContext

DETAIL_CHARS_MAX = 200
"""An answer's `detail` is stored in markers and shown in timelines, so it stays short."""


class CheckCall(Struct, frozen=True):
    """The question for the decision about a transaction.

    Attributes:
        attempt: attempts that count, with this one, from 1; `attempts_max` is the last.
        prepared_at_ms: when the half message was appended.
        round: attempts are numbered per round; reviving a transaction starts a new round.
        number: of this attempt's marker. Unique within a round; `attempt` is not, after an
            attempt was given back.
        timeout_s: maximum time for the answer; the transaction parks that long after its last
            attempt.
        trace: the trace that the question belongs to, if known.
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
    """The group answered. `unknown` with `ask_again_s` is a deliberate "not yet".

    `detail` is a short text for the next marker and the transaction's timeline; `text` is the
    beginning of an endpoint's body. It stays in memory and is shown to readers only: a producer,
    who can register any check URL, must not read with it what that URL serves.
    """

    decision: Decision
    ask_again_s: float | None = None
    messages: tuple[Message, ...] | None = None
    detail: str = ""
    text: str = ""


class Unreached(Struct, frozen=True):
    """The question reached no instance, or was refused there: the attempt is given back.

    Attributes:
        ask_again_s: an instance cannot find the answer out now, for example because its database
            does not answer, and asks for another question after this many seconds.
        lasting: another question would not change it: the instance has no check function, or there
            is no further instance and no check URL.
    """

    detail: str
    ask_again_s: float | None = None
    lasting: bool = False


class Unclear(Struct, frozen=True):
    """The question may have reached an instance: the attempt counts. `text` as in `Answered`."""

    detail: str
    text: str = ""


CheckResult: TypeAlias = Answered | Unreached | Unclear


class AttemptRequest(Struct, frozen=True, gc=False):
    """An attempt to be made: the transaction, the reason, and the endpoint that will be asked."""

    id: str
    reason: CheckReason
    endpoint: str


class AttemptResult(Struct, frozen=True):
    """The result of an attempt, and the endpoint that was asked."""

    call: CheckCall
    endpoint: str
    result: CheckResult


def shortened(detail: str) -> str:
    """Return a detail that is safe to store and show: one line, printable, at most 200 long."""
    if len(detail) <= DETAIL_CHARS_MAX and detail.isprintable():
        return detail
    line = "".join(c if c.isprintable() else " " for c in detail[: DETAIL_CHARS_MAX * 2])
    return line if len(line) <= DETAIL_CHARS_MAX else line[: DETAIL_CHARS_MAX - 1] + "…"


def already(result: CheckResult) -> "asyncio.Future[CheckResult]":
    future: asyncio.Future[CheckResult] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


class Channel(Protocol):
    """An acquired connection to an instance of a group."""

    endpoint: str
    """For the marker and the timeline: a URL, or `session INSTANCE`."""
    instance: str
    """The SDK instance that it reaches; "" for a check URL."""

    def ask(self, call: CheckCall, timeout_s: float) -> "asyncio.Future[CheckResult]":
        """Ask, once. The question has been handed to the socket when this returns.

        Faults of the other side raise nothing: every outcome is a CheckResult, known within
        `timeout_s`.
        """

    def release(self) -> None:
        """Give the connection back; call it once, also if nothing was asked."""


class Finder(Protocol):
    """Finds an instance of a group to ask."""

    def at_hand(self, group: str, prefer: str) -> Channel | None:
        """Return the channel that `acquire` would return without waiting, if any."""

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """Return a channel to the group, or why there is none. Takes at most a few seconds and
        sends nothing of a question.

        Args:
            prefer: the instance to use if it can be asked.
            avoid: instances that are not to be asked, preferred or not; "" is the check URL.
        """


class CheckOwner(Protocol):
    """The owner of a transaction's half partition. Compared by identity."""

    def in_memory(self, id: str) -> bool:
        """Return True if the transaction's messages are in memory. Checks with messages in memory
        do not wait for those whose messages must be read."""

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> "list[CheckCall | TxbrokerError | None]":
        """Write the numbered markers of attempts; return one item for each.

        The question, once its marker is durable and the ledger has accepted it; None if there is
        nothing to ask (decided, too early, not of this owner); or the error that kept its marker
        from being written.
        """

    def still_pending(self, id: str) -> bool:
        """Return True if the transaction is undecided, by all markers that the ledger knows."""

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        """Apply the results of attempts."""
