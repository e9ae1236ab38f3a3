"""A call of a handler, or of user code that pulls messages."""

from __future__ import annotations

from collections.abc import Sequence

from txbroker.consumer.message import ReceivedMessage
from txbroker.door.writing import Copy


class HandlerCall:
    """One call of a handler and its messages.

    Attributes:
        collecting: it is taking a batch: no handler has begun with its messages.
        since_s: when it began, None if there is none.
        interrupted: it was cancelled, and has not ended.
        untimed: its handler does not run: the call waits for a connection, or a commit.
        reports: results of single messages that wait for the end of their batch; None: no batch.
        outputs: copies to store with the messages' positions.
    """

    collecting = False
    since_s: float | None = None
    interrupted = False
    untimed = False
    reports: dict[ReceivedMessage, BaseException | None] | None = None
    outputs: Sequence[Copy] = ()

    def resume_timeout(self, now_s: float) -> None:
        """Apply the timeout to the handler, or to later stages, which follow."""
        self.untimed, self.since_s = False, now_s

    def cancel(self, reason: BaseException | None) -> None:
        """Cancel the handler, if it can be. The messages fail for this reason, None: they are given
        back."""


def call_of(message: ReceivedMessage) -> HandlerCall | None:
    """Return the call that has a message; None: it is not in flight."""
    call: HandlerCall | None = message.feed.partition.in_flight.get(message)
    return call
