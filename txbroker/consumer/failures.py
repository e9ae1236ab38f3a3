"""Applies the failure policy: local retries, copies to the group's topics, set-aside keys."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import structlog

from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import source_of
from txbroker.core.consuming.aside import KEYS_MAX
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    DEAD_PARTITIONS,
    Failed,
    GroupTopics,
    make_copy,
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
from txbroker.door.consuming import Copy
from txbroker.error_text import safe_repr

log = structlog.wrap_logger(logging.getLogger(__name__))

REFUSED_PAUSE_S = 5.0
"""Before messages are handled again whose copies cannot be stored."""


class Results(Protocol):
    """What the engine does with messages that need nothing more.

    Attributes:
        counts: events by name.
    """

    counts: Counter[str]

    def end(self, message: ReceivedMessage) -> None:
        """The message needs nothing more: its lane continues, its offset is done."""

    def settled(self, message: ReceivedMessage) -> None:
        """The message is done: so is its offset, and its memory is free."""


class Failures:
    """Decides what happens to messages that failed, and does it.

    Args:
        topics: of the group, for copies.
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

    def fail(self, message: ReceivedMessage, error: BaseException) -> None:
        """Apply the policy to a message whose handler raised `error`."""
        failed = not isinstance(error, Later)
        message.failures += failed
        self._results.counts["failed"] += failed
        verdict = self._policy.decide(error, message.failures, message.step)
        if failed:
            log.warning(
                "message failed",
                message=repr(message),
                error=safe_repr(error),
                next=type(verdict).__name__,
            )
        self._apply(message, verdict)

    def _apply(self, message: ReceivedMessage, verdict: Verdict) -> None:
        work = message.work
        if isinstance(verdict, SetAside) and work.aside_count >= KEYS_MAX:
            log.error("too many set-aside keys", partition=work.place, keys=KEYS_MAX)
            self._results.counts["aside_full"] += 1
            verdict = RetryHere(REFUSED_PAUSE_S)
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
            self.set_aside(message, verdict.cause)
        else:
            self._copy(message, verdict)

    def _copy(self, message: ReceivedMessage, verdict: Bury | RetryLater) -> None:
        """Copy a message to another topic; its lane waits until the copy is stored."""
        source, due = source_of(message), round(time.time() * 1000)
        step = -1
        if isinstance(verdict, RetryLater):
            step = verdict.failed_step
            topic, number, name = self._topics.retry, verdict.step, f"retry_{verdict.step}"
            due += round(verdict.delay_s * 1000)
        else:
            topic, name = self._topics.dead, "dead"
            number = spread(source[:2], DEAD_PARTITIONS)
        failed = Failed(source, message.attempt, due, verdict.cause, step)
        record = make_copy(message.record, failed)

        def stored() -> None:
            self._results.counts[name] += 1
            self._results.end(message)

        self._store(message, Copy(topic, number, record), stored)

    def _store(self, message: ReceivedMessage, copy: Copy, stored: Callable[[], None]) -> None:
        if message.work.commits is not None:
            message.work.commits.copy(message.work, message, copy, stored)

    def take_back(self, message: ReceivedMessage, copy: Copy) -> None:
        """Let a message be handled again whose copy is not stored."""
        if copy.topic == self._topics.aside:
            self._queues.take_back(message.work.queue, message)
        else:
            self._queues.put_back(message.work.queue, message)

    def set_aside(self, message: ReceivedMessage, cause: str) -> None:
        """Copy a message to the aside topic. Its lane continues at once: later messages of the key
        follow in the same order."""
        source = source_of(message)
        number = spread(source[:2], ASIDE_PARTITIONS)
        now_ms = round(time.time() * 1000)
        record = make_copy(message.record, Failed(source, message.attempt, now_ms, cause))
        self._queues.settle(message.work.queue, message)

        def stored() -> None:
            self._results.counts["aside"] += 1
            self._results.settled(message)

        copy = Copy(self._topics.aside, number, record)
        self._store(message, copy, stored)
