"""Claims and turns of one message, for tests of what becomes of them."""

from __future__ import annotations

from tests.kit.kafka import KafkaHarness
from txbroker.core.records import LOG_VERSION, Checkpoint, Claim, Record
from txbroker.door.protocols import PromotionTxn, PromotionTxnHandle, TargetRecord
from txbroker.kafka.door.partition import KafkaPartitionDoor

FENCED_CODES = (47, 90)


def claim(name: str) -> Claim:
    """A claim by its name."""
    return Claim(LOG_VERSION, name, "one", "http://127.0.0.1:1")


async def write(
    partition: KafkaPartitionDoor, name: str, op: int, topic: str
) -> PromotionTxnHandle:
    """Write the turn of a claim up to `op`, which holds one message."""
    target = TargetRecord(topic, 0, Record(b"%s-%d" % (name.encode(), op), b""))
    return await partition.write(PromotionTxn((target,), (), Checkpoint(LOG_VERSION, name, op, op)))


async def keys(world: KafkaHarness, topic: str) -> list[bytes | None]:
    """Return the keys of what consumers see."""
    return [record.key for record in await world.visible(topic)]
