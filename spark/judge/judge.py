"""Judge how one transaction ended, from the records of all topics: a pure function.

The ledger's rules are written a second time here, on the audit's narrow rows and without a line of
`txbroker.core`, so that a fault in the one shows in the other. Only the standard library, `fold`,
`kinds` and `rows` are imported: Spark ships these modules to its executors by value.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txbroker.spark.judge.fold import EARLY_MS, CopiedMessages, TransactionFold
from txbroker.spark.judge.kinds import KIND_NAMES
from txbroker.spark.judge.rows import (
    ALWAYS,
    NOTHING_TAKEN,
    Content,
    HalfFact,
    Horizon,
    JudgedTransaction,
    JudgeTerms,
    MarkerFact,
    MessagePosition,
    ParkedFact,
    ParsedId,
    TransactionFacts,
    VisibleFact,
    facts_of,
    read_id,
)

_SETTLED = frozenset({"promoted", "rolled_back"})
_CHANGES = frozenset({"body_changed", "headers_changed", "timestamp_changed"})


# --- half messages ---------------------------------------------------------------------------


class _Halves(NamedTuple):
    """The half messages with one id."""

    counts: Sequence[HalfFact] | None
    """Rows of the one that counts, by `seq`."""
    any_void: bool
    parts: str
    """Description of an incomplete one."""
    cut: bool
    """Whether retention removed a part of it."""


def _is_whole(numbers: Collection[int], count: int) -> bool:
    """Return whether these are the numbers of `count` messages. No list of `count` numbers is
    built: a record may claim any count."""
    return len(numbers) == count and all(0 <= number < count for number in numbers)


def _halves(rows: Sequence[HalfFact], home: int, horizon: Horizon) -> _Halves:
    batches: dict[tuple[int, int], dict[int, HalfFact]] = {}
    for row in rows:
        batches.setdefault((row.partition, row.offset - row.seq), {})[row.seq] = row
    any_void, parts, cut = False, "", False
    for (partition, base), batch in sorted(batches.items()):
        first = next(iter(batch.values()))
        same = all((row.grp, row.count) == (first.grp, first.count) for row in batch.values())
        if not same or not _is_whole(batch.keys(), first.count):
            if base < horizon.half_start.get(partition, 0):
                cut = True
            else:
                parts = parts or f"{len(batch)} of {first.count} messages"
        elif partition != home or any(row.void is not None for row in batch.values()):
            any_void = True
        else:
            return _Halves([batch[seq] for seq in range(first.count)], any_void, parts, cut)
    return _Halves(None, any_void, parts, cut)


# --- visible messages -------------------------------------------------------------------------


def _hold_twice(fold: TransactionFold, visible: Sequence[VisibleFact]) -> None:
    """Find a message that is visible twice, which is wrong for any decision."""
    seen: dict[int, VisibleFact] = {}
    for row in visible:
        first = seen.setdefault(row.seq, row)
        if first is not row:
            fold.findings["visible_twice"] = (
                f"message {row.seq}: {first.topic}-{first.partition} at {first.offset}, "
                f"{row.topic}-{row.partition} at {row.offset}"
            )
            return


def _compare(fold: TransactionFold, visible: Sequence[VisibleFact]) -> None:
    """Compare the visible messages of a committed transaction with the prepared ones."""
    decided, expected = fold.decided, fold.contents or fold.prepared
    assert expected is not None
    assert decided is not None
    for row in visible:
        where = f"{row.topic}-{row.partition} at {row.offset}"
        if row.seq >= len(expected) or row.count != len(expected):
            wrong = f"{where} is message {row.seq} of {row.count}, not of {len(expected)}"
            fold.findings.setdefault("wrong_target", wrong)
            if row.seq >= len(expected):
                continue
        message = expected[row.seq]
        if (row.topic, row.partition) != (message.topic, message.target_partition):
            place = f"{message.topic}-{message.target_partition}"
            fold.findings.setdefault("wrong_target", f"{where}: prepared for {place}")
        if row.body != message.body:
            fold.findings.setdefault("body_changed", f"key or value of {where}")
        if row.headers != message.headers:
            fold.findings.setdefault("headers_changed", f"headers of {where}")
        stamp_ms = decided.at_ms if message.timestamp_ms is None else message.timestamp_ms
        if not row.append_time and row.at_ms != stamp_ms:
            fold.findings.setdefault("timestamp_changed", f"{where}: {row.at_ms}, not {stamp_ms}")
        early_ms = decided.at_ms - row.at_ms
        if row.append_time and early_ms > EARLY_MS:
            early = f"message {row.seq} in {where}, {early_ms} ms before the commit"
            fold.findings.setdefault("visible_without_commit", early)


def _hold_contrary(fold: TransactionFold, visible: Sequence[VisibleFact]) -> None:
    """Find visible messages that follow another decision than the first.

    Contrary decisions alone are no drift: a check may be answered while a commit is in flight, and
    the second of two markers changes nothing.
    """
    if fold.decided is None or not fold.others:
        return
    if fold.decided.kind == "rollback":
        follows = bool(visible)
    else:
        unseen = not visible and not fold.findings.keys().isdisjoint(("late", "lost"))
        follows = unseen and any(marker.kind == "rollback" for marker in fold.others)
        if not fold.findings.keys().isdisjoint(_CHANGES):
            follows = follows or any(_is_from(marker, visible) for marker in fold.others)
    if follows:
        fold.findings["contrary_markers"] = fold.contrary


def _is_from(marker: MarkerFact, visible: Sequence[VisibleFact]) -> bool:
    brought = {(content.seq, content.body, content.headers) for content in marker.contents or ()}
    return any((row.seq, row.body, row.headers) in brought for row in visible)


# --- parked copies ----------------------------------------------------------------------------


class _Copy(NamedTuple):
    """The copy of a transaction in the parked topic; `state` is None without a copy."""

    state: str | None
    last_ms: int
    newest: Mapping[int, ParkedFact]


def _copy(rows: Sequence[ParkedFact]) -> _Copy:
    newest = {}
    for row in rows:
        newest[row.seq] = row
    first = newest.get(0)
    last_ms = max((row.at_ms for row in rows), default=0)
    return _Copy(None if first is None or first.tombstone else first.state, last_ms, newest)


def _kept(rows: Sequence[ParkedFact]) -> CopiedMessages | None:
    """Return the newest copy; None where it is incomplete or unknown."""
    newest = {row.seq: row for row in rows if not row.tombstone}
    first = newest.get(0)
    if first is None or first.grp is None or not _is_whole(newest.keys(), first.count or 0):
        return None
    messages = []
    for seq in range(len(newest)):
        row = newest[seq]
        if row.topic is None or row.target_partition is None:
            return None
        if row.body is None or row.headers is None:
            return None
        place = row.topic, row.target_partition
        messages.append(Content(seq, *place, row.body, row.headers, row.timestamp_ms))
    return CopiedMessages(first.grp, messages)


def _hold_copy(fold: TransactionFold, copy: _Copy) -> None:
    prepared = fold.prepared or ()
    count = len(prepared)
    for number, message in enumerate(prepared):
        row = copy.newest.get(number)
        if row is None or row.tombstone:
            fold.findings["not_kept"] = f"message {number} of {count} has no copy"
            return
        right = {_content_of(message)}
        if fold.contents:
            right.add(_content_of(fold.contents[number]))
            # An earlier version did not read the contents of a copy.
        same = (row.grp, row.count) == (fold.grp, count) and _content_of(row) in right
        if row.count is not None and not same:
            fold.findings["not_kept"] = (
                f"the copy at {row.offset} is not message {number} of {count}"
            )
            return


def _content_of(message: HalfFact | Content | ParkedFact) -> tuple[object, ...]:
    """Return the content of a message, independent of its topic."""
    place = message.topic, message.target_partition
    return *place, message.body, message.headers, message.timestamp_ms


def _left_over(copy: _Copy) -> str:
    """Describe a copy of a settled transaction; the promotion that settles it should have
    dropped it."""
    left = [row.offset for row in copy.newest.values() if not row.tombstone]
    return f"its copy is still in the parked topic, at {min(left)}" if left else ""


def _hold_refused(
    fold: TransactionFold,
    visible: Sequence[VisibleFact],
    copy: _Copy,
    terms: JudgeTerms,
    horizon: Horizon,
) -> None:
    """Check that a refused transaction is kept whole, and that none of its messages is visible."""
    _hold_copy(fold, copy)
    if not visible:
        return
    # Its promotion may be in flight: partitions do not show it at the same time.
    seen = {row.seq for row in visible}
    missing = [row for row in fold.prepared or () if row.seq not in seen]
    ends = all(
        (row.topic, row.target_partition) in horizon.open or horizon.is_unread(row.topic)
        for row in missing
    )
    fresh = all(row.append_time for row in visible) and any(
        terms.now_ms - row.at_ms <= terms.late_after_ms for row in visible
    )
    if not ends and not fresh:
        fold.findings["refused_visible"] = _shown(visible)


# --- how a committed one ended ---------------------------------------------------------------


def _end(
    fold: TransactionFold, facts: TransactionFacts, terms: JudgeTerms, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` of a committed transaction; find whether it is late or lost."""
    half, decided = fold.contents or fold.prepared, fold.decided
    assert half is not None
    assert decided is not None
    seen = {row.seq for row in facts.visible}
    missing = [row for row in half if row.seq not in seen]
    if not missing:
        return "promoted", False
    copy = _copy(facts.parked)
    if copy.state == "refused":
        _hold_refused(fold, facts.visible, copy, terms, horizon)
        return "refused", True
    # A refused transaction leaves the parked topic in the Kafka transaction that promotes it.
    age_ms = terms.now_ms - max(decided.at_ms, copy.last_ms)
    unread = [row for row in missing if horizon.is_unread(row.topic)]
    if unread:
        first = unread[0]
        fold.findings["target_unreadable"] = (
            f"message {first.seq} for {first.topic} was not searched: the topic could not be read"
        )
        missing = [row for row in missing if not horizon.is_unread(row.topic)]
    former = {row.seq for row in facts.former}
    vanished = [row for row in missing if row.seq in former]
    # Of what an earlier run has seen, no promotion is in flight.
    in_time = not vanished and (not decided.early or age_ms <= terms.late_after_ms)
    if not missing or in_time:
        return "committed", True
    if all(_may_be_gone(horizon, decided, row) for row in missing):
        return ("committed", True) if unread else ("gone", False)
    first = (vanished or missing)[0]
    hidden = all((row.topic, row.target_partition) in horizon.hidden for row in missing)
    is_lost = vanished or (age_ms > terms.lost_after_ms and not hidden)
    kind = "lost" if is_lost else "late"
    fold.findings[kind] = (
        f"{len(missing)} of {len(half)} not visible {age_ms // 1000} s after the commit:"
        f" message {first.seq} for {first.topic}-{first.target_partition}"
        + (", which an earlier run has seen in a former topic" if vanished else "")
        + (", which ends in an open transaction" if hidden else "")
    )
    return "committed", True


def _may_be_gone(horizon: Horizon, decided: MarkerFact, row: HalfFact | Content) -> bool:
    """Return whether a message may have been visible and then removed."""
    if decided.at_ms <= horizon.taken_ms.get((row.topic, -1), -1):
        return True
    until_ms = horizon.taken_ms.get((row.topic, row.target_partition), -1)
    # Whether its timestamp is the user's or the broker's, it is no older than this.
    stamp_ms = decided.at_ms if row.timestamp_ms is None else min(decided.at_ms, row.timestamp_ms)
    return decided.at_ms <= until_ms and stamp_ms < horizon.kept_from_ms.get(row.topic, ALWAYS)


# --- the verdict -----------------------------------------------------------------------------


def judge(
    facts: TransactionFacts, terms: JudgeTerms, horizon: Horizon = NOTHING_TAKEN
) -> JudgedTransaction:
    """Judge a transaction.
    Records that were read after `facts` can only settle an open transaction: a transaction in
    flight has no findings."""
    parts = read_id(facts.id)
    facts = _sorted(facts)
    visible = facts.visible
    if parts is None:
        return _judged(facts, None, TransactionFold(None), visible, "void", False)
    halves = _halves(facts.half, parts.partition, horizon)
    fold = TransactionFold(halves.counts, _kept(facts.parked))
    for marker in facts.op:
        if marker.partition == parts.partition:
            fold.apply(marker)
    _hold_twice(fold, visible)
    if fold.half is None:
        state, carry = _without_half(facts, fold, parts, halves, terms, horizon)
    elif fold.decided is None:
        state, carry = fold.state, True
        parked = fold.parked if state == "parked" else None
        if parked and parked.early and terms.now_ms - parked.at_ms > terms.lost_after_ms:
            _hold_copy(fold, _copy(facts.parked))
        prepared_ms = max(row.clock_ms for row in fold.half)
        if visible:
            if _has_all_markers(parts, prepared_ms, terms, horizon):
                fold.findings["visible_without_commit"] = _shown(visible)
            else:
                fold.findings.pop("not_kept", None)
                state, carry = "gone", False
        elif state == "pending" and _has_all_markers(parts, prepared_ms, terms, horizon):
            _hold_overdue(fold, facts, fold.next_check_ms(), terms)
    elif fold.state == "rolled_back":
        state, carry = "rolled_back", False
        if visible:
            fold.findings["rolled_back_visible"] = _shown(visible)
    else:
        _compare(fold, visible)
        state, carry = _end(fold, facts, terms, horizon)
    _hold_contrary(fold, visible)
    return _judged(facts, parts, fold, visible, state, carry)


def _has_all_markers(
    parts: ParsedId, prepared_ms: int, terms: JudgeTerms, horizon: Horizon
) -> bool:
    """Return whether retention cannot have removed a marker of a transaction that was prepared at
    `prepared_ms`, or whose id has that time."""
    begin_ms = horizon.op_begin_ms.get(parts.partition)
    return begin_ms is None or prepared_ms > begin_ms + terms.dedup_window_ms


def _hold_overdue(
    fold: TransactionFold, facts: TransactionFacts, due_ms: int | None, terms: JudgeTerms
) -> None:
    """Find that the first check is long overdue, and that the transaction was neither checked nor
    parked.
    The logs do not show whether an instance of the group was reachable, so this waits for longer
    than an outage should last. A copy alone proves nothing: a proxy also copies pending
    transactions before retention removes the half message."""
    parked = any(row.state not in (None, "pending") for row in facts.parked)
    if due_ms is None or parked or any(row.kind in ("check", "park") for row in facts.op):
        return
    since_ms = terms.now_ms - due_ms
    if since_ms > terms.overdue_after_ms:
        fold.findings["overdue"] = f"the first check was due {since_ms // 1000} s ago"


def _sorted(facts: TransactionFacts) -> TransactionFacts:
    half = {(row.partition, row.offset): row for row in facts.half}
    op = {(row.partition, row.offset): row for row in facts.op}
    parked = {(row.partition, row.offset): row for row in facts.parked}
    visible = {
        (row.seq, row.topic, row.partition, row.offset): row
        for row in facts.visible
        if not row.former
    }
    return TransactionFacts(
        facts.id,
        [half[place] for place in sorted(half)],
        [op[place] for place in sorted(op)],
        [visible[place] for place in sorted(visible)],
        [parked[place] for place in sorted(parked)],
        [row for row in facts.visible if row.former],
    )


def _without_half(
    facts: TransactionFacts,
    fold: TransactionFold,
    parts: ParsedId,
    halves: _Halves,
    terms: JudgeTerms,
    horizon: Horizon,
) -> tuple[str, bool]:
    """Return state and `carry` where no half message counts; find the fault in that."""
    # Until then a half message of this id may still arrive, and count.
    open_still = terms.now_ms <= parts.time_ms + terms.dedup_window_ms
    decision = None if fold.decided is None else fold.decided.kind
    if halves.any_void:
        if facts.visible:
            fold.findings["visible_without_commit"] = _shown(facts.visible)
        fold.decided, fold.contrary = None, ""
        return "void", open_still
    copy = _copy(facts.parked)
    begin_ms = horizon.half_begin_ms.get(parts.partition)
    taken = begin_ms is not None and parts.time_ms <= begin_ms + terms.dedup_window_ms
    # A dropped copy counts too, while its records are there.
    dropped = fold.prepared is not None and decision == "commit" and (taken or halves.cut)
    if copy.state is not None or dropped:
        return _from_copy(facts, fold, copy, terms, horizon)
    known = not taken and not halves.cut
    if known and halves.parts:
        fold.findings["half_incomplete"] = f"{halves.parts} are stored"
    elif known and facts.op:
        fold.findings["marker_without_half"] = f"{facts.op[0].kind} at {facts.op[0].offset}"
    if not known and _is_disputed(fold):
        fold.others, fold.contrary = [], ""
    elif facts.visible:
        complete = parts.time_ms > horizon.removed_ms and _has_all_markers(
            parts, parts.time_ms, terms, horizon
        )
        if decision == "commit" and known:
            fold.findings["visible_without_half"] = _shown(facts.visible)
        elif decision == "rollback" and (known or complete):
            fold.findings["rolled_back_visible"] = _shown(facts.visible)
            if not known:
                return "rolled_back", False
        elif decision is None and known:
            fold.findings["visible_without_commit"] = _shown(facts.visible)
    # Where retention removed nothing and nothing is wrong, only tombstones are left in the parked
    # topic.
    return ("void", open_still) if known and fold.findings else ("gone", False)


def _is_disputed(fold: TransactionFold) -> bool:
    """Return whether another group has decided otherwise: without the half message the owner of the
    transaction is unknown."""
    first = "" if fold.decided is None else fold.decided.grp
    return any(first and row.grp and row.grp != first for row in fold.others)


def _from_copy(
    facts: TransactionFacts, fold: TransactionFold, copy: _Copy, terms: JudgeTerms, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` where retention removed the half message and a copy is known."""
    visible = facts.visible
    if fold.decided is None:
        return _undecided_copy(facts, fold, copy, terms, horizon)
    if fold.decided.kind == "rollback":
        if visible:
            fold.findings["rolled_back_visible"] = _shown(visible)
        return "rolled_back", False
    if fold.prepared is not None:
        _compare(fold, visible)
        return _end(fold, facts, terms, horizon)
    # An earlier version has read the copy, or it is incomplete: its messages are unknown.
    if visible:
        return "promoted", False
    return ("refused" if copy.state == "refused" else "committed"), True


def _undecided_copy(
    facts: TransactionFacts, fold: TransactionFold, copy: _Copy, terms: JudgeTerms, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` of a copy without a known decision."""
    state, visible = copy.state or "gone", facts.visible
    parts = read_id(facts.id)
    assert parts is not None
    has_all = _has_all_markers(parts, parts.time_ms, terms, horizon)
    if not visible:
        if state == "pending" and has_all:
            _hold_overdue(fold, facts, copy.newest[0].due_ms, terms)
        return state, True
    if state in ("refused", "committed"):
        # It was committed, and the marker was removed.
        if {row.seq for row in visible} >= set(range(len(fold.prepared or ()))):
            return "promoted", False
        if state == "refused":
            _hold_refused(fold, visible, copy, terms, horizon)
        return state, True
    if not has_all:
        return "gone", False
    fold.findings["visible_without_commit"] = _shown(visible)
    return state, True


def _shown(visible: Sequence[VisibleFact]) -> str:
    first = visible[0]
    return f"message {first.seq} in {first.topic}-{first.partition} at {first.offset}"


def _judged(
    facts: TransactionFacts,
    parts: ParsedId | None,
    fold: TransactionFold,
    visible: Sequence[VisibleFact],
    state: str,
    carry: bool,
) -> JudgedTransaction:
    half, decided = fold.half, fold.decided
    findings = tuple(kind for kind in KIND_NAMES if kind in fold.findings)
    settled = "settled" if state in _SETTLED else state
    named = half if half is not None else facts.half
    known = fold.grp or next((row.grp for row in facts.op if row.grp), None)
    group = named[0].grp if named else known
    prepared = fold.prepared or ()
    topics = [row.topic for row in (prepared or visible)]
    words = [f"{kind}: {fold.findings[kind]}" for kind in findings]
    if fold.contrary and "contrary_markers" not in fold.findings:
        words.append(f"contrary markers, and the first counts: {fold.contrary}")
    if state in _SETTLED:
        words += filter(None, [_left_over(_copy(facts.parked))])
    by_broker = bool(visible) and all(row.append_time for row in visible)
    return JudgedTransaction(
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
        visible_at_ms=max(row.at_ms for row in visible) if by_broker else None,
        attempts=len(fold.counted_ms),
        messages=len(prepared) or max((row.count for row in visible), default=0),
        topics=tuple(dict.fromkeys(topics)),
        half_partition=None if parts is None else parts.partition,
        half_offset=None if half is None else half[0].offset,
        op_offset=None if decided is None else decided.offset,
        places=tuple(
            MessagePosition(row.topic, row.partition, row.offset, row.seq) for row in visible
        ),
        why="; ".join(words) or None,
        carry=carry,
    )


def in_order(facts: TransactionFacts, judged: JudgedTransaction) -> list[MessagePosition] | None:
    """Return the positions of messages that must follow the order of their key.

    None where no order applies: without a key, or after a refusal, which gives up the place.
    """
    mark = order_mark(facts, judged)
    refused = any(row.tombstone or row.state == "refused" for row in facts.parked)
    if mark is None or refused or judged.decision != "commit":
        return None
    half = {row.offset: row for row in facts.half if row.partition == judged.half_partition}
    first: dict[int, MessagePosition] = {}
    for place in judged.places:
        row = half.get((judged.half_offset or 0) + place.seq)
        if row is not None and (row.topic, row.target_partition) == place[:2]:
            first.setdefault(place.seq, place)
    return list(first.values())


def order_mark(facts: TransactionFacts, judged: JudgedTransaction) -> int | None:
    """Return the mark shared by transactions of one order; None without an order."""
    place = judged.half_partition, judged.half_offset
    marks = (row.order_mark for row in facts.half if (row.partition, row.offset) == place)
    return next(marks, None)


def judge_rows(
    rows: Iterable[Mapping[str, Any]], terms: JudgeTerms, horizon: Horizon
) -> list[dict[str, Any]]:
    """Judge rows of `group`.

    Returns rows of `JudgedTransaction` with positions as dicts, with `order_mark` and the result of
    `in_order` as `ordered`.
    """
    verdicts = []
    for row in rows:
        facts = facts_of(row)
        judged = judge(facts, terms, horizon)
        ordered = in_order(facts, judged)
        verdicts.append(
            {
                **judged._asdict(),
                "places": [place._asdict() for place in judged.places],
                "order_mark": order_mark(facts, judged),
                "ordered": None if ordered is None else [place._asdict() for place in ordered],
            }
        )
    return verdicts
