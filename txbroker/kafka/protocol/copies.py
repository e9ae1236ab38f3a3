"""Copies as batches, which copies of a refused batch are at fault, and why."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple, Protocol

from txbroker.core.records import Cause, Partition
from txbroker.door.writing import Copy
from txbroker.kafka.protocol.batch import Body, batch_body
from txbroker.kafka.protocol.codes import RETRIABLE, TOPIC_REFUSED, Code, describe

_BATCH_BYTES = 1_000_000
"""A bit less than the default of `max.message.bytes`."""
_TOO_LARGE = (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE)


def default_bytes(topic: str) -> int:
    """Return the size of batches for a topic of unknown settings."""
    return _BATCH_BYTES


class Batch(NamedTuple):
    """A batch of copies for one partition."""

    body: Body
    indexes: Sequence[int]
    """Of its copies among all."""


class BatchRefusal(Protocol):
    """Why a broker refused a batch.

    Attributes:
        partition: topic and partition.
        code: the broker's error code.
        message: its reason, "" if it gave none.
        records: which records of the batch are at fault, as far as known.
    """

    partition: Partition
    code: int
    message: str
    records: Sequence[int]


class RefusedBatch(NamedTuple):
    """A batch that a broker refused."""

    batch: Batch
    why: BatchRefusal


_CAUSES = {
    Code.MESSAGE_TOO_LARGE: ("too_large", "is larger than max.message.bytes: raise that setting"),
    Code.RECORD_LIST_TOO_LARGE: ("too_large", "is larger than a segment: raise segment.bytes"),
    Code.TOPIC_AUTHORIZATION_FAILED: (
        "not_authorized",
        "may not be written by this login: grant it Write on the topic",
    ),
    Code.UNKNOWN_TOPIC_OR_PARTITION: ("unknown_topic", "does not exist: create it"),
    Code.INVALID_TIMESTAMP: (
        "bad_timestamp",
        "rejects the message's timestamp: see message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms",
    ),
    Code.INVALID_RECORD: (
        "bad_record",
        "rejects the message: a compacted topic takes none without a key",
    ),
}


def cause_of(error: BatchRefusal) -> Cause:
    """Return why a topic refused a batch."""
    topic, number = error.partition
    name = f"{topic}-{number}"
    passing = error.code in RETRIABLE
    try:
        code, sentence = _CAUSES[Code(error.code)]
    except (ValueError, KeyError):
        why = ": ".join(filter(None, (describe(error.code), error.message)))
        return Cause("refused", f"{name} refused: {why}", topic, number, passing)
    if error.code == Code.INVALID_RECORD and error.message and "ompacted" not in error.message:
        sentence = f"rejects the message: {error.message}"  # of a plugin of the broker
    return Cause(code, f"{name} {sentence}", topic, number, passing)


class Batches:
    """The copies of one commit as batches, which become smaller until it is known which copies are
    refused: a broker refuses a batch as a whole.

    Args:
        limits: sizes of batches by topic, bytes, kept for later commits. They shrink if a topic
            takes smaller batches than others do.
        bytes_max: returns the size for a topic without a limit.
    """

    def __init__(self, limits: MutableMapping[str, int], bytes_max: Callable[[str], int]) -> None:
        self._limits = limits
        self._bytes_max = bytes_max
        self._cuts: set[int] = set()
        """Indexes of copies that begin a batch."""

    def rounds(self, copies: Sequence[Copy]) -> list[dict[Partition, Batch]]:
        """Return the copies as batches, in order; each round writes at most one to a partition."""
        rounds: list[dict[Partition, Batch]] = []
        by_partition: dict[Partition, list[int]] = {}
        for index, copy in enumerate(copies):
            by_partition.setdefault((copy.topic, copy.partition), []).append(index)
        for at, indexes in by_partition.items():
            for number, batch in enumerate(self._batches(at[0], copies, indexes)):
                if number == len(rounds):
                    rounds.append({})
                rounds[number][at] = batch
        return rounds

    def _batches(self, topic: str, copies: Sequence[Copy], indexes: Sequence[int]) -> list[Batch]:
        limit, found, begin = self._limits.get(topic) or self._bytes_max(topic), [], 0
        cuts = [n for n, index in enumerate(indexes) if index in self._cuts] if self._cuts else []
        for end in (*cuts, len(indexes)):
            while begin < end:
                body = batch_body([copies[index].record for index in indexes[begin:end]], limit)
                found.append(Batch(body, indexes[begin : begin + body.count]))
                begin += body.count
        return found

    def refused(self, refused: RefusedBatch, copies: Sequence[Copy]) -> Sequence[int]:
        """Return the indexes of copies that are certainly refused; none: the next batches are
        smaller."""
        batch, why = refused
        topic, number = why.partition
        if why.code in TOPIC_REFUSED:
            return [
                index
                for index, copy in enumerate(copies)
                if copy.topic == topic
                and (copy.partition == number or why.code != Code.UNKNOWN_TOPIC_OR_PARTITION)
            ]
        if len(batch.indexes) == 1:
            return batch.indexes
        if why.records:
            return [batch.indexes[number] for number in why.records]
        if why.code in _TOO_LARGE:
            self._limits[topic] = batch.body.batch_bytes // 2
        else:
            self._cuts.add(batch.indexes[len(batch.indexes) // 2])
        return ()
