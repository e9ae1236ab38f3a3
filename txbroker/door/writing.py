"""Writes in a Kafka transaction, and their outcomes.

A write that returns is written, a commit that returns is committed. The three other outcomes are
errors, which no caller passes over by mistake; each says what the caller may do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from txbroker.core.records import Cause, Partition, Record
from txbroker.errors import KafkaUnavailable


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

    def __init__(
        self, message: str | None = None, cause: Cause | None = None, *, lasting: bool = False
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.lasting = lasting


class PositionRecord(NamedTuple):
    """A position that is kept as the newest record with a key, in a compacted topic of one
    partition."""

    topic: str
    key: str


class Identity(Protocol):
    """Who commits as a member of a group. Read for every attempt: it changes with each generation.

    Attributes:
        instance: the instance id; None for a dynamic member.
    """

    generation: int
    member_id: str
    instance: str | None


class GroupOffsets(Struct, frozen=True):
    """Offsets to commit for a consumer group.

    Attributes:
        offsets: that of the next record, and metadata, by partition.
        member: they are stored in its generation alone; None: in any, so that nothing fences an
            earlier process but the writer's claim.
    """

    group: str
    offsets: Mapping[Partition, tuple[int, str]]
    member: Identity | None = None


class Writer(Protocol):
    """Writes records and positions, each time in one Kafka transaction.

    Its own position, if it has a `PositionRecord`, is the newest record with that key that it or an
    earlier writer with its transactional id wrote; see `PositionScan`. One call at a time. After
    any error but `Refused`, and after a call that was cancelled, the writer must be claimed again:
    until then `write` and `commit` raise `Unknown`.
    """

    async def look(self) -> bytes | None:
        """Return the stored position without a claim; None: there is none.

        Raises:
            ConfigurationError: the position cannot be proved.
            KafkaUnavailable
        """

    async def claim(self) -> bytes | None:
        """Fence earlier writers with the same transactional id, and return the stored position.

        Nothing of an earlier writer is committed after this has returned. A position that is older
        than another client's record with its key is stored again, as compaction would remove it.

        Raises:
            ConfigurationError: the position cannot be proved.
            KafkaUnavailable
        """

    async def write(self, copies: Sequence[Copy]) -> None:
        """Add records to the open transaction, or begin one.

        They may be sent with a later call, which raises their errors: indexes of `Refused` are
        those of all records written since the transaction began.

        Raises:
            Refused, Fenced
            Unknown: the next claim aborts the transaction.
        """

    async def abort(self) -> None:
        """Drop all messages written since the last commit.

        Where the writer must be claimed again, also after a call that was cancelled, end its
        transaction if Kafka answers soon, without an error: readers need not wait for the claim.

        Raises:
            Fenced, Unknown
        """

    async def commit(
        self, position: bytes | None = None, offsets: Sequence[GroupOffsets] = ()
    ) -> None:
        """Store positions in the open transaction, or in one that begins, and commit it.

        Args:
            position: the new value of its `PositionRecord`; None: that stays.
            offsets: of groups.

        Raises:
            Fenced: another process has claimed the transactional id; or a member's generation has
                ended, then nothing is stored and the writer may be used.
            Refused, Unknown
        """
