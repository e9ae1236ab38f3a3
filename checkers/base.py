"""What a check-back is, whoever is asked and however."""

from typing import Protocol

from msgspec import Struct

from txbroker.core.records import CheckReason, Decision, Message


class CheckCall(Struct, frozen=True):
    """The question: what became of this transaction?"""

    id: str
    group: str
    attempt: int
    attempts_max: int
    reason: CheckReason
    prepared_at_ms: int
    messages: tuple[Message, ...]


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


CheckResult = Answered | Unreached | Unclear


class Channel(Protocol):
    """A connection to an instance of a group, in hand: asking it needs no further look-up."""

    endpoint: str
    """Whom it asks, for the marker and the timeline: a URL, or `session INSTANCE`."""

    async def ask(self, call: CheckCall, timeout_s: float) -> CheckResult:
        """Ask, once. The question is handed to the socket before the first suspension.

        Never raises for what the other side does: every outcome is a CheckResult, within
        `timeout_s`.
        """
        ...

    def release(self) -> None:
        """Give the connection back; once, also where nothing was asked."""
        ...


class Finder(Protocol):
    """Finds somebody of a group to ask."""

    async def acquire(self, group: str, prefer: str) -> Channel | Unreached:
        """Return a channel to the group, to the instance `prefer` if it is there, or why there
        is none. Takes at most a few seconds; sends nothing of a question yet."""
        ...
