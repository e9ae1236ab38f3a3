"""How one transaction ended, from the records of all topics: a pure function.

The ledger's rules again, written anew on the audit's narrow rows, so that a fault in the one shows
in the other. Only the standard library, `life` and `rows` are used here: Spark ships these modules
to its executors by value, and nothing of ours need be installed there.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txbroker.spark.judge.fold import CopiedMessages, TransactionFold
from txbroker.spark.judge.rows import (
    ALWAYS,
    NOTHING_TAKEN,
    Content,
    HalfFact,
    Horizon,
    JudgedTransaction,
    MarkerFact,
    MessagePosition,
    ParkedFact,
    ParsedId,
    TermsLike,
    TransactionFacts,
    VisibleFact,
    facts_of,
    read_id,
)

GRAVITY = (
    "rolled_back_visible",
    "visible_without_commit",
    "visible_without_half",
    "visible_twice",
    "lost",
    "refused_visible",
    "half_incomplete",
    "not_kept",
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
    "target_unreadable",
    "overdue",
)
"""The kinds of findings, the gravest first."""

_SETTLED = frozenset({"promoted", "rolled_back"})
_CHANGES = frozenset({"body_changed", "headers_changed", "timestamp_changed"})


# --- half messages ---------------------------------------------------------------------------


class _Halves(NamedTuple):
    """What there is of half messages with one id."""

    counts: Sequence[HalfFact] | None
    """The rows of the one that counts, by `seq`."""
    any_void: bool
    parts: str
    """How much there is of one that is not whole."""
    cut: bool
    """Retention has taken a part of it."""


def _is_whole(numbers: Collection[int], count: int) -> bool:
    """Say whether the numbers of messages are those of `count` messages. No list of them is made:
    a record may say any count."""
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


# --- what is visible -------------------------------------------------------------------------


def _hold_twice(life: TransactionFold, visible: Sequence[VisibleFact]) -> None:
    """Note where a message is visible twice: that is wrong whatever was prepared and decided."""
    seen: dict[int, VisibleFact] = {}
    for row in visible:
        first = seen.setdefault(row.seq, row)
        if first is not row:
            life.found["visible_twice"] = (
                f"message {row.seq}: {first.topic}-{first.partition} at {first.offset}, "
                f"{row.topic}-{row.partition} at {row.offset}"
            )
            return


def _compare(life: TransactionFold, visible: Sequence[VisibleFact]) -> None:
    """Compare what is visible of a committed transaction with what was prepared."""
    decided, expected = life.decided, life.contents or life.prepared
    assert expected is not None
    assert decided is not None
    for row in visible:
        where = f"{row.topic}-{row.partition} at {row.offset}"
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


def _hold_contrary(life: TransactionFold, visible: Sequence[VisibleFact]) -> None:
    """Find fault with contrary decisions where what is visible follows another than the first.

    By itself one is no drift: a check may answer while a commit is on its way, and the second of
    two markers changes nothing.
    """
    if life.decided is None or not life.others:
        return
    if life.decided.kind == "rollback":
        follows = bool(visible)
    else:
        unseen = not visible and not life.found.keys().isdisjoint(("late", "lost"))
        follows = unseen and any(marker.kind == "rollback" for marker in life.others)
        if not life.found.keys().isdisjoint(_CHANGES):
            follows = follows or any(_is_from(marker, visible) for marker in life.others)
    if follows:
        life.found["contrary_markers"] = life.contrary


def _is_from(marker: MarkerFact, visible: Sequence[VisibleFact]) -> bool:
    """Say whether something visible is what a marker brought."""
    told = {(each.seq, each.body, each.headers) for each in marker.contents or ()}
    return any((row.seq, row.body, row.headers) in told for row in visible)


# --- what is kept ----------------------------------------------------------------------------


class _Copy(NamedTuple):
    """What the parked topic holds of a transaction: its state there, None without a copy."""

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
    """Return the newest copy, None where it is not whole or not known."""
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


def _hold_copy(life: TransactionFold, copy: _Copy) -> None:
    """See that the parked topic keeps what it has to, as it was prepared or came with a commit."""
    prepared = life.prepared or ()
    count = len(prepared)
    for number, message in enumerate(prepared):
        row = copy.newest.get(number)
        if row is None or row.tombstone:
            life.found["not_kept"] = f"message {number} of {count} has no copy"
            return
        right = {_told(message)}
        if life.contents:
            right.add(_told(life.contents[number]))
        # An earlier version did not read what a copy holds.
        same = (row.grp, row.count) == (life.grp, count) and _told(row) in right
        if row.count is not None and not same:
            life.found["not_kept"] = f"the copy at {row.offset} is not message {number} of {count}"
            return


def _told(message: HalfFact | Content | ParkedFact) -> tuple[object, ...]:
    """Return what a message is, wherever it lies."""
    place = message.topic, message.target_partition
    return *place, message.body, message.headers, message.timestamp_ms


def _left_over(copy: _Copy) -> str:
    """Say where there is still a copy of what is settled; the turn that settles it drops that."""
    left = [row.offset for row in copy.newest.values() if not row.tombstone]
    return f"its copy is still in the parked topic, at {min(left)}" if left else ""


def _hold_refused(
    life: TransactionFold,
    visible: Sequence[VisibleFact],
    copy: _Copy,
    terms: TermsLike,
    horizon: Horizon,
) -> None:
    """See that what was refused is kept whole, and that nothing of it is visible."""
    _hold_copy(life, copy)
    if not visible:
        return
    # The turn that promotes it may be on its way: not all partitions show it at the same time.
    seen = {row.seq for row in visible}
    missing = [row for row in life.prepared or () if row.seq not in seen]
    ends = all(
        (row.topic, row.target_partition) in horizon.open or horizon.is_unread(row.topic)
        for row in missing
    )
    fresh = all(row.append_time for row in visible) and any(
        terms.now_ms - row.at_ms <= terms.late_after_ms for row in visible
    )
    if not ends and not fresh:
        life.found["refused_visible"] = _shown(visible)


# --- how a committed one ended ---------------------------------------------------------------


def _end(
    life: TransactionFold, facts: TransactionFacts, terms: TermsLike, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` of a committed transaction; note whether it is late or lost."""
    half, decided = life.contents or life.prepared, life.decided
    assert half is not None
    assert decided is not None
    seen = {row.seq for row in facts.visible}
    missing = [row for row in half if row.seq not in seen]
    if not missing:
        return "promoted", False
    copy = _copy(facts.parked)
    if copy.state == "refused":
        _hold_refused(life, facts.visible, copy, terms, horizon)
        return "refused", True
    # What was refused and is tried again leaves the parked topic in the turn that promotes it.
    age_ms = terms.now_ms - max(decided.at_ms, copy.last_ms)
    unread = [row for row in missing if horizon.is_unread(row.topic)]
    if unread:
        first = unread[0]
        life.found["target_unreadable"] = (
            f"message {first.seq} for {first.topic} was not looked for"
        )
        missing = [row for row in missing if not horizon.is_unread(row.topic)]
    if not missing or not decided.early or age_ms <= terms.late_after_ms:
        return "committed", True
    if all(_may_be_gone(horizon, decided, row) for row in missing):
        return ("committed", True) if unread else ("gone", False)
    first = missing[0]
    hidden = all((row.topic, row.target_partition) in horizon.hidden for row in missing)
    kind = "lost" if age_ms > terms.lost_after_ms and not hidden else "late"
    life.found[kind] = (
        f"{len(missing)} of {len(half)} not visible {age_ms // 1000} s after the commit:"
        f" message {first.seq} for {first.topic}-{first.target_partition}"
        + (", which ends in an open transaction" if hidden else "")
    )
    return "committed", True


def _may_be_gone(horizon: Horizon, decided: MarkerFact, row: HalfFact | Content) -> bool:
    """Say whether a message may have been visible, and been taken away since."""
    if decided.at_ms <= horizon.taken_ms.get((row.topic, -1), -1):
        return True
    until_ms = horizon.taken_ms.get((row.topic, row.target_partition), -1)
    # By whichever timestamp it has there, the user's or the broker's, it is no older than this.
    stamp_ms = decided.at_ms if row.timestamp_ms is None else min(decided.at_ms, row.timestamp_ms)
    return decided.at_ms <= until_ms and stamp_ms < horizon.kept_from_ms.get(row.topic, ALWAYS)


# --- the verdict -----------------------------------------------------------------------------


def judge(
    facts: TransactionFacts, terms: TermsLike, horizon: Horizon = NOTHING_TAKEN
) -> JudgedTransaction:
    """Say how a transaction ended.

    Whatever was read later than `facts` can only make an open one settled: a transaction that is
    still under way has no findings.
    """
    parts = read_id(facts.id)
    facts = _sorted(facts)
    visible = facts.visible
    if parts is None:
        return _judged(facts, None, TransactionFold(None), visible, "void", False)
    halves = _halves(facts.half, parts.partition, horizon)
    life = TransactionFold(halves.counts, _kept(facts.parked))
    for marker in facts.op:
        if marker.partition == parts.partition:
            life.apply(marker)
    _hold_twice(life, visible)
    if life.half is None:
        state, carry = _without_half(facts, life, parts, halves, terms, horizon)
    elif life.decided is None:
        state, carry = life.state, True
        parked = life.parked if state == "parked" else None
        if parked and parked.early and terms.now_ms - parked.at_ms > terms.lost_after_ms:
            _hold_copy(life, _copy(facts.parked))
        prepared_ms = max(row.clock_ms for row in life.half)
        if visible:
            if _has_all_markers(parts, prepared_ms, terms, horizon):
                life.found["visible_without_commit"] = _shown(visible)
            else:
                life.found.pop("not_kept", None)
                state, carry = "gone", False
        elif state == "pending" and _has_all_markers(parts, prepared_ms, terms, horizon):
            _hold_overdue(life, facts, life.next_check_ms(), terms)
    elif life.state == "rolled_back":
        state, carry = "rolled_back", False
        if visible:
            life.found["rolled_back_visible"] = _shown(visible)
    else:
        _compare(life, visible)
        state, carry = _end(life, facts, terms, horizon)
    _hold_contrary(life, visible)
    return _judged(facts, parts, life, visible, state, carry)


def _has_all_markers(parts: ParsedId, prepared_ms: int, terms: TermsLike, horizon: Horizon) -> bool:
    """Say whether retention cannot have taken a marker of a transaction.

    Args:
        prepared_ms: when it was prepared, or the time in its id.
    """
    begin_ms = horizon.op_begin_ms.get(parts.partition)
    return begin_ms is None or prepared_ms > begin_ms + terms.dedup_window_ms


def _hold_overdue(
    life: TransactionFold, facts: TransactionFacts, due_ms: int | None, terms: TermsLike
) -> None:
    """Note that nobody was ever asked, though that was due long ago, and that it was never parked.

    The logs do not tell whether anybody of the group could be reached, so this waits for longer
    than an outage is thought to last. A copy by itself says nothing: a proxy also copies what is
    still pending, before retention takes the half message.
    """
    parked = any(row.state not in (None, "pending") for row in facts.parked)
    if due_ms is None or parked or any(row.kind in ("check", "park") for row in facts.op):
        return
    since_ms = terms.now_ms - due_ms
    if since_ms > terms.overdue_after_ms:
        life.found["overdue"] = f"the first check was due {since_ms // 1000} s ago"


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
    life: TransactionFold,
    parts: ParsedId,
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
        life.decided, life.contrary = None, ""
        return "void", open_still
    copy = _copy(facts.parked)
    begin_ms = horizon.half_begin_ms.get(parts.partition)
    taken = begin_ms is not None and parts.time_ms <= begin_ms + terms.dedup_window_ms
    # A copy that was dropped tells too, while its records are there.
    dropped = life.prepared is not None and decision == "commit" and (taken or halves.cut)
    if copy.state is not None or dropped:
        return _from_copy(facts, life, copy, terms, horizon)
    known = not taken and not halves.cut
    if known and halves.parts:
        life.found["half_incomplete"] = f"{halves.parts} are stored"
    elif known and facts.op:
        life.found["marker_without_half"] = f"{facts.op[0].kind} at {facts.op[0].offset}"
    if not known and _is_disputed(life):
        life.others, life.contrary = [], ""
    elif facts.visible:
        complete = parts.time_ms > horizon.removed_ms and _has_all_markers(
            parts, parts.time_ms, terms, horizon
        )
        if decision == "commit" and known:
            life.found["visible_without_half"] = _shown(facts.visible)
        elif decision == "rollback" and (known or complete):
            life.found["rolled_back_visible"] = _shown(facts.visible)
            if not known:
                return "rolled_back", False
        elif decision is None and known:
            life.found["visible_without_commit"] = _shown(facts.visible)
    # Where nothing was taken and nothing is wrong, only tombstones are left in the parked topic.
    return ("void", open_still) if known and life.found else ("gone", False)


def _is_disputed(life: TransactionFold) -> bool:
    """Say whether somebody of another group has decided otherwise: without the half message nobody
    knows whose transaction it was."""
    first = "" if life.decided is None else life.decided.grp
    return any(first and row.grp and row.grp != first for row in life.others)


def _from_copy(
    facts: TransactionFacts, life: TransactionFold, copy: _Copy, terms: TermsLike, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` where retention took the half message and a copy is known."""
    visible = facts.visible
    if life.decided is None:
        return _undecided_copy(facts, life, copy, terms, horizon)
    if life.decided.kind == "rollback":
        if visible:
            life.found["rolled_back_visible"] = _shown(visible)
        return "rolled_back", False
    if life.prepared is not None:
        _compare(life, visible)
        return _end(life, facts, terms, horizon)
    # An earlier version has read the copy, or it is not whole: nobody knows its messages.
    if visible:
        return "promoted", False
    return ("refused" if copy.state == "refused" else "committed"), True


def _undecided_copy(
    facts: TransactionFacts, life: TransactionFold, copy: _Copy, terms: TermsLike, horizon: Horizon
) -> tuple[str, bool]:
    """Return state and `carry` of a copy of which no decision is known."""
    state, visible = copy.state or "gone", facts.visible
    parts = read_id(facts.id)
    assert parts is not None
    has_all = _has_all_markers(parts, parts.time_ms, terms, horizon)
    if not visible:
        if state == "pending" and has_all:
            _hold_overdue(life, facts, copy.newest[0].due_ms, terms)
        return state, True
    if state in ("refused", "committed"):
        # It was committed, and the marker is gone.
        if {row.seq for row in visible} >= set(range(len(life.prepared or ()))):
            return "promoted", False
        if state == "refused":
            _hold_refused(life, visible, copy, terms, horizon)
        return state, True
    if not has_all:
        return "gone", False
    life.found["visible_without_commit"] = _shown(visible)
    return state, True


def _shown(visible: Sequence[VisibleFact]) -> str:
    first = visible[0]
    return f"message {first.seq} in {first.topic}-{first.partition} at {first.offset}"


def _judged(
    facts: TransactionFacts,
    parts: ParsedId | None,
    life: TransactionFold,
    visible: Sequence[VisibleFact],
    state: str,
    carry: bool,
) -> JudgedTransaction:
    half, decided = life.half, life.decided
    findings = tuple(kind for kind in GRAVITY if kind in life.found)
    settled = "settled" if state in _SETTLED else state
    named = half if half is not None else facts.half
    known = life.grp or next((row.grp for row in facts.op if row.grp), None)
    group = named[0].grp if named else known
    prepared = life.prepared or ()
    topics = [row.topic for row in (prepared or visible)]
    words = [f"{kind}: {life.found[kind]}" for kind in findings]
    if life.contrary and "contrary_markers" not in life.found:
        words.append(f"contrary markers, and the first counts: {life.contrary}")
    if state in _SETTLED:
        words += filter(None, [_left_over(_copy(facts.parked))])
    tell = bool(visible) and all(row.append_time for row in visible)
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
        visible_at_ms=max(row.at_ms for row in visible) if tell else None,
        attempts=len(life.counted_ms),
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
    """Return where a transaction's messages have to stand in the order of their key.

    None where they need not: without a key, or after a refusal, which costs the place.
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
    """Return what transactions whose order is kept have in common, None without an order."""
    place = judged.half_partition, judged.half_offset
    marks = (row.order_mark for row in facts.half if (row.partition, row.offset) == place)
    return next(marks, None)


def judge_rows(
    rows: Iterable[Mapping[str, Any]], terms: TermsLike, horizon: Horizon
) -> list[dict[str, Any]]:
    """Judge rows of `gather`.

    Returns rows of `JudgedTransaction`, places as dicts, with `order_mark` and, as `ordered`,
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
