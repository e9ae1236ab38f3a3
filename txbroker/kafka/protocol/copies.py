"""Copies as batches, and which copies of a refused batch are at fault."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple, Protocol

from txbroker.door.consuming import Partition
from txbroker.door.writing import Copy
from txbroker.kafka.protocol.batch import Body, batch_body
from txbroker.kafka.protocol.codes import TOPIC_REFUSED, Code

_BATCH_BYTES = 1_000_000
"""A bit less than the default of `max.message.bytes`."""
_TOO_LARGE = (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE)


class Batch(NamedTuple):
    """A batch of copies for one partition."""

    body: Body
    copies: Sequence[Copy]


class Refusal(Protocol):
    """Why a broker refused a batch.

    Attributes:
        partition: topic and partition.
        code: the broker's error code.
        records: which records of the batch are at fault, as far as known.
    """

    partition: Partition
    code: int
    records: Sequence[int]


class RefusedBatch(NamedTuple):
    """A batch that a broker refused."""

    batch: Batch
    why: Refusal

    @property
    def passing(self) -> bool:
        """Whether waiting can help: the topic is created, or the right is granted."""
        return self.why.code in TOPIC_REFUSED and self.why.code != Code.INVALID_TOPIC

    def __str__(self) -> str:
        return str(self.why)

    @property
    def too_large(self) -> bool:
        """Whether its topic takes only smaller ones."""
        return self.why.code in _TOO_LARGE


class Batches:
    """The copies of one commit as batches, which become smaller until it is known which copies are
    refused: a broker refuses a batch as a whole.

    Args:
        limits: sizes of batches by topic, bytes, kept for later commits. They shrink if a topic
            takes smaller batches than others do.
    """

    def __init__(self, limits: MutableMapping[str, int]) -> None:
        self._limits = limits
        self._cuts: set[int] = set()
        """Identities of copies that begin a batch."""

    def rounds(self, copies: Sequence[Copy]) -> list[dict[Partition, Batch]]:
        """Return the copies as batches, in order; each round writes at most one to a partition."""
        rounds: list[dict[Partition, Batch]] = []
        by_partition: dict[Partition, list[Copy]] = {}
        for copy in copies:
            by_partition.setdefault((copy.topic, copy.partition), []).append(copy)
        for at, entries in by_partition.items():
            for number, batch in enumerate(self._batches(at[0], entries)):
                if number == len(rounds):
                    rounds.append({})
                rounds[number][at] = batch
        return rounds

    def _batches(self, topic: str, copies: Sequence[Copy]) -> list[Batch]:
        limit, found, begin = self._limits.get(topic, _BATCH_BYTES), [], 0
        cuts = [n for n, copy in enumerate(copies) if id(copy) in self._cuts] if self._cuts else []
        for end in (*cuts, len(copies)):
            while begin < end:
                body = batch_body([copy.record for copy in copies[begin:end]], limit)
                found.append(Batch(body, copies[begin : begin + body.count]))
                begin += body.count
        return found

    def refused(self, refused: RefusedBatch, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Return copies that are certainly refused; nothing: the next batches are smaller."""
        batch, why = refused
        topic, number = why.partition
        if why.code in TOPIC_REFUSED:
            return [
                copy
                for copy in copies
                if copy.topic == topic
                and (copy.partition == number or why.code != Code.UNKNOWN_TOPIC_OR_PARTITION)
            ]
        if len(batch.copies) == 1:
            return batch.copies
        if why.records:
            return [batch.copies[number] for number in why.records]
        if why.code in _TOO_LARGE:
            self._limits[topic] = batch.body.batch_bytes // 2
        else:
            self._cuts.add(id(batch.copies[len(batch.copies) // 2]))
        return ()
