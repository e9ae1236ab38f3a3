"""Record batches: what Kafka stores all or none of."""

from collections.abc import Sequence

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from txbroker.core.records import Record

_UNBOUNDED = (1 << 31) - 1
_NO_COMPRESSION = 0
_MAGIC = 2
HEADER_BYTES = 61
"""Bytes of an empty batch."""


def encode_batch(
    records: Sequence[Record],
    *,
    producer_id: int,
    epoch: int,
    sequence: int,
    transactional: bool = False,
) -> bytes:
    """Return `records` as one batch of an idempotent producer.

    A record without a timestamp gets this machine's; in topics with LogAppendTime the broker
    replaces either.
    """
    builder = DefaultRecordBatchBuilder(
        _MAGIC, _NO_COMPRESSION, int(transactional), producer_id, epoch, sequence, _UNBOUNDED
    )
    for number, record in enumerate(records):
        timestamp = record.timestamp_ms if record.timestamp_ms >= 0 else None
        builder.append(number, timestamp, record.key, record.value, list(record.headers))
    return bytes(builder.build())


def record_bytes(record: Record) -> int:
    """Return an upper bound for the bytes that a record takes in a batch."""
    size = DefaultRecordBatchBuilder.estimate_size_in_bytes(
        record.key, record.value, list(record.headers)
    )
    return int(size) - HEADER_BYTES


def batch_bytes(records: Sequence[Record], bytes_max: int) -> int:
    """Return the size of a batch: an upper bound, or exactly where the bound is over the limit."""
    bound = HEADER_BYTES + sum(map(record_bytes, records))
    if bound <= bytes_max:
        return bound
    return len(encode_batch(records, producer_id=-1, epoch=-1, sequence=-1))


def split_by_bytes(records: Sequence[Record], bytes_max: int) -> list[Sequence[Record]]:
    """Cut records into runs whose batches take at most `bytes_max`, in order.

    A record that is too large by itself gets a batch of its own, for the broker to judge.
    """
    runs: list[Sequence[Record]] = []
    start, size = 0, HEADER_BYTES
    for number, record in enumerate(records):
        more = record_bytes(record)
        if number > start and size + more > bytes_max:
            runs.append(records[start:number])
            start, size = number, HEADER_BYTES
        size += more
    if start < len(records):
        runs.append(records[start:])
    return runs
