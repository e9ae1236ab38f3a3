"""Brokers whose answers a test gives, and a client of theirs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError

from txbroker.kafka.client.client import Client
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.transactions import Partition

A, B, C = ("half", 0), ("op", 0), ("half", 1)


class Sent:
    """A request on its way to a broker."""

    def __init__(self, node: int, lane: str, request: Any, answer: Any) -> None:
        self.node = node
        self.lane = lane
        self.request = request
        self.answer = answer or asyncio.get_running_loop().create_future()

    @property
    def batches(self) -> dict[Partition, bytes]:
        """What it writes."""
        topics = self.request._topics
        pairs = [((topic, number), data) for topic, some in topics for number, data in some]
        assert len(dict(pairs)) == len(pairs), "a partition is there twice"
        return dict(pairs)

    def store(self, offset: int = 5, leave_out: Partition | None = None, **codes: int) -> None:
        """Answer it; `codes` are those of topics whose batches are not stored."""
        topics = [
            (topic, [(number, codes.get(topic, 0), offset, 77)])
            for topic, number in self.batches
            if (topic, number) != leave_out
        ]
        self.answer.set_result(SimpleNamespace(topics=topics))

    def lose(self) -> None:
        """Break its connection."""
        self.answer.set_exception(KafkaConnectionError("reset"))


class Scripted:
    """A connection that leaves answers to the test."""

    def __init__(self, brokers: Brokers, node: int) -> None:
        self._brokers = brokers
        self._node = node
        self._up = True

    def connected(self) -> bool:
        return self._up

    def send(self, request: Any, answer: Any = None) -> Any:
        if self._brokers.send_fails is not None:
            raise self._brokers.send_fails
        connections = self._brokers.client._connections.items()
        lane = next(lane for (_, lane), each in connections if each is self)
        sent = Sent(self._node, lane, request, answer)
        if type(request).__name__ == "InitProducerIdRequest":
            answer = SimpleNamespace(error_code=0, producer_id=7, producer_epoch=0)
            sent.answer.set_result(answer)
        else:
            self._brokers.sent.append(sent)
        return sent.answer

    def close(self, reason: CloseReason | None = None) -> asyncio.Future[None]:
        self._up = False
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        closed.set_result(None)
        return closed


class Brokers:
    """Brokers 1 and 2 and a client of theirs, whose connections the test answers."""

    def __init__(self, **changes: Any) -> None:
        self.sent: list[Sent] = []
        self.send_fails: Exception | None = None
        self.refused: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        settings = KafkaSettings(bootstrap_servers=("x:1",), instance_id="one", **changes)
        self.client = Client(settings, self._open)
        self.client.brokers = {1: ("one", 1), 2: ("two", 2)}
        for at in (A, B, C):
            self.client._leaders[at] = 1

    async def _open(self, _host: str, port: int, **_: Any) -> Any:
        await self.open.wait()
        if self.refused is not None:
            raise self.refused
        return Scripted(self, port)
