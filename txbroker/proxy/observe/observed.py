"""What metrics and overviews read of a half partition and of the broker.

They read counters that the ledgers keep and walk no transactions, so that a scrape takes
milliseconds even with a million pending transactions.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from txbroker.contract.service import Readiness
from txbroker.core.ledger import Ledger
from txbroker.proxy.observe.rates import RateCounter


class ObservedPartition(Protocol):
    """The owner of a half partition."""

    partition: int
    ledger: Ledger
    rates: RateCounter

    def now_ms(self) -> int:
        """Return the time by the brokers' clock, ms."""
        ...


class ObservedBroker(Protocol):
    """The broker of one proxy."""

    def ledgers(self) -> Iterable[ObservedPartition]:
        """Return the owners of the half partitions that are certainly this proxy's."""
        ...

    def readiness(self) -> Readiness:
        """Return the state of each half partition."""
        ...

    def topic_problems(self) -> Sequence[str]:
        """Return the problems of txbroker's own topics."""
        ...
