"""The operations of a proxy: requests, answers and the `Service` protocol.

`Broker` implements `Service`; the HTTP API and the SDK's sessions are thin layers over it, and the
command line reads the same answers as JSON.
"""

from collections.abc import Awaitable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from txbroker.contract.groups import DecisionName, SourceName, StateName
from txbroker.core.records import Attempt, Cause, Decision, Message, Source, State
from txbroker.core.terms import SearchTerms
from txbroker.errors import RequestError

TEXT_MAX = 1000
"""Characters of a key of a transaction, a reason or an author."""
SECONDS_MAX = 366 * 86400
"""The longest time that a request may name, seconds."""


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


OPTIONS = tuple(
    name
    for name in PrepareRequest.__struct_fields__
    if name not in ("group", "messages", "id", "instance")
)
"""The names of the fields of a prepare that its caller may leave out."""
option_values = attrgetter(*OPTIONS)
"""Returns the values of fields of these names."""


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


class SubmitRequest(Struct, frozen=True):
    """A request to prepare a transaction and decide it at once, without a local transaction.

    Attributes:
        wait, wait_s: as in `DecideRequest`.
    """

    prepare: PrepareRequest
    decision: Decision = Decision.COMMIT
    reason: str = ""
    source: Source = Source.PRODUCER
    by: str = ""
    wait: bool = False
    wait_s: float = 0.0

    @property
    def group(self) -> str:
        """The producer group."""
        return self.prepare.group

    def decide(self, id: str) -> DecideRequest:
        """Return the decision of the prepared transaction."""
        return DecideRequest(
            id,
            self.decision,
            self.group,
            None,
            self.reason,
            self.source,
            self.by,
            self.wait,
            self.wait_s,
        )


Request: TypeAlias = PrepareRequest | DecideRequest | SubmitRequest
"""What a run is made of."""


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
    record: str = ""
    """Its record as `topic/partition@offset`, "" if there is none or its place is unknown."""


class TransactionView(Struct, frozen=True):
    """Everything known about one transaction.

    Attributes:
        attempts_known: False if memory has lost the attempts of a settled one; `round`, `attempts`
            and `attempts_max` then mean nothing.
        waiting: why a check that is due is not made; "" if nothing prevents it.
        read_back: whether facts were read from the topics because memory had lost them.
        gaps: facts that cannot be shown, and why.
        last_answer: the last answer of a check, in a list, where `checks` are left out.
    """

    id: str
    group: str
    state: StateName
    partition: int
    half_offset: int
    prepared_at_ms: int
    messages: tuple[PlacedMessage, ...]
    order_key: str | None = None
    dedup_key: str | None = None
    decision: DecisionName | None = None
    decided_at_ms: int | None = None
    source: SourceName | None = None
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
    attempts_known: bool = True
    read_back: bool = False
    gaps: tuple[str, ...] = ()
    last_answer: str = ""


LIST_LIMIT_MAX = 1000
"""Transactions on one page of a list."""
LISTED_MESSAGES_MAX = 10_000
"""Messages on one page of a list, of all its transactions: 3 MB with the longest topics. A page
that would have more has fewer transactions."""


class ListRequest(Struct, frozen=True):
    """A request for a list of transactions by time of preparation; None matches any.

    Attributes:
        cursor: of the last page.
        partitions: only these half partitions, for calls between proxies.
        groups_allowed, groups_denied: patterns of the groups that the caller may see; others are
            left out by the owner, so that no cursor names their transactions.
        newest: newest first, else oldest first.
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
    newest: bool = False


class TransactionPage(Struct, frozen=True):
    """A page of a list; `next_cursor` is None on the last one."""

    transactions: tuple[TransactionView, ...]
    next_cursor: str | None = None


class SearchRequest(SearchTerms, frozen=True):
    """A search; all terms must match, None matches any.

    A page reads a bounded part of one half partition: first the memory of all of them, then their
    topics, the newest records first. It may find nothing although a later page does.

    Attributes:
        record: `topic/partition@offset`: the transaction of this record; no other term is used.
        cursor: of the last page.
        groups_allowed, groups_denied: as in `ListRequest`.
    """

    record: str | None = None
    cursor: str | None = None
    groups_allowed: tuple[str, ...] | None = None
    groups_denied: tuple[str, ...] = ()


class SearchPage(Struct, frozen=True):
    """A page of a search; a transaction may be on several pages.

    Attributes:
        next_cursor: None on the last page.
        done: the part of the topics that was read, from 0 to 1.
        records: how many records this page read.
        unread: how many more transactions match and could not be read: their markers were deleted,
            or reading took too long.
    """

    transactions: tuple[TransactionView, ...]
    next_cursor: str | None = None
    done: float = 1.0
    records: int = 0
    unread: int = 0


class HalfPartitionState(StrEnum):
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


UNREACHABLE = "unreachable"
"""The state, in an overview, of a half partition whose proxy did not answer."""
FILE_PROBLEM = "the file of "
"""How the problem of a proxy's file begins."""


class Readiness(Struct, frozen=True):
    """Whether the proxy is ready, and the state of each half partition."""

    ready: bool
    partitions: dict[int, str]
    """A HalfPartitionState, followed by `: <why>` if there is a reason."""
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
        state: a HalfPartitionState, or `unreachable` if its proxy did not answer.
        why: the reason for the state, "" without one.
        pending, parked, refused, committed: transactions; None if unknown.
        settled: those that lists still show; None if unknown.
        oldest_pending_age_s: None if unknown, or without one.
        oldest_committed_age_s: the age of the oldest commit that is not visible yet.
        rates: zero if unknown.
        as_of_ms: the time of the counts, if the owner cannot confirm them now, because Kafka does
            not answer it or it is suspended; None: current.
    """

    partition: int
    owner: str
    state: str
    why: str = ""
    pending: int | None = None
    parked: int | None = None
    refused: int | None = None
    committed: int | None = None
    settled: int | None = None
    oldest_pending_age_s: float | None = None
    oldest_committed_age_s: float | None = None
    rates: Rates = Rates()
    as_of_ms: int | None = None


CHECKS_FAILING_MIN, CHECKS_FAILING_SHARE = 3, 0.5
"""The checks of a group fail from this number without a decision on, if it is more than this share
of those that were answered or may have been."""


class CheckCounts(Struct, frozen=True):
    """Checks by outcome.

    Attributes:
        unknown: answered without a decision; `later`: with a "not yet".
        unclear: without a valid answer in time; the attempt counts.
        unreached: reached no instance, so no attempt is used up.
    """

    commit: int = 0
    rollback: int = 0
    unknown: int = 0
    unclear: int = 0
    later: int = 0
    unreached: int = 0

    @property
    def undecided(self) -> int:
        """Checks that used up an attempt and brought no decision."""
        return self.unknown + self.unclear

    @property
    def failing(self) -> bool:
        """Whether the alert TxBrokerChecksFailing would fire, by counts of 15 minutes."""
        counted = self.commit + self.rollback + self.undecided
        return (
            self.undecided >= CHECKS_FAILING_MIN and self.undecided > CHECKS_FAILING_SHARE * counted
        )


class CheckReport(Struct, frozen=True):
    """One check of a transaction and its answer.

    Attributes:
        outcome: a field of `CheckCounts`, with `returned` for one that reached no instance.
        answer: in a few words, and the beginning of the endpoint's body, printable.
    """

    id: str
    at_ms: int
    endpoint: str
    outcome: str
    answer: str


class GroupChecks(Struct, frozen=True):
    """The checks of one group in the last 15 minutes, and the last answer without a decision."""

    counts: CheckCounts = CheckCounts()
    undecided: CheckReport | None = None


class ParkedAnswer(Struct, frozen=True):
    """The last answer of parked transactions, and how many of them have it."""

    answer: str
    count: int


PARKED_ANSWERS_MAX = 5
"""Last answers of a group's parked transactions in an overview, the most frequent first."""


class GroupOverview(Struct, frozen=True):
    """One producer group: its undecided transactions, and whether it can be asked.

    Attributes:
        sessions: connected instances with a check function, of all proxies; if more than
            `instances` can name, the most that one proxy has.
        instances: their names, at most `INSTANCES_SHOWN_MAX`.
        unreachable_since_ms: since when no endpoint of it could be reached; None if reachable.
        unreachable_why: the error of the last attempt.
        check_url: it has registered one, so it can be asked without a session.
        checks: of the last 15 minutes.
        parked_answers: why its transactions are parked: their last answers.
        pending_growth_per_s: of its pending transactions in the last 15 minutes; None if unknown.
        as_of_ms: the time of the counts, if an owner cannot confirm them now; None: current.
    """

    group: str
    pending: int = 0
    parked: int = 0
    oldest_pending_age_s: float | None = None
    sessions: int = 0
    instances: tuple[str, ...] = ()
    unreachable_since_ms: int | None = None
    unreachable_why: str = ""
    check_url: bool = False
    checks: GroupChecks = GroupChecks()
    parked_answers: tuple[ParkedAnswer, ...] = ()
    pending_growth_per_s: float | None = None
    as_of_ms: int | None = None


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
        kafka_silent_since_ms: since when Kafka has not answered it for half partitions that it
            owns; None if Kafka answers.
        kafka_why: the error of the last attempt, "" before the first one ended.
        kafka_partitions: these half partitions.
        lost_last_hour: transactions whose half messages were found deleted before they settled.
        prepare_p99_s: 99 % of the prepares of the last 5 minutes took at most this, seconds; None
            without any.
        half_retention_s: retention of half messages; None if unknown.
        half_retention_headroom_s: until retention reaches an unsettled one without a copy; None
            without one.
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
    kafka_silent_since_ms: int | None = None
    kafka_why: str = ""
    kafka_partitions: tuple[int, ...] = ()
    lost_last_hour: int = 0
    prepare_p99_s: float | None = None
    half_retention_s: float | None = None
    half_retention_headroom_s: float | None = None


class AuditOverview(Struct, frozen=True):
    """The newest result of audits of one mode, `batch` or `stream`.

    Attributes:
        ended_ms: when the batch ended, or up to when the stream has judged.
        drift: transactions that did not end as decided, by kind, without zeros.
        failed_checks: the severity of each check that failed, by its name.
    """

    mode: str
    ended_ms: int
    drift: dict[str, int]
    failed_checks: dict[str, str] = {}


class Overview(Struct, frozen=True):
    """The state of proxies, half partitions and groups. Ages are seconds, times milliseconds since
    1970.

    Attributes:
        complete: False if counts are unknown (null) or not current (`as_of_ms`), as those of a
            proxy or a half partition that did not answer: sums are then lower bounds, or older.
        groups: those that need attention first; `groups_left_off` further ones are left out.
        refused_topics: refused transactions by the topic that refuses them.
        kafka: the bootstrap servers of the proxy that answered.
        audits: the newest results of audits.
    """

    at_ms: int
    complete: bool
    proxies: tuple[ProxyOverview, ...]
    partitions: tuple[PartitionOverview, ...]
    groups: tuple[GroupOverview, ...]
    groups_left_off: int
    refused_topics: dict[str, int]
    kafka: str = ""
    audits: tuple[AuditOverview, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether counts of a half partition are unknown, so that sums are lower bounds."""
        return any(partition.pending is None for partition in self.partitions) or not all(
            proxy.reached for proxy in self.proxies
        )

    @property
    def as_of_ms(self) -> int | None:
        """The time of the oldest counts that are not current; None if all are."""
        times = [p.as_of_ms for p in self.partitions if p.as_of_ms is not None]
        return min(times, default=None)


HISTORY_S = 3600
"""How far back the history reaches, seconds."""
HISTORY_STEPS_S = (1, 10, 30)
"""Its steps, seconds: the shorter ones only reach the newest minutes."""


class HistoryRequest(Struct, frozen=True):
    """A request for the last hour.

    Attributes:
        group: only this group, with its last checks and instances; "": all groups together.
        since_s: how far back, seconds.
        step_s: the shortest step of interest; None: the shortest that reaches back that far.
        actions: with operators' actions.
    """

    group: str = ""
    since_s: float = HISTORY_S
    step_s: float | None = None
    actions: bool = False


class Latency(Struct, frozen=True):
    """Durations in one step: their number, and two percentiles in seconds, as exact as the buckets
    of the metric."""

    count: int
    p50_s: float
    p99_s: float


class HistoryPoint(Struct, frozen=True):
    """One step of the history.

    Attributes:
        at_ms: its begin.
        prepared, decided, promoted: transactions within it.
        pending, parked: transactions at its end; None if unknown, as while Kafka did not answer or
            a half partition had no owner.
        oldest_pending_age_s: the greatest age within it.
        checks: that ended within it.
        latency: by kind (`prepare`, `decision`, `promotion`); also for one group those of all.
        buckets: the same as counts of the metric's buckets, between proxies only.
        proxies: how many proxies it is known of.
        observed: half partitions whose transactions were known at its end, of `half_partitions`;
            None if a proxy of an older version does not tell.
    """

    at_ms: int
    prepared: int = 0
    decided: int = 0
    promoted: int = 0
    pending: int | None = None
    parked: int | None = None
    oldest_pending_age_s: float | None = None
    checks: CheckCounts = CheckCounts()
    latency: dict[str, Latency] = {}
    buckets: dict[str, tuple[int, ...]] = {}
    proxies: int = 1
    observed: int | None = None


class HistoryEvent(Struct, frozen=True):
    """Something that happened at a proxy.

    Attributes:
        kind: `start`, `takeover`, `handover`, `problem` or `solved`.
        group: the producer group that it is about, "" for none.
    """

    at_ms: int
    kind: str
    text: str
    proxy: str = ""
    group: str = ""


class OperatorAction(Struct, frozen=True):
    """What an operator did to one transaction, or to several within a minute.

    Attributes:
        action: `commit`, `rollback`, `revive` or `check`.
        id: the transaction, the first of several.
        count: transactions.
    """

    at_ms: int
    action: str
    by: str
    reason: str
    group: str
    id: str
    count: int = 1


class InstanceOverview(Struct, frozen=True):
    """A connected instance of a group, as its session tells.

    Attributes:
        address: from where it is connected.
        client: its library and version, "" if it names none.
        checks: it has a check function.
        proxy: to which it is connected.
    """

    name: str
    address: str = ""
    client: str = ""
    checks: bool = True
    proxy: str = ""


class History(Struct, frozen=True):
    """The last hour, as the proxies observed it. Times are milliseconds since 1970.

    Attributes:
        step_s: of the points, seconds. Steps of which no proxy knows anything are left out.
        complete: False if a proxy did not answer: then counts are lower bounds.
        events: oldest first.
        checks: the last checks of the group, newest first.
        actions: of operators, newest first.
        actions_since_ms: from when on they are known, by half partition: from its newest snapshot
            when it was taken over.
        bounds_s: the upper bounds of the buckets, between proxies only.
        half_partitions: how many the installation has, 0 if not known.
    """

    step_s: int
    points: tuple[HistoryPoint, ...] = ()
    events: tuple[HistoryEvent, ...] = ()
    complete: bool = True
    checks: tuple[CheckReport, ...] = ()
    instances: tuple[InstanceOverview, ...] = ()
    actions: tuple[OperatorAction, ...] = ()
    actions_since_ms: dict[int, int] = {}
    bounds_s: dict[str, tuple[float, ...]] = {}
    half_partitions: int = 0


class Service(Protocol):
    """The operations of a proxy. Every method may raise `txbroker.errors.RequestError`."""

    def runs(self, requests: Sequence[Request]) -> Sequence[Run]:
        """Start operations of one group and return them as runs.

        A prepare is answered when the brokers have its half message (acks=all), a decision when the
        ledger has applied its marker. An operation that must be executed alone, or is refused at
        once, is a run of one.
        """

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        """Pull the next attempt forward, never the last of a round.

        Args:
            group: the required group of the transaction, "" for any.
        """

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        """Make a parked transaction pending again, or retry a refused one at once."""

    async def find(
        self, id: str, *, bodies: bool = False, trace: bool = False, brief: bool = False
    ) -> TransactionView:
        """Return everything known about a transaction.

        Settled ones that memory has lost in part are read back from the topics.

        Args:
            trace: read the places of all its records, and read back for longer.
            brief: return what memory has of it, without reading back.
        """

    async def search(self, request: SearchRequest) -> SearchPage:
        """Return the transactions of one page of a search."""

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return unsettled transactions and those settled within the window.

        Checks and timelines are left out; `find` returns them.
        """

    async def overview(self) -> Overview:
        """Return counts, owners and rates of the installation.

        A proxy that does not answer is shown as such, with its partitions.
        """

    async def history(self, request: HistoryRequest) -> History:
        """Return the last hour of the installation; a proxy that does not answer is left out."""

    def readiness(self) -> Readiness:
        """Return whether calls can be taken, and if not, why."""

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" if unknown."""

    def now_ms(self) -> int:
        """Return the estimated clock of the brokers, by which ids are made."""


async def execute(service: Service, request: Request) -> TransactionStatus:
    """Execute one operation as a run of one.

    Raises:
        RequestError: it was refused, or its outcome is unknown.
    """
    [run] = service.runs((request,))
    [answer] = await run.answers
    if isinstance(answer, RequestError):
        raise answer
    return answer
