"""The operations of a proxy: requests, answers and the `Service` protocol.

`Broker` implements `Service`; the HTTP API and the SDK's sessions are thin layers over it, and the
command line reads the same answers as JSON.
"""

from collections.abc import Awaitable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from txbroker.core.records import Attempt, Cause, Decision, Message, Source, State
from txbroker.errors import RequestError


class PrepareRequest(Struct, frozen=True):
    """A request to store messages as a half message.

    Attributes:
        id: made by the SDK; None lets the proxy make one (from `dedup_key` if given).
        instance: the SDK process that prepares; checks prefer it.
    """

    group: str
    messages: tuple[Message, ...]
    id: str | None = None
    dedup_key: str | None = None
    order_key: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    instance: str = ""
    check_attempts_max: int | None = None
    check_timeout_s: float | None = None


class DecideRequest(Struct, frozen=True):
    """A request to commit or roll back a transaction.

    Attributes:
        group: the deciding group, "" if the caller names none.
        messages: replace the prepared ones, with the same topics and count.
        by: the caller, for the marker.
        wait: answer only when `read_committed` consumers can see the messages, or a target has
            refused them.
        wait_s: maximum wait in seconds; 0 waits indefinitely.
    """

    id: str
    decision: Decision
    group: str = ""
    messages: tuple[Message, ...] | None = None
    reason: str = ""
    source: Source = Source.PRODUCER
    by: str = ""
    wait: bool = False
    wait_s: float = 0.0


class TransactionStatus(Struct, frozen=True):
    """The status of a transaction; `created` is True if this call stored it."""

    id: str
    state: State
    decision: Decision | None = None
    created: bool = False


Answer: TypeAlias = TransactionStatus | RequestError
"""The result of one operation of a run."""


class Run(NamedTuple):
    """Operations that are executed together.

    Attributes:
        numbers: of these operations in the request.
        answers: their answers in this order; to be awaited once.
    """

    numbers: Sequence[int]
    answers: Awaitable[Sequence[Answer]]


class PlacedMessage(Struct, frozen=True):
    """A message of a transaction and, once promoted, its offset.

    Attributes:
        offset: None before promotion, or if it was promoted before this proxy started.
        message: None if the body is not in memory and was not requested.
    """

    topic: str
    partition: int
    offset: int | None = None
    message: Message | None = None


class Event(Struct, frozen=True):
    """One event of a transaction's history, by log time."""

    at_ms: int
    event: str
    """`prepared`, a MarkerKind, `promoted`, `refused` or `conflict`."""
    text: str = ""


class TransactionView(Struct, frozen=True):
    """Everything known about one transaction.

    Attributes:
        waiting: why a check that is due is not made; "" if nothing prevents it.
    """

    id: str
    group: str
    state: State
    partition: int
    half_offset: int
    prepared_at_ms: int
    messages: tuple[PlacedMessage, ...]
    order_key: str | None = None
    dedup_key: str | None = None
    decision: Decision | None = None
    decided_at_ms: int | None = None
    source: Source | None = None
    by: str = ""
    reason: str = ""
    round: int = 1
    attempts: int = 0
    attempts_max: int = 15
    next_check_at_ms: int | None = None
    cause: Cause | None = None
    checks: tuple[Attempt, ...] = ()
    timeline: tuple[Event, ...] = ()
    waiting: str = ""


LIST_LIMIT_MAX = 1000
"""Transactions on one page of a list."""
LISTED_MESSAGES_MAX = 10_000
"""Messages on one page of a list, of all its transactions: 3 MB with the longest topics. A page
that would have more has fewer transactions."""


class ListRequest(Struct, frozen=True):
    """A request for a list of transactions, oldest first; None matches any.

    Attributes:
        cursor: of the last page.
        partitions: only these half partitions, for calls between proxies.
        groups_allowed, groups_denied: patterns of the groups that the caller may see; others are
            left out by the owner, so that no cursor names their transactions.
    """

    state: State | None = None
    group: str | None = None
    topic: str | None = None
    older_than_s: float | None = None
    limit: int = 100
    cursor: str | None = None
    partitions: tuple[int, ...] | None = None
    groups_allowed: tuple[str, ...] | None = None
    groups_denied: tuple[str, ...] = ()


class TransactionPage(Struct, frozen=True):
    """A page of a list; `next_cursor` is None on the last one."""

    transactions: tuple[TransactionView, ...]
    next_cursor: str | None = None


class PartitionState(StrEnum):
    """The state of a half partition at a proxy.

    An assigned partition that is not `owned` makes the proxy not ready.
    """

    OWNED = "owned"
    ELSEWHERE = "elsewhere"
    """Owned by another proxy, whose URL is known."""
    NONE = "none"
    """Without a known owner."""
    CLAIMING = "claiming"
    REPLAYING = "replaying"
    SUSPENDED = "suspended"
    """Ours until contact with the group was lost; everything waits until it is assigned again."""
    HANGING = "hanging"
    """An open Kafka transaction hides its checkpoint."""
    TRUNCATED = "truncated"
    """Its topics end before what was promoted, or were recreated."""
    NEWER = "newer"
    """A newer txbroker wrote records that this one cannot read."""
    STOPPED = "stopped"
    """An invariant is broken."""


class Readiness(Struct, frozen=True):
    """Whether the proxy is ready, and the state of each half partition."""

    ready: bool
    partitions: dict[int, str]
    """A PartitionState, followed by `: <why>` if there is a reason."""
    problems: tuple[str, ...] = ()


OVERVIEW_GROUPS_MAX = 1000
"""Groups in an overview: those that need attention first."""
INSTANCES_SHOWN_MAX = 100
"""Connected instances of one group in an overview."""


class Rates(Struct, frozen=True):
    """Transactions per second, over the last ten seconds."""

    prepared_per_s: float = 0.0
    decided_per_s: float = 0.0
    promoted_per_s: float = 0.0


class PartitionOverview(Struct, frozen=True):
    """One half partition: its owner, state and counts.

    Attributes:
        owner: URL of its proxy, "" if unknown.
        state: a PartitionState, or `unreachable` if its proxy did not answer.
        why: the reason for the state, "" without one.
        pending, parked, refused, committed: transactions; None if unknown.
        oldest_pending_age_s: None if unknown, or without one.
        oldest_committed_age_s: the age of the oldest commit that is not visible yet.
    """

    partition: int
    owner: str
    state: str
    why: str = ""
    pending: int | None = None
    parked: int | None = None
    refused: int | None = None
    committed: int | None = None
    oldest_pending_age_s: float | None = None
    oldest_committed_age_s: float | None = None
    rates: Rates = Rates()


class GroupOverview(Struct, frozen=True):
    """One producer group: its undecided transactions, and whether it can be asked.

    Attributes:
        sessions: connected instances with a check function, of all proxies; if more than
            `instances` can name, the most that one proxy has.
        instances: their names, at most `INSTANCES_SHOWN_MAX`.
        unreachable_since_ms: since when no endpoint of it could be reached; None if reachable.
        unreachable_why: the error of the last attempt.
    """

    group: str
    pending: int = 0
    parked: int = 0
    oldest_pending_age_s: float | None = None
    sessions: int = 0
    instances: tuple[str, ...] = ()
    unreachable_since_ms: int | None = None
    unreachable_why: str = ""


class ProxyOverview(Struct, frozen=True):
    """One proxy: its own report, or why there is none.

    Attributes:
        reached: False if it did not answer; then the rest is unknown.
        ready: as in its `/readyz`.
        problems: as in its `/readyz`, and credential files that cannot be used.
        version: of its build.
        partitions: the half partitions that it owns.
        now_ms: its estimate of the brokers' clock.
        why: why it did not answer.
        admin_url: its separate URL for operators, "" if that is `url`.
    """

    url: str
    reached: bool = True
    ready: bool = False
    problems: tuple[str, ...] = ()
    version: str = ""
    partitions: tuple[int, ...] = ()
    now_ms: int = 0
    why: str = ""
    admin_url: str = ""


class Overview(Struct, frozen=True):
    """The state of proxies, half partitions and groups. Ages are seconds, times milliseconds since
    1970.

    Attributes:
        complete: False if a proxy or a half partition did not answer: the counts of its half
            partitions are null, and sums are lower bounds.
        groups: those that need attention first; `groups_left_off` further ones are left out.
        refused_topics: refused transactions by the topic that refuses them.
    """

    at_ms: int
    complete: bool
    proxies: tuple[ProxyOverview, ...]
    partitions: tuple[PartitionOverview, ...]
    groups: tuple[GroupOverview, ...]
    groups_left_off: int
    refused_topics: dict[str, int]


class Service(Protocol):
    """The operations of a proxy. Every method may raise `txbroker.errors.RequestError`."""

    def runs(self, requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        """Start operations of one group and return them as runs.

        An operation that must be executed alone, or is refused at once, is a run of one.
        """

    async def prepare(self, request: PrepareRequest) -> TransactionStatus:
        """Store a half message; returns when the brokers have it (acks=all)."""

    async def decide(self, request: DecideRequest) -> TransactionStatus:
        """Write a marker; returns when the ledger has applied it."""

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        """Pull the next attempt forward, never the last of a round.

        Args:
            group: the required group of the transaction, "" for any.
        """

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        """Make a parked transaction pending again, or retry a refused one at once."""

    async def find(self, id: str, *, bodies: bool = False) -> TransactionView:
        """Return everything known about a transaction."""

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return unsettled transactions and those settled within the window.

        Checks and timelines are left out; `find` returns them.
        """

    async def overview(self) -> Overview:
        """Return counts, owners and rates of the installation.

        A proxy that does not answer is shown as such, with its partitions.
        """

    def readiness(self) -> Readiness:
        """Return whether calls can be taken, and if not, why."""

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" if unknown."""

    def now_ms(self) -> int:
        """Return the estimated clock of the brokers, by which ids are made."""


async def alone(service: Service, request: PrepareRequest | DecideRequest) -> Sequence[Answer]:
    """Execute one operation and return its answer as that of a run of one."""
    try:
        if isinstance(request, PrepareRequest):
            return (await service.prepare(request),)
        return (await service.decide(request),)
    except RequestError as error:
        return (error,)
