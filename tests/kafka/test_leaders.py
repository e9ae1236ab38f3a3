"""Quorums on the leader of a partition, on a scripted client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from txbroker.core.records import Partition
from txbroker.door.protocols import LogTruncated
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client import leaders
from txbroker.kafka.client.client import Client, KafkaRefused, Unanswered
from txbroker.kafka.client.leaders import confirm_leader, confirm_leaders
from txbroker.kafka.client.reader import Picker, Reader
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.schemas import FetchV11, ListOffsetsV3, MetadataV10

T, U = ("t", 0), ("u", 3)
SETTINGS = KafkaSettings(
    bootstrap_servers=("127.0.0.1:1",), instance_id="one", watermark_timeout_s=0.05
)


class Brokers(Client):
    """Brokers, each with its own knowledge: of each partition the leader and its epoch."""

    def __init__(self, replicas: dict[Partition, list[int]]) -> None:
        super().__init__(SETTINGS)
        self.replicas = replicas
        self.known: dict[int, dict[Partition, tuple[int, int]]] = {}
        self.errors: dict[str, int] = {}
        self.silent: set[int] = set()
        self.hanging: set[int] = set()
        self.first = 1
        """Who answers what any broker answers."""
        self.asked: list[int] = []
        self.ends: dict[int, int] = {}
        """Where the partition asked about ends, by who is asked."""

    async def ask_any(self, request: MetadataV10, lane: str, timeout_s: float | None = None) -> Any:
        """Answer as the first broker."""
        self.asked.append(0)
        return self._answer(self.first, request)

    async def ask(self, node: int, request: Any, lane: str, timeout_s: float | None = None) -> Any:
        """Answer as one broker."""
        if isinstance(request, ListOffsetsV3):
            return SimpleNamespace(topics=[("t", [(0, Code.NONE, -1, self.ends[node])])])
        if isinstance(request, FetchV11):
            ((topic, ((number, offset, _),)),) = request.topics
            end = self.ends[node]
            code = Code.OFFSET_OUT_OF_RANGE if offset > end else Code.NONE
            part = (number, code, end, end, None, b"")
            return SimpleNamespace(error_code=0, topics=[(topic, [part])])
        self.asked.append(node)
        if node in self.hanging:
            await asyncio.Event().wait()
        if node in self.silent:
            raise Unanswered(f"broker {node} did not answer")
        return self._answer(node, request)

    def _answer(self, node: int, request: MetadataV10) -> Any:
        topics = []
        for _id, topic in request.values[0]:
            parts = [
                (Code.NONE if leader >= 0 else Code.LEADER_NOT_AVAILABLE, number, leader, epoch,
                 self.replicas[name, number], [], [])
                for (name, number), (leader, epoch) in self.known[node].items()
                if name == topic
            ]  # fmt: skip
            topics.append((self.errors.get(topic, Code.NONE), topic, bytes(16), False, parts, 0))
        return SimpleNamespace(topics=topics)

    async def confirm(self, partition: Partition = T) -> int:
        """Confirm the leader of a partition."""
        async with asyncio.timeout(5.0):
            return await confirm_leader(self, *partition)


def three(cut_off: int) -> Brokers:
    """Three brokers; one has old metadata, in which it leads the partition."""
    brokers = Brokers({T: [1, 2, 3]})
    other = 2 if cut_off != 2 else 3
    brokers.known = {node: {T: (other, 7)} for node in (1, 2, 3)}
    brokers.known[cut_off] = {T: (cut_off, 6)}
    return brokers


@pytest.mark.parametrize("cut_off", [1, 2, 3])
@pytest.mark.parametrize("silent", [set(), {1}, {2}, {3}])
async def test_deposed_leader_is_outvoted(cut_off: int, silent: set[int]) -> None:
    brokers = three(cut_off)
    brokers.first, brokers.silent = cut_off, silent - {cut_off}
    leader = 3 if cut_off == 2 else 2
    assert await brokers.confirm() == leader
    assert brokers._leaders == {T: leader}


async def test_hanging_replica_is_not_awaited() -> None:
    brokers = three(3)
    brokers.hanging = {1}
    assert await brokers.confirm() == 2


@pytest.mark.rule(3)
async def test_minority_is_no_quorum() -> None:
    brokers = three(1)
    brokers.silent = {2, 3}
    with pytest.raises(KafkaUnavailable, match="did not answer"):
        await brokers.confirm()
    assert brokers._leaders == {}


@pytest.mark.parametrize("silent", [set(), {1}, {2}])
async def test_one_of_two_replicas_is_enough(silent: set[int]) -> None:
    brokers = Brokers({T: [1, 2]})
    brokers.known = {1: {T: (2, 5)}, 2: {T: (2, 5)}}
    brokers.silent = silent
    assert await brokers.confirm() == 2
    brokers.silent = {1, 2}
    with pytest.raises(KafkaUnavailable):
        await brokers.confirm()


async def test_moved_replicas_are_asked() -> None:
    brokers = Brokers({T: [1, 2, 3]})
    brokers.known = {1: {T: (1, 4)}, 2: {T: (4, 9)}, 3: {T: (4, 9)}}
    brokers.known |= {node: {T: (5, 10)} for node in (4, 5, 6)}
    answer_of = brokers._answer

    def moved(node: int, request: MetadataV10) -> Any:
        brokers.replicas[T] = [4, 5, 6] if node > 1 else [1, 2, 3]
        return answer_of(node, request)

    brokers._answer = moved  # type: ignore[method-assign]
    assert await brokers.confirm() == 5
    assert {4, 5, 6} & set(brokers.asked)


async def test_each_broker_gets_one_request_for_all_partitions() -> None:
    brokers = Brokers({T: [1, 2, 3], U: [1, 2, 3]})
    brokers.known = {node: {T: (2, 7), U: (-1, 3)} for node in (1, 2, 3)}
    brokers.errors = {"v": Code.TOPIC_AUTHORIZATION_FAILED}
    found = await confirm_leaders(brokers, [T, U, ("v", 0), ("t", 9)])
    assert found[T] == 2
    refused = [found[each] for each in (U, ("v", 0), ("t", 9))]
    assert [cast(KafkaRefused, each).code for each in refused] == [
        Code.LEADER_NOT_AVAILABLE,
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert sorted(brokers.asked) == [0, 1, 2, 3]


async def test_cached_replicas_are_asked_first_then_any_broker() -> None:
    brokers = three(cut_off=1)
    brokers._replicas = {T: (1, 2, 3)}
    assert await brokers.confirm() == 2
    assert sorted(brokers.asked) == [1, 2, 3]
    brokers._replicas = {T: (7, 8, 9)}
    brokers.silent = {7, 8, 9}
    assert await brokers.confirm() == 2
    brokers._replicas, brokers.errors = {T: (1, 2, 3)}, {"t": Code.UNKNOWN_TOPIC_OR_PARTITION}
    brokers.known = {1: {}, 2: {}, 3: {}}
    with pytest.raises(KafkaRefused) as refused:
        await brokers.confirm()
    assert refused.value.code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_quorum_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "_TIMEOUT_S", 0.05)
    brokers = three(cut_off=1)
    brokers.hanging = {1, 2, 3}
    with pytest.raises(KafkaUnavailable, match="too few replicas answer"):
        await brokers.confirm()


async def test_reader_moves_from_deposed_leader_to_next() -> None:
    brokers = three(cut_off=1)
    brokers.ends = {1: 10, 2: 12, 3: 12}
    brokers._leaders = {T: 1}
    reader = Reader(brokers, "t", 0, "lane")
    assert (await reader.fetch(11)).high_watermark == 12
    with pytest.raises(LogTruncated):
        await reader.fetch(13)
    brokers._leaders = {T: 1}
    picker = Picker(lambda name: Reader(brokers, "t", 0, name))
    # Not missing, as the deposed one would have it: the next leader has it, hidden here.
    with pytest.raises(KafkaUnavailable, match="hides the record at offset 10"):
        await picker.pick([10])
    assert brokers._leaders == {T: 2}


@pytest.mark.rule(3)
async def test_confirmed_end_is_the_leaders() -> None:
    brokers = three(cut_off=1)
    brokers.ends = {1: 10, 2: 12, 3: 12}
    brokers._leaders = {T: 1}
    reader = Reader(brokers, "t", 0, "lane")
    assert await reader.end() == 10
    assert await reader.end(confirmed=True) == 12
    assert await reader.end() == 12


@pytest.mark.rule(3)
async def test_log_bounds_are_confirmed() -> None:
    brokers = three(cut_off=1)
    brokers.ends = {1: 10, 2: 12, 3: 12}
    brokers._leaders = {T: 1}
    log = KafkaLog(brokers, "t", 0, "lane/half", 1 << 20)
    assert (await log.bounds(confirmed=False))[1] == 10
    assert (await log.bounds())[1] == 12


async def test_no_partitions_need_no_request() -> None:
    assert await confirm_leaders(Brokers({}), []) == {}
