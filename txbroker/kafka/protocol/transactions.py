"""Kafka's transaction protocol in both versions, and which of them a Kafka takes.

In the first one the producer keeps its epoch from claim to claim: a request to end a transaction
that is delayed ends whichever is open when it arrives. In the second one (KIP-890) every end
raises the epoch, so that what is late is refused, an end may be asked for again until there is an
answer, and a write puts its partition into the transaction by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from aiokafka.protocol.transaction import InitProducerIdRequest

from txbroker.kafka.protocol.packed import (
    Batches,
    EndTxnResponse,
    EndTxnV0,
    EndTxnV5,
    PackedRequest,
    ProduceResponse,
    ProduceV7,
    ProduceV12,
)
from txbroker.kafka.protocol.schemas import BeginRequest, finalized_features

ACKS_ALL = -1
_FEATURE = "transaction.version"
_SECOND_FROM = 2
"""The level of the feature from which on brokers speak the second version to clients."""
_NEEDED = {
    BeginRequest.API_KEY: BeginRequest.VERSION,
    EndTxnV5.API_KEY: EndTxnV5.API_VERSION,
    ProduceV12.API_KEY: ProduceV12.API_VERSION,
}
_EPOCH_MAX = (1 << 15) - 1

Partition: TypeAlias = tuple[str, int]
"""A topic and the number of one of its partitions."""

ProducerIdentity = tuple[int, int]
"""A producer id and its epoch."""
NO_PRODUCER: ProducerIdentity = (-1, -1)


class PartitionResult(NamedTuple):
    """What a broker says of one partition of a write."""

    topic: str
    partition: int
    code: int
    base_offset: int
    timestamp_ms: int
    message: str | None


class TxnProtocolV1:
    """The first version; partitions are put into a transaction before they are written.

    Attributes:
        number: of the version.
        explicit_add_partitions: whether partitions have to be put into the transaction beforehand.
        retries_unanswered: whether a request that the coordinator did not answer may be resent.
        epoch_limit: the first epoch in which no transaction is to be opened.
    """

    number = 1
    explicit_add_partitions = True
    retries_unanswered = False
    epoch_limit = _EPOCH_MAX + 1

    def begin(
        self, transactional_id: Any, timeout_ms: int, current: ProducerIdentity = NO_PRODUCER
    ) -> Any:
        """Return the request for a producer id; `transactional_id` is None for one without."""
        return InitProducerIdRequest(transactional_id, timeout_ms)

    def write(self, transactional_id: Any, timeout_ms: int, batches: Batches) -> PackedRequest:
        """Return the request that writes."""
        return ProduceV7(transactional_id, ACKS_ALL, timeout_ms, batches)

    def parse_produce_response(self, answer: ProduceResponse) -> Iterator[PartitionResult]:
        """Yield what a broker says of each partition."""
        for topic, partitions in answer.topics:
            for number, code, offset, timestamp, *_rest in partitions:
                yield PartitionResult(topic, number, code, offset, timestamp, None)

    def end(
        self, transactional_id: Any, producer_id: int, epoch: int, *, commit: bool
    ) -> PackedRequest:
        """Return the request that ends a transaction."""
        return EndTxnV0(transactional_id, producer_id, epoch, commit)

    def next(self, answer: EndTxnResponse) -> ProducerIdentity | None:
        """Return the producer id and epoch of the next transaction where an end changes them."""
        return None


class TxnProtocolV2(TxnProtocolV1):
    """The second version: KIP-890."""

    number = 2
    explicit_add_partitions = False
    retries_unanswered = True
    # Epochs go by quickly here, and brokers that have to abort a transaction in the last of them
    # can get stuck (KAFKA-19367, KAFKA-20090).
    epoch_limit = _EPOCH_MAX - 3

    def begin(
        self, transactional_id: Any, timeout_ms: int, current: ProducerIdentity = NO_PRODUCER
    ) -> Any:
        """Return the request for a producer id; with `current` for the epoch behind it, or a new
        producer id behind the last epoch: that is refused, and fences nobody, where somebody else
        has taken the transactional id."""
        return BeginRequest(transactional_id, timeout_ms, *current)

    def write(self, transactional_id: Any, timeout_ms: int, batches: Batches) -> PackedRequest:
        """Return the request that writes and puts the partitions into the transaction."""
        return ProduceV12(transactional_id, ACKS_ALL, timeout_ms, batches)

    def parse_produce_response(self, answer: ProduceResponse) -> Iterator[PartitionResult]:
        """Yield what a broker says of each partition."""
        for topic, partitions in answer.topics:
            for number, code, offset, timestamp, message in partitions:
                yield PartitionResult(topic, number, code, offset, timestamp, message)

    def end(
        self, transactional_id: Any, producer_id: int, epoch: int, *, commit: bool
    ) -> PackedRequest:
        """Return the request that ends a transaction and raises the epoch."""
        return EndTxnV5(transactional_id, producer_id, epoch, commit)

    def next(self, answer: EndTxnResponse) -> ProducerIdentity | None:
        """Return the producer id and epoch of the next transaction."""
        return answer.producer_id, answer.producer_epoch


TXN_V1, TXN_V2 = TxnProtocolV1(), TxnProtocolV2()


def negotiate(answer: Any) -> TxnProtocolV1:
    """Return the newest version that a broker takes, from its answer to a `FeaturesRequest`.

    A feature is finalized only while all brokers have it, so one broker's word is enough; and it
    can be taken back while a cluster runs, so it is asked for at every claim.
    """
    if finalized_features(answer).get(_FEATURE, 0) < _SECOND_FROM:
        return TXN_V1
    known = {key: last for key, _first, last, _tags in answer.api_versions}
    understood = all(known.get(key, -1) >= version for key, version in _NEEDED.items())
    return TXN_V2 if understood else TXN_V1
