"""What is written in a Kafka transaction, and what a broker refuses of it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from txbroker.core.records import Record
from txbroker.errors import KafkaUnavailable


class Copy(Struct, frozen=True, gc=False):
    """A record to write within a commit, for example to a dead-letter topic."""

    topic: str
    partition: int
    record: Record


class CopyRefused(KafkaUnavailable):
    """A broker refused copies, and so the whole commit: nothing of it was stored.

    Attributes:
        copies: refused ones, at least one. Of the others some may be refused next time.
        too_large: they are larger than their topic takes.
        passing: waiting can help, see `Cause`: the topic is at fault, not the copies.
    """

    lasting = True

    def __init__(
        self,
        message: str,
        copies: Sequence[Copy],
        *,
        too_large: bool = False,
        passing: bool = False,
    ) -> None:
        super().__init__(message)
        self.copies = copies
        self.too_large = too_large
        self.passing = passing
