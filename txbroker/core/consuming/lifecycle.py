"""The lifecycle of a message in a consumer: its states, the events between them, their effects.

`RULES` holds every change of state: (state, event) -> (state after, effect). An event that is not
in the table changes nothing: a handler may end after its message was given back.

A message is in one queue of its partition while it is READY or DELAYED, in none otherwise. It
occupies its lane while it is IN_FLIGHT, COPYING or WITHHELD; SENT, its lane has continued without
it. Its offset is in the position once it is DONE, and at most once as soon as it is READY. When
its partition is lost it is dropped, in any state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from txbroker.core.consuming.queues import PartitionQueue, Queues


class MessageState(StrEnum):
    """What a message waits for.

    GATED: its due time, or, at most once, a stored position that includes it.
    READY: a call of the handler.
    DELAYED: the time of its next attempt, in front of its lane.
    IN_FLIGHT: the end of the handler's call.
    COPYING: a commit of its copy; its lane waits for that, too.
    SENT: a commit of its outputs, or of its copy in the aside topic.
    WITHHELD: the end of the release of its key.
    DONE: nothing.
    """

    GATED = "gated"
    READY = "ready"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    COPYING = "copying"
    SENT = "sent"
    WITHHELD = "withheld"
    DONE = "done"


class MessageEvent(StrEnum):
    """What happens to a message.

    ADMIT: it may be handled.
    TAKE: a call of the handler takes it.
    FINISH: the handler succeeded, or what it did is dropped.
    SEND: the handler succeeded, and its outputs are to be stored; or its key is set aside.
    COPY: it failed, and goes to the retry or dead-letter topic.
    RETRY: it failed, and is handled here again.
    RETURN: it was not handled, and did not fail.
    WITHHOLD: a copy of a released key failed: nothing of its key is handled any more.
    STORED: a commit has its copy or outputs, and its offset.
    """

    ADMIT = "admit"
    TAKE = "take"
    FINISH = "finish"
    SEND = "send"
    COPY = "copy"
    RETRY = "retry"
    RETURN = "return"
    WITHHOLD = "withhold"
    STORED = "stored"


class MessageFeed(Protocol):
    """Where messages of a partition come from; see `txbroker.core.consuming.partition.Feed`."""

    queue: PartitionQueue[Any]
    finished: Any
    bytes: int

    def admit(self, messages: Sequence[Any]) -> None: ...


class Partition(Protocol):
    """A partition, as the effects know it; see `PartitionState`."""

    queues: Queues[Any]
    in_flight: dict[Any, Any]


class MessageRule(NamedTuple):
    """One change of state.

    Attributes:
        after: the state after it.
        effect: what it does beyond, to messages of one feed that have that state now. Takes a
            detail: of TAKE the call that has them, of RETRY the time of the next attempt, event
            loop seconds.
    """

    after: MessageState
    effect: Callable[[Partition, MessageFeed, Sequence[Any], Any], None]


def apply_event(
    partition: Partition, event: MessageEvent, messages: Sequence[Any], detail: Any = None
) -> list[Any]:
    """Apply an event to messages of one feed of a partition, in order.

    Args:
        detail: see `MessageRule.effect`.

    Returns:
        Those whose state allowed it; the others are left as they are.
    """
    # Hot path: most events are of one message.
    rules, last = _BY_EVENT[event], None
    run: list[Any] = []
    runs: list[tuple[MessageRule, list[Any]]] = []
    for message in messages:
        rule = rules.get(message.state)
        if rule is None:
            continue
        if rule is not last:
            last, run = rule, []
            runs.append((rule, run))
        message.state = rule.after
        run.append(message)
    for rule, run in runs:
        rule.effect(partition, run[0].feed, run, detail)
    return run if len(runs) == 1 else [message for _, run in runs for message in run]


def _admit(partition: Partition, feed: MessageFeed, messages: Sequence[Any], _: Any) -> None:
    feed.admit(messages)
    partition.queues.add(feed.queue, messages)


def _take(partition: Partition, _feed: MessageFeed, messages: Sequence[Any], call: Any) -> None:
    in_flight = partition.in_flight
    for message in messages:
        in_flight[message] = call


def _finish(partition: Partition, feed: MessageFeed, messages: Sequence[Any], _: Any) -> None:
    in_flight, finished = partition.in_flight, feed.finished
    for message in messages:
        in_flight.pop(message, None)
        feed.bytes -= message.size
        finished.append(message.record.offset)
    partition.queues.settle(feed.queue, messages)


def _end_calls(partition: Partition, _feed: MessageFeed, messages: Sequence[Any], _: Any) -> None:
    """The lanes wait, and give their holder no more."""
    for message in messages:
        del partition.in_flight[message]
        if message.lane is not None:
            message.lane.holder = None


def _leave_lane(partition: Partition, feed: MessageFeed, messages: Sequence[Any], _: Any) -> None:
    _end_calls(partition, feed, messages, _)
    partition.queues.settle(feed.queue, messages)


def _retry(partition: Partition, feed: MessageFeed, messages: Sequence[Any], due_s: float) -> None:
    _end_calls(partition, feed, messages, due_s)
    for message in messages:
        message.attempt += 1
        partition.queues.delay(feed.queue, message, due_s)


def _return(partition: Partition, feed: MessageFeed, messages: Sequence[Any], _: Any) -> None:
    """The first of them is in front again."""
    _end_calls(partition, feed, messages, _)
    for message in reversed(messages):
        partition.queues.put_back(feed.queue, message)


def _count_done(partition: Partition, feed: MessageFeed, messages: Sequence[Any], _: Any) -> None:
    """The lanes have continued before."""
    for message in messages:
        feed.bytes -= message.size
        feed.finished.append(message.record.offset)


TAKE = MessageRule(MessageState.IN_FLIGHT, _take)
FINISH = MessageRule(MessageState.DONE, _finish)
SEND = MessageRule(MessageState.SENT, _leave_lane)
"""Hot paths apply these three without `apply_event`."""

RULES: dict[tuple[MessageState, MessageEvent], MessageRule] = {
    (MessageState.GATED, MessageEvent.ADMIT): MessageRule(MessageState.READY, _admit),
    (MessageState.READY, MessageEvent.TAKE): TAKE,
    (MessageState.DELAYED, MessageEvent.TAKE): TAKE,  # the queues give it out when it is due
    (MessageState.IN_FLIGHT, MessageEvent.FINISH): FINISH,
    (MessageState.IN_FLIGHT, MessageEvent.SEND): SEND,
    (MessageState.IN_FLIGHT, MessageEvent.COPY): MessageRule(MessageState.COPYING, _end_calls),
    (MessageState.IN_FLIGHT, MessageEvent.RETRY): MessageRule(MessageState.DELAYED, _retry),
    (MessageState.IN_FLIGHT, MessageEvent.RETURN): MessageRule(MessageState.READY, _return),
    (MessageState.IN_FLIGHT, MessageEvent.WITHHOLD): MessageRule(MessageState.WITHHELD, _end_calls),
    (MessageState.COPYING, MessageEvent.STORED): FINISH,
    (MessageState.SENT, MessageEvent.STORED): MessageRule(MessageState.DONE, _count_done),
}
_BY_EVENT: dict[MessageEvent, dict[MessageState, MessageRule]] = {
    event: {state: rule for (state, each), rule in RULES.items() if each is event}
    for event in MessageEvent
}
