"""How one transaction ended, from the records of all topics: a pure function.

The ledger's rules again, written anew on the audit's narrow rows, so that a fault in the one shows
in the other. Only the standard library and `rows` are used here: Spark ships both modules to
its executors by value, and nothing of ours need be installed there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txbroker.spark.rows import (
    NOTHING_TAKEN,
    Content,
    HalfRow,
    Horizon,
    Judged,
    OpRow,
    ParkedRow,
    Place,
    TermsLike,
    TransactionFacts,
    VisibleRow,
    facts_of,
)

ASK_SPACING_MS = 1000
"""Attempts that were asked for are not closer than this to the last one."""
LATER_MIN_MS, LATER_MAX_MS = 1000, 3_600_000
"""A deliberate "not yet" postpones the next attempt by no less and no more than this."""
CLOCKS_APART_MS = 1000
"""As far as brokers' clocks may be apart: a check that is early by less is no finding."""
GRAVITY = (
    "rolled_back_visible",
    "visible_without_commit",
    "visible_twice",
    "lost",
    "half_incomplete",
    "body_changed",
    "headers_changed",
    "timestamp_changed",
    "wrong_target",
    "out_of_order",
    "too_many_attempts",
    "check_too_early",
    "contrary_markers",
    "marker_without_half",
    "late",
)
"""The kinds of findings, the gravest first."""

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}
_SETTLED = frozenset({"promoted", "rolled_back"})
_OPPOSITE = {"commit": "rollback", "rollback": "commit"}


class IdParts(NamedTuple):
    """What a transaction id says of where and when."""

    partition: int
    time_ms: int


def read_id(id: str) -> IdParts | None:
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
    return IdParts(number >> 112, number >> 64 & (1 << 48) - 1)


# --- half messages ---------------------------------------------------------------------------


class _Halves(NamedTuple):
    """What there is of half messages with one id."""

    counts: Sequence[HalfRow] | None
    """The rows of the one that counts, by `seq`."""
    any_void: bool
    parts: str
    """How much there is of one that is not whole."""
    cut: bool
    """Retention has taken a part of it."""


def _halves(rows: Sequence[HalfRow], home: int, horizon: Horizon) -> _Halves:
    batches: dict[tuple[int, int], dict[int, HalfRow]] = {}
    for row in rows:
        batches.setdefault((row.partition, row.offset - row.seq), {})[row.seq] = row
    any_void, parts, cut = False, "", False
    for (partition, base), batch in sorted(batches.items()):
        first = next(iter(batch.values()))
        same = all((row.grp, row.count) == (first.grp, first.count) for row in batch.values())
        if not same or batch.keys() != set(range(first.count)):
            if base < horizon.half_start.get(partition, 0):
                cut = True
            else:
                parts = parts or f"{len(batch)} of {first.count} messages"
        elif partition != home or any(row.void is not None for row in batch.values()):
            any_void = True
        else:
            return _Halves([batch[seq] for seq in range(first.count)], any_void, parts, cut)
    return _Halves(None, any_void, parts, cut)


# --- markers ---------------------------------------------------------------------------------


class _Life:
    """A transaction as its markers make it: the ledger's fold.

    `half` None: nothing of the half message is known, so only the first decision is looked for.
    """

    def __init__(self, half: Sequence[HalfRow] | None) -> None:
        self.half = half
        self.found: dict[str, str] = {}
        self.state = "pending"
        self.decided: OpRow | None = None
        self.contents: Sequence[Content] | None = None
        first = None if half is None else half[0]
        self.after_ms = (first and first.after_ms) or 0
        self.interval_ms = (first and first.interval_ms) or 0
        self.attempts_max = (first and first.attempts_max) or 0
        self.timeout_ms = (first and first.timeout_ms) or 0
        self.round = 1
        self.round_started_ms = 0 if half is None else max(row.clock_ms for row in half)
        self.number = 0
        self.counted_ms: list[int] = []
        self.last_check_ms = 0
        self.not_before_ms = 0
        self.last_counts = False
        """Whether the last attempt of this round can still be given back."""

    def apply(self, marker: OpRow) -> None:
        """Apply the next marker; one that is not legal changes nothing."""
        if marker.contents_count and not _whole(marker):
            return
        if marker.kind in _OPPOSITE:
            self._decide(marker)
        elif self.half is None:
            return
        elif marker.kind == "check":
            self._check(marker)
        elif marker.kind == "returned" or marker.kind == "later":
            self._give_back(marker)
        elif marker.kind == "park":
            self._park(marker)
        elif marker.kind == "revive":
            self._revive(marker)

    def _decide(self, marker: OpRow) -> None:
        if self.half is not None:
            if marker.grp and marker.grp != self.half[0].grp:
                return
            if self.decided is None and marker.contents and not _fits(self.half, marker.contents):
                return
        if self.decided is None:
            self.decided = marker
            self.state = "committed" if marker.kind == "commit" else "rolled_back"
            self.contents = _in_order(marker.contents) if marker.contents else None
        elif marker.kind != self.decided.kind:
            self.found.setdefault(
                "contrary_markers",
                f"{self.decided.kind} at {self.decided.offset}, {marker.kind} at {marker.offset}",
            )
        elif marker.contents and self._other_contents(marker.contents):
            self.found.setdefault(
                "contrary_markers",
                f"other messages came with the commit at {marker.offset} than stand",
            )

    def _other_contents(self, contents: Sequence[Content]) -> bool:
        stand: Iterable[HalfRow | Content] = self.contents or self.half or ()
        return [_content_of(each) for each in _in_order(contents)] != [
            _content_of(each) for each in stand
        ]

    def _check(self, marker: OpRow) -> None:
        if self.decided is not None or marker.round != self.round:
            return
        made, at_ms = len(self.counted_ms), marker.clock_ms
        if marker.number != self.number + 1:
            return
        if made >= self.attempts_max:
            self.found.setdefault(
                "too_many_attempts",
                f"attempt {marker.number} at {marker.offset} after {made} that count,"
                f" of {self.attempts_max}",
            )
            return
        if marker.reason == "asked":
            if made + 1 >= self.attempts_max or at_ms < self.last_check_ms + ASK_SPACING_MS:
                return
        elif marker.reason != "due":
            return
        elif at_ms < self.next_check_ms():
            early_ms = self.next_check_ms() - at_ms
            if self.state == "pending" and early_ms > CLOCKS_APART_MS:
                self.found.setdefault(
                    "check_too_early",
                    f"attempt {marker.number} at {marker.offset} came {early_ms} ms early",
                )
            return
        if self.state != "pending":
            return
        self.number = marker.number
        self.counted_ms.append(at_ms)
        self.last_check_ms = at_ms
        self.not_before_ms = 0
        self.last_counts = True

    def next_check_ms(self) -> int:
        """Return when the next attempt is due, ms by the log clock."""
        if self.not_before_ms:
            return self.not_before_ms
        if self.counted_ms:
            return self.counted_ms[-1] + self.interval_ms
        return self.round_started_ms + self.after_ms

    def _give_back(self, marker: OpRow) -> None:
        named = (marker.round, marker.number) == (self.round, self.number)
        if self.state != "pending" or not self.last_counts or not named:
            return
        self.counted_ms.pop()
        self.last_counts = False
        if marker.kind == "later":
            delay_ms = min(max(marker.later_ms, LATER_MIN_MS), LATER_MAX_MS)
            self.not_before_ms = marker.clock_ms + delay_ms

    def _park(self, marker: OpRow) -> None:
        if self.state != "pending" or marker.round != self.round:
            return
        if len(self.counted_ms) < self.attempts_max:
            return
        if marker.clock_ms >= self.counted_ms[-1] + self.timeout_ms:
            self.state = "parked"

    def _revive(self, marker: OpRow) -> None:
        if self.state != "parked" or marker.round != self.round:
            return
        self.state = "pending"
        self.round += 1
        self.round_started_ms = marker.clock_ms
        self.number = 0
        self.counted_ms = []
        self.last_check_ms = self.not_before_ms = 0
        self.last_counts = False


def _whole(marker: OpRow) -> bool:
    """Say whether the messages that a marker announces are all there."""
    given = [each.seq for each in _in_order(marker.contents or ())]
    return given == list(range(marker.contents_count))


def _in_order(contents: Sequence[Content]) -> list[Content]:
    return sorted(contents, key=lambda content: content.seq)


def _fits(half: Sequence[HalfRow], contents: Sequence[Content]) -> bool:
    """Say whether messages can replace the prepared ones: same topics, same partitions."""
    return [(each.topic, each.target_partition) for each in _in_order(contents)] == [
        (row.topic, row.target_partition) for row in half
    ]


def _content_of(message: HalfRow | Content) -> tuple[str, int, int, int | None]:
    """Return what a message is, its partition left out."""
    return message.topic, message.body, message.headers, message.timestamp_ms


# --- what is visible -------------------------------------------------------------------------


def _compare(life: _Life, visible: Sequence[VisibleRow]) -> None:
    """Compare what is visible of a committed transaction with what was prepared."""
    half, decided = life.half, life.decided
    assert half is not None
    assert decided is not None
    expected: Sequence[HalfRow | Content] = life.contents or half
    seen: dict[int, VisibleRow] = {}
    for row in visible:
        where = f"{row.topic}-{row.partition} at {row.offset}"
        if row.seq in seen:
            first = seen[row.seq]
            twice = f"message {row.seq}: {first.topic}-{first.partition} at {first.offset}, {where}"
            life.found.setdefault("visible_twice", twice)
        seen.setdefault(row.seq, row)
        if row.seq >= len(expected) or row.count != len(expected):
            wrong = f"{where} is message {row.seq} of {row.count}, not of {len(expected)}"
            life.found.setdefault("wrong_target", wrong)
            if row.seq >= len(expected):
                continue
        message = expected[row.seq]
        if (row.topic, row.partition) != (message.topic, message.target_partition):
            place = f"{message.topic}-{message.target_partition}"
            life.found.setdefault("wrong_target", f"{where}: prepared for {place}")
        if row.body != message.body:
            life.found.setdefault("body_changed", f"key or value of {where}")
        if row.headers != message.headers:
            life.found.setdefault("headers_changed", f"headers of {where}")
        stamp_ms = decided.at_ms if message.timestamp_ms is None else message.timestamp_ms
        if not row.append_time and row.at_ms != stamp_ms:
            life.found.setdefault("timestamp_changed", f"{where}: {row.at_ms}, not {stamp_ms}")


class _Copy(NamedTuple):
    """What the parked topic holds of a transaction: its state there, None without a copy."""

    state: str | None
    last_ms: int


def _copy(rows: Sequence[ParkedRow]) -> _Copy:
    newest = {}
    for row in rows:
        newest[row.seq] = row
    first = newest.get(0)
    last_ms = max((row.at_ms for row in rows), default=0)
    return _Copy(None if first is None or first.tombstone else first.state, last_ms)


def _end(
    life: _Life, facts: TransactionFacts, terms: TermsLike, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` of a committed transaction; note whether it is late or lost."""
    half, decided = life.half, life.decided
    assert half is not None
    assert decided is not None
    seen = {row.seq for row in facts.visible}
    missing = [row for row in half if row.seq not in seen]
    if not missing:
        return "promoted", False
    copy = _copy(facts.parked)
    if copy.state == "refused":
        return "refused", True
    # What was refused and is tried again leaves the parked topic in the turn that promotes it.
    age_ms = terms.now_ms - max(decided.at_ms, copy.last_ms)
    if not decided.early or age_ms <= terms.late_after_ms:
        return "committed", True
    if all(decided.at_ms <= _taken_ms(horizon, row) for row in missing):
        return "gone", False
    first = missing[0]
    kind = "lost" if age_ms > terms.lost_after_ms else "late"
    life.found[kind] = (
        f"{len(missing)} of {len(half)} not visible {age_ms // 1000} s after the commit:"
        f" message {first.seq} for {first.topic}-{first.target_partition}"
    )
    return "committed", True


def _taken_ms(horizon: Horizon, row: HalfRow) -> int:
    """Return until when what was decided for this place may have been there and be gone."""
    whole_topic = horizon.taken_ms.get((row.topic, -1), -1)
    return horizon.taken_ms.get((row.topic, row.target_partition), whole_topic)


# --- the verdict -----------------------------------------------------------------------------


def judge(facts: TransactionFacts, terms: TermsLike, horizon: Horizon = NOTHING_TAKEN) -> Judged:
    """Say how a transaction ended.

    Whatever was read later than `facts` can only make an open one settled: a transaction that is
    still under way has no findings.
    """
    parts = read_id(facts.id)
    facts = _sorted(facts)
    visible = facts.visible
    if parts is None:
        return _judged(facts, None, _Life(None), visible, "void", False)
    halves = _halves(facts.half, parts.partition, horizon)
    life = _Life(halves.counts)
    for marker in facts.op:
        if marker.partition == parts.partition:
            life.apply(marker)
    if life.half is None:
        state, carry = _without_half(facts, life, parts, halves, terms, horizon)
    elif life.decided is None:
        state, carry = life.state, True
        if visible:
            begin_ms = horizon.op_begin_ms.get(parts.partition, -1)
            if max(row.clock_ms for row in life.half) <= begin_ms + terms.dedup_window_ms:
                state, carry = "gone", False
            else:
                life.found["visible_without_commit"] = _shown(visible)
    elif life.state == "rolled_back":
        state, carry = "rolled_back", False
        if visible:
            life.found["rolled_back_visible"] = _shown(visible)
    else:
        _compare(life, visible)
        state, carry = _end(life, facts, terms, horizon)
    return _judged(facts, parts, life, visible, state, carry)


def _sorted(facts: TransactionFacts) -> TransactionFacts:
    """Return the facts in the order of their logs, each record once."""
    half = {(row.partition, row.offset): row for row in facts.half}
    op = {(row.partition, row.offset): row for row in facts.op}
    parked = {(row.partition, row.offset): row for row in facts.parked}
    visible = {(row.seq, row.topic, row.partition, row.offset): row for row in facts.visible}
    return TransactionFacts(
        facts.id,
        [half[place] for place in sorted(half)],
        [op[place] for place in sorted(op)],
        [visible[place] for place in sorted(visible)],
        [parked[place] for place in sorted(parked)],
    )


def _without_half(
    facts: TransactionFacts,
    life: _Life,
    parts: IdParts,
    halves: _Halves,
    terms: TermsLike,
    horizon: Horizon,
) -> tuple[str, bool]:
    """Return state and `carry` where no half message counts; note what is wrong with that."""
    # Until then a half message of this id may still come, and count.
    open_still = terms.now_ms <= parts.time_ms + terms.dedup_window_ms
    decision = None if life.decided is None else life.decided.kind
    if halves.any_void:
        if facts.visible:
            life.found["visible_without_commit"] = _shown(facts.visible)
        life.decided = None
        return "void", open_still
    copy = _copy(facts.parked)
    begin_ms = horizon.half_begin_ms.get(parts.partition)
    taken = begin_ms is not None and parts.time_ms <= begin_ms + terms.dedup_window_ms
    if copy.state is not None:
        return _from_copy(facts, life, copy.state)
    if taken or halves.cut:
        return "gone", False
    if halves.parts:
        life.found["half_incomplete"] = f"{halves.parts} are stored"
    elif facts.op:
        life.found["marker_without_half"] = f"{facts.op[0].kind} at {facts.op[0].offset}"
    if facts.visible and decision == "rollback":
        life.found["rolled_back_visible"] = _shown(facts.visible)
    elif facts.visible and decision is None:
        life.found["visible_without_commit"] = _shown(facts.visible)
    if not life.found:
        # Only tombstones are left in the parked topic.
        return "gone", False
    return "void", open_still


def _from_copy(facts: TransactionFacts, life: _Life, state: str) -> tuple[str, bool]:
    """Return state and `carry` where retention took the half message and a copy is kept."""
    if life.decided is not None and life.decided.kind == "rollback":
        if facts.visible:
            life.found["rolled_back_visible"] = _shown(facts.visible)
        return "rolled_back", False
    if facts.visible:
        return "promoted", False
    if state == "refused":
        return "refused", True
    return ("committed" if life.decided is not None else state), True


def _shown(visible: Sequence[VisibleRow]) -> str:
    first = visible[0]
    return f"message {first.seq} in {first.topic}-{first.partition} at {first.offset}"


def _judged(
    facts: TransactionFacts,
    parts: IdParts | None,
    life: _Life,
    visible: Sequence[VisibleRow],
    state: str,
    carry: bool,
) -> Judged:
    half, decided = life.half, life.decided
    findings = tuple(kind for kind in GRAVITY if kind in life.found)
    settled = "settled" if state in _SETTLED else state
    named = half if half is not None else facts.half
    group = named[0].grp if named else next((row.grp for row in facts.op if row.grp), None)
    topics = [row.topic for row in (half if half is not None else visible)]
    tell = bool(visible) and all(row.append_time for row in visible)
    return Judged(
        id=facts.id,
        id_ms=None if parts is None else parts.time_ms,
        verdict=findings[0] if findings else settled,
        findings=findings,
        state=state,
        grp=group,
        decision=None if decided is None else decided.kind,
        source=None if decided is None else decided.source,
        prepared_at_ms=None if half is None else max(row.clock_ms for row in half),
        decided_at_ms=None if decided is None else decided.at_ms,
        visible_at_ms=max(row.at_ms for row in visible) if tell else None,
        attempts=len(life.counted_ms),
        messages=len(half) if half is not None else max((row.count for row in visible), default=0),
        topics=tuple(dict.fromkeys(topics)),
        half_partition=None if parts is None else parts.partition,
        half_offset=None if half is None else half[0].offset,
        op_offset=None if decided is None else decided.offset,
        places=tuple(Place(row.topic, row.partition, row.offset, row.seq) for row in visible),
        why="; ".join(f"{kind}: {life.found[kind]}" for kind in findings) or None,
        carry=carry,
    )


def in_order(facts: TransactionFacts, judged: Judged) -> list[Place] | None:
    """Return where a transaction's messages have to stand in the order of their key.

    None where they need not: without a key, or after a refusal, which costs the place.
    """
    mark = order_mark(facts, judged)
    refused = any(row.tombstone or row.state == "refused" for row in facts.parked)
    if mark is None or refused or judged.decision != "commit":
        return None
    half = {row.offset: row for row in facts.half if row.partition == judged.half_partition}
    first: dict[int, Place] = {}
    for place in judged.places:
        row = half.get((judged.half_offset or 0) + place.seq)
        if row is not None and (row.topic, row.target_partition) == place[:2]:
            first.setdefault(place.seq, place)
    return list(first.values())


def order_mark(facts: TransactionFacts, judged: Judged) -> int | None:
    """Return what transactions whose order is kept have in common, None without an order."""
    place = judged.half_partition, judged.half_offset
    marks = (row.order_mark for row in facts.half if (row.partition, row.offset) == place)
    return next(marks, None)


def judge_rows(
    rows: Iterable[Mapping[str, Any]], terms: TermsLike, horizon: Horizon
) -> list[dict[str, Any]]:
    """Judge rows of `gather`.

    What comes out are rows of `Judged`, places as dicts, with `order_mark` and, as `ordered`,
    what `in_order` says.
    """
    found = []
    for row in rows:
        facts = facts_of(row)
        judged = judge(facts, terms, horizon)
        ordered = in_order(facts, judged)
        found.append(
            {
                **judged._asdict(),
                "places": [place._asdict() for place in judged.places],
                "order_mark": order_mark(facts, judged),
                "ordered": None if ordered is None else [place._asdict() for place in ordered],
            }
        )
    return found
