"""Waits for last stable offsets, on a scripted client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from txbroker.core.records import Partition
from txbroker.door.protocols import NotVisible
from txbroker.kafka.client.client import Client, Unanswered
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door import stable_offset as visible
from txbroker.kafka.door.stable_offset import StableEnds

A, B, C = ("t", 0), ("t", 1), ("u", 0)


class Kafka(Client):
    """A scripted client.

    Attributes:
        ends: the last stable offset of each partition.
        leaders: the leader of each, by what the brokers know.
        known: the same by what the client knows.
        asked: the questions, each with its broker and partitions.
        hung: brokers that do not answer.
    """

    def __init__(self, ends: dict[Partition, int]) -> None:
        super().__init__(KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one"))
        self.ends = ends
        self.leaders = dict.fromkeys(ends, 1)
        self.known = self._leaders = dict(self.leaders)
        self.asked: list[tuple[int, list[Partition]]] = []
        self.asking, self.found = asyncio.Event(), asyncio.Event()
        self.found.set()
        self.hung: set[int] = set()
        self.silent: set[int] = set()
        self.stable = StableEnds(self)

    async def leader(self, topic: str, partition: int) -> int:
        """Look the leader up."""
        self.asking.set()
        await self.found.wait()
        return self.known.setdefault((topic, partition), self.leaders[topic, partition])

    async def ask(self, node: int, request: Any, *_: Any) -> Any:
        """Return the ends."""
        partitions = [(topic, n) for topic, parts in request.topics for n, _ in parts]
        self.asked.append((node, partitions))
        if node in self.hung:
            await asyncio.Event().wait()
        if node in self.silent:
            raise Unanswered("no answer")
        topics = [
            (topic, [(number, 0, -1, self.ends[topic, number])]) for topic, number in partitions
        ]
        return SimpleNamespace(topics=topics)


@pytest.fixture
def kafka() -> Kafka:
    return Kafka({A: 10, B: 10, C: 10})


async def test_waits_during_leader_lookup_join_the_request(kafka: Kafka) -> None:
    kafka.known.clear()
    kafka.found.clear()
    first = asyncio.create_task(kafka.stable.pass_by({A: 9, B: 9}, 60.0))
    await kafka.asking.wait()
    second = asyncio.create_task(kafka.stable.pass_by({C: 9}, 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    kafka.found.set()
    async with asyncio.timeout(2.0):
        await asyncio.gather(first, second)


async def test_one_request_serves_several_half_partitions(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.stable.pass_by({A: 9}, 60.0)
    assert kafka.asked == [(1, [A])]  # a single wait is sent at once
    monkeypatch.setattr(visible, "BATCH_WAIT_S", 0.2)
    waiting = [asyncio.create_task(kafka.stable.pass_by({each: 9}, 60.0)) for each in (A, B)]
    await asyncio.sleep(0.05)
    waiting.append(asyncio.create_task(kafka.stable.pass_by({C: 9}, 60.0)))
    async with asyncio.timeout(10.0):
        await asyncio.gather(*waiting)
    assert kafka.asked[1:] == [(1, [A, B, C])]


@pytest.mark.parametrize("late", [False, True])
async def test_hurried_wait_is_not_delayed(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    await kafka.stable.pass_by({A: 9}, 60.0)
    monkeypatch.setattr(visible, "BATCH_WAIT_S", 3600.0)
    waiting = asyncio.create_task(kafka.stable.pass_by({B: 9}, 60.0))
    if late:  # the question waits already
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10.0):
        assert await kafka.stable.left({C: 9}, 5.0, hurry=True) == []
        await waiting
    assert [sorted(asked) for _, asked in kafka.asked] == [[A], [B, C]]


async def test_invisible_offset_is_polled_without_delay(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "BATCH_WAIT_S", 3600.0)
    waiting = asyncio.create_task(kafka.stable.pass_by({A: 10}, 60.0))
    async with asyncio.timeout(10.0):
        while len(kafka.asked) < 3:
            await asyncio.sleep(0)
        kafka.ends[A] = 11
        await waiting


async def test_hanging_broker_delays_no_other_waits(kafka: Kafka) -> None:
    kafka.known[B] = kafka.leaders[B] = 2
    kafka.hung = {2}
    hanging = asyncio.create_task(kafka.stable.pass_by({B: 9}, 0.2))
    async with asyncio.timeout(10.0):
        for _ in range(3):
            await kafka.stable.pass_by({A: 9}, 60.0)
        with pytest.raises(NotVisible, match="t-1"):
            await hanging
    assert kafka.asked.count((2, [B])) == 1


@pytest.mark.parametrize("others", [False, True])
async def test_waits_move_to_new_leader(kafka: Kafka, others: bool) -> None:
    kafka.silent = {1}
    kafka.leaders[B] = 2
    waiting = [asyncio.create_task(kafka.stable.pass_by({B: 9}, 60.0))]
    if others:
        kafka.leaders[C] = kafka.known[C] = 2
        waiting.append(asyncio.create_task(kafka.stable.pass_by({C: 9}, 60.0)))
    async with asyncio.timeout(10.0):
        await asyncio.gather(*waiting)
    assert kafka.asked[0] == (1, [B])
    assert kafka.asked[-1] == (2, [B])


async def test_polling_stops_without_waits(kafka: Kafka) -> None:
    kafka.leaders[C] = kafka.known[C] = 2
    assert await kafka.stable.left({A: 10, B: 9, C: 10}, 0.05) == [A, C]
    asked = len(kafka.asked)
    await kafka.stable.pass_by({B: 9}, 60.0)
    assert kafka.asked[asked:] == [(1, [B])]
