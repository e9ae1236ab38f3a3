"""Rows of the fact tables as plain values, and the terms of a judgement.

Only the standard library is imported: Spark ships this module to its executors by value.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ALWAYS = (1 << 63) - 1
"""A time that never passes."""
_is_id = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}").fullmatch
_AS_DIGITS = str.maketrans("0123456789ABCDEFGHJKMNPQRSTVWXYZ", "0123456789ABCDEFGHIJKLMNOPQRSTUV")
"""From the digits of ids to those that Python reads in base 32."""
_is_topic_name = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}").fullmatch
_RESERVE_MS = 3_600_000
"""Margin for brokers' clocks that differ, and for the delay between a clock and its answer."""


def can_be_topic(name: str) -> bool:
    """Return whether Kafka accepts this name for a topic."""
    return _is_topic_name(name) is not None


class ParsedId(NamedTuple):
    """Half partition and time of a transaction id."""

    partition: int
    time_ms: int


def read_id(id: str) -> ParsedId | None:
    """Parse a transaction id; return None where the text is none."""
    if _is_id(id) is None:
        return None
    number = int(id.translate(_AS_DIGITS), 32)
    return ParsedId(number >> 112, number >> 64 & (1 << 48) - 1)


class JudgeTerms(NamedTuple):
    """`schema.Terms` in the form that is shipped to executors."""

    now_ms: int
    dedup_window_ms: int = 120_000
    late_after_ms: int = 60_000
    lost_after_ms: int = 600_000
    overdue_after_ms: int = 86_400_000


class Horizon(NamedTuple):
    """What retention or compaction removed from the topics; empty where nothing was removed.

    Attributes:
        half_start: first offset kept, by half partition.
        half_begin_ms: append time of the first record kept, by half partition. A half message whose
            id is no younger than this plus the dedup window may have been removed.
        op_begin_ms: the same for the operation topic.
        taken_ms: by target topic and partition: messages decided no later may have been visible
            and then removed; `ALWAYS` for a compacted or deleted topic. Partition -1 stands for
            all partitions of a topic.
        kept_from_ms: by target topic, the timestamp from which on retention removed nothing. Unset
            for topics with retention by size or compaction.
        parked_from_ms: by half partition, the time from which on the parked topic shows every past
            refusal: an earlier decision may have been refused without a trace.
        open: target partitions that end in an open transaction, mostly a promotion in flight:
            missing messages may become visible at any moment.
        hidden: those of them that the same transaction has kept open since the run began: missing
            messages may have been committed after it.
        removed_ms: facts of transactions with ids no later than this may have been deleted after
            earlier runs had read them; -1 where none were.
        unread: target topics that could not be read.
    """

    half_start: Mapping[int, int] = {}
    half_begin_ms: Mapping[int, int] = {}
    op_begin_ms: Mapping[int, int] = {}
    taken_ms: Mapping[tuple[str, int], int] = {}
    parked_from_ms: Mapping[int, int] = {}
    open: frozenset[tuple[str, int]] = frozenset()
    hidden: frozenset[tuple[str, int]] = frozenset()
    kept_from_ms: Mapping[str, int] = {}
    removed_ms: int = -1
    unread: frozenset[str] = frozenset()

    def is_unread(self, topic: str) -> bool:
        """Return whether a target could not be read, so that its contents are unknown."""
        return topic in self.unread or not can_be_topic(topic)


NOTHING_TAKEN = Horizon()


def kept_from_ms(now_ms: int, kept_ms: int) -> int:
    """Return the timestamp from which on retention has removed nothing from a target.

    `now_ms`: when its start offsets were read. `kept_ms`: its retention time.
    """
    return now_ms - kept_ms + _RESERVE_MS


class HalfFact(NamedTuple):
    """A row of `schema.HALF`, without the id."""

    partition: int
    offset: int
    at_ms: int
    clock_ms: int
    early: bool
    void: str | None
    grp: str
    seq: int
    count: int  # type: ignore[assignment]
    topic: str
    target_partition: int
    body: int
    headers: int
    timestamp_ms: int | None
    order_mark: int | None
    dedup: str | None
    after_ms: int | None
    interval_ms: int | None
    attempts_max: int | None
    timeout_ms: int | None


class Content(NamedTuple):
    """A message that came with its commit and replaces the prepared one."""

    seq: int
    topic: str
    target_partition: int
    body: int
    headers: int
    timestamp_ms: int | None


class MarkerFact(NamedTuple):
    """A row of `schema.OP`, without the id."""

    partition: int
    offset: int
    at_ms: int
    clock_ms: int
    early: bool
    kind: str
    source: str
    grp: str
    round: int
    number: int
    reason: str
    later_ms: int
    contents: Sequence[Content] | None
    contents_count: int


class VisibleFact(NamedTuple):
    """A row of `schema.VISIBLE`, without the id."""

    topic: str
    partition: int
    offset: int
    at_ms: int
    seq: int
    count: int  # type: ignore[assignment]
    body: int
    headers: int
    append_time: bool
    former: bool | None = None


class ParkedFact(NamedTuple):
    """A row of `schema.PARKED`, without the id.

    The columns of the copy are None in tombstones and in rows that an earlier version wrote.
    """

    partition: int
    offset: int
    seq: int
    at_ms: int
    state: str | None
    cause: str | None
    tombstone: bool
    grp: str | None = None
    count: int | None = None  # type: ignore[assignment]
    topic: str | None = None
    target_partition: int | None = None
    body: int | None = None
    headers: int | None = None
    timestamp_ms: int | None = None
    due_ms: int | None = None


class TransactionFacts(NamedTuple):
    """All records of one transaction, in any order; duplicates count once.

    `judge` splits `visible` into the records that are there, and `former`: those that an earlier
    run has read in a topic that was deleted or truncated since.
    """

    id: str
    half: Sequence[HalfFact] = ()
    op: Sequence[MarkerFact] = ()
    visible: Sequence[VisibleFact] = ()
    parked: Sequence[ParkedFact] = ()
    former: Sequence[VisibleFact] = ()


class MessagePosition(NamedTuple):
    """The position of a visible message."""

    topic: str
    partition: int
    offset: int
    seq: int


class JudgedTransaction(NamedTuple):
    """How a transaction ended: `schema.VERDICT` with the id's time.

    `id_ms`: the time in the id, None where it does not parse. `carry`: whether later records can
    change the verdict, so that the next run needs these facts.
    """

    id: str
    id_ms: int | None
    verdict: str
    findings: tuple[str, ...]
    state: str
    grp: str | None
    decision: str | None
    source: str | None
    prepared_at_ms: int | None
    decided_at_ms: int | None
    visible_at_ms: int | None
    attempts: int
    messages: int
    topics: tuple[str, ...]
    half_partition: int | None
    half_offset: int | None
    op_offset: int | None
    places: tuple[MessagePosition, ...]
    why: str | None
    carry: bool


def facts_of(row: Mapping[str, Any]) -> TransactionFacts:
    """Return the facts of a row of `group`: arrays of structs, each null where it is empty.

    A half message's `dedup` and a copy's `cause` influence no verdict and may be absent.
    """
    half = [HalfFact(**{"dedup": None, **fields}) for fields in row["half"] or ()]
    op = [
        MarkerFact(**{**fields, "contents": _contents(fields["contents"])})
        for fields in row["op"] or ()
    ]
    parked = [ParkedFact(**{"cause": None, **fields}) for fields in row["parked"] or ()]
    alone = is_alone(half, parked)
    visible = [_visible(fields, alone) for fields in row["visible"] or ()]
    return TransactionFacts(row["id"], half, op, visible, parked)


def is_alone(half: Sequence[HalfFact], parked: Sequence[ParkedFact]) -> bool:
    """Return whether a transaction has exactly one message; without a half message, its copy
    decides."""
    if half:
        return half[0].count == 1
    return any(row.count == 1 for row in parked)


def _visible(row: Mapping[str, Any], alone: bool) -> VisibleFact:
    fields = dict(row)
    if_alone = fields.pop("headers_if_alone", None)
    return as_promoted(VisibleFact(**fields), if_alone, alone)


def as_promoted(row: VisibleFact, if_alone: int | None, alone: bool) -> VisibleFact:
    """Return a visible row as it was promoted: in a transaction of one message (`alone`), the
    sequence header is the user's own, and `if_alone` the hash of the headers."""
    if not alone or if_alone is None:
        return row
    return row._replace(seq=0, count=1, headers=if_alone)


def _contents(rows: Iterable[Mapping[str, Any]] | None) -> list[Content] | None:
    return None if rows is None else [Content(**fields) for fields in rows]
