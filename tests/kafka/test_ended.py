"""Whether earlier turns have ended in a partition, on a client that answers as a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest

from txbroker.core.records import Record
from txbroker.kafka.client import Client, KafkaRefused, NotSent, Patience, Unanswered
from txbroker.kafka.codes import Code
from txbroker.kafka.ended import HANGING, Ended
from txbroker.kafka.producer import Producer
from txbroker.kafka.settings import KafkaSettings
from txbroker.kafka.transactions import Partition
from txbroker.kafka.wire import ProducersRequest

OURS, STRANGER = 7, 8
T, U = ("t", 0), ("u", 0)


class Leaders:
    """Brokers that lead two partitions, each by one of its own."""

    settings = KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one")

    def __init__(self) -> None:
        self.leaders: dict[Partition, int] = {T: 1, U: 2}
        self.open: dict[Partition, dict[int, int]] = {}
        self.ends: dict[Partition, int] = {T: 10, U: 10}
        self.codes: dict[Partition, int] = {}
        self.silent: set[int] = set()
        self.left_out: set[Partition] = set()
        self.asked: list[Partition] = []
        self.taken: list[tuple[str, int, int]] = []
        self.forgotten: list[Partition] = []

    async def leader(self, topic: str, partition: int) -> int:
        """Return a broker."""
        if self.leaders[topic, partition] < 0:
            raise KafkaRefused(Code.LEADER_NOT_AVAILABLE)
        return self.leaders[topic, partition]

    def forget_leader(self, topic: str, partition: int) -> None:
        """Remember that it was forgotten."""
        self.forgotten.append((topic, partition))

    async def ask(self, node: int, request: Any, lane: str) -> Any:
        """Answer about producers, or about ends."""
        if node in self.silent:
            raise Unanswered(f"broker {node} did not answer")
        if isinstance(request, OffsetRequest):
            return self._ends(request)
        if isinstance(request, ProduceRequest):
            return self._take(node, request)
        assert isinstance(request, ProducersRequest)
        topics = []
        for topic, numbers, _ in request._topics:
            self.asked += [(topic, number) for number in numbers]
            told = [self._told((topic, n)) for n in numbers if (topic, n) not in self.left_out]
            topics.append((topic, told, {}))
        return SimpleNamespace(topics=topics)

    def _told(self, partition: Partition) -> tuple[Any, ...]:
        code = self.codes.get(partition, 0)
        open_ = {} if code else self.open.get(partition, {})
        # One that has written, and has nothing open, is told of with -1.
        found = [(STRANGER + 1, 0, 0, 0, 0, -1, {})]
        found += [(id, 0, 0, 0, 0, first, {}) for id, first in open_.items()]
        return (partition[1], code, None, found, {})

    def _take(self, node: int, request: Any) -> Any:
        topics = []
        for topic, parts in request._topics:
            self.taken += [(topic, number, node) for number, _ in parts]
            topics.append((topic, [(number, 0, 10, -1) for number, _ in parts]))
        return SimpleNamespace(topics=topics)

    def _ends(self, request: Any) -> Any:
        topics = []
        for topic, parts in request._topics:
            found = []
            for number, _ in parts:
                end = self.ends[topic, number]
                if request._isolation_level == 1:
                    end = min([end, *self.open.get((topic, number), {}).values()])
                found.append((number, 0, -1, end))
            topics.append((topic, found))
        return SimpleNamespace(topics=topics)


@pytest.fixture
def leaders() -> Leaders:
    return Leaders()


@pytest.fixture
def ended(leaders: Leaders) -> Ended:
    producers = [cast(Producer, SimpleNamespace(id=id)) for id in (OURS - 1, OURS)]
    return Ended(cast(Client, leaders), "ended", producers)


async def test_where_a_turn_of_ours_is_open_nothing_may_be_written(
    leaders: Leaders, ended: Ended
) -> None:
    leaders.open[T] = {STRANGER: 2, OURS: 4}
    (cause,) = await ended.prove([T, U])
    assert (cause.code, cause.topic, cause.partition, cause.passing) == (HANGING, "t", 0, True)
    assert "t-0" in cause.message
    assert "offset 4" in cause.message
    assert ended.unproved([T, U, T]) == [T]
    del leaders.open[T][OURS]
    assert await ended.prove([T]) == []
    assert ended.unproved([T, U]) == []


async def test_what_is_proved_is_not_asked_about_again(leaders: Leaders, ended: Ended) -> None:
    await ended.prove([T, U])
    # Open now is a turn of this very claim.
    leaders.open[T] = {OURS: 10}
    assert await ended.prove([T, U]) == []
    assert leaders.asked == [T, U]


async def test_a_transaction_of_somebody_else_is_nothing_to_wait_for(
    leaders: Leaders, ended: Ended
) -> None:
    leaders.open[T] = {STRANGER: 0}
    assert await ended.prove([T]) == []


async def test_without_the_right_to_ask_readers_must_have_come_past_the_end(
    leaders: Leaders, ended: Ended
) -> None:
    leaders.codes[T] = Code.TOPIC_AUTHORIZATION_FAILED
    leaders.open[T] = {OURS: 4}
    (cause,) = await ended.prove([T])
    assert (cause.code, cause.passing) == ("not_known", True)
    # A busy topic has always some transaction open, but later ones.
    leaders.ends[T] = 30
    leaders.open[T] = {STRANGER: 9}
    assert [cause.code for cause in await ended.prove([T])] == ["not_known"]
    leaders.open[T] = {STRANGER: 10}
    assert await ended.prove([T]) == []


@pytest.mark.parametrize("how", ["silent", "no leader", "moved", "left out"])
async def test_no_answer_proves_nothing_and_is_asked_for_again(
    leaders: Leaders, ended: Ended, how: str
) -> None:
    if how == "silent":
        leaders.silent.add(1)
    elif how == "no leader":
        leaders.leaders[T] = -1
    elif how == "moved":
        leaders.codes[T] = Code.NOT_LEADER
    else:
        leaders.left_out.add(T)
    (cause,) = await ended.prove([T, U])
    assert (cause.code, cause.topic, cause.passing) == ("no_answer", "t", True)
    assert ended.unproved([T, U]) == [T]
    assert leaders.forgotten == ([T] if how in ("silent", "moved") else [])
    leaders.silent.clear()
    leaders.codes.clear()
    leaders.left_out.clear()
    leaders.leaders[T] = 1
    assert await ended.prove([T]) == []


async def test_only_the_leader_that_was_asked_takes_the_first_batch(leaders: Leaders) -> None:
    client = cast(Client, leaders)
    one, other = (Producer(client, side, side) for side in "ab")
    ended = Ended(client, "ended", [one, other])
    assert await ended.prove([T]) == []
    batch, patience = {T: [Record(b"k", b"")]}, Patience(1.0, 0.01)
    # It had been deposed long ago, and did not know.
    leaders.leaders[T] = 2
    with pytest.raises(NotSent, match="t-0 is led by another broker"):
        await one.produce(batch, patience)
    assert leaders.taken == []
    leaders.leaders[T] = 1
    await one.produce(batch, patience)
    # From here on only we have written there.
    leaders.leaders[T] = 2
    await other.produce(batch, patience)
    assert leaders.taken == [("t", 0, 1), ("t", 0, 2)]
