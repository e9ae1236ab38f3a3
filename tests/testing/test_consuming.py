"""Consumers' doors to a Kafka in memory: other event loops, silence, and faults on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.consuming import Consuming, Fetching, shared
from tests.kit.until import until
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import ConsumingDoor, TopicSpec
from txbroker.door.writing import Copy, Fenced
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.sdk import BlockingTransactionalProducer, Message
from txbroker.testing.broker import InMemoryBroker
from txbroker.testing.consuming import MemoryConsumingDoor
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import LostReply

T0, T1 = ("topic", 0), ("topic", 1)


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as running:
        running.create_topic("topic", 4)
        running.create_topic("dead")
        yield running


@pytest.fixture
def memory() -> MemoryKafka:
    kafka = MemoryKafka()
    kafka.create_topic("topic", 2)
    kafka.create_topic("dead")
    return kafka


@pytest.fixture
async def door(memory: MemoryKafka) -> AsyncIterator[ConsumingDoor]:
    door = MemoryConsumingDoor(memory)
    await door.start()
    yield door
    await door.close()


# --- in another event loop -------------------------------------------------------------------


async def test_promoted_messages_are_fetched_in_users_loop(broker: InMemoryBroker) -> None:
    door = broker.consuming_door()
    await door.start()
    fetching = Fetching(door)
    fetching.add(T0)

    def produce() -> None:
        with BlockingTransactionalProducer(broker.url, group="orders") as producer:
            for number in range(5):
                message = Message("topic", key=b"%d" % number, partition=0)
                producer.send_in_transaction(message, lambda _: None)

    await asyncio.to_thread(produce)
    await until(lambda: len(fetching.keys(T0)) == 5)
    assert sorted(filter(None, fetching.keys(T0))) == [b"%d" % number for number in range(5)]
    await fetching.fetcher.close()
    await door.close()


def test_members_in_several_loops_share_a_group(broker: InMemoryBroker) -> None:
    every = {("topic", number) for number in range(4)}
    both = threading.Barrier(2)

    async def consume() -> frozenset[Partition]:
        door = broker.consuming_door()
        await door.start()
        made = await Consuming().start(door, "group", ["topic"])
        await until(lambda: len(made.member.owned) == 2)
        share = frozenset(made.member.owned)
        mine = min(share)
        copy = Copy("dead", 0, Record(b"%d" % mine[1], b"", (("cause", b"why"),)))
        await made.member.commit({mine: StoredOffset(1, "x")}, [copy])
        assert await made.member.load([mine]) == {mine: StoredOffset(1, "x")}
        # It stays until the other one has its share, too.
        await asyncio.to_thread(both.wait, 20)
        await made.member.close()
        await door.close()
        assert made.losses == []
        return share

    with ThreadPoolExecutor(2) as threads:
        shares = [threads.submit(lambda: asyncio.run(consume())) for _ in range(2)]
        one, two = (share.result() for share in shares)
    assert one | two == every
    dead = broker.messages("dead")
    assert {(m.headers, m.transaction_id) for m in dead} == {((("cause", b"why"),), "")}
    keys = {message.key for message in dead}
    assert keys == {b"%d" % min(share)[1] for share in (one, two)}


def test_closed_broker_is_unavailable() -> None:
    with InMemoryBroker() as broker:
        door = broker.consuming_door()
        asyncio.run(door.start())
    with pytest.raises(KafkaUnavailable, match="closed"):
        asyncio.run(door.topics())


def test_member_of_an_ended_loop_is_removed_after_its_session(broker: InMemoryBroker) -> None:
    async def consume(session_s: float, *, close: bool) -> set[Partition]:
        door = broker.consuming_door()
        await door.start()
        made = await Consuming().start(door, "group", ["topic"], session_s=session_s)
        await until(lambda: len(made.member.owned) == 4)
        if close:
            await made.member.close()
        return made.member.owned

    # As a process that crashes: it does not leave.
    asyncio.run(consume(0.2, close=False))
    assert len(asyncio.run(consume(60.0, close=True))) == 4


# --- silence ---------------------------------------------------------------------------------


async def test_silent_member_keeps_lease_until_its_end(
    memory: MemoryKafka, door: ConsumingDoor
) -> None:
    timing = {"session_s": 60.0, "heartbeat_s": 0.01, "lease_s": 0.2}
    first = await Consuming().start(door, "group", ["topic"], "first", **timing)
    second = await Consuming().start(door, "group", ["topic"], "second", **timing)
    await shared([T0, T1], first, second)
    group, loop = memory.group("group"), asyncio.get_running_loop()
    (mine,) = first.member.owned
    group.silence("first")
    await until(lambda: loop.time() > first.member.deadline_s)
    assert (first.losses, first.member.owned) == ([], {mine})
    group.expire("first")
    await second.owns(T0, T1)
    with pytest.raises(Fenced):
        await first.member.commit({mine: StoredOffset(1, "")})
    assert first.losses == []
    group.reconnect("first")
    await shared([T0, T1], first, second)
    assert (len(first.losses), second.losses) == (1, [])
    assert first.member.deadline_s > loop.time()
    for each in (first, second):
        await each.member.close()


async def test_silent_member_loses_its_session(memory: MemoryKafka, door: ConsumingDoor) -> None:
    timing = {"session_s": 0.2, "heartbeat_s": 0.01, "lease_s": 0.1}
    first = await Consuming().start(door, "group", ["topic"], "first", **timing)
    second = await Consuming().start(door, "group", ["topic"], "second", **timing)
    await shared([T0, T1], first, second)
    memory.group("group").silence("first")
    await until(lambda: first.losses)
    await second.owns(T0, T1)
    memory.group("group").reconnect("first")
    await shared([T0, T1], first, second)
    assert (len(first.losses), second.losses) == (1, [])
    for each in (first, second):
        await each.member.close()


async def test_member_that_returns_within_session_keeps_its_share(
    memory: MemoryKafka, door: ConsumingDoor
) -> None:
    first = await Consuming().start(door, "group", ["topic"], "first")
    memory.group("group").silence("first")
    joining = asyncio.create_task(Consuming().start(door, "group", ["topic"], "second"))
    await until(lambda: len(memory.group("group").seats) == 2)
    # The generation waits for the silent member.
    assert len(first.assignments) == 1
    memory.group("group").reconnect("first")
    second = await joining
    await shared([T0, T1], first, second)
    assert first.losses == second.losses == []
    for each in (first, second):
        await each.member.close()


async def test_second_process_leaves_instance_to_the_first(
    memory: MemoryKafka, door: ConsumingDoor
) -> None:
    first = await Consuming().start(door, "group", ["topic"], "same")
    second = await Consuming().start(door, "group", ["topic"], "same")
    await until(lambda: first.losses)
    await second.member.close()
    memory.group("group").expire("same")
    await first.owns(T0, T1)
    await first.member.close()


# --- Kafka down, refusals, lost answers ------------------------------------------------------


async def test_group_and_fetching_outlast_kafka_being_down(
    memory: MemoryKafka, door: ConsumingDoor
) -> None:
    member = await Consuming().start(door, "group", ["topic"], session_s=60, heartbeat_s=0.01)
    fetching = Fetching(door)
    fetching.add(T0)
    await fetching.reaches(T0, 0)
    memory.go_down()
    for call in (
        door.topics(),
        member.member.load([T0]),
        member.member.commit({T0: StoredOffset(1, "")}),
        door.append("topic", 0, [Record(b"a", b"")]),
    ):
        with pytest.raises(KafkaUnavailable):
            await call
    member.member.subscribe(["topic", "dead"])
    fetching.add(T1)
    await until(lambda: fetching.failures)
    lease = member.member.deadline_s
    assert member.losses == []
    memory.come_up()
    await member.owns(T0, T1, ("dead", 0))
    await until(lambda: member.member.deadline_s > lease)
    await door.append("topic", 1, [Record(b"b", b"")])
    await fetching.reaches(T1, 1)
    assert await member.member.load([T0]) == {}
    await fetching.fetcher.close()
    await member.member.close()


@pytest.mark.parametrize("outcome", LostReply)
@pytest.mark.parametrize("down", [True, False])
async def test_commit_without_answer(
    memory: MemoryKafka, door: ConsumingDoor, outcome: LostReply, down: bool
) -> None:
    member = await Consuming().start(door, "group", ["topic"])
    if down:
        memory.go_down(outcome)
    else:
        memory.group("group").lose_answer_of_next_commit(outcome)
    with pytest.raises(KafkaUnavailable):
        await member.member.commit(
            {T0: StoredOffset(1, "")}, [Copy("dead", 0, Record(b"copy", b""))]
        )
    memory.come_up()
    done = outcome is LostReply.DONE
    assert bool(await member.member.load([T0])) == bool(memory.visible("dead")) == done
    await member.member.close()


async def test_rights_are_refused_in_sentences(memory: MemoryKafka, door: ConsumingDoor) -> None:
    memory.create_refusal = "Topic authorization failed."
    with pytest.raises(ConfigurationError, match=r"topic new: Topic authorization failed"):
        await door.create([TopicSpec("new", 1, -1, {})])
    memory.group("group").authorized = False
    with pytest.raises(ConfigurationError, match="grant Read"):
        await Consuming().start(door, "group", ["topic"])
    memory.set_authorized("topic", authorized=False)
    with pytest.raises(ConfigurationError, match="not authorized to read topic topic"):
        await door.topics(["topic"])
    assert "topic" not in await door.topics()
    fetching = Fetching(door)
    fetching.add(T0)
    await until(lambda: fetching.failures)
    assert fetching.failures[0][1].lasting
    memory.set_authorized("topic", authorized=True)
    await fetching.reaches(T0, 0)
    await fetching.fetcher.close()
