"""Results that a consumer does not learn, and partitions that it loses while it is busy."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.kit.processing import Doors
from tests.kit.until import until
from txbroker.consumer import Consumer, InDatabase, ReceivedMessage
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.pending import Pending
from txbroker.consumer.rounds import CommitPolicy, Rounds, StoreTraits
from txbroker.consumer.stores.connections import Connections
from txbroker.core.consuming.copies import Failed, GroupTopics, MessageSource, make_copy
from txbroker.core.consuming.failure import make_policy
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.position import Position, StoredOffset
from txbroker.core.consuming.progress import PartitionProgress
from txbroker.core.consuming.queues import Order
from txbroker.core.records import Partition, Record
from txbroker.databases import SQLite
from txbroker.databases.steps import Query, Steps
from txbroker.door.writing import Copy
from txbroker.errors import KafkaUnavailable
from txbroker.testing.memory import MemoryKafka

PLACE = ("orders", 0)
GROUP = "stock"
SHORT = {"session_s": 0.5, "lease_s": 0.25, "heartbeat_s": 0.05}


class UnclearStore:
    """A store that does not answer commits."""

    def __init__(self) -> None:
        self.offsets: dict[Partition, StoredOffset] = {}
        self.copies: list[Copy] = []
        self.unanswered: list[bool] = []
        """For each of the next commits, whether it is stored."""

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        return {place: self.offsets[place] for place in partitions if place in self.offsets}

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        unanswered = bool(self.unanswered)
        if not unanswered or self.unanswered.pop(0):
            self.offsets |= offsets
            self.copies += copies
        if unanswered:
            raise KafkaUnavailable("no answer")


FOREVER = SimpleNamespace(deadline_s=math.inf)
"""The lease of a partition."""


class Noted:
    """Notes what becomes of copies."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def stored(self, pendings: Sequence[Pending]) -> None:
        self.events += ["stored"] * len(pendings)

    def refused(self, pending: Pending, cause: str) -> None:
        self.events.append("refused")

    def dropped(self, pending: Pending) -> None:
        self.events.append("dropped")


class NoFlow:
    def pause(self, partition: Partition) -> None: ...

    def resume(self, partition: Partition) -> None: ...


def committing(store: UnclearStore) -> tuple[Rounds, PartitionState]:
    policy = make_policy(Order.KEY, "aside", 3, None, drop=False)
    engine = Engine(Order.KEY, policy, GroupTopics.of("txbroker", GROUP), 1 << 20)
    rounds = Rounds(engine, store, CommitPolicy(), lambda _lost: None, traits=StoreTraits())
    partition = PartitionState(PLACE, engine.queues, FOREVER, PartitionProgress())
    engine.partitions.add(partition, rounds, NoFlow())
    return rounds, partition


async def flushed(rounds: Rounds, partition: PartitionState) -> None:
    while True:
        try:
            return await rounds.flush([partition])
        except KafkaUnavailable:
            continue


@pytest.mark.rule(34)
@pytest.mark.parametrize("plain", [None, True, False])
@pytest.mark.parametrize("stored", [True, False])
async def test_copy_without_new_position_is_stored_once(plain: bool | None, stored: bool) -> None:
    """Copies of a released key leave the position of its partition as it is."""
    store = UnclearStore()
    rounds, partition = committing(store)
    store.offsets[PLACE] = partition.stored()
    if plain is not None:
        store.unanswered = [plain]
        rounds.changed(partition, 0)
        with pytest.raises(KafkaUnavailable):
            await rounds.flush([partition])
    store.unanswered = [stored]
    done = Noted()
    copies = [Copy("aside", 0, Record(b"k", b"1"))]
    rounds.store(Pending(partition, None, copies, done))
    await flushed(rounds, partition)
    assert [copy.record.key for copy in store.copies] == [b"k"]
    assert done.events == ["stored"]


async def test_retried_message_keeps_its_first_stage() -> None:
    """Its output is stored; after a crash only the later stages follow."""
    policy = make_policy(Order.NONE, "retry", 3, None, drop=False)
    engine = Engine(Order.NONE, policy, GroupTopics.of("txbroker", GROUP), 1 << 20)
    partition = PartitionState(
        ("retry", 0), engine.queues, FOREVER, PartitionProgress(), retries=True
    )
    partition.progress.begin_at(Position(0), {7})
    record = Record(b"k", b"1")
    failed = Failed(MessageSource("orders", 0, 3), 1, 0, "once")
    messages = engine.arrivals.wrap(
        partition.log, [replace(make_copy(record, failed), offset=n) for n in (6, 7)]
    )
    assert [message.stage for message in messages] == [0, 1]


@pytest.fixture
def memory() -> MemoryKafka:
    kafka = MemoryKafka()
    kafka.create_topic("orders", 1)
    return kafka


def write(kafka: MemoryKafka, count: int) -> None:
    records = [Record(b"%d" % number, b"", timestamp_ms=1) for number in range(count)]
    kafka.write("orders", 0, records, None)


async def running(consumer: Consumer, handler: Callable[[ReceivedMessage], Any]) -> Any:
    await consumer.start()
    return asyncio.create_task(consumer.run(handler))


@pytest.mark.rule(36)
async def test_at_most_once_does_not_repeat_after_a_short_silence(memory: MemoryKafka) -> None:
    """The handler of a message was cancelled at the end of the lease, which then goes on."""
    write(memory, 1)
    begun: list[int] = []

    async def handle(message: ReceivedMessage) -> None:
        begun.append(message.offset)
        await asyncio.sleep(3600 if message.offset == 0 else 0)

    timing = {**SHORT, "session_s": 30.0}
    consumer = Consumer(
        Doors.to(memory), group=GROUP, topics=["orders"], mode="at-most-once", drain_s=0.1, **timing
    )
    task = await running(consumer, handle)
    await until(lambda: begun)
    (name,) = memory.group(GROUP).seats
    memory.group(GROUP).silence(name)
    await until(lambda: consumer.statistics().counts.get("fenced"))
    memory.group(GROUP).reconnect(name)
    write(memory, 1)
    await until(lambda: begun[1:])
    assert begun == [0, 1]
    await consumer.aclose()
    await task


@pytest.mark.rule(31)
async def test_claim_of_a_lost_assignment_moves_no_position_back(memory: MemoryKafka) -> None:
    """Another owner came and went between the two steps of a claim."""
    write(memory, 3)
    group = memory.group(GROUP)
    reached, go_on = asyncio.Event(), asyncio.Event()
    calls = 0

    async def on_assign(partitions: Sequence[Partition]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            reached.set()
            await go_on.wait()

    handled: list[int] = []

    async def handle(message: ReceivedMessage) -> None:
        handled.append(message.offset)

    consumer = Consumer(
        Doors.to(memory),
        group=GROUP,
        topics=["orders"],
        order="key",
        on_assign=on_assign,
        heartbeat_s=0.05,
    )
    starting = asyncio.create_task(running(consumer, handle))
    await reached.wait()
    (name,) = group.seats
    group.expire(name)
    group.offsets[PLACE] = StoredOffset(2, "txb1:7::0:")
    await until(lambda: name in group.seats and group.seats[name].share)
    go_on.set()
    task = await starting
    await until(lambda: handled)
    assert handled == [2]
    assert group.offsets[PLACE].metadata.split(":")[1] == "8"
    await consumer.aclose()
    await task


async def test_cancelled_transaction_ends_and_is_reported_as_cancelled(tmp_path: Path) -> None:
    """Or a background task goes on for ever, and its consumer does not end."""
    begun = threading.Event()
    go_on = threading.Event()

    def steps() -> Steps[None]:
        begun.set()
        go_on.wait()
        yield Query("CREATE TABLE ended (at INTEGER)")

    connections = Connections(SQLite(tmp_path / "results.db", create_tables=True), 1, 60.0)
    task = asyncio.create_task(connections.transaction(steps))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await connections.close()
    with closing(sqlite3.connect(tmp_path / "results.db")) as connection:
        connection.execute("SELECT * FROM ended")


async def test_reported_failure_of_a_batch_keeps_the_order(
    memory: MemoryKafka, tmp_path: Path
) -> None:
    """The last message of a batch fails once; those before it are stored before it."""
    write(memory, 4)
    file = tmp_path / "results.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE effects (number INTEGER PRIMARY KEY, at INTEGER)")

    def handle(messages: list[ReceivedMessage], connection: sqlite3.Connection) -> None:
        for message in messages:
            connection.execute("INSERT INTO effects (at) VALUES (?)", (message.offset,))
            if message.offset == 2 and message.attempt == 1:
                message.failed(ValueError("once"))

    consumer = Consumer(
        Doors.to(memory),
        group=GROUP,
        topics=["orders"],
        mode="exactly-once",
        store=InDatabase(SQLite(file, create_tables=True)),
        retry_interval_s=0.01,
    )
    await consumer.start()
    task = asyncio.create_task(consumer.run(handle, batch=10, max_wait_s=0.5))
    with closing(sqlite3.connect(file)) as connection:
        rows = await until(
            lambda: (
                found
                if len(found := connection.execute("SELECT at FROM effects").fetchall()) == 4
                else None
            )
        )
    assert [at for (at,) in rows] == [0, 1, 2, 3]
    await consumer.aclose()
    await task
