"""The stream's state of transactions, and when a suspicion becomes a finding: pure, without Spark.

Transactions are kept in *buckets*, by the randomness in their ids, and within a bucket in *slots*,
by the time in their ids. A slot is read and written as one text: transactions of the same seconds
change together, so thousands of them cost one look-up. All ids that share a `dedup_key` have the
same randomness, so they meet in one bucket.

Nothing here reads a clock. `moment_ms` is the watermark: every log was read past it. Three rules
keep a transaction in flight from raising an alarm:

- A commit is late by the moment, not by any clock: messages visible by then were read.
- Every other finding depends on a record in one log and its absence in another. It is reported
  after the moment has moved `RISES` times since the transaction's last record was read. Each
  moment is requested only after the one before it is known; so the third one was requested after
  that record was read, and all logs were read past it.
- A marker without a half message waits for the dedup window, in which that could still arrive.

Only the standard library, `judge`, `fold` and `rows` are imported: Spark ships these modules to its
executors by value.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from txbroker.spark.judge.fold import CLOCKS_APART_MS
from txbroker.spark.judge.judge import GRAVITY, judge
from txbroker.spark.judge.rows import (
    ALWAYS,
    NOTHING_TAKEN,
    Content,
    HalfFact,
    Horizon,
    JudgedTransaction,
    JudgeTerms,
    MarkerFact,
    ParkedFact,
    TransactionFacts,
    VisibleFact,
    as_promoted,
    is_alone,
    read_id,
)

RISES = 3
"""How often the moment must move before an absent record counts."""
NOT_STREAMED = frozenset({"out_of_order"})
"""Findings about several transactions, which only a batch audit compares."""
_BY_AGE = frozenset({"late", "lost", "overdue"})
_OVER = frozenset({"promoted", "rolled_back", "void", "gone"})
_HALF_VOID, _HALF_DEDUP = HalfFact._fields.index("void"), HalfFact._fields.index("dedup")


class StreamTerms(NamedTuple):
    """The terms of the stream's judgement.

    Attributes:
        dedup_window_ms, late_after_ms, lost_after_ms, overdue_after_ms: as in `schema.Terms`.
        keep_ms: how long an ended transaction is remembered after its last change.
        slot_ms: span of the ids' time in one slot.
        targets: the target topics that are read.
        horizon: what retention had removed when the stream began.
    """

    dedup_window_ms: int = 120_000
    late_after_ms: int = 60_000
    lost_after_ms: int = 600_000
    overdue_after_ms: int = 86_400_000
    keep_ms: int = 300_000
    slot_ms: int = 10_000
    targets: frozenset[str] = frozenset()
    horizon: Horizon = NOTHING_TAKEN


class Fact(NamedTuple):
    """One record: the table of its row, its transaction, and the row's columns."""

    table: str
    id: str
    columns: dict[str, Any]


class StreamFinding(NamedTuple):
    """A finding, reported once, with the moments at which it was first suspected, and certain."""

    id: str
    kind: str
    group: str
    why: str
    first_seen_ms: int
    at_ms: int


class BucketChanges(NamedTuple):
    """The result of one examination of a bucket.

    Attributes:
        drift: new findings.
        counts: changes of counts: (`state`, name), (`drift`, kind) or (`stranger`, table).
        targets: topics that half messages name and that are not read yet.
        due_ms: when to examine it again; None: at the next record.
    """

    drift: list[StreamFinding]
    counts: Counter[tuple[str, str]]
    targets: set[str]
    due_ms: int | None


class TextStore(Protocol):
    """A bucket's texts by name."""

    def read(self, name: str) -> str | None:
        """Return a text, None where there is none."""

    def write(self, name: str, text: str | None) -> None:
        """Store a text; None removes it."""


@dataclass(slots=True)
class _TransactionEntry:
    """A transaction: its rows, and the findings so far.

    Attributes:
        rows: by table; those of `content` begin with their marker's offset.
        state: as it was last counted.
        findings: those that are counted.
        reported: those that were ever reported.
        suspected_ms: since when something is suspected; 0 if nothing is.
        rises: how often the moment moved since the last row.
        moment_ms: the moment of the last examination.
        row_ms: the moment of the last row.
        due_ms: when to examine it again; `ALWAYS`: at the next record.
    """

    id: str
    # The other fields are stored in this order.
    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    state: str = ""
    findings: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    suspected_ms: int = 0
    rises: int = 0
    moment_ms: int = 0
    row_ms: int = 0
    due_ms: int = ALWAYS

    def fields(self) -> list[Any]:
        """Return all fields but the id."""
        return [getattr(self, name) for name in self.__slots__[1:]]

    def add(self, table: str, row: list[Any]) -> None:
        self.rows.setdefault(table, []).append(row)

    def dedup(self) -> tuple[str, str] | None:
        for row in self.rows.get("half", ()):
            if row[_HALF_DEDUP] is not None:
                return HalfFact(*row).grp, row[_HALF_DEDUP]
        return None

    def facts(self) -> TransactionFacts:
        half = [HalfFact(*row) for row in self.rows.get("half", ())]
        parked = [ParkedFact(*row) for row in self.rows.get("parked", ())]
        visible = self._visible(is_alone(half, parked))
        return TransactionFacts(self.id, half, self._op(), visible, parked)

    def _op(self) -> list[MarkerFact]:
        contents: dict[int, list[Content]] = {}
        for marker, *content in self.rows.get("content", ()):
            contents.setdefault(marker, []).append(Content(*content))
        markers = [MarkerFact(*row) for row in self.rows.get("op", ())]
        return [
            marker._replace(contents=contents.get(marker.offset)) if contents else marker
            for marker in markers
        ]

    def _visible(self, alone: bool) -> list[VisibleFact]:
        return [
            as_promoted(VisibleFact(*row), if_alone, alone)
            for *row, if_alone in self.rows.get("visible", ())
        ]


def _row(fact: Fact) -> tuple[str, list[Any]]:
    given = fact.columns
    # A partition's append times differ from its log clock by as much as its leaders' clocks did.
    given.setdefault("clock_ms", given.get("at_ms"))
    given.setdefault("early", True)
    if fact.table == "op" and given.get("content") is not None:
        content = given["content"]
        marker = given["offset"] - content["seq"] - 1
        return "content", [marker, *(content.get(name) for name in Content._fields)]
    fields: Sequence[str]
    if fact.table == "half":
        fields = HalfFact._fields
    elif fact.table == "op":
        fields = MarkerFact._fields
    elif fact.table == "visible":
        fields = (*VisibleFact._fields, "headers_if_alone")
    else:
        fields = ParkedFact._fields
    return fact.table, [given.get(name) for name in fields]


class Bucket:
    """One bucket, for one examination."""

    def __init__(self, texts: TextStore, terms: StreamTerms, moment_ms: int) -> None:
        self._texts = texts
        self._terms = terms
        self._moment_ms = moment_ms
        self._slots: dict[str, dict[str, _TransactionEntry]] = {}
        self._agenda: dict[str, int] = json.loads(texts.read("agenda") or "{}")
        self._changes = BucketChanges([], Counter(), set(), None)

    def look(self, facts: Iterable[Fact]) -> BucketChanges:
        """Add new records, examine due transactions, and return the changes."""
        changed = self._take(facts)
        due = [slot for slot, due_ms in self._agenda.items() if due_ms <= self._moment_ms]
        for slot in dict.fromkeys([*self._slots, *due]):
            entries = self._slot(slot)
            for entry in list(entries.values()):
                if entry.id in changed or entry.due_ms <= self._moment_ms:
                    self._visit(entry, entry.id in changed)
                    if entry.due_ms < 0:
                        self._forget(entries, entry)
            self._put(slot, entries)
            # At the first moment all transactions are due: hold one slot at a time.
            del self._slots[slot]
        self._texts.write("agenda", json.dumps(self._agenda) if self._agenda else None)
        due_ms = min(self._agenda.values(), default=None)
        return self._changes._replace(due_ms=due_ms)

    # --- slots -------------------------------------------------------------------------------

    def _slot(self, slot: str) -> dict[str, _TransactionEntry]:
        if slot not in self._slots:
            entries = json.loads(self._texts.read(slot) or "{}")
            self._slots[slot] = {
                id: _TransactionEntry(id, *fields) for id, fields in entries.items()
            }
        return self._slots[slot]

    def _put(self, slot: str, entries: dict[str, _TransactionEntry]) -> None:
        text = json.dumps({id: entry.fields() for id, entry in entries.items()})
        self._texts.write(slot, text if entries else None)
        due_ms = min((entry.due_ms for entry in entries.values()), default=ALWAYS)
        if due_ms == ALWAYS:
            self._agenda.pop(slot, None)
        else:
            self._agenda[slot] = due_ms

    def _take(self, facts: Iterable[Fact]) -> set[str]:
        """Add rows to their transactions; return the ids of those."""
        changed = set()
        for fact in sorted(facts, key=_place):
            parts = read_id(fact.id)
            if parts is None:
                self._changes.counts["stranger", fact.table] += 1
                continue
            entries = self._slot(str(parts.time_ms // self._terms.slot_ms))
            entry = entries.get(fact.id)
            if entry is None:
                # Ended transactions are forgotten after this time. So the state may be gone, and
                # only a batch audit can compare the record.
                if parts.time_ms + self._terms.keep_ms < self._moment_ms:
                    self._changes.counts["stranger", fact.table] += 1
                    continue
                entry = entries[fact.id] = _TransactionEntry(fact.id)
            table, row = _row(fact)
            if table == "half":
                self._examine(HalfFact(*row), parts.time_ms, entry, row)
            entry.add(table, row)
            changed.add(fact.id)
        return changed

    def _examine(
        self, half: HalfFact, id_ms: int, entry: _TransactionEntry, row: list[Any]
    ) -> None:
        """Note whether a half message is void, and the topic of a valid one."""
        if half.void is not None:
            return
        if abs(half.at_ms - id_ms) > self._terms.dedup_window_ms:
            row[_HALF_VOID] = "expired"
        elif half.dedup is not None and half.seq == 0 and self._repeats(half, entry.id):
            row[_HALF_VOID] = "dedup"
        elif half.topic not in self._terms.targets:
            self._changes.targets.add(half.topic)

    def _repeats(self, half: HalfFact, id: str) -> bool:
        """Return whether another transaction holds a `dedup_key`; if not, store this one as
        holder."""
        name = _dedup_name(half.grp, half.dedup or "")
        text = self._texts.read(name)
        if text is not None:
            holder, prepared_ms = json.loads(text)
            if holder == id:
                return False
            if half.at_ms - prepared_ms <= self._terms.dedup_window_ms:
                return True
        self._texts.write(name, json.dumps([id, half.at_ms]))
        return False

    def _forget(self, entries: dict[str, _TransactionEntry], entry: _TransactionEntry) -> None:
        del entries[entry.id]
        key = entry.dedup()
        if key is not None:
            name = _dedup_name(*key)
            text = self._texts.read(name)
            if text is not None and json.loads(text)[0] == entry.id:
                self._texts.write(name, None)

    # --- one transaction ---------------------------------------------------------------------

    def _visit(self, entry: _TransactionEntry, changed: bool) -> None:
        """Judge a transaction, report certain findings, and set when to examine it again."""
        moment_ms, terms = self._moment_ms, self._terms
        limits = JudgeTerms(moment_ms, *(getattr(terms, name) for name in JudgeTerms._fields[1:]))
        judged = judge(entry.facts(), limits, terms.horizon)
        if changed:
            entry.rises, entry.row_ms = 0, moment_ms
        elif moment_ms > entry.moment_ms:
            entry.rises += 1
        entry.moment_ms = moment_ms
        suspected = [] if self._in_doubt(entry, judged) else judged.findings
        suspected = [kind for kind in suspected if kind not in NOT_STREAMED]
        waits: list[int] = []
        certain = []
        for kind in suspected:
            certain_ms = self._certain_ms(entry, judged, kind)
            if certain_ms <= moment_ms:
                certain.append(kind)
            else:
                waits.append(certain_ms)
        if not suspected:
            entry.suspected_ms = 0
        elif not entry.suspected_ms:
            entry.suspected_ms = max(moment_ms, 1)
        self._count(entry, judged, certain)
        # Foreign records may bring times that, with a wait added, overflow a timer.
        entry.due_ms = min(self._due_ms(entry, judged, waits), ALWAYS)

    def _in_doubt(self, entry: _TransactionEntry, judged: JudgedTransaction) -> bool:
        """Return whether the half message is so close to the end of the dedup window that brokers
        with other clocks decide otherwise."""
        if judged.id_ms is None:
            return True
        window_ms = self._terms.dedup_window_ms
        apart_ms = [
            abs(abs(HalfFact(*row).at_ms - judged.id_ms) - window_ms)
            for row in entry.rows.get("half", ())
        ]
        return any(distance_ms <= CLOCKS_APART_MS for distance_ms in apart_ms)

    def _certain_ms(self, entry: _TransactionEntry, judged: JudgedTransaction, kind: str) -> int:
        """Return the moment from which on a finding is certain."""
        if kind in _BY_AGE or kind in entry.findings:
            return 0
        if kind == "marker_without_half":
            wait_ms = (judged.id_ms or 0) + self._terms.dedup_window_ms + CLOCKS_APART_MS
            if wait_ms > self._moment_ms:
                return wait_ms
        return 0 if entry.rises >= RISES else self._moment_ms + 1

    def _count(
        self, entry: _TransactionEntry, judged: JudgedTransaction, certain: Sequence[str]
    ) -> None:
        counts = self._changes.counts
        if judged.state != entry.state:
            if entry.state:
                counts["state", entry.state] -= 1
            counts["state", judged.state] += 1
            entry.state = judged.state
        for kind in set(entry.findings) - set(certain):
            counts["drift", kind] -= 1
        for kind in certain:
            if kind not in entry.findings:
                counts["drift", kind] += 1
            if kind not in entry.reported:
                entry.reported.append(kind)
                self._changes.drift.append(
                    StreamFinding(
                        entry.id,
                        kind,
                        judged.grp or "",
                        judged.why or "",
                        entry.suspected_ms,
                        self._moment_ms,
                    )
                )
        entry.findings = sorted(certain, key=GRAVITY.index)

    def _due_ms(self, entry: _TransactionEntry, judged: JudgedTransaction, waits: list[int]) -> int:
        """Return when to examine a transaction again; less than 0: never, it is forgotten now."""
        terms = self._terms
        if judged.state == "committed" and judged.decided_at_ms is not None:
            parked_ms = [ParkedFact(*row).at_ms for row in entry.rows.get("parked", ())]
            since_ms = max([judged.decided_at_ms, *parked_ms])
            ages_ms = (since_ms + after for after in (terms.late_after_ms, terms.lost_after_ms))
            waits.extend(age_ms + 1 for age_ms in ages_ms if age_ms >= self._moment_ms)
            if "target_unreadable" in judged.findings:  # by then it may be readable
                waits.append(self._moment_ms + terms.late_after_ms)
        elif judged.state == "pending":
            dues_ms = [ParkedFact(*row).due_ms for row in entry.rows.get("parked", ())]
            if judged.prepared_at_ms is not None:
                after_ms = [HalfFact(*row).after_ms or 0 for row in entry.rows.get("half", ())]
                dues_ms = [judged.prepared_at_ms + max(after_ms)]
            ages_ms = (due_ms + terms.overdue_after_ms for due_ms in dues_ms if due_ms is not None)
            waits.extend(age_ms + 1 for age_ms in ages_ms if age_ms >= self._moment_ms)
        elif judged.state == "parked":
            # Its copy must be there by then; it may be read before the marker.
            parked_ms = [row.at_ms for row in entry.facts().op if row.kind == "park"]
            age_ms = max(parked_ms, default=0) + terms.lost_after_ms
            waits.extend([age_ms + 1] if age_ms >= self._moment_ms else [])
        elif judged.state == "refused":
            # Visible messages may belong to a promotion in flight, but not for ever.
            shown_ms = [row.at_ms for row in entry.facts().visible]
            age_ms = max(shown_ms, default=-terms.late_after_ms - 1) + terms.late_after_ms
            waits.extend([age_ms + 1] if age_ms >= self._moment_ms else [])
        elif judged.state in _OVER and not waits:
            # The id's author may have dated it far into the future.
            latest_ms = entry.row_ms + terms.dedup_window_ms if entry.row_ms else ALWAYS
            id_ms = min(judged.id_ms or 0, latest_ms)
            times = (id_ms, judged.decided_at_ms, judged.prepared_at_ms, entry.row_ms)
            over_ms = max(time or 0 for time in times) + terms.keep_ms
            return -1 if over_ms < self._moment_ms else over_ms + 1
        return min(waits, default=ALWAYS)


def _place(fact: Fact) -> tuple[str, int, int]:
    return fact.table, fact.columns["partition"], fact.columns["offset"]


def _dedup_name(group: str, key: str) -> str:
    """Return the short name of the text with the holder of a key."""
    digest = hashlib.blake2b(f"{len(group)} {group} {key}".encode("utf-8", "surrogatepass"))
    return f"dedup {digest.hexdigest()[:32]}"
