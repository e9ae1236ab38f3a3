"""What a proxy can be asked and what it answers, whichever way the call comes in.

`Broker` implements `Service`; the HTTP API and the SDK's sessions are two
thin shells round it, and the command line reads the same answers as JSON.
"""

from collections.abc import Awaitable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from txbroker.core.records import (
    Attempt,
    Cause,
    Decision,
    Message,
    Source,
    State,
)
from txbroker.errors import RequestError


class PrepareRequest(Struct, frozen=True):
    """Store these messages as a half message.

    Attributes:
        id: made by the SDK; None lets the proxy make one (from `dedup_key` where given).
        instance: the SDK process that prepares; it is preferred when the group is asked.
    """

    group: str
    messages: tuple[Message, ...]
    id: str | None = None
    dedup_key: str | None = None
    order_key: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    instance: str = ""


class DecideRequest(Struct, frozen=True):
    """Commit or roll back a transaction.

    Attributes:
        group: the deciding group, "" where the caller names none.
        messages: final content for the prepared ones, topics and count unchanged.
        by: who exactly, for the marker.
        wait: answer only when `read_committed` consumers can see the messages, or it is known that
            a target refuses them.
        wait_s: so long at most; 0: for as long as it takes.
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
    """Where a transaction stands. `created` is True where this very call stored it."""

    id: str
    state: State
    decision: Decision | None = None
    created: bool = False


Answer: TypeAlias = TransactionStatus | RequestError
"""What became of one operation of a run."""


class Run(NamedTuple):
    """Operations that are carried out together, and what becomes of them.

    Attributes:
        numbers: which ones of the operations that were handed over.
        answers: an answer of each, in their order; to be awaited once.
    """

    numbers: Sequence[int]
    answers: Awaitable[Sequence[Answer]]


class PlacedMessage(Struct, frozen=True):
    """A message of a transaction and, once promoted, where it is.

    `message` None: the body is not kept in memory and was not asked for. `offset` None: not
    promoted, or promoted before this proxy began.
    """

    topic: str
    partition: int
    offset: int | None = None
    message: Message | None = None


class Event(Struct, frozen=True):
    """One line of a transaction's life: what happened, when by the log, through whom."""

    at_ms: int
    event: str
    """`prepared`, a MarkerKind, `promoted`, `refused` or `conflict`."""
    text: str = ""


class TransactionView(Struct, frozen=True):
    """All that is known of one transaction.

    `waiting` says why a check that is due is not made; "" where nothing keeps it from being made.
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
"""Messages that one page of a list names, all its transactions together: with the longest topics
an answer of 3 MB. A page that would name more is a shorter one."""


class ListRequest(Struct, frozen=True):
    """Which transactions to list; None means any. Oldest first, `cursor` from the last page.

    `partitions` limits the list to these half partitions, for proxies that ask one another.
    `groups_allowed` and `groups_denied` are patterns of the groups that the caller may see; others
    are left out where the list is made, so that no cursor names their transactions.
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
    """A part of a list; `next_cursor` None where it ends."""

    transactions: tuple[TransactionView, ...]
    next_cursor: str | None = None


class PartitionState(StrEnum):
    """What a proxy does with a half partition. A partition that this proxy is to own and that is
    not `owned` makes it not ready."""

    OWNED = "owned"
    ELSEWHERE = "elsewhere"
    """Another proxy's, whose URL is known."""
    NONE = "none"
    """Nobody's, as far as is known."""
    CLAIMING = "claiming"
    REPLAYING = "replaying"
    SUSPENDED = "suspended"
    """Ours until touch with the group was lost; nothing is done until it is known again."""
    HANGING = "hanging"
    """A Kafka transaction that nobody ends hides its progress."""
    TRUNCATED = "truncated"
    """Its topics end before what was promoted, or are other topics than they were."""
    NEWER = "newer"
    """A newer txbroker wrote to it what this one does not understand."""
    STOPPED = "stopped"
    """Something that must hold does not."""


class Readiness(Struct, frozen=True):
    """Whether the proxy can take calls, and per half partition what it is doing if not."""

    ready: bool
    partitions: dict[int, str]
    """A PartitionState, followed by `: <why>` where there is more to say."""
    problems: tuple[str, ...] = ()


OVERVIEW_GROUPS_MAX = 1000
"""Groups that an overview names: those that need somebody first."""
INSTANCES_SHOWN_MAX = 100
"""Connected instances of one group that an overview names."""


class Rates(Struct, frozen=True):
    """Transactions per second, over the last ten seconds."""

    prepared_per_s: float = 0.0
    decided_per_s: float = 0.0
    promoted_per_s: float = 0.0


class PartitionOverview(Struct, frozen=True):
    """One half partition: who owns it, what is done with it and how much it holds.

    Attributes:
        owner: URL of its proxy, "" where none is known.
        state: a PartitionState as its proxy says, `unreachable` where that did not answer.
        why: what more there is to say, "" for nothing.
        pending, parked, refused, committed: transactions; None where nobody can say now.
        oldest_pending_age_s: None without any, too.
        oldest_committed_age_s: how long the oldest decision to commit waits to be visible.
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
    """One producer group: what it left undecided, and whether it can be asked.

    Attributes:
        sessions: instances that are connected and can be asked (those without a check function
            cannot), all proxies together; beyond those that `instances` can name, as many as one
            proxy has.
        instances: their names, at most `INSTANCES_SHOWN_MAX`.
        unreachable_since_ms: since when nobody of it could be asked, None where that is not so.
        unreachable_why: what the last try met.
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
    """One proxy: what it says of itself, or why it says nothing.

    Attributes:
        reached: False where it did not answer; then the rest is not known.
        ready: as its `/readyz` has it.
        problems: as its `/readyz` has them, and files of credentials that cannot be used.
        version: which build runs.
        partitions: the half partitions that are its own.
        now_ms: the brokers' clock as it knows it.
        why: why it did not answer.
        admin_url: where it takes operators' calls, "" where that is `url`, too.
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
    """How all stands now.

    Attributes:
        complete: False where a proxy or a half partition could not be asked: sums are lower bounds.
        groups: those that need somebody first; `groups_left_off` further ones are not named.
        refused_topics: refused transactions by the topic that does not take them.
    """

    at_ms: int
    complete: bool
    proxies: tuple[ProxyOverview, ...] = ()
    partitions: tuple[PartitionOverview, ...] = ()
    groups: tuple[GroupOverview, ...] = ()
    groups_left_off: int = 0
    refused_topics: dict[str, int] = {}


class Service(Protocol):
    """What a proxy does. Every method raises `txbroker.errors.RequestError` where it cannot."""

    def runs(self, requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        """Return the operations of one group as the runs in which they are carried out.

        What can only be done alone, or what is refused at once, is a run of one.
        """
        ...

    async def prepare(self, request: PrepareRequest) -> TransactionStatus:
        """Store a half message; answered after the brokers have it (acks=all)."""
        ...

    async def decide(self, request: DecideRequest) -> TransactionStatus:
        """Write a marker; answered when the ledger has applied it."""
        ...

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        """Pull the next attempt forward, never the last of a round.

        Args:
            group: whose the transaction has to be, "" for any group's.
        """
        ...

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        """Make a parked transaction pending again, or try a refused one again at once."""
        ...

    async def find(self, id: str, *, bodies: bool = False) -> TransactionView:
        """Return all that is known of a transaction."""
        ...

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return transactions that are not settled, or settled but still in the window.

        Each without its checks and timeline; `find` has those.
        """
        ...

    async def overview(self) -> Overview:
        """Return how all stands now: counts, owners, rates.

        A proxy that does not answer is shown as such, with what it owns, and fails nothing.
        """
        ...

    def readiness(self) -> Readiness:
        """Return whether calls can be taken, and if not, why."""
        ...

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" where none is known."""
        ...

    def now_ms(self) -> int:
        """Return the clock by which ids are made: that of the brokers, as far as known."""
        ...


async def alone(service: Service, request: PrepareRequest | DecideRequest) -> Sequence[Answer]:
    """Carry one operation out, as what becomes of a run of one."""
    try:
        if isinstance(request, PrepareRequest):
            return (await service.prepare(request),)
        return (await service.decide(request),)
    except RequestError as error:
        return (error,)
