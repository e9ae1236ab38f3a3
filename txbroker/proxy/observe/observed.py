"""What operators' views read: the overview, the gauges and the history of one proxy."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from txbroker.contract.service import (
    HISTORY_STEPS_S,
    AuditOverview,
    CheckReport,
    GroupChecks,
    History,
    HistoryRequest,
    InstanceOverview,
    OperatorAction,
    Readiness,
)
from txbroker.core.ledger import Ledger
from txbroker.proxy.observe.counting import RateCounter
from txbroker.proxy.partition.clock import LogTime

Actions: TypeAlias = tuple[tuple[OperatorAction, ...], dict[int, int]]
"""Operators' actions, and by half partition from when on they are known, ms."""


class ObservedKafka(Protocol):
    """Whether Kafka answers an owner.

    Attributes:
        why: the error of the last read, "" if it succeeded.
    """

    why: str

    def silent_since_ms(self, now_ms: int) -> int | None:
        """Return since when Kafka has not answered, None if it answers."""


class ObservedPartition(Protocol):
    """The owner of a half partition.

    Attributes:
        clock: the brokers' clock.
        suspended_since_ms: None if it is not suspended.
    """

    partition: int
    ledger: Ledger
    clock: LogTime
    rates: RateCounter
    suspended_since_ms: int | None

    @property
    def kafka(self) -> ObservedKafka:
        """Whether Kafka answers it."""


class ObservedPartitions(Protocol):
    """The half partitions of one proxy.

    Attributes:
        url: the proxy's URL.
        own_admin_url: where it takes calls of operators, "" if at `url`.
        topic_problems: the problems of txbroker's own topics.
    """

    url: str
    own_admin_url: str
    topic_problems: tuple[str, ...]

    def open(self) -> Mapping[int, ObservedPartition]:
        """Return the owners that are open here, suspended ones included."""

    def assigned(self) -> Sequence[str]:
        """Return the proxy of each half partition of the installation; none if not known."""


class ObservedBroker(Protocol):
    """The broker of one proxy."""

    @property
    def partitions(self) -> ObservedPartitions:
        """Its half partitions."""

    def now_ms(self) -> int:
        """Return the brokers' clock, ms."""

    def ledgers(self) -> Iterable[ObservedPartition]:
        """Return the owners of the half partitions that are certainly this proxy's."""

    def readiness(self) -> Readiness:
        """Return the state of each half partition."""


class Past:
    """The last hour of one proxy; of one that does not observe itself, nothing is known."""

    def lost(self) -> int:
        """Return how many transactions were found without their half messages."""
        return 0

    def prepare_p99_s(self) -> float | None:
        """Return the 99th percentile of prepares in the last 5 minutes, seconds; None without."""
        return None

    def growth_per_s(self, group: str) -> float | None:
        """Return by how much the pending transactions of a group grow, on average of the last 15
        minutes; None if they were not observed that long."""
        return None

    async def history(self, request: HistoryRequest) -> History:
        """Return the history of this proxy."""
        return History(HISTORY_STEPS_S[-1])


class Observed(Protocol):
    """One proxy. The defaults are those of a proxy of which only the broker is known.

    Attributes:
        past: the last hour.
    """

    broker: ObservedBroker
    past: Past

    # --- groups --------------------------------------------------------------------------------

    def connected(self) -> Mapping[str, Sequence[str]]:
        """Return the instances of each group that have a session at this proxy."""
        return {}

    def instances(self, group: str) -> Sequence[InstanceOverview]:
        """Return the same of one group, described."""
        return ()

    def unreachable(self) -> Mapping[str, str]:
        """Return the reason for each unreachable group."""
        return {}

    def unreachable_for_s(self) -> Mapping[str, float]:
        """Return for how many seconds each of them has been unreachable."""
        return {}

    def check_urls(self) -> Collection[str]:
        """Return the groups that can be asked at a URL."""
        return ()

    # --- checks --------------------------------------------------------------------------------

    def checks(self, now_ms: int) -> Mapping[str, GroupChecks]:
        """Return the checks of each group, their times by this time."""
        return {}

    def take_checks(self) -> Mapping[str, Sequence[int]]:
        """Return the checks of each group since the last call, by outcome."""
        return {}

    def reports(self, group: str, now_ms: int) -> Sequence[CheckReport]:
        """Return the last checks of a group, their times by this time."""
        return ()

    # --- the proxy -----------------------------------------------------------------------------

    def files_not_read(self) -> Mapping[str, bool]:
        """Return by setting whether the content of its file cannot be used."""
        return {}

    def audits(self) -> Iterable[AuditOverview]:
        """Return the newest results of audits."""
        return ()

    def retention(self) -> tuple[float | None, float | None]:
        """Return the retention of half messages and the headroom, as in `ProxyOverview`."""
        return None, None

    def latencies(self) -> Mapping[str, tuple[Sequence[float], Sequence[int]]]:
        """Return bounds and counts of the buckets of each latency, by the metric's name."""
        return {}

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return the present problems, as pairs of text and group."""
        return ()

    async def actions(self) -> Actions:
        """Return what operators did."""
        return (), {}
