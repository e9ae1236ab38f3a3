"""Rules 8 and 9: the steps of a claim, on a door to Kafka that records them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from txbroker.core.records import Claim
from txbroker.door.protocols import Claimed, Hanging
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import Producer, Stored
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.door.partition import KafkaPartitionDoor
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.schemas import DescribeProducersV0, MetadataV10
from txbroker.kafka.protocol.transactions import Partition
from txbroker.net.timers import Backoff

PRODUCER_ID = 7


class Leaders(Client):
    """A client whose brokers only return open transactions."""

    steps: list[str]
    open: Mapping[Partition, int]

    async def leader(self, topic: str, partition: int) -> int:
        return 0

    async def ask_any(
        self, request: Any, lane: str, timeout_s: float | None = None
    ) -> SimpleNamespace:
        """Name the only broker as the leader of everything."""
        topics = [
            (0, topic, bytes(16), False, [(0, 0, 0, 0, [0])]) for _, topic in request.values[0]
        ]
        return SimpleNamespace(topics=topics)

    async def ask(
        self, node: int, request: Any, lane: str, timeout_s: float | None = None
    ) -> SimpleNamespace:
        if isinstance(request, MetadataV10):
            return await self.ask_any(request, lane)
        assert isinstance(request, DescribeProducersV0)
        topics = []
        for topic, numbers in request.values[0]:
            self.steps += [f"ask about {topic}-{number}" for number in numbers]
            states = [(n, 0, None, self._found((topic, n))) for n in numbers]
            topics.append((topic, states))
        return SimpleNamespace(topics=topics)

    def _found(self, partition: Partition) -> list[tuple[Any, ...]]:
        return [(PRODUCER_ID, 0, 0, 0, 0, self.open.get(partition, -1))]


class WatchedDoor(KafkaPartitionDoor):
    """A door to Kafka that records its steps."""

    steps: list[str]

    def _producer(self, side: str) -> Producer:
        self.steps.append(f"producer {side}")
        return Started(self.steps, side)

    async def _write_claim(self, producer: Producer, claim: Claim, backoff: Backoff) -> Stored:
        self.steps.append("claim record")
        return Stored(7, 1)

    async def _read_progress(self, claim: Claim) -> Claimed:
        self.steps.append("read")
        return Claimed(1, None)


class Started(Producer):
    """A producer that records its start."""

    def __init__(self, steps: list[str], side: str) -> None:
        self._steps, self._side = steps, side
        self._producer_id = PRODUCER_ID

    async def start(self, backoff: Backoff) -> None:
        self._steps.append(f"start {self._side}")


def watched_door(found_open: Mapping[Partition, int]) -> WatchedDoor:
    """A door, and where an earlier turn is open, by its first offset."""
    client = Leaders(KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one"))
    door = WatchedDoor(
        client, 0, lambda _: 1000, lambda _: None, SharedWrites(client), StableEnds(client)
    )
    door.steps = client.steps = []
    client.open = found_open
    return door


@pytest.mark.rule(8, 9)
async def test_claim_reads_after_own_record_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    door = watched_door({})
    settings = door._settings

    async def pass_by(_: StableEnds, last: Mapping[Partition, int], seconds: float) -> None:
        assert 0 < seconds <= 30.0
        door.steps.append(f"visible after {last[settings.checkpoint_topic, 0]}")

    monkeypatch.setattr(StableEnds, "pass_by", pass_by)
    await door.claim(Claim(1, "c", "one", ""))
    assert door.steps[2:] == [
        "start a",
        "start b",
        "ask about txbroker.checkpoint-0",
        "ask about txbroker.parked-0",
        "claim record",
        "visible after 7",
        "read",
    ]


@pytest.mark.rule(8)
@pytest.mark.parametrize("topic", ["txbroker.checkpoint", "txbroker.parked"])
async def test_claim_writes_nothing_while_earlier_txn_is_open(topic: str) -> None:
    door = watched_door({(topic, 0): 17})
    with pytest.raises(Hanging, match=rf"{topic}-0 .* offset 17"):
        await door.claim(Claim(1, "c", "one", ""))
    assert "claim record" not in door.steps
    assert door.unverified([("t", 0)]) == [("t", 0)]
