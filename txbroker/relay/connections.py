"""A relay's connection to Kafka, and its topic of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from txbroker.config.settings import load_kafka_access
from txbroker.door.consuming import ConsumingDoor, HasConsumingDoor, TopicSpec

TRANSACTION_S = 300.0
"""How long a delivery may take: a database transaction of millions of rows is never split. If a
relay dies meanwhile and none takes over, readers of its topics wait as long."""


async def open_door(
    kafka: str | HasConsumingDoor, security: Mapping[str, Any] | None, positions: str
) -> ConsumingDoor:
    """Connect to a Kafka, and create the topic of positions if it is missing.

    Args:
        security: settings of the connection, see `RelayOptions`.
        positions: the topic's name.

    Raises:
        ConfigurationError, KafkaUnavailable
    """
    if isinstance(kafka, str):
        from txbroker.kafka.client.settings import KafkaSettings
        from txbroker.kafka.door.consuming import KafkaConsumingDoor

        settings = KafkaSettings.from_access(load_kafka_access(kafka, security), "txbroker-relay")
        settings = structs.replace(settings, transaction_timeout_s=TRANSACTION_S)
        door: ConsumingDoor = KafkaConsumingDoor(settings)
    else:
        door = kafka.consuming_door()
    try:
        await door.start()
        await door.create([positions_topic(positions)])
    except BaseException:
        await door.close()
        raise
    return door


def positions_topic(name: str) -> TopicSpec:
    """Return the topic of positions: compacted, and small enough to be read at a start."""
    return TopicSpec(
        name,
        1,
        -1,
        {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0.1",
            "segment.bytes": str(16 << 20),
            "segment.ms": str(24 * 60 * 60 * 1000),
            "max.message.bytes": str(8 << 20),
        },
    )
