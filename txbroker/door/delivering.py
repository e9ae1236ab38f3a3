"""What a relay asks of Kafka: records and the position that they end at, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from txbroker.door.consuming import Copy
from txbroker.errors import KafkaUnavailable


class WriterFenced(KafkaUnavailable):
    """Another process has claimed this writer's transactional id: nothing more can be written."""

    lasting = True


class DeliveryWriter(Protocol):
    """Writes deliveries, each in one Kafka transaction with a position.

    The position is the newest record with this writer's key in a compacted topic. One call at a
    time; after any error but `CopyRefused` the writer must be claimed again.
    """

    async def look(self) -> bytes | None:
        """Return the stored position without a claim; None: there is none."""

    async def claim(self) -> bytes | None:
        """Fence earlier writers with the same transactional id, and return the stored position.

        Nothing of an earlier writer is committed after this has returned.

        Raises:
            KafkaUnavailable
        """

    async def write(self, copies: Sequence[Copy]) -> None:
        """Add records to the open transaction, or begin one.

        Raises:
            CopyRefused: a broker refused some; the transaction is aborted.
            WriterFenced
            KafkaUnavailable: the transaction is aborted, or will be by the next claim.
        """

    async def abort(self) -> None:
        """Drop all messages written since the last commit.

        Raises:
            WriterFenced, KafkaUnavailable
        """

    async def commit(self, position: bytes) -> None:
        """Store a position in the open transaction, and commit it.

        Raises:
            CopyRefused, WriterFenced
            KafkaUnavailable: whether it is committed is unknown until the next claim.
        """
