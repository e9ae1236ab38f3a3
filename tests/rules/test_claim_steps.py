"""Rules 8 and 9: the steps of a claim, on a door to Kafka that records them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from txbroker.core.records import RECORD_VERSION, Checkpoint, Claim, Partition, Record
from txbroker.door.protocols import Claimed, Hanging, PartitionDoor, PromotionTxn
from txbroker.door.writing import Copy, Fenced, Unknown
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import Producer
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.client.transaction import TransactionalWriter
from txbroker.kafka.door.partition import KafkaPartitionDoor
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.schemas import DescribeProducersV0, MetadataV10
from txbroker.net.timers import Backoff
from txbroker.testing.door import MemoryDoor
from txbroker.testing.memory import MemoryKafka

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

    def _writers(self) -> tuple[TransactionalWriter, TransactionalWriter]:
        self.steps += ["producer a", "producer b"]
        first, second = super()._writers()
        for writer, side in ((first, "a"), (second, "b")):
            writer.producer = Started(self.steps, side)
        return first, second

    async def _write_claim(
        self, writer: TransactionalWriter, claim: Claim, backoff: Backoff
    ) -> int:
        self.steps.append("claim record")
        return 7

    async def _read_progress(self, claim: Claim) -> Claimed:
        self.steps.append("read")
        return Claimed(1, None)


class Started(Producer):
    """A producer that records its start."""

    def __init__(self, steps: list[str], side: str) -> None:
        self._steps, self._side = steps, side
        self.id = PRODUCER_ID

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


# --- two claims at once --------------------------------------------------------------------------

NAMES = ("one", "two")


class Stepped:
    """A coroutine that goes on by one step at a time.

    While it waits for internal events, a step is one round of the event loop.
    """

    def __init__(self, work: Coroutine[Any, Any, str]) -> None:
        self._work = work
        self._waits_for: asyncio.Future[Any] | None = None
        self.result: str | None = None

    async def step(self) -> None:
        if self._waits_for is not None and not self._waits_for.done():
            await asyncio.sleep(0)
            return
        try:
            self._waits_for = self._work.send(None)
        except StopIteration as done:
            self.result = done.value
        if self._waits_for is not None:
            # Awaiting a future sets this flag; this loop sets it instead.
            self._waits_for._asyncio_future_blocking = False


def turn(claim: str) -> PromotionTxn:
    """Return the turn that promotes the only transaction there is."""
    target = Copy("t", 0, Record(b"k", b"v"))
    return PromotionTxn((target,), (), Checkpoint(RECORD_VERSION, claim, 1, 1))


async def own(door: PartitionDoor, name: str) -> str:
    try:
        claimed = await door.claim(Claim(RECORD_VERSION, name, name, ""))
        if claimed.progress is None:
            await (await door.write(turn(name))).committed()
    except (Fenced, Unknown):
        return "lost"
    return "owner"


async def can_write(door: PartitionDoor, name: str) -> bool:
    """Return whether an owner can still make a record visible."""
    empty = PromotionTxn((), (), Checkpoint(RECORD_VERSION, name, 1, 1))
    try:
        await (await door.write(empty)).committed()
    except (Fenced, Unknown):
        return False
    return True


class Schedules:
    """Every order of the steps of two, one after another."""

    def __init__(self) -> None:
        self.count = 0
        self._choices: list[int] = []
        self._taken = 0

    def __iter__(self) -> Iterator[None]:
        while True:
            self._taken = 0
            self.count += 1
            yield
            del self._choices[self._taken :]
            while self._choices and self._choices[-1] == 1:
                self._choices.pop()
            if not self._choices:
                return
            self._choices[-1] = 1

    def choose(self) -> int:
        """Return whose step is next, where either could go on."""
        if self._taken == len(self._choices):
            self._choices.append(0)
        self._taken += 1
        return self._choices[self._taken - 1]


async def run(schedules: Schedules) -> tuple[list[str | None], list[bool], int]:
    """Run one order; return both results, the writers, and the count of each visible value."""
    kafka = MemoryKafka()
    main = MemoryDoor(kafka, half_partitions=1)
    await main.start()
    kafka.create_topic("t", 1)
    doors = [main.partition(0), main.partition(0)]
    both = [Stepped(own(door, name)) for door, name in zip(doors, NAMES, strict=True)]
    while any(each.result is None for each in both):
        going = [each for each in both if each.result is None]
        await (going[0] if len(going) == 1 else going[schedules.choose()]).step()
    writers = [await can_write(door, name) for door, name in zip(doors, NAMES, strict=True)]
    seen = len(kafka.visible("t"))
    for door in doors:
        await door.close()
    await main.close()
    return [each.result for each in both], writers, seen


@pytest.mark.rule(8)
async def test_every_order_of_two_claims_leaves_one_owner() -> None:
    schedules = Schedules()
    outcomes = set()
    for _ in schedules:
        results, writers, seen = await run(schedules)
        assert writers.count(True) == 1, (schedules._choices, results, writers)
        assert results[writers.index(True)] == "owner"
        assert seen == 1, (schedules._choices, results, seen)
        outcomes.add((tuple(results), tuple(writers)))
    # All that can come out did: the first or the second wins, against one that had promoted or
    # was fenced before.
    assert len(outcomes) >= 4
    assert schedules.count > 100
