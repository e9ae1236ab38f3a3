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
    EndRequest,
    EndTxnRequest,
    Over,
    Packed,
    ProduceRequest,
    WriteRequest,
    Written,
)
from txbroker.kafka.protocol.schemas import BeginRequest, FeaturesRequest, finalized_features

ACKS_ALL = -1
_FEATURE = "transaction.version"
_SECOND_FROM = 2
"""The level of the feature from which on brokers speak the second version to clients."""
_NEEDED = {
    BeginRequest.API_KEY: BeginRequest.VERSION,
    EndRequest.API_KEY: EndRequest.API_VERSION,
    WriteRequest.API_KEY: WriteRequest.API_VERSION,
}
_EPOCH_MAX = (1 << 15) - 1

Partition: TypeAlias = tuple[str, int]
"""A topic and the number of one of its partitions."""

Current = tuple[int, int]
"""A producer id and its epoch."""
NOBODY: Current = (-1, -1)


class Answered(NamedTuple):
    """What a broker says of one partition of a write."""

    topic: str
    partition: int
    code: int
    base_offset: int
    timestamp_ms: int
    message: str | None


class First:
    """The first version; partitions are put into a transaction before they are written.

    Attributes:
        number: of the version.
        adds: whether partitions have to be put into the transaction beforehand.
        asks_again: whether a request to the coordinator without an answer may be sent again.
        renews_from: the first epoch in which no transaction is to be opened.
    """

    number = 1
    adds = True
    asks_again = False
    renews_from = _EPOCH_MAX + 1

    def begin(self, transactional_id: Any, timeout_ms: int, current: Current = NOBODY) -> Any:
        """Return the request for a producer id; `transactional_id` is None for one without."""
        return InitProducerIdRequest(transactional_id, timeout_ms)

    def write(self, transactional_id: Any, timeout_ms: int, batches: Batches) -> Packed:
        """Return the request that writes."""
        return ProduceRequest(transactional_id, ACKS_ALL, timeout_ms, batches)

    def written(self, answer: Written) -> Iterator[Answered]:
        """Yield what a broker says of each partition."""
        for topic, partitions in answer.topics:
            for number, code, offset, timestamp, *_rest in partitions:
                yield Answered(topic, number, code, offset, timestamp, None)

    def end(self, transactional_id: Any, producer_id: int, epoch: int, *, commit: bool) -> Packed:
        """Return the request that ends a transaction."""
        return EndTxnRequest(transactional_id, producer_id, epoch, commit)

    def next(self, answer: Over) -> Current | None:
        """Return the producer id and epoch of the next transaction where an end changes them."""
        return None


class Second(First):
    """The second version: KIP-890."""

    number = 2
    adds = False
    asks_again = True
    # Epochs go by quickly here, and brokers that have to abort a transaction in the last of them
    # can get stuck (KAFKA-19367, KAFKA-20090).
    renews_from = _EPOCH_MAX - 3

    def begin(self, transactional_id: Any, timeout_ms: int, current: Current = NOBODY) -> Any:
        """Return the request for a producer id; with `current` for the epoch behind it, or a new
        producer id behind the last epoch: that is refused, and fences nobody, where somebody else
        has taken the transactional id."""
        return BeginRequest(transactional_id, timeout_ms, *current)

    def write(self, transactional_id: Any, timeout_ms: int, batches: Batches) -> Packed:
        """Return the request that writes and puts the partitions into the transaction."""
        return WriteRequest(transactional_id, ACKS_ALL, timeout_ms, batches)

    def written(self, answer: Written) -> Iterator[Answered]:
        """Yield what a broker says of each partition."""
        for topic, partitions in answer.topics:
            for number, code, offset, timestamp, message in partitions:
                yield Answered(topic, number, code, offset, timestamp, message)

    def end(self, transactional_id: Any, producer_id: int, epoch: int, *, commit: bool) -> Packed:
        """Return the request that ends a transaction and raises the epoch."""
        return EndRequest(transactional_id, producer_id, epoch, commit)

    def next(self, answer: Over) -> Current | None:
        """Return the producer id and epoch of the next transaction."""
        return answer.producer_id, answer.producer_epoch


FIRST, SECOND = First(), Second()

Question = FeaturesRequest
"""Asks a broker which version the cluster takes; `chosen` reads its answer."""


def chosen(answer: Any) -> First:
    """Return the newest version that a broker takes, from its answer to a `Question`.

    A feature is finalized only while all brokers have it, so one broker's word is enough; and it
    can be taken back while a cluster runs, so it is asked for at every claim.
    """
    if finalized_features(answer).get(_FEATURE, 0) < _SECOND_FROM:
        return FIRST
    known = {key: last for key, _first, last, _tags in answer.api_versions}
    understood = all(known.get(key, -1) >= version for key, version in _NEEDED.items())
    return SECOND if understood else FIRST
