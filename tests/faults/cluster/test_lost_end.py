"""A turn whose end a Kafka of three nodes loses, as 4.3.1 does where a partition has no leader
(KAFKA-20734), or keeps sending, as other versions do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewTopic

from tests.faults.cluster.three_nodes import START_S, ThreeNodes
from tests.kit.kafka import KafkaHarness
from tests.kit.topic_reader import ADMIN_TIMEOUT_S, admin_of
from txbroker.core.records import RECORD_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import PromotionTxn
from txbroker.door.writing import Copy, Unknown
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import Producer
from txbroker.kafka.protocol.batch import batch_body
from txbroker.net.timers import Backoff

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NODE = 3
LOSING, SENDING = "4.3.1", "4.2.1"
_POLL_S = 0.1


@pytest.fixture(params=[LOSING, SENDING])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ThreeNodes]:
    made = ThreeNodes(tmp_path, [], version=request.param)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def leads(nodes: ThreeNodes, topic: str, node: int) -> None:
    """Wait until every running broker reports this leader of a topic's partition; -1: none."""
    end = time.monotonic() + START_S
    for each in nodes.nodes.values():
        while each.running and await asyncio.to_thread(each.led_by, topic) != node:
            assert time.monotonic() < end
            await asyncio.sleep(_POLL_S)


@pytest.fixture
async def world(nodes: ThreeNodes) -> AsyncIterator[KafkaHarness]:
    made = KafkaHarness(nodes.bootstrap)
    yield made
    await made.close()


@pytest.fixture
async def topic(nodes: ThreeNodes, world: KafkaHarness) -> str:
    """A topic that only one node holds."""
    name = world.name("target")
    new = NewTopic(name, num_partitions=1, replica_assignment=[[NODE]])
    created = admin_of(nodes.bootstrap).create_topics([new])[name]
    await asyncio.to_thread(created.result, ADMIN_TIMEOUT_S)
    await leads(nodes, name, NODE)
    return name


async def test_next_transaction_ends_no_lost_one(
    nodes: ThreeNodes, world: KafkaHarness, topic: str, request: pytest.FixtureRequest
) -> None:
    loses = request.node.callspec.params["nodes"] == LOSING
    servers = tuple(nodes.bootstrap.split(","))
    door = await world.door("one", bootstrap_servers=servers, claim_timeout_s=10.0)
    partition = door.partition(0)
    client = Client(world.settings("lost", bootstrap_servers=servers))
    lost = Producer(client, "lost", f"{client.settings.half_topic}-0-a")
    backoff = Backoff(30.0, 0.01)
    try:
        await lost.start(backoff)
        await lost.add([(topic, 0)], backoff)
        await lost.produce({(topic, 0): batch_body([Record(b"lost", b"")])}, backoff)
        await nodes.nodes[NODE].stop()
        await leads(nodes, topic, -1)
        if not loses:
            with pytest.raises(KafkaUnavailable):
                await partition.claim(claim("waits"))
        else:
            await partition.claim(claim("let through"))
            (cause,) = await partition.verify_no_open_txn([(topic, 0)])
            assert cause.code == "no_answer"

        await nodes.nodes[NODE].launch()
        await nodes.nodes[NODE].ready()
        await leads(nodes, topic, NODE)
        await partition.claim(claim("next"))
        causes = await partition.verify_no_open_txn([(topic, 0)])
        assert [cause.code for cause in causes] == ["hanging"] * loses
        assert await world.visible(topic) == []
        # Without the quarantine both would become visible.
        await (await partition.write(turn(1, topic, b"next"))).visible()
        seen = [record.key for record in await world.visible(topic)]
        assert seen == [*[b"lost"] * loses, b"next"]
    finally:
        await client.close()


@pytest.mark.parametrize("nodes", [LOSING], indirect=True)
async def test_no_transaction_begins_after_a_lost_commit(
    nodes: ThreeNodes, world: KafkaHarness, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as it takes to stop a node and to notice it.
    door = await world.door(
        "one", bootstrap_servers=tuple(nodes.bootstrap.split(",")), transaction_timeout_s=120.0
    )
    partition = door.partition(0)
    may_end, end = asyncio.Event(), Producer.end

    async def held_back(producer: Producer, *, commit: bool, backoff: Backoff) -> None:
        await may_end.wait()
        await end(producer, commit=commit, backoff=backoff)

    await partition.claim(claim("first"))
    assert await partition.verify_no_open_txn([(topic, 0)]) == []
    monkeypatch.setattr(Producer, "end", held_back)
    first = await partition.write(turn(1, topic, b"first"))
    await nodes.nodes[NODE].stop()
    await leads(nodes, topic, -1)
    may_end.set()
    await first.committed()
    # The third is of the same producer: its coordinator reports that the first has ended.
    for number in (2, 3, 4):
        await (await partition.write(turn(number))).committed()
    await nodes.nodes[NODE].launch()
    await nodes.nodes[NODE].ready()
    await leads(nodes, topic, NODE)
    with pytest.raises(Unknown) as lost:
        await partition.write(turn(5, topic, b"fifth"))
    assert lost.value.cause is not None
    assert (lost.value.cause.code, lost.value.cause.topic) == ("hanging", topic)
    await partition.claim(claim("second"))
    (cause,) = await partition.verify_no_open_txn([(topic, 0)])
    assert cause.code == "hanging"
    # It is not aborted: the next commit makes it visible.
    assert await world.visible(topic) == []
    await (await partition.write(turn(5, topic, b"fifth"))).visible()
    assert [record.key for record in await world.visible(topic)] == [b"first", b"fifth"]


def turn(number: int, topic: str = "", key: bytes = b"") -> PromotionTxn:
    promoted = (Copy(topic, 0, Record(key, b"")),) if topic else ()
    return PromotionTxn(promoted, (), Checkpoint(RECORD_VERSION, "next", number, number))


def claim(name: str) -> Claim:
    return Claim(RECORD_VERSION, name, "one", "http://127.0.0.1:1")
