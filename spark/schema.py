"""The tables of the audit, and the summary of a run.

Tables are given as Spark DDL, so that this module needs no Spark. No table holds a body: messages
are compared by 64-bit hashes with a secret (see `facts.keyed`). Times are milliseconds since 1970
by the brokers' clocks.
"""

from collections.abc import Mapping
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import Struct

from txbroker.contract.audit import StreamFigures
from txbroker.contract.drift import Severity

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

HALF = """
    id string, id_ms bigint, partition int, offset bigint, at_ms bigint, clock_ms bigint,
    early boolean, void string,
    grp string, seq int, count int, topic string, target_partition int,
    body bigint, headers bigint, timestamp_ms bigint, order_mark bigint, dedup string,
    after_ms bigint, interval_ms bigint, attempts_max int, timeout_ms bigint
"""
"""One row for each record of the half topic.

`id_ms`: the time in the id, in the other tables too, so that Parquet's statistics narrow the search
for an id. `clock_ms`: the log clock there (the running maximum of append times). `early`: read
before the targets were. `void`: why the record does not count, null where it counts: `expired`
(appended too far from its id's time), `dedup` (another transaction holds its key).
`timestamp_ms`: null where the user gave none. `order_mark`: hash of the order key, null without
order. `dedup`: hash of the `dedup_key`. The last four columns are the check policy; it and
`order_mark` are on the row with `seq` 0.
"""

OP = """
    id string, id_ms bigint, partition int, offset bigint, at_ms bigint, clock_ms bigint,
    early boolean, kind string, source string, grp string, round int, number int, reason string,
    later_ms bigint, contents array<struct<seq: int, topic: string, target_partition: int,
        body: bigint, headers: bigint, timestamp_ms: bigint>>, contents_count int
"""
"""One row for each marker. `clock_ms`: the operation topic's log clock there, by which checks are
timed; `at_ms` is the timestamp of promoted messages. `reason`: of a check. `contents`: the
replacing messages that follow a commit, by `seq`; null where it announces none. An incomplete batch
is no marker."""

VISIBLE = """
    id string, id_ms bigint, topic string, partition int, offset bigint, at_ms bigint, seq int,
    count int, body bigint, headers bigint, headers_if_alone bigint, append_time boolean,
    former boolean
"""
"""One row for each record that this installation promoted to a target topic; a target's other
records are left out.

`at_ms`: its timestamp. `append_time`: whether that is the broker's (timestamp type LogAppendTime),
not its producer's. `headers_if_alone`: of a message of several, the value of `headers` if the
sequence header were a user's header of a single message. `former`: an earlier run has read it in
a topic of that name that was deleted or truncated since; null: the record is there.
"""

PARKED = """
    id string, id_ms bigint, partition int, offset bigint, seq int, at_ms bigint, state string,
    cause string, tombstone boolean, grp string, count int, topic string, target_partition int,
    body bigint, headers bigint, timestamp_ms bigint, due_ms bigint
"""
"""One row for each record of the parked topic. The columns after `tombstone` are those of the copy,
as in `HALF`, and when its first check was due; null in a tombstone."""

TABLES = {"half": HALF, "op": OP, "visible": VISIBLE, "parked": PARKED}
"""The tables of facts."""


@lru_cache(maxsize=64)
def types_of(ddl: str) -> "StructType":
    """Return the columns of a table; Spark's parser needs a session."""
    from pyspark.sql.types import StructType

    return cast(StructType, StructType.fromDDL(ddl))


def arrow_types(types: "StructType") -> "pa.Schema":
    """Return columns as Arrow has them; times are UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    converted: Any = to_arrow_schema
    # Spark 4.0 and 4.1 do not ask for it.
    zone = {"timezone": "UTC"} if "timezone" in signature(converted).parameters else {}
    return cast("pa.Schema", converted(types, **zone))


def no_rows(spark: "SparkSession", ddl: str) -> "DataFrame":
    """Return an empty table, which Spark drops from a plan without a job."""
    return spark.sql(f"SELECT row.* FROM (SELECT CAST(NULL AS STRUCT<{ddl}>) AS row) WHERE false")


class Facts(NamedTuple):
    """The tables of facts, read from the topics or from files of earlier runs."""

    half: "DataFrame"
    op: "DataFrame"
    visible: "DataFrame"
    parked: "DataFrame"

    def __or__(self, other: "Facts") -> "Facts":
        """Return the rows of both."""
        pairs = zip(self, other, strict=True)
        return Facts(*(mine.unionByName(theirs) for mine, theirs in pairs))

    def of(self, ids: "DataFrame") -> "Facts":
        """Return the rows of these transactions. `ids`: one column `id`, each once."""
        return Facts(*(table.join(ids.select("id"), "id", "left_semi") for table in self))


BROKEN = """
    topic string, partition int, offset bigint, at_ms bigint, why string, own boolean
"""
"""Unreadable records: set aside and counted. `own`: by its headers or its key it is one of
txbroker's, in one of txbroker's topics, and not a newer version's."""

VERDICT = """
    id string, verdict string, findings array<string>, state string,
    grp string, decision string, source string,
    prepared_at_ms bigint, decided_at_ms bigint, visible_at_ms bigint,
    attempts int, messages int, topics array<string>,
    half_partition int, half_offset bigint, op_offset bigint,
    places array<struct<topic: string, partition: int, offset: bigint, seq: int>>,
    why string, carry boolean
"""
"""One row for each transaction that a run judges; written by verdict, and removed with the run.

`verdict`: the gravest finding, else `settled`, `pending`,
`committed`, `parked`, `refused`, `void` or `gone` (retention or compaction removed the evidence).
`attempts`: of the last round, returned ones left out. `visible_at_ms`: append time of the last
message to become visible; null where the target's timestamps are the users'. `places`: positions
of its visible messages. `why`: the findings in a sentence, and a contrary decision that changed
nothing, which is no finding; null without either. `carry`: whether later records, or time, can
change this row without a fault: the next run judges it again.
"""


class TopicNames(Struct, frozen=True):
    """The topics of an installation."""

    half: str
    op: str
    parked: str
    audit: str
    drift: str

    @classmethod
    def of(cls, prefix: str) -> "TopicNames":
        """Return the topics of the installation with a `topic_prefix`."""
        return cls(*(f"{prefix}.{n}" for n in ("half", "op", "parked", "audit", "audit.drift")))

    @property
    def prefix(self) -> str:
        """The common prefix without the dot: the installation's `topic_prefix`."""
        return self.half.rpartition(".")[0]


class Terms(Struct, frozen=True):
    """The terms of a judgement.

    Attributes:
        now_ms: when the run began, by the brokers' clocks.
        dedup_window_ms: maximum distance of a half message from its id's time.
        late_after_ms: a commit older than this, and not visible, is late.
        lost_after_ms: a commit older than this, and not visible, is lost.
        overdue_after_ms: a first check that is due for longer than this, and was never made, is
            overdue.
    """

    now_ms: int
    dedup_window_ms: int = 120_000
    late_after_ms: int = 60_000
    lost_after_ms: int = 600_000
    overdue_after_ms: int = 86_400_000


_END_OF_TIME_MS = 1 << 48
"""No transaction id holds a later time."""
_MARGIN_MS = 600_000
"""Brokers' clocks differ by less, and a half message of several records takes less to append."""


class Part(Struct, frozen=True):
    """A part of an installation's transactions, which a run judges without the others.

    Attributes:
        from_ms, to_ms: those prepared from the first time on and before the second, by the log
            clock. Without a half message the decision's time counts, else the time in the id.
        topics: those with a message for one of these targets; all of them if empty.
        groups: those of these producer groups; all of them if empty.
    """

    from_ms: int = 0
    to_ms: int = _END_OF_TIME_MS
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def read_from_ms(self, terms: Terms) -> int:
        """Return the append time of the first record on which a verdict may depend: for one dedup
        window, another transaction may have held a `dedup_key`, and for another one before it."""
        return max(self.from_ms - 2 * terms.dedup_window_ms - _MARGIN_MS, 0)

    def id_times_ms(self, terms: Terms) -> tuple[int, int]:
        """Return the first and last time in the ids of these transactions, whose half messages are
        at most one dedup window away from it: earlier ones may not have been read."""
        window_ms = terms.dedup_window_ms
        return self.read_from_ms(terms) + window_ms, self.to_ms + window_ms + _MARGIN_MS


class TopicRead(Struct, frozen=True):
    """How far a topic was read.

    Attributes:
        starts, begins, ends: by partition, the first offset kept, and where reading began and
            ended. A deleted topic has no partitions.
        taken: offsets that retention removed since the last run, unread. Of records removed before
            the first run only `starts` is evidence.
        compacted: older records of a key may be missing.
        open: the partitions that ended in an open transaction, which may hold further commits.
        kept_ms: retention time; 0 where size or compaction may remove a record sooner.
        id: the topic's id; a recreated topic has another.
        unread: why the topic was not read, empty where it was; offsets are then the last run's.
        since: the first run that read the topic as it is now, or found it deleted: earlier ones
            have read another topic of that name, or one that was truncated since. Empty: none has.
    """

    topic: str
    starts: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    taken: int = 0
    compacted: bool = False
    open: tuple[int, ...] = ()
    kept_ms: int = 0
    id: str = ""
    unread: str = ""
    since: str = ""


class SnapshotBounds(Struct, frozen=True):
    """How far each log was read.

    Attributes:
        op_early, half_early: ends of op and half topic before the targets were read; their `ends`
            were read after that.
    """

    half: TopicRead
    op: TopicRead
    parked: TopicRead
    targets: tuple[TopicRead, ...]
    op_early: tuple[int, ...]
    half_early: tuple[int, ...]
    half_clock_ms: tuple[int, ...] = ()
    """The half topic's log clock at the ends, by partition."""
    op_clock_ms: tuple[int, ...] = ()
    """The operation topic's log clock at the ends, by partition."""
    named_late: tuple[str, ...] = ()
    """Targets that only half messages after `half_early` name; the next run reads them."""
    held: tuple[str, ...] = ()
    """Partitions of targets, as `topic-0`, that ended in the same open transaction during the
    whole run."""
    asked_ms: int = 0
    """When Kafka returned the targets' first offsets, by the brokers' clocks; a long run reads for
    hours before. 0: an earlier version did not store it."""

    @property
    def since(self) -> dict[str, str]:
        """The first run that read a target as it is now, by topic; see `TopicRead`."""
        return {target.topic: target.since for target in self.targets if target.since}


class TimeSpan(NamedTuple):
    """A time span with both ends included, ms."""

    first_ms: int
    last_ms: int


class TableCount(NamedTuple):
    """Number of rows in a table, of rows with a `dedup_key`, the times in their ids, if any, and
    the number of check-backs."""

    rows: int
    keyed: int
    span: TimeSpan | None
    checks: int = 0


class Extract(Struct, frozen=True):
    """Facts, unreadable records, the snapshot bounds of both, and the counts of the facts by
    table."""

    facts: Facts
    broken: "DataFrame"
    cut: SnapshotBounds
    read: Mapping[str, TableCount]

    @property
    def rows(self) -> int:
        """Number of facts."""
        return sum(table.rows for table in self.read.values())


TEXT_MAX = 500
"""Maximum characters of a group or reason that are shown: a broken record may name a group that is
longer than any of our records allows."""


class Example(Struct, frozen=True):
    """A transaction with findings, as an example."""

    id: str
    findings: tuple[str, ...]
    grp: str
    why: str


class BrokenRecord(Struct, frozen=True):
    """An unreadable record, as an example; columns as in `BROKEN`."""

    topic: str
    partition: int
    offset: int
    why: str
    own: bool = False


class Check(Struct, frozen=True):
    """A limit that runs are compared with.

    Attributes:
        name: in results and metrics.
        measure: a name of `checks.MEASURES`.
        limit: seconds or a ratio.
        group, topic: a pattern as `orders-*`: each that matches is compared with the limit, and the
            worst counts. None: all transactions together.
        hours: how far a measure of the table `latency` looks back; 0 for the others.
    """

    name: str
    measure: str
    limit: float
    severity: Severity = "error"
    group: str | None = None
    topic: str | None = None
    hours: int = 0

    @property
    def is_daily(self) -> bool:
        """Whether the same hours of other days are compared."""
        return self.measure.startswith("volume_")


class Thresholds(Struct, frozen=True):
    """Limits that runs are compared with.

    Attributes:
        exit_from: findings and failed checks from this severity on end a run with exit code 4.
    """

    checks: tuple[Check, ...] = ()
    exit_from: Severity = "warning"


class CheckResult(Struct, frozen=True):
    """A check of a run.

    Attributes:
        name, severity, measure, limit: of the check, see `Check`.
        value: None where there was nothing to compare.
        ok: whether the value keeps the limit; None without a value.
        of: the group or topic with the worst value; empty where all are measured together.
    """

    name: str
    severity: Severity
    measure: str
    value: float | None
    limit: float
    ok: bool | None
    of: str = ""


class Acknowledgement(Struct, frozen=True):
    """A known finding: until a date it stays visible, and is not counted as drift.

    Attributes:
        id: the transaction, or the position of an unreadable record; empty where `grp` is set.
        grp: all transactions of a producer group; empty where `id` is set.
        kind: of the finding.
        by, why: who acknowledged it, and the reason.
        at_ms, until_ms: from when, by the clock of that machine, and until when.
    """

    id: str
    grp: str
    kind: str
    by: str
    why: str
    at_ms: int
    until_ms: int

    def covers(self, id: str, grp: str) -> bool:
        """Return whether it concerns a transaction of a group."""
        return id == self.id if self.id else grp == self.grp


class Histogram(Struct, frozen=True):
    """Counts of values by bucket. `bounds`: upper bounds, ms; there is one count more than
    bounds."""

    label: str
    bounds: tuple[int, ...]
    counts: tuple[int, ...]


class RunSummary(Struct, frozen=True):
    """The result of a run; stored in the journal, published, and shown.

    Attributes:
        run: its name, which sorts by time.
        mode: `full`, `incremental`, `part`, `rejudged` or `stream`.
        started_ms, took_s: start by the clock of the machine that ran it, and duration.
        cut: the snapshot bounds.
        records: number of records read, by topic kind (half, op, visible, parked).
        transactions: number of transactions judged.
        states: number of transactions in each state.
        drift: number of transactions with each kind of finding; only kinds that were found.
        carried: number of open transactions that the next run takes over.
        quarantined: unreadable records, ours (`drift` counts them as `unreadable`) and others'.
        set_aside: some of them, ours first, a bounded number.
        missing_targets: topics that do not exist, with the number of transactions committed to
            each; a bounded number of topics.
        unread_targets: topics that could not be read, each with the reason; a bounded number.
        taken: records that retention removed before they were read, by topic.
        examples: transactions with findings, a bounded number.
        pending_age: ages of the pending transactions.
        business: business rows compared, where configured.
        terms: the terms of the judgement; None in old entries.
        strangers: records that came too late for a stream, which had forgotten their transactions:
            they were not judged.
        part: the transactions that the run has judged; None: all of them.
        stream: load and state of a stream.
        oldest_undecided_ms: age of the oldest pending transaction; None without one.
        acknowledged: how many of `drift` are acknowledged, by kind.
        open_findings: open findings in the table `drift` after the run, by kind.
        changed_findings: rows of that table that the run changed.
        checks: the run compared with the limits of a file.
        reopened: open transactions that an earlier run saw promoted: their rows stay.
        cost: what Spark spent on it until its tables were staged: `jobs`, `tasks`, `cpu_ms` (of
            Java in tasks), `input_bytes`, `shuffle_bytes`, `spill_bytes` (on disk).
    """

    run: str
    mode: str
    started_ms: int
    took_s: float
    cut: SnapshotBounds | None
    records: dict[str, int]
    transactions: int
    states: dict[str, int]
    drift: dict[str, int]
    carried: int = 0
    quarantined: int = 0
    taken: dict[str, int] = {}
    examples: tuple[Example, ...] = ()
    pending_age: Histogram | None = None
    business: dict[str, int] = {}
    terms: Terms | None = None
    strangers: int = 0
    set_aside: tuple[BrokenRecord, ...] = ()
    missing_targets: dict[str, int] = {}
    unread_targets: dict[str, str] = {}
    part: Part | None = None
    stream: StreamFigures | None = None
    oldest_undecided_ms: int | None = None
    acknowledged: dict[str, int] = {}
    open_findings: dict[str, int] = {}
    changed_findings: int = 0
    checks: tuple[CheckResult, ...] = ()
    reopened: int = 0
    cost: dict[str, int] = {}

    @property
    def continues(self) -> bool:
        """Whether it is a batch that the next one continues, and that the proxies show."""
        return self.mode in ("full", "incremental")

    @property
    def now_ms(self) -> int:
        """The run's now, by the brokers' clocks; in old entries its start."""
        return self.started_ms if self.terms is None else self.terms.now_ms

    @property
    def has_drift(self) -> bool:
        """Whether a transaction did not end as it was decided, acknowledged or not."""
        return any(self.drift.values())

    @property
    def open_drift(self) -> dict[str, int]:
        """The number of findings of each kind without the acknowledged ones."""
        return {
            kind: count - self.acknowledged.get(kind, 0)
            for kind, count in self.drift.items()
            if count > self.acknowledged.get(kind, 0)
        }
