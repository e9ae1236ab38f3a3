"""What is written in a Kafka transaction, and how a write ends.

A write that returns is written, a commit that returns is committed. The three other outcomes are
errors, which no caller passes over by mistake; each says what the caller may do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from txbroker.core.records import Cause, Record
from txbroker.errors import KafkaUnavailable

Partition: TypeAlias = tuple[str, int]
"""A topic and the number of one of its partitions."""


class Copy(Struct, frozen=True, gc=False):
    """A record to write in a transaction, for example to a dead-letter topic."""

    topic: str
    partition: int
    record: Record


class Refused(KafkaUnavailable):
    """A broker refused records: nothing of the transaction becomes visible.

    Attributes:
        indexes: of refused records in the sequence that was passed, ascending; none: the
            writer's own are at fault. Of the others some may be refused next time.
        cause: of the first one.
    """

    lasting = True

    def __init__(self, indexes: Sequence[int], cause: Cause) -> None:
        super().__init__(cause.message)
        self.indexes = indexes
        self.cause = cause

    @property
    def of_topic(self) -> bool:
        """Whether the topic is at fault: it is missing, or may not be written. Waiting can help."""
        return self.cause.code in ("unknown_topic", "not_authorized")

    @property
    def too_large(self) -> bool:
        """Whether the topic takes smaller records."""
        return self.cause.code == "too_large"


class Fenced(KafkaUnavailable):
    """Another process has what this one claimed: a partition, a position, a member's generation.
    Nothing of this transaction, nor of a later one, is stored."""


class Unknown(KafkaUnavailable):
    """Whether the transaction is committed is not known: a new claim ends it, and shows it.

    Attributes:
        cause: names the partition that did not answer, where it was one.
    """

    def __init__(self, message: str | None = None, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.cause = cause
