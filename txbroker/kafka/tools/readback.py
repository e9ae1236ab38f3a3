"""Read topics as any `read_committed` consumer does.

Uses the client library's consumer, like users, so that it checks the owner's reader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from txbroker.core.records import Record
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.tools.counting import stop_consumer

_WAIT_MS = 500


class Seen(NamedTuple):
    """A record and its place."""

    topic: str
    partition: int
    record: Record


async def read_back(bootstrap: str, topics: tuple[str, ...]) -> list[Seen]:
    """Return all visible records of topics; a missing topic has none.

    Raises:
        KafkaUnavailable: Kafka does not answer.
    """
    consumer: Any = AIOKafkaConsumer(  # type: ignore[no-untyped-call]
        *topics,
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    try:
        await consumer.start()
        return await _read(consumer)
    except (KafkaError, OSError) as error:
        raise KafkaUnavailable(f"cannot read topics back from {bootstrap}: {error}") from None
    finally:
        await stop_consumer(consumer)


async def _read(consumer: Any) -> list[Seen]:
    records: list[Seen] = []
    partitions = sorted(consumer.assignment())
    ends = await consumer.end_offsets(partitions) if partitions else {}
    for partition in partitions:
        while await consumer.position(partition) < ends[partition]:
            batches = await consumer.getmany(partition, timeout_ms=_WAIT_MS)
            for r in batches.get(partition, ()):
                record = Record(r.key, r.value, tuple(r.headers), r.timestamp, r.offset)
                records.append(Seen(partition.topic, partition.partition, record))
    return records
