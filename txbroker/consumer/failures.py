"""Applies the failure policy: local retries, copies to the group's topics, set-aside keys."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from msgspec import structs

from txbroker.consumer.failure_lines import FailureLines
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import source_of
from txbroker.consumer.stores.pending import Pending
from txbroker.core.consuming.aside import KEYS_MAX, AsideKey
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
from txbroker.core.consuming.queues import Queues
from txbroker.door.writing import Copy, Refused

log = structlog.wrap_logger(logging.getLogger(__name__))

REFUSED_PAUSE_S = 5.0
"""Before messages are handled again whose copies cannot be stored."""


class Results(Protocol):
    """What the engine does with messages that need nothing more.

    Attributes:
        counts: events by name.
        handled: messages whose handler has succeeded; with outputs, once these are stored.
    """

    counts: Counter[str]
    handled: int

    def end(self, message: ReceivedMessage, *, stored: bool = False) -> None:
        """The message needs nothing more: its lane continues, its offset is done.

        Args:
            stored: in the stored position, too.
        """

    def settled(self, *messages: ReceivedMessage, stored: bool = False) -> None:
        """Messages of one partition are done: so are their offsets, and their memory is free."""


class Failures:
    """Decides what happens to messages that failed, and does it.

    Args:
        topics: of the group, for copies.

    Attributes:
        lines: the log of errors.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        topics: GroupTopics,
        queues: Queues[ReceivedMessage],
        results: Results,
    ) -> None:
        self._policy = policy
        self._topics = topics
        self._queues = queues
        self._results = results
        self._loop = asyncio.get_running_loop()
        self.lines = FailureLines()
        self._outputs = _Outputs(results, self._dead_letter, self.lines)

    def fail(self, message: ReceivedMessage, error: BaseException) -> None:
        """Apply the policy to a message whose handler raised `error`."""
        failed = not isinstance(error, Later)
        message.failures += failed
        self._results.counts["failed"] += failed
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
        work = message.work
        if isinstance(verdict, SetAside) and work.aside_count >= KEYS_MAX:
            log.error("too many set-aside keys", partition=work.place, keys=KEYS_MAX)
            self._results.counts["aside_full"] += 1
            verdict = self._policy.wait(message.failures)
        if isinstance(verdict, RetryHere):
            message.attempt += 1
            due_s = self._loop.time() + verdict.delay_s
            self._queues.delay(work.queue, message, due_s)
        elif isinstance(verdict, Drop):
            self._results.counts["dropped"] += 1
            self._results.end(message)
        elif isinstance(verdict, SetAside) and work.fails_again():
            return  # its lane stays occupied: nothing of the key is handled any more
        elif isinstance(verdict, SetAside):
            key = message.record.key
            work.setting_aside.add(message.offset if key is None else key)
            self.set_aside(message, verdict.cause, called=True)
        else:
            self._copy(message, verdict)

    def _copy(self, message: ReceivedMessage, verdict: Bury | RetryLater) -> None:
        """Copy a message to another topic; its lane waits until the copy is stored."""
        if isinstance(verdict, RetryLater):
            name = f"retry_{verdict.step}"
            due = round((time.time() + verdict.delay_s) * 1000)
            copy = Copy(
                self._topics.retry,
                verdict.step,
                make_copy(
                    message.record, _failed(message, due, verdict.cause, verdict.failed_step)
                ),
            )
        else:
            name, copy = "dead", self._dead_letter(message, verdict.cause)

        copies = [copy, *message.work.clearance(message)]
        owner = _Copied(self._results, name, self._dead_letter)
        self._store(Pending(message.work.owner, message, copies, owner))

    def _dead_letter(self, message: ReceivedMessage, cause: str) -> Copy:
        failed = _failed(message, round(time.time() * 1000), cause)
        number = spread(failed.source[:2], DEAD_PARTITIONS)
        return Copy(self._topics.dead, number, make_copy(message.record, failed))

    def _store(self, pending: Pending, *, soon: bool = True) -> None:
        if pending.work.commits is not None:
            pending.work.commits.store(pending, soon=soon)

    def take_back(self, message: ReceivedMessage, *, settled: bool) -> None:
        """Let a message be handled again whose copies are not stored."""
        if settled:
            self._queues.take_back(message.work.queue, message)
        else:
            self._queues.put_back(message.work.queue, message)

    def produce(self, message: ReceivedMessage, outputs: Sequence[Copy]) -> None:
        """Store the outputs of a message with its position. Its lane continues at once."""
        work = message.work
        self._queues.settle(work.queue, message)
        self._store(Pending(work.owner, message, outputs, self._outputs, True), soon=False)

    def set_aside(self, message: ReceivedMessage, cause: str, *, called: bool = False) -> None:
        """Copy a message to the aside topic. Its lane continues at once: later messages of the key
        follow in the same order.

        Args:
            called: the attempt was one; otherwise it is the next one's number.
        """
        failed = _failed(message, round(time.time() * 1000), cause)
        failed = structs.replace(failed, attempts=failed.attempts - (not called))
        number = spread(failed.source[:2], ASIDE_PARTITIONS)
        record = make_copy(message.record, failed)
        self._queues.settle(message.work.queue, message)
        work, key = message.work, message.key
        if work.keeps_rows and work.aside is not None:  # no topic shows the copy
            known = message.offset if key is None else key
            work.aside.keys.setdefault(known, AsideKey(0)).count += 1
            work.setting_aside.discard(known)

        copies = [Copy(self._topics.aside, number, record)]
        owner = _Copied(self._results, "aside", self._dead_letter)
        self._store(Pending(message.work.owner, message, copies, owner, settled=True))


class _Copied:
    """Takes the result of a copy; see `Storing`.

    Args:
        name: counts the event.
        dead_letter: makes the copy that is stored in place of one for a later attempt.
    """

    def __init__(
        self,
        results: Results,
        name: str,
        dead_letter: Callable[[ReceivedMessage, str], Copy],
    ) -> None:
        self._results = results
        self._name = name
        self._dead_letter = dead_letter

    def stored(self, pending: Pending) -> None:
        assert pending.message is not None
        self._results.counts[self._name] += 1
        if pending.settled:
            self._results.settled(pending.message, stored=True)
        else:
            self._results.end(pending.message, stored=True)

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        if not error.too_large or not self._name.startswith("retry_"):
            return _smaller(self._results, pending, error, keyed=self._name == "aside")
        # An attempt needs the whole message.
        assert pending.message is not None
        log.error("copy too large", message=repr(pending.message), next="Bury")
        self._name = "dead"
        return [self._dead_letter(pending.message, str(error)), *pending.copies[1:]]

    def dropped(self, pending: Pending) -> None: ...


class _Outputs:
    """Takes the results of outputs; see `Storing`.

    Args:
        dead_letter: makes the copy that is stored in place of refused outputs.
    """

    def __init__(
        self,
        results: Results,
        dead_letter: Callable[[ReceivedMessage, str], Copy],
        lines: FailureLines,
    ) -> None:
        self._results = results
        self._dead_letter = dead_letter
        self._lines = lines

    def stored(self, pending: Pending) -> None:
        assert pending.message is not None
        if pending.replaced:
            self._results.counts["dead"] += 1
        else:
            self._results.handled += 1
        self._results.settled(pending.message, stored=True)

    def refused(self, pending: Pending, error: Refused) -> Sequence[Copy] | None:
        if pending.replaced:
            return _smaller(self._results, pending, error, keyed=False)
        assert pending.message is not None
        self._lines.note(log.error, "output refused", error=error, message=repr(pending.message))
        return [
            self._dead_letter(pending.message, str(error)),
            *pending.message.work.clearance(pending.message),
        ]

    def dropped(self, pending: Pending) -> None: ...


def _smaller(
    results: Results, pending: Pending, error: Refused, *, keyed: bool
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
        results.counts["left_out"] += 1
    return found


def _failed(message: ReceivedMessage, due_ms: int, cause: str, step: int = -1) -> Failed:
    return Failed(source_of(message), message.attempt, due_ms, cause, step, message.stage)
