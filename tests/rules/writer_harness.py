"""A pipelined writer on two producers whose answers a test releases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from txbroker.core.records import Cause, Checkpoint, Record
from txbroker.door.protocols import PromotionTxn, TargetRecord
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import Producer, Stored
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.open_transactions import OpenTransactionGuard
from txbroker.kafka.door.pipelined_writer import KafkaPromotionTxn, PipelinedTxnWriter
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.batch import Body
from txbroker.kafka.protocol.transactions import Partition
from txbroker.net.timers import Backoff


class FakeProducer:
    """A producer whose answers a test releases."""

    id, epoch = 7, 0

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.produce_now = asyncio.Event()
        self.produce_now.set()
        self.end_now = asyncio.Event()
        self.end_now.set()
        self.end_error: Exception | None = None
        self.produce_error: Exception | None = None

    async def add(self, partitions: Sequence[Partition], backoff: Backoff) -> None:
        self.log.append(f"{self.name} begins")

    async def produce(
        self, batches: Mapping[Partition, Body], backoff: Backoff
    ) -> dict[Partition, Stored]:
        self.log.append(f"{self.name} writes")
        await self.produce_now.wait()
        if self.produce_error is not None:
            raise self.produce_error
        self.log.append(f"{self.name} written")
        return {partition: Stored(0, 0) for partition in batches}

    async def end(self, *, commit: bool, backoff: Backoff) -> None:
        what = "commit" if commit else "abort"
        self.log.append(f"{self.name} {what}s")
        if not commit:
            return
        await self.end_now.wait()
        if self.end_error is not None:
            raise self.end_error
        self.log.append(f"{self.name} {what} acknowledged")

    def note_visible(self) -> None:
        self.log.append(f"{self.name} seen")


class WriterHarness:
    """A pipelined writer on two fake producers, with the log of their steps."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stable = 0
        """How far readers come, in every partition."""
        self.open: dict[str, dict[Partition, Cause]] = {}
        """Where which producer has something open."""
        self.asked: list[tuple[str, Partition]] = []
        self.a, self.b = FakeProducer("a", self.log), FakeProducer("b", self.log)
        settings = KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one")
        client = SimpleNamespace(
            settings=settings, leader=self._leader, known_leader=lambda *_: 1, ask=self._ask
        )
        ended = SimpleNamespace(left_open=self._left_open)
        self.writer = PipelinedTxnWriter(
            cast(Client, client),
            0,
            (cast(Producer, self.a), cast(Producer, self.b)),
            lambda _: 1000,
            cast(OpenTransactionGuard, ended),
            StableEnds(cast(Client, client)),
        )

    async def write(self, number: int) -> KafkaPromotionTxn:
        promoted = (TargetRecord("t", 0, Record(b"k", b"v", (), 1)),)
        return await self.writer.write(
            PromotionTxn(promoted, (), Checkpoint(1, "c", number, number))
        )

    async def _leader(self, topic: str, partition: int) -> int:
        return 1

    async def _ask(self, node: int, request: Any, lane: str) -> Any:
        topics = [
            (topic, [(number, 0, -1, self.stable) for number, _ in parts])
            for topic, parts in request._topics
        ]
        return SimpleNamespace(topics=topics)

    async def _left_open(
        self, producer: Producer, partitions: Mapping[Partition, int]
    ) -> dict[Partition, Cause]:
        name = cast(FakeProducer, producer).name
        self.asked += [(name, partition) for partition in partitions]
        found = self.open.get(name, {})
        return {partition: found[partition] for partition in partitions if partition in found}
