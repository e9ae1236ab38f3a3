"""What the audit judges by: the rows of the tables as plain values.

Only the standard library is used here, as in `judge`: they are shipped to executors by value.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

ALWAYS = (1 << 63) - 1
"""A time that never passes."""
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}
_is_topic_name = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}").fullmatch
_RESERVE_MS = 3_600_000
"""For clocks of brokers that differ, and for what lies between the clock and the answer."""


def can_be_topic(name: str) -> bool:
    """Say whether Kafka accepts this name for a topic."""
    return _is_topic_name(name) is not None


class ParsedId(NamedTuple):
    """What a transaction id says of where and when."""

    partition: int
    time_ms: int


def read_id(id: str) -> ParsedId | None:
    """Return half partition and time of a transaction id, None where it is none."""
    if len(id) != 26:
        return None
    number = 0
    for character in id:
        value = _VALUES.get(character)
        if value is None:
            return None
        number = number << 5 | value
    if number >> 128:
        return None
    return ParsedId(number >> 112, number >> 64 & (1 << 48) - 1)


class TermsLike(Protocol):
    """What is judged by; see `schema.Terms`."""

    @property
    def now_ms(self) -> int: ...
    @property
    def dedup_window_ms(self) -> int: ...
    @property
    def late_after_ms(self) -> int: ...
    @property
    def lost_after_ms(self) -> int: ...
    @property
    def overdue_after_ms(self) -> int: ...


class JudgeTerms(NamedTuple):
    """`schema.Terms` as it goes to executors."""

    now_ms: int
    dedup_window_ms: int = 120_000
    late_after_ms: int = 60_000
    lost_after_ms: int = 600_000
    overdue_after_ms: int = 86_400_000


class Horizon(NamedTuple):
    """What retention or compaction has left of the topics; empty where nothing was taken.

    Attributes:
        half_start: first offset that is left, by half partition.
        half_begin_ms: append time of what is left first, by half partition. A half message whose
            id is not younger than this and the dedup window may have been taken.
        op_begin_ms: the same for the operation topic.
        taken_ms: by target topic and partition. What was decided no later may have been visible
            and be gone; `ALWAYS` for a topic that is compacted or no longer there. Partition -1
            stands for all of a topic's.
        kept_from_ms: by target topic, the timestamp from which on nothing can be gone: retention
            takes older records only. Not of topics from which size or compaction takes.
        parked_from_ms: by half partition, since when the parked topic tells of every refusal that
            is over: what was decided before may have been refused, and nothing says so any more.
        open: target topics and partitions that end in an open transaction, mostly a turn that is
            under way: what is missing there may be visible in a moment.
        hidden: those in which it is the same transaction since the run has begun to read: what is
            missing there may have been committed behind it.
        removed_ms: facts of transactions whose ids are no later than this may have been removed
            after earlier runs had read them; -1 where none were.
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
        """Say whether a target could not be read, so that nothing is known of what it holds."""
        return topic in self.unread or not can_be_topic(topic)


NOTHING_TAKEN = Horizon()


def kept_from_ms(now_ms: int, kept_ms: int) -> int:
    """Return from which timestamp on nothing can be gone of a target.

    Args:
        now_ms: when it was asked for where it begins.
        kept_ms: for how long retention leaves a record.
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
    """A message that came with its commit, in place of the prepared one."""

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


class ParkedFact(NamedTuple):
    """A row of `schema.PARKED`, without the id.

    What a copy holds is None in tombstones, and where an earlier version has read it.
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
    """All records of one transaction, in any order; one that was read twice counts once."""

    id: str
    half: Sequence[HalfFact] = ()
    op: Sequence[MarkerFact] = ()
    visible: Sequence[VisibleFact] = ()
    parked: Sequence[ParkedFact] = ()


class MessagePosition(NamedTuple):
    """Where a message is visible."""

    topic: str
    partition: int
    offset: int
    seq: int


class JudgedTransaction(NamedTuple):
    """How a transaction ended: `schema.VERDICT` without run and day.

    `id_ms`: the time in the id, None where it does not read. `carry`: whether later records could
    still change what is said here, so that the next run has to know these facts.
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
    """Return the facts of a row of `gather`: arrays of structs, each null where there is none.

    A half message's `dedup` and a parked one's `cause`, which nothing depends on, may be left out.
    """
    half = [HalfFact(**{"dedup": None, **each}) for each in row["half"] or ()]
    op = [
        MarkerFact(**{**each, "contents": _contents(each["contents"])}) for each in row["op"] or ()
    ]
    parked = [ParkedFact(**{"cause": None, **each}) for each in row["parked"] or ()]
    alone = is_alone(half, parked)
    visible = [_visible(each, alone) for each in row["visible"] or ()]
    return TransactionFacts(row["id"], half, op, visible, parked)


def is_alone(half: Sequence[HalfFact], parked: Sequence[ParkedFact]) -> bool:
    """Say whether a transaction has but one message, by its copy where nothing else is left."""
    if half:
        return half[0].count == 1
    return any(row.count == 1 for row in parked)


def _visible(row: Mapping[str, Any], alone: bool) -> VisibleFact:
    fields = dict(row)
    if_alone = fields.pop("headers_if_alone", None)
    return as_promoted(VisibleFact(**fields), if_alone, alone)


def as_promoted(row: VisibleFact, if_alone: int | None, alone: bool) -> VisibleFact:
    """Return a visible row as it was promoted.

    What numbers the messages of a transaction is, where it has but one, the user's own header.

    Args:
        if_alone: the column `headers_if_alone`.
        alone: whether the transaction has but one message.
    """
    if not alone or if_alone is None:
        return row
    return row._replace(seq=0, count=1, headers=if_alone)


def _contents(rows: Iterable[Mapping[str, Any]] | None) -> list[Content] | None:
    return None if rows is None else [Content(**each) for each in rows]
