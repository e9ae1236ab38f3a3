"""Switches of the Kafka in memory: expiry and changed settings."""

from __future__ import annotations

import pytest

from txbroker.core.records import RECORD_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import PromotionTxn
from txbroker.door.writing import Copy, Unknown
from txbroker.testing.door import MemoryDoor
from txbroker.testing.memory import MemoryKafka


def claim(name: str) -> Claim:
    return Claim(RECORD_VERSION, name, "one", "http://127.0.0.1:1")


def turn(op: int, *promoted: Copy) -> PromotionTxn:
    return PromotionTxn(promoted, (), Checkpoint(RECORD_VERSION, "mine", op, op))


async def started(kafka: MemoryKafka) -> MemoryDoor:
    door = MemoryDoor(kafka)
    await door.start()
    return door


async def test_expired_transactional_ids_lead_to_a_claim() -> None:
    kafka = MemoryKafka()
    kafka.create_topic("target")
    partition = (await started(kafka)).partition(0)
    await partition.claim(claim("mine"))
    await (await partition.write(turn(1))).visible()
    kafka.forget_transactional_ids()
    for _ in range(2):
        with pytest.raises(Unknown):
            await partition.write(turn(2, Copy("target", 0, Record(b"lost", b""))))
    assert (await partition.claim(claim("again"))).progress == turn(1).progress
    await (await partition.write(turn(2, Copy("target", 0, Record(b"seen", b""))))).visible()
    assert [record.key for record in kafka.visible("target")] == [b"seen"]


async def test_id_with_open_transaction_does_not_expire() -> None:
    kafka = MemoryKafka()
    partition = (await started(kafka)).partition(0)
    await partition.claim(claim("mine"))
    handle = await partition.write(turn(1))
    kafka.forget_transactional_ids()
    await handle.visible()
    await (await partition.write(turn(2))).visible()


async def test_changed_timestamp_type_is_reported() -> None:
    kafka = MemoryKafka()
    door = await started(kafka)
    kafka.set_log_append_time("txbroker.op", log_append_time=False)
    (problem,) = await door.check_topics()
    assert problem == "txbroker.op needs message.timestamp.type=LogAppendTime"
