"""The tables of the audit, the kinds of findings, and what a run says in the end.

Tables are given as Spark DDL, so that nothing here needs Spark. No table holds a body: messages are
compared by 64-bit hashes. Times are milliseconds since 1970 by the brokers' clocks.
"""

from typing import NamedTuple

from msgspec import Struct

HALF = """
    id string, id_ms bigint, partition int, offset bigint, at_ms bigint, clock_ms bigint,
    early boolean, void string,
    grp string, seq int, count int, topic string, target_partition int,
    body bigint, headers bigint, timestamp_ms bigint, order_mark bigint, dedup string,
    after_ms bigint, interval_ms bigint, attempts_max int, timeout_ms bigint
"""
"""One row for each record of the half topic.

`id_ms`: the time in the id, in the other tables too, so that Parquet can be searched for an id
without reading all of it. `clock_ms`: the log clock there (the running maximum of append times).
`early`: read before the targets were. `void`: why the record counts for nothing, null where it
counts: `expired` (appended too far from its id's time), `dedup` (its key is another's).
`timestamp_ms`: null where the user gave none. `order_mark`: hash of the order key, null without
order. The last four columns are the check policy; it and `order_mark` are on the row with `seq` 0.
"""

OP = """
    id string, id_ms bigint, partition int, offset bigint, at_ms bigint, clock_ms bigint,
    early boolean, kind string, source string, grp string, round int, number int, reason string,
    later_ms bigint, contents array<struct<seq: int, topic: string, target_partition: int,
        body: bigint, headers: bigint, timestamp_ms: bigint>>, contents_count int
"""
"""One row for each marker. `clock_ms`: the operation topic's log clock there, by which checks are
timed; `at_ms` is what promoted messages bear. `contents`: the replacing messages that follow a
commit, by `seq`; null where it announces none. A batch that is not whole is no marker."""

VISIBLE = """
    id string, id_ms bigint, topic string, partition int, offset bigint, at_ms bigint, seq int,
    count int, body bigint, headers bigint, headers_if_alone bigint, append_time boolean
"""
"""One row for each record that this installation promoted to a target topic.

`at_ms`: its timestamp. `append_time`: whether that is the broker's (timestamp type LogAppendTime),
not its writer's.
`headers_if_alone`: of a message of several, what `headers` were if the number in front of them were
a user's header of a single message. Other records of a target topic are none of ours."""

PARKED = """
    id string, id_ms bigint, partition int, offset bigint, seq int, at_ms bigint, state string,
    cause string, tombstone boolean, grp string, count int, topic string, target_partition int,
    body bigint, headers bigint, timestamp_ms bigint, due_ms bigint
"""
"""One row for each record of the parked topic. The columns behind `tombstone` are what the copy
holds, as in `HALF`, and when its first check was due; null in a tombstone."""

BROKEN = """
    topic string, partition int, offset bigint, at_ms bigint, why string, own boolean
"""
"""Records that do not read: set aside and counted. `own`: by its headers or its key it is one of
ours, in one of our own topics, and not a newer version's."""

VERDICT = """
    run string, id string, day date, verdict string, findings array<string>, state string,
    grp string, decision string, source string,
    prepared_at_ms bigint, decided_at_ms bigint, visible_at_ms bigint,
    attempts int, messages int, topics array<string>,
    half_partition int, half_offset bigint, op_offset bigint,
    places array<struct<topic: string, partition: int, offset: bigint, seq: int>>,
    why string, carry boolean
"""
"""One row for each transaction; the table that `audit run` writes, below run, day and verdict.

`day`: of the id's time (UTC). `verdict`: the gravest finding, else `settled`, `pending`,
`committed`, `parked`, `refused`, `void` or `gone` (retention or compaction took what would tell).
`attempts`: of the last round, given back ones left out.
`visible_at_ms`: append time of the last message to become visible; null where the target's topic
does not tell (its timestamps are the user's). `places`: where its messages are visible. `why`: the
findings in a sentence, and a contrary decision that changed nothing, which is no finding; null
without either. `carry`: whether later records, or time, can change what is said here without a
fault: the next run looks at it again.
"""


class Kind(NamedTuple):
    """A kind of finding, in the words of reports and metrics."""

    name: str
    title: str
    meaning: str


KINDS = (
    # The gravest first: a row's verdict is its first finding in this order.
    Kind("rolled_back_visible", "Rolled back but visible", "consumers see what was rolled back"),
    Kind("visible_without_commit", "Visible without a commit", "consumers see what nobody decided"),
    Kind("visible_without_half", "Visible without a half message", "committed, never prepared"),
    Kind("visible_twice", "Visible twice", "a message was promoted more than once"),
    Kind("lost", "Committed, not visible: lost", "a committed message has not become visible"),
    Kind("refused_visible", "Refused but visible", "consumers see a part of what was refused"),
    Kind("half_incomplete", "Half incomplete", "only some of its messages are stored"),
    Kind("not_kept", "Not kept whole", "parked or refused, and the copy is not whole"),
    Kind("body_changed", "Body changed", "key or value are not what was prepared"),
    Kind("headers_changed", "Headers changed", "headers are not what was prepared"),
    Kind("timestamp_changed", "Timestamp changed", "the timestamp is not what was prepared"),
    Kind("wrong_target", "Wrong target", "visible in another topic or partition than prepared"),
    Kind("out_of_order", "Out of order", "visible in another order than its key was decided in"),
    Kind("too_many_attempts", "Too many attempts", "checked more often than its policy allows"),
    Kind("check_too_early", "Check too early", "checked before its time, unasked"),
    Kind("contrary_markers", "Contrary markers", "what is visible follows not the first of them"),
    Kind("marker_without_half", "Marker without half", "a marker's half message does not exist"),
    Kind("late", "Committed, not visible: late", "not visible though its decision is old"),
    Kind("target_unreadable", "Target not readable", "committed, but its target was not readable"),
    Kind("overdue", "Overdue, never checked", "undecided, and nobody was ever asked"),
)
"""Every kind of drift of one transaction, the gravest first."""
KIND_NAMES = tuple(kind.name for kind in KINDS)
TOPIC_KINDS = (
    # Not found by judging one transaction. `unreadable` counts records.
    Kind("unreadable", "Own record unreadable", "records of ours in own topics that do not read"),
    Kind("target_missing", "Target missing", "committed to a topic that does not exist"),
)
"""Kinds of drift that are found in topics."""
BUSINESS_KINDS = (
    Kind("message_without_row", "Message without row", "visible, but the business has no row"),
    Kind("row_without_message", "Row without message", "a business row without a visible message"),
)
ALL_KINDS = (*KINDS, *TOPIC_KINDS, *BUSINESS_KINDS)
"""Every kind of drift."""


class TopicNames(Struct, frozen=True):
    """The topics of an installation."""

    half: str
    op: str
    parked: str
    audit: str
    drift: str

    @property
    def prefix(self) -> str:
        """What all of them begin with, without the dot: the installation's `topic_prefix`."""
        return self.half.rpartition(".")[0]


class Terms(Struct, frozen=True):
    """What is judged by.

    Attributes:
        now_ms: when the run began, by the brokers' clocks.
        dedup_window_ms: how far a half message may be from its id's time.
        late_after_ms: a commit older than this, and not visible, is late.
        lost_after_ms: and one older than this is lost.
        overdue_after_ms: a first check that was due for longer than this, and was never made, is
            overdue.
    """

    now_ms: int
    dedup_window_ms: int = 120_000
    late_after_ms: int = 60_000
    lost_after_ms: int = 600_000
    overdue_after_ms: int = 86_400_000


class TopicRead(Struct, frozen=True):
    """How far a topic was read: by partition, the first offset that was there, where reading began
    and where it ended. `taken`: offsets that retention took since the last run, and before anybody
    read them; what it took before the first run is told by `starts` alone.
    `compacted`: older records of a key may be missing. `open`: the partitions that ended in an open
    transaction, so that more may have been committed than could be read. `kept_ms`: so long
    retention leaves a record; 0 where size or compaction may take it sooner. `id`: another one
    for each topic that is made. A topic that is no more has no partitions here. `unread`: why
    the topic was not read, empty where it was; offsets are then those of the run before."""

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


class SnapshotBounds(Struct, frozen=True):
    """How far each log was read. `op_early`, `half_early`: where op and half topic ended before the
    targets were read; their `ends` were asked for after that."""

    half: TopicRead
    op: TopicRead
    parked: TopicRead
    targets: tuple[TopicRead, ...]
    op_early: tuple[int, ...]
    half_early: tuple[int, ...]
    half_clock_ms: tuple[int, ...] = ()
    """The half topic's log clock at the ends, by partition."""
    op_clock_ms: tuple[int, ...] = ()
    """And the operation topic's."""
    named_late: tuple[str, ...] = ()
    """Targets that only half messages behind `half_early` name; they were not read, so the next run
    reads them."""
    held: tuple[str, ...] = ()
    """Partitions of targets, as `topic-0`, that ended in an open transaction for as long as the run
    read."""
    asked_ms: int = 0
    """When Kafka had told where targets begin, by the brokers' clocks; a long run has been reading
    for hours by then. 0: an earlier version did not note it."""


TEXT_MAX = 500
"""Characters of a group or reason that are shown: a broken record may name a group that fits no
record of ours."""


class Example(Struct, frozen=True):
    """A transaction with findings, for show."""

    id: str
    findings: tuple[str, ...]
    grp: str
    why: str


class BrokenRecord(Struct, frozen=True):
    """A record that does not read, for show; columns as in `BROKEN`."""

    topic: str
    partition: int
    offset: int
    why: str
    own: bool = False


class Histogram(Struct, frozen=True):
    """How often which value came up. `bounds`: upper bounds, ms; one count more than bounds."""

    label: str
    bounds: tuple[int, ...]
    counts: tuple[int, ...]


class RunSummary(Struct, frozen=True):
    """What a run says in the end; stored in the journal, published, and shown.

    Attributes:
        run: its name, which sorts by time.
        mode: `full`, `incremental` or `stream`.
        started_ms, took_s: when by the clock of the machine that ran it, and how long.
        cut: how far everything was read.
        records: how many records were read, by topic kind (half, op, visible, parked).
        transactions: how many were judged.
        states: how many transactions are in each state.
        drift: how many transactions have each kind of finding; only kinds that were found.
        carried: how many were not finished and go on to the next run.
        quarantined: records that did not read, ours (`drift` counts them as `unreadable`) and
            others'.
        set_aside: some of them, ours first, a bounded number.
        missing_targets: topics that do not exist, with how many transactions were committed to
            each; a bounded number of topics.
        unread_targets: topics that could not be read, each with the reason; a bounded number.
        taken: records that retention took before they were read, by topic.
        examples: transactions with findings, a bounded number.
        pending_age: how long the pending ones are pending.
        decide_latency, visible_latency: prepare to decision, and decision to visible, by topic
            (`topic:NAME`) and by group (`group:NAME`); a bounded number.
        business: rows of the business compared, where asked for.
        terms: what was judged by; None where a run does not say.
        strangers: records that came too late for a stream, which had forgotten their transactions:
            they were not judged.
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
    decide_latency: tuple[Histogram, ...] = ()
    visible_latency: tuple[Histogram, ...] = ()
    business: dict[str, int] = {}
    terms: Terms | None = None
    strangers: int = 0
    set_aside: tuple[BrokenRecord, ...] = ()
    missing_targets: dict[str, int] = {}
    unread_targets: dict[str, str] = {}

    @property
    def has_drift(self) -> bool:
        """Whether anything did not end as it was decided."""
        return any(self.drift.values())
