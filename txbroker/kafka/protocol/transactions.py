"""The two versions of Kafka's transaction protocol, and which one a cluster takes.

In version 1 a producer keeps its epoch from one InitProducerId to the next, so a delayed EndTxn can
end a later transaction. In version 2 (KIP-890) every EndTxn raises the epoch: brokers refuse late
requests, EndTxn may be retried until answered, and Produce adds its partition to the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import (
    Batches,
    EndTxnV0,
    EndTxnV5,
    InitProducerIdV0,
    InitProducerIdV5,
    ProduceV7,
    ProduceV12,
    TxnOffsetCommitV3,
    TxnOffsetCommitV5,
    finalized_features,
)

ACKS_ALL = -1
_FEATURE = "transaction.version"
_FEATURE_LEVEL_V2 = 2
"""Level of the feature from which brokers speak version 2 to clients."""
_REQUIRED_BY_V2 = {
    request.API_KEY: request.API_VERSION for request in (InitProducerIdV5, EndTxnV5, ProduceV12)
}
_EPOCH_MAX = (1 << 15) - 1

_T = TypeVar("_T")

ProducerIdentity = tuple[int, int]
"""A producer id and its epoch."""
NO_PRODUCER: ProducerIdentity = (-1, -1)


def by_topic(entries: Iterable[tuple[str, _T]]) -> dict[str, list[_T]]:
    """Group entries by their topics, as requests need them."""
    topics: dict[str, list[_T]] = {}
    for topic, entry in entries:
        topics.setdefault(topic, []).append(entry)
    return topics


class PartitionResult(NamedTuple):
    """A broker's answer about one partition of a Produce request.

    Attributes:
        records: which records of the batch are at fault, as far as known.
    """

    topic: str
    partition: int
    code: int
    base_offset: int
    timestamp_ms: int
    message: str | None
    records: Sequence[int] = ()


class TxnProtocolV1:
    """Version 1: AddPartitionsToTxn comes before Produce, AddOffsetsToTxn before offsets."""

    number = 1
    explicit_add_partitions = True
    retries_unanswered = False
    """Whether a request that the coordinator did not answer may be resent."""
    epoch_limit = _EPOCH_MAX + 1
    """The first epoch in which no transaction may begin."""

    def init_producer_id(
        self, transactional_id: Any, timeout_ms: int, current: ProducerIdentity = NO_PRODUCER
    ) -> Any:
        """Return the request for a producer id; `transactional_id` may be None."""
        return InitProducerIdV0(transactional_id, timeout_ms)

    def produce(self, transactional_id: Any, timeout_ms: int, batches: Batches) -> Request:
        """Return the request that writes batches."""
        return ProduceV7(transactional_id, ACKS_ALL, timeout_ms, batches)

    def parse_produce_response(self, response: Any) -> Iterator[PartitionResult]:
        """Yield the result of each partition."""
        for topic, partitions in response.topics:
            for number, code, offset, timestamp, *_rest in partitions:
                yield PartitionResult(topic, number, code, offset, timestamp, None)

    def offset_commit(self, *fields: Any) -> Request:
        """Return the request that stores a group's offsets, see `TxnOffsetCommitV3`."""
        return TxnOffsetCommitV3(*fields)

    def end_txn(
        self, transactional_id: Any, producer_id: int, epoch: int, *, commit: bool
    ) -> Request:
        """Return the request that commits or aborts a transaction."""
        return EndTxnV0(transactional_id, producer_id, epoch, commit)

    def next_identity(self, response: Any) -> ProducerIdentity | None:
        """Return the identity for the next transaction; None if it stays the same."""
        return None


class TxnProtocolV2(TxnProtocolV1):
    """Version 2, KIP-890: Produce adds partitions to the transaction, TxnOffsetCommit the group,
    EndTxn raises the epoch."""

    number = 2
    explicit_add_partitions = False
    retries_unanswered = True
    # Every transaction uses an epoch, and brokers that abort a transaction in the last epochs can
    # get stuck (KAFKA-19367, KAFKA-20090).
    epoch_limit = _EPOCH_MAX - 3

    def init_producer_id(
        self, transactional_id: Any, timeout_ms: int, current: ProducerIdentity = NO_PRODUCER
    ) -> Any:
        """Return the request for a producer id.

        With `current` it asks for the next epoch, or for a new producer id after the last epoch.
        Brokers then refuse it, and fence no producer, if another one took the transactional id.
        """
        return InitProducerIdV5(transactional_id, timeout_ms, *current)

    def produce(self, transactional_id: Any, timeout_ms: int, batches: Batches) -> Request:
        return ProduceV12(transactional_id, ACKS_ALL, timeout_ms, batches)

    def parse_produce_response(self, response: Any) -> Iterator[PartitionResult]:
        for topic, partitions in response.topics:
            for number, code, offset, timestamp, _start, records, message in partitions:
                faulty = [index for index, _message in records or ()]
                yield PartitionResult(topic, number, code, offset, timestamp, message, faulty)

    def offset_commit(self, *fields: Any) -> Request:
        return TxnOffsetCommitV5(*fields)

    def end_txn(
        self, transactional_id: Any, producer_id: int, epoch: int, *, commit: bool
    ) -> Request:
        return EndTxnV5(transactional_id, producer_id, epoch, commit)

    def next_identity(self, response: Any) -> ProducerIdentity | None:
        return response.producer_id, response.producer_epoch


TXN_V1, TXN_V2 = TxnProtocolV1(), TxnProtocolV2()


def negotiate(answer: Any) -> TxnProtocolV1:
    """Return the newest version that a cluster takes, from an answer to `api_versions`.

    One broker's answer is enough: a feature is finalized only while all brokers support it. A
    running cluster can withdraw it, so every claim negotiates again.
    """
    if finalized_features(answer).get(_FEATURE, 0) < _FEATURE_LEVEL_V2:
        return TXN_V1
    newest = {key: version for key, _oldest, version in answer.api_versions}
    supported = all(newest.get(key, -1) >= needed for key, needed in _REQUIRED_BY_V2.items())
    return TXN_V2 if supported else TXN_V1
