"""The ceiling: what Kafka takes from one Python client that only writes, and promises nothing.

Each message is written three times, to half, operation and target topic, with records just as
large as txbroker's, in batches, acks=all. Records a second divided by three is what no broker of
this kind can pass with this client on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiokafka
import uvloop
from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder

from benchmarks.peers.base import PARTITIONS, Figure, Plan, body_of, run_lanes, times_of
from benchmarks.peers.kafka import KAFKA, create_topics, producing, running_kafka
from txbroker.core.encoding import encode_half, encode_marker, promoted_headers
from txbroker.core.records import Half, Marker, MarkerKind, Message, Record
from txbroker.core.routing import make_id

TOPICS = ("half", "op", "target")
_BATCH_BYTES = 1 << 20


class Ceiling:
    """Raw Kafka through aiokafka's `send_batch`."""

    name = "ceiling"
    title = "raw Kafka ÷ 3 (the ceiling)"
    counts = (
        "three plain records of txbroker's sizes, idempotent, acks=all; no decision, no check, "
        "nothing is tied together"
    )

    def version(self) -> str:
        return f"{KAFKA}, aiokafka {aiokafka.__version__}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        with running_kafka(folder) as kafka:
            uvloop.run(create_topics(kafka.bootstrap, TOPICS))
            for in_flight in plan.in_flight:
                yield uvloop.run(_measure(kafka.bootstrap, plan, in_flight))


async def _measure(kafka: str, plan: Plan, in_flight: int) -> Figure:
    lanes = min(PARTITIONS, in_flight)
    records, count = _records(plan), in_flight // lanes
    async with producing(kafka, _BATCH_BYTES) as producer:

        async def write(partition: int) -> int:
            """Write the records of some transactions at once."""
            written = []
            for topic, record in zip(TOPICS, records, strict=True):
                batch = _batch(producer, record, count)
                written.append(await producer.send_batch(batch, topic, partition=partition))
            await asyncio.gather(*written)
            return count

        per_s, times = await run_lanes(plan, lanes, write)
    return Figure(in_flight, round(per_s, 1), times_of(times))


def _batch(producer: AIOKafkaProducer, record: Record, count: int) -> BatchBuilder:
    batch = producer.create_batch()
    headers = list(record.headers)
    for _ in range(count):
        stored = batch.append(key=record.key, value=record.value, timestamp=None, headers=headers)
        if stored is None:
            raise ValueError("the batch is full")
    batch.close()
    return batch


def _records(plan: Plan) -> Sequence[Record]:
    """Return the records of one transaction as txbroker writes them."""
    id = make_id(0, 1_700_000_000_000, 1 << 60)
    message = Message("target", b"0123456789abcdef0123", body_of(plan), partition=0)
    (half,) = encode_half(Half(id, "bench", (message,)))
    marker = encode_marker(Marker(v=1, kind=MarkerKind.COMMIT, id=id, half=1_000_000))
    return half, marker, Record(message.key, message.value, promoted_headers(id, 0, 1, message))
