"""`PartitionState` against a model, with random events; and the table of its lifecycle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from txbroker.core.consuming.lifecycle import RULES, MessageEvent, MessageState
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.position import Position, decode_metadata
from txbroker.core.consuming.progress import PartitionProgress
from txbroker.core.consuming.queues import Lane, Queues, StopReason
from txbroker.core.records import Record

PLACE = ("orders", 0)
READY, DELAYED = MessageState.READY, MessageState.DELAYED
IN_FLIGHT, COPYING = MessageState.IN_FLIGHT, MessageState.COPYING
SENT, DONE, GATED = MessageState.SENT, MessageState.DONE, MessageState.GATED


class Forever:
    deadline_s = float("inf")


class Message:
    def __init__(self, record: Record, partition: PartitionState) -> None:
        self.record = record
        self.feed = partition.log
        self.size = 10
        self.lane_key = record.key
        self.lane: Lane | None = None
        self.state = GATED
        self.attempt = 1
        self.stage = 0
        self.failed_before = None

    @property
    def offset(self) -> int:
        return self.record.offset


class Model(RuleBasedStateMachine):
    """The state of each message, as one dictionary; its steps are a few lines each."""

    @initialize(before=st.booleans(), start=st.integers(0, 5))
    def begin(self, before: bool, start: int) -> None:
        self.queues: Queues[Any] = Queues()
        progress = PartitionProgress()
        progress.begin_at(Position(start))
        self.partition = PartitionState(PLACE, self.queues, Forever(), progress, before=before)
        self.before, self.start, self.end, self.now = before, start, start, 0.0
        self.state: dict[Message, MessageState] = {}
        self.due: dict[Message, float] = {}
        self.stops: set[str] = set()

    def in_state(self, *states: MessageState) -> list[Message]:
        return [message for message, state in self.state.items() if state in states]

    def apply(self, event: MessageEvent, message: Message, after: MessageState) -> None:
        assert self.partition.apply(event, [message], self.now + 1) == [message]
        self.state[message] = after

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", None]), max_size=5), gap=st.integers(0, 2))
    def arrive(self, keys: list[bytes | None], gap: int) -> None:
        """Offsets without a record follow them."""
        offsets = range(self.end, self.end + len(keys))
        records = [Record(key, b"", offset=at) for key, at in zip(keys, offsets, strict=True)]
        self.end += len(keys) + gap
        fresh = self.partition.arrive(records, self.end, self.end)
        messages = [Message(record, self.partition) for record in fresh]
        self.partition.log.bytes += sum(message.size for message in messages)
        self.partition.gate.extend(messages)
        self.state.update(dict.fromkeys(messages, GATED))

    @rule(count=st.integers(1, 5))
    def admit(self, count: int) -> None:
        gated = self.in_state(GATED)[:count]
        assert self.partition.admit_first(len(gated)) == gated
        self.state.update(dict.fromkeys(gated, READY))

    def can_be_taken(self, message: Message) -> bool:
        """It is the first of its key, and nothing of its key is handled."""
        others = [each for each in self.state if each.record.key == message.record.key is not None]
        busy = any(self.state[each] in (IN_FLIGHT, COPYING) for each in others)
        waits = [each for each in others if self.state[each] in (READY, DELAYED)]
        first = not waits or message is min(waits, key=lambda each: each.offset)
        due = self.due.get(message, 0) <= self.now or self.state[message] is READY
        return due and not busy and first

    @rule()
    def take(self) -> None:
        message = self.queues.take()
        possible = [each for each in self.in_state(READY, DELAYED) if self.can_be_taken(each)]
        assert message in possible if possible and not self.stops else message is None
        if message is not None:
            assert self.partition.apply(MessageEvent.TAKE, [message], "call") == [message]
            self.state[message] = IN_FLIGHT

    @precondition(lambda self: self.in_state(IN_FLIGHT))
    @rule(data=st.data(), event=st.sampled_from(["finish", "send", "copy", "retry", "return"]))
    def end_call(self, data: st.DataObject, event: str) -> None:
        message = data.draw(st.sampled_from(self.in_state(IN_FLIGHT)))
        after = {"finish": DONE, "send": SENT, "copy": COPYING, "retry": DELAYED, "return": READY}
        self.apply(MessageEvent(event), message, after[event])
        self.due[message] = self.now + 1 if event == "retry" else 0.0

    @precondition(lambda self: self.in_state(SENT, COPYING))
    @rule(data=st.data())
    def end_commit(self, data: st.DataObject) -> None:
        self.apply(
            MessageEvent.STORED, data.draw(st.sampled_from(self.in_state(SENT, COPYING))), DONE
        )

    @precondition(lambda self: self.state)
    @rule(data=st.data(), event=st.sampled_from(list(MessageEvent)))
    def event_too_late(self, data: st.DataObject, event: MessageEvent) -> None:
        message = data.draw(st.sampled_from(list(self.state)))
        if (self.state[message], event) not in RULES:
            assert self.partition.apply(event, [message], "call") == []

    @rule(passed_s=st.sampled_from([0.5, 1.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        self.queues.wake(self.now)

    @rule(owner=st.sampled_from("xy"), stop=st.booleans())
    def stop_or_go_on(self, owner: str, stop: bool) -> None:
        (self.partition.stop if stop else self.partition.go_on)(StopReason.SUSPENDED, owner)
        (self.stops.add if stop else self.stops.discard)(owner)

    @invariant()
    def state_is_that_of_the_model(self) -> None:
        if not hasattr(self, "state"):
            return
        assert {message: message.state for message in self.state} == self.state
        assert set(self.partition.in_flight) == set(self.in_state(IN_FLIGHT))
        assert self.partition.log.queue.count == len(self.in_state(READY, DELAYED))
        assert self.partition.bytes == 10 * len([m for m in self.state if self.state[m] != DONE])

    @invariant()
    def position_has_all_that_are_done(self) -> None:
        if not hasattr(self, "state"):
            return
        undone = {m.offset for m, state in self.state.items() if self.is_undone(state)}
        stored = self.partition.stored()
        metadata = decode_metadata(*stored)
        assert metadata is not None
        done = set(range(stored.offset)).union(*(range(*each) for each in metadata.ranges))
        assert done == set(range(self.end)) - undone

    def is_undone(self, state: MessageState) -> bool:
        return state is GATED if self.before else state is not DONE


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPartitionFollowsTheModel = Model.TestCase


@pytest.mark.parametrize("state", list(MessageState))
def test_every_state_can_be_left_but_the_last_ones(state: MessageState) -> None:
    """And each can be entered."""
    left: Iterable[Any] = [event for before, event in RULES if before is state]
    entered = [rule_ for rule_ in RULES.values() if rule_.after is state]
    assert bool(left) is (state not in (DONE, MessageState.WITHHELD))
    assert bool(entered) is (state is not GATED)
