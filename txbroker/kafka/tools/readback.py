"""What any consumer that reads `read_committed` sees of some topics, from begin to end.

Reads through the client library's own consumer, as users do, not through the owner's reader, so
that the two can be compared.
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
    """A record and where it is."""

    topic: str
    partition: int
    record: Record


async def read_back(bootstrap: str, topics: tuple[str, ...]) -> list[Seen]:
    """Return every record of these topics that is visible now; a topic that is missing has none.

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
        raise KafkaUnavailable(f"reading back from {bootstrap} failed: {error}") from None
    finally:
        await stop_consumer(consumer)


async def _read(consumer: Any) -> list[Seen]:
    found: list[Seen] = []
    partitions = sorted(consumer.assignment())
    ends = await consumer.end_offsets(partitions) if partitions else {}
    for partition in partitions:
        while await consumer.position(partition) < ends[partition]:
            batches = await consumer.getmany(partition, timeout_ms=_WAIT_MS)
            for r in batches.get(partition, ()):
                record = Record(r.key, r.value, tuple(r.headers), r.timestamp, r.offset)
                found.append(Seen(partition.topic, partition.partition, record))
    return found
