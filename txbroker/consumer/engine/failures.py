"""Applies the failure policy: local retries, copies to the group's topics, set-aside keys."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import structlog
from msgspec import structs

from txbroker.consumer.engine.failure_lines import FailureLines
from txbroker.consumer.engine.settlement import Settlement
from txbroker.consumer.message import ReceivedMessage, source_of
from txbroker.consumer.pending import Pending
from txbroker.core.consuming.aside import KEYS_MAX
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    DEAD_PARTITIONS,
    Failed,
    GroupTopics,
    is_smaller,
    make_copy,
    smaller,
    spread,
)
from txbroker.core.consuming.failure import (
    Bury,
    Drop,
    FailurePolicy,
    Later,
    RetryHere,
    RetryLater,
    SetAside,
    Verdict,
)
from txbroker.core.consuming.lifecycle import SEND, MessageEvent
from txbroker.door.writing import Copy, Refused

log = structlog.wrap_logger(logging.getLogger(__name__))

_SENT, _send = SEND


class Failures:
    """Decides what happens to messages that failed, and does it.

    Args:
        topics: of the group, for copies.

    Attributes:
        lines: the log of errors.
    """

    def __init__(self, policy: FailurePolicy, topics: GroupTopics, settlement: Settlement) -> None:
        self._policy = policy
        self._topics = topics
        self._settlement = settlement
        self.lines = FailureLines()
        self._outputs = _Outputs(topics.aside, settlement, self._dead_letter, self.lines)

    def fail(self, message: ReceivedMessage, error: BaseException) -> None:
        """Apply the policy to a message in flight whose handler raised `error`."""
        failed = not isinstance(error, Later)
        message.failures += failed
        self._settlement.counts["failed"] += failed
        verdict = self._policy.decide(error, message.failures, message.step)
        if failed:
            self.lines.note(
                log.warning,
                "message failed",
                error=error,
                message=repr(message),
                next=type(verdict).__name__,
            )
        self._apply(message, verdict)

    def _apply(self, message: ReceivedMessage, verdict: Verdict) -> None:
        partition = message.feed.partition
        if isinstance(verdict, SetAside) and message.feed.fail_again():
            partition.apply(MessageEvent.WITHHOLD, [message])
            return
        if isinstance(verdict, SetAside) and partition.aside.count >= KEYS_MAX:
            log.error("too many set-aside keys", partition=partition.place, keys=KEYS_MAX)
            self._settlement.counts["aside_full"] += 1
            verdict = self._policy.wait(message.failures)
        match verdict:
            case RetryHere():
                due_s = self._settlement.time() + verdict.delay_s
                partition.apply(MessageEvent.RETRY, [message], due_s)
            case Drop():
                self._settlement.counts["dropped"] += 1
                self._settlement.finish((message,), partition.in_flight[message], handled=False)
            case SetAside():
                partition.aside.pending.add(message.offset if message.key is None else message.key)
                self.set_aside(message, verdict.cause, called=True)
            case _:
                self._copy(message, verdict)

    def _copy(self, message: ReceivedMessage, verdict: Bury | RetryLater) -> None:
        """Copy a message to another topic; its lane waits until the copy is stored."""
        if isinstance(verdict, RetryLater):
            name = f"retry_{verdict.step}"
            due = round((time.time() + verdict.delay_s) * 1000)
            failed = _failed(message, due, verdict.cause, verdict.failed_step)
            copy = Copy(self._topics.retry, verdict.step, make_copy(message.record, failed))
        else:
            name, copy = "dead", self._dead_letter(message, verdict.cause)
        copies = [copy, *message.feed.clearance(message)]
        message.feed.partition.apply(MessageEvent.COPY, [message])
        self._store(message, copies, _Copied(self._settlement, name, self._dead_letter))

    def _dead_letter(self, message: ReceivedMessage, cause: str) -> Copy:
        failed = _failed(message, round(time.time() * 1000), cause)
        number = spread(failed.source[:2], DEAD_PARTITIONS)
        return Copy(self._topics.dead, number, make_copy(message.record, failed))

    def _store(self, message: ReceivedMessage, copies: Sequence[Copy], owner: _Copied) -> None:
        self._settlement.store(Pending(message.feed.partition, message, copies, owner))

    def produce(self, message: ReceivedMessage, outputs: Sequence[Copy]) -> None:
        """Store the outputs of a message in flight with its position. Its lane continues."""
        feed, message.state = message.feed, _SENT
        _send(feed.partition, feed, (message,), None)
        self._settlement.store(Pending(feed.partition, message, outputs, self._outputs), soon=False)

    def set_aside(self, message: ReceivedMessage, cause: str, *, called: bool = False) -> None:
        """Copy a message in flight to the aside topic. Its lane continues at once: later messages
        of the key follow in the same order.

        Args:
            called: the attempt was one; otherwise it is the next one's number.
        """
        failed = _failed(message, round(time.time() * 1000), cause)
        failed = structs.replace(failed, attempts=failed.attempts - (not called))
        number = spread(failed.source[:2], ASIDE_PARTITIONS)
        record = make_copy(message.record, failed)
        partition = message.feed.partition
        partition.apply(MessageEvent.SEND, [message])
        if partition.keeps_rows:  # no topic shows the copy
            partition.aside.add(message.offset if message.key is None else message.key)
        owner = _Copied(self._settlement, "aside", self._dead_letter)
        self._store(message, [Copy(self._topics.aside, number, record)], owner)


class _Copied:
    """Takes the result of a copy; see `Storing`.

    Args:
        name: counts the event.
        dead_letter: makes the copy that is stored in place of one for a later attempt.
    """

    def __init__(
        self,
        settlement: Settlement,
        name: str,
        dead_letter: Callable[[ReceivedMessage, str], Copy],
    ) -> None:
        self._settlement = settlement
        self._name = name
        self._is_attempt = name.startswith("retry_")
        self._dead_letter = dead_letter

    def stored(self, pendings: Sequence[Pending]) -> None:
        for each in pendings:
            name = "dead" if self._is_attempt and each.refused else self._name
            self._settlement.counts[name] += 1
        self._settlement.stored(pendings)

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        if not (error.too_large and self._is_attempt) or pending.refused:
            return _smaller(self._settlement, pending, error, keyed=self._name == "aside")
        # An attempt needs the whole message.
        assert pending.message is not None
        log.error("copy too large", message=repr(pending.message), next="Bury")
        return [self._dead_letter(pending.message, str(error)), *pending.copies[1:]]

    def dropped(self, pending: Pending) -> None: ...


class _Outputs:
    """Takes the results of outputs; see `Storing`.

    Args:
        own: the topic of clearances, which are no outputs.
        dead_letter: makes the copy that is stored in place of refused outputs.
    """

    def __init__(
        self,
        own: str,
        settlement: Settlement,
        dead_letter: Callable[[ReceivedMessage, str], Copy],
        lines: FailureLines,
    ) -> None:
        self._own = own
        self._settlement = settlement
        self._dead_letter = dead_letter
        self._lines = lines

    def stored(self, pendings: Sequence[Pending]) -> None:
        if dead := sum([bool(each.refused) for each in pendings]):
            self._settlement.counts["dead"] += dead
        self._settlement.handled += len(pendings) - dead
        self._settlement.stored(pendings)

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        if pending.refused or all(pending.copies[n].topic == self._own for n in error.indexes):
            return _smaller(self._settlement, pending, error, keyed=False)
        assert pending.message is not None
        self._lines.note(log.error, "output refused", error=error, message=repr(pending.message))
        return [
            self._dead_letter(pending.message, str(error)),
            *pending.message.feed.clearance(pending.message),
        ]

    def dropped(self, pending: Pending) -> None: ...


def _smaller(
    settlement: Settlement, pending: Pending, error: Refused, *, keyed: bool
) -> Sequence[Copy] | None:
    """Return the copies with less of their message where a topic takes only smaller ones; None:
    they are refused for another reason, or nothing more can be left out."""
    refused = error.indexes if error.too_large else ()
    found = [
        Copy(each.topic, each.partition, record)
        for n, each in enumerate(pending.copies)
        if (record := smaller(each.record, keyed=keyed) if n in refused else each.record)
    ]
    if not refused or len(found) < len(pending.copies):
        return None
    if not any(is_smaller(each.record) for each in pending.copies):
        log.error("copy too large", message=repr(pending.message), next="without its value")
        settlement.counts["left_out"] += 1
    return found


def _failed(message: ReceivedMessage, due_ms: int, cause: str, step: int = -1) -> Failed:
    return Failed(source_of(message), message.attempt, due_ms, cause, step, message.stage)
