"""Turns that were never ended in a partition, as Kafka 4.3.1 leaves them (KAFKA-20734).

Made here by writing with our transactional id what its coordinator knows nothing of, which takes
a broker that does not ask it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tests.kafka.small_turns import claim, keys, progress, write
from tests.kit.kafka import ADMIN_TIMEOUT_S, KafkaHarness
from txbroker.core.encoding import encode_progress
from txbroker.core.records import Partition, Record
from txbroker.door.protocols import Hanging
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import BatchRefused, Producer
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.tools.examination import KafkaExamination
from txbroker.net.timers import Backoff

_VERIFICATION = "transaction.partition.verification.enable"


@asynccontextmanager
async def unverified(world: KafkaHarness) -> AsyncIterator[None]:
    """The broker takes what its coordinator knows nothing of, a moment from now."""
    admin = AdminClient({"bootstrap.servers": world.bootstrap, "log_level": 0})
    (broker,) = admin.list_topics(timeout=ADMIN_TIMEOUT_S).brokers

    async def change(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry(_VERIFICATION, "false", incremental_operation=operation)
        kind = ConfigResource.Type.BROKER
        resource = ConfigResource(kind, str(broker), incremental_configs=[entry])
        future = admin.incremental_alter_configs([resource])[resource]
        await asyncio.to_thread(future.result, ADMIN_TIMEOUT_S)

    await change(AlterConfigOpType.SET)
    try:
        yield
    finally:
        await change(AlterConfigOpType.DELETE)


async def leave_open(world: KafkaHarness, at: Partition, records: Sequence[Record]) -> None:
    """Write with half partition 0's first transactional id, and never end it there."""
    # By the first version of the protocol, in which writing puts no partition into a transaction.
    settings = world.settings("itself", transactions=1)
    client = Client(settings)
    backoff = Backoff(10.0, 0.01)
    written = False
    try:
        async with unverified(world):
            while not written:
                producer = Producer(client, "lost", f"{settings.half_topic}-0-a")
                await producer.start(backoff)
                try:
                    await producer.produce({at: batch_body(records)}, backoff)
                    written = True
                except BatchRefused:
                    # The setting has not reached the broker yet.
                    if not await backoff.pause():
                        raise
    finally:
        await client.close()


@pytest.mark.rule(17)
async def test_target_with_lost_end_marker_is_quarantined(world: KafkaHarness) -> None:
    topic = await world.create_topic("target")
    door = await world.door("one", transactions=1)
    await leave_open(world, (topic, 0), [Record(b"lost", b"")])
    partition = door.partition(0)
    await partition.claim(claim("next"))
    assert partition.unverified([(topic, 0)]) == [(topic, 0)]
    (cause,) = await partition.verify_no_open_txn([(topic, 0)])
    assert (cause.code, cause.topic, cause.partition) == ("hanging", topic, 0)
    assert await world.visible(topic) == []
    async with KafkaExamination(world.settings("doctor")) as kafka:
        (found,) = await kafka.open_transactions([topic])
    assert (found.lost, found.first, found.state) == (True, 0, "CompleteCommit")
    # Why it is quarantined: the next end marker ends the open records, too.
    await (await write(partition, "next", 1, topic)).visible()
    assert await keys(world, topic) == [b"lost", b"next-1"]


@pytest.mark.rule(8)
async def test_claim_does_not_commit_open_progress(world: KafkaHarness) -> None:
    door = await world.door("one")
    checkpoint = world.name("checkpoint")
    await leave_open(world, (checkpoint, 0), [encode_progress(progress("lost", 5))])
    partition = door.partition(0)
    with pytest.raises(Hanging, match=r"checkpoint-0 .*offset 0"):
        await partition.claim(claim("next"))
    assert await world.visible(checkpoint) == []


async def test_claim_verifies_every_target_once(world: KafkaHarness) -> None:
    topic = await world.create_topic("target")
    partition = (await world.door("one")).partition(0)
    for name in ("first", "second"):
        await partition.claim(claim(name))
        assert partition.unverified([(topic, 0)]) == [(topic, 0)]
        assert await partition.verify_no_open_txn([(topic, 0)]) == []
        assert partition.unverified([(topic, 0)]) == []
