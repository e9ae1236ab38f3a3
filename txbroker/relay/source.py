"""What a relay reads: messages with a position, in deliveries that become visible whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from txbroker.core.records import Message
from txbroker.door.placing import Refusal
from txbroker.errors import TxbrokerError


class DeliveryRefused(TxbrokerError):
    """Kafka refuses a message that cannot be left out: the relay waits and tries again."""


class Delivery(Protocol):
    """Messages of one or several whole database transactions; they become visible together, in one
    Kafka transaction with their position.

    """

    @property
    def position(self) -> bytes:
        """Where the source goes on after it; known once all pieces were taken."""

    def pieces(self) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages, in order and with all headers, about a megabyte at a time."""


class DeliverySource(Protocol):
    """Where messages come from. One call at a time."""

    async def resume(self, position: bytes | None) -> None:
        """Begin after a position, or at the beginning; called at the start and after each failure.

        Nothing that was returned before counts, unless `position` includes it.

        Raises:
            ConfigurationError: the database no longer has what follows the position, or is not set
                up: the relay stops.
            DatabaseUnavailable: the relay tries again.
        """

    async def next(self) -> Delivery:
        """Wait for committed messages, and return them. See `resume` for errors."""

    async def delivered(self, delivery: Delivery) -> None:
        """Note that a delivery and its position are committed in Kafka: only now may the database
        forget it."""

    async def refused(self, delivery: Delivery, refusals: Sequence[Refusal]) -> None:
        """Note that Kafka refuses messages of a delivery; nothing of it was written.

        Return if `next` goes on without them.

        Raises:
            DeliveryRefused: it cannot: the relay tries again with growing pauses.
        """

    async def close(self) -> None:
        """Release all connections."""
