"""The stream's state of transactions, and when a suspicion becomes a finding: pure, without Spark.

Transactions are kept in *buckets*, by the randomness in their ids, and within a bucket in *slots*,
by the time in their ids. A slot is read and written as one text: transactions of the same seconds
change together, so thousands of them cost one look-up. All ids that share a `dedup_key` have the
same randomness, so they meet in one bucket.

Ended transactions leave their slot's text for *chunks*: texts that are written once, and removed
unread when no record can be expected any more. The slot holds six characters of each of their ids,
so that a late record finds its transaction, which then returns to the slot. So the work depends on
the number of records and open transactions, not on how many are remembered.

Nothing here reads a clock. A *tick* brings the moment up to which every log was read, and its own
append time. Three rules keep a transaction in flight from raising an alarm:

- A commit is late by the moment, not by any clock: messages visible by then were read.
- Every other finding depends on a record in one log and its absence in another. It is certain once
  the moment is later than the newest tick that was read with the transaction's last record or
  before: all logs were then read up to a time after that record was visible.
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
from txbroker.spark.judge.judge import judge
from txbroker.spark.judge.kinds import BY_AGE, COMPARED, KIND_NAMES
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

_OVER = frozenset({"promoted", "rolled_back", "void", "gone"})
_AGENDA = "agenda"
"""The text with the newest tick, the moment, and when each slot is due."""
_MARK_LENGTH = 6
"""Last characters of an id: 30 random bits."""
_HALF_VOID, _HALF_DEDUP = HalfFact._fields.index("void"), HalfFact._fields.index("dedup")


class StreamTerms(NamedTuple):
    """The terms of the stream's judgement.

    Attributes:
        dedup_window_ms, late_after_ms, lost_after_ms, overdue_after_ms: as in `schema.Terms`.
        keep_ms: how long an ended transaction is remembered after its last change.
        slot_ms: span of the ids' time in one slot.
        targets: the target topics that are read.
        horizon: what retention had removed when the stream began.
        half, op: names of these topics.
    """

    dedup_window_ms: int = 120_000
    late_after_ms: int = 60_000
    lost_after_ms: int = 600_000
    overdue_after_ms: int = 86_400_000
    keep_ms: int = 300_000
    slot_ms: int = 10_000
    targets: frozenset[str] = frozenset()
    horizon: Horizon = NOTHING_TAKEN
    half: str = "half"
    op: str = "op"


class Fact(NamedTuple):
    """One record: the table of its row, its transaction, and the row's columns."""

    table: str
    id: str
    columns: dict[str, Any]


class Tick(NamedTuple):
    """A record that the stream wrote: its append time, and the moment up to which all logs had been
    read by then."""

    at_ms: int
    moment_ms: int


class FindingChange(NamedTuple):
    """A finding that became certain (`opened`) or disappeared (`healed`).

    `first_ms`, `last_ms`: the moments at which it was first suspected, and last found. `topic`,
    `partition`, `offset`: where the evidence is.
    """

    state: str
    id: str
    kind: str
    group: str
    why: str
    at_ms: int
    first_ms: int
    last_ms: int
    topic: str | None
    partition: int | None
    offset: int | None


class BucketChanges(NamedTuple):
    """The result of one examination of a bucket.

    Attributes:
        findings: those that changed.
        counts: changes of counts: (`state`, name), (`drift`, kind), (`stranger`, table), or
            (`held`, `open` or `ended`): transactions in the state.
        targets: topics that half messages name and that are not read yet.
        due_ms: the moment at which something is due; None: at the next record.
    """

    findings: list[FindingChange]
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
class _FoundFault:
    """A finding of a transaction that was reported; `is_open` until it disappears."""

    is_open: bool
    first_ms: int
    last_ms: int
    why: str
    topic: str | None
    partition: int | None
    offset: int | None


@dataclass(slots=True)
class _TransactionEntry:
    """A transaction: its rows, and the findings so far.

    Attributes:
        rows: by table; those of `content` begin with their marker's offset.
        state: as it was last counted.
        found: the reported findings, by kind, as lists of the fields of `_FoundFault`.
        suspected_ms: since when something is suspected; 0 if nothing is.
        row_ms: the moment of the last row.
        tick_ms: append time of the newest tick that had been read with the last row.
        due_ms: when to examine it again; `ALWAYS`: at the next record.
    """

    id: str
    # The other fields are stored in this order.
    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    state: str = ""
    found: dict[str, list[Any]] = field(default_factory=dict)
    suspected_ms: int = 0
    row_ms: int = 0
    tick_ms: int = 0
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


class _Slot:
    """One slot of a bucket, for one examination.

    A chunk is stored as `[number, until_ms, marks, keys]`: when it is removed, the last characters
    of its ids, and the names of their dedup keys.
    """

    def __init__(self, texts: TextStore, name: str) -> None:
        self._texts, self.name = texts, name
        stored = json.loads(texts.read(name) or "{}")
        self.entries = {id: _TransactionEntry(id, *fields) for id, fields in stored.items()}
        self.chunks: list[list[Any]] = json.loads(texts.read(f"{name} ended") or "[]")
        self._had, self._changed = bool(stored), False
        self._read: dict[int, dict[str, Any]] = {}
        self._by_mark: dict[str, list[int]] = {}
        for number, _, marks, _ in self.chunks:
            for start in range(0, len(marks), _MARK_LENGTH):
                self._by_mark.setdefault(marks[start : start + _MARK_LENGTH], []).append(number)

    def find(self, id: str) -> _TransactionEntry | None:
        """Return a transaction; one that had ended returns from its chunk."""
        entry = self.entries.get(id)
        if entry is None:
            # The newest first: it may have ended twice.
            for number in reversed(self._by_mark.get(id[-_MARK_LENGTH:], ())):
                if number not in self._read:
                    text = self._texts.read(f"{self.name} {number}")
                    self._read[number] = json.loads(text or "{}")
                if id in self._read[number]:
                    return self.add(_TransactionEntry(id, *self._read[number][id]))
        return entry

    def add(self, entry: _TransactionEntry) -> _TransactionEntry:
        self.entries[entry.id] = entry
        return entry

    def end(self, entries: Sequence[_TransactionEntry], until_ms: int, keys: list[str]) -> None:
        """Move ended transactions into a chunk."""
        number = self.chunks[-1][0] + 1 if self.chunks else 0
        stored = {entry.id: self.entries.pop(entry.id).fields() for entry in entries}
        self._texts.write(f"{self.name} {number}", json.dumps(stored, separators=(",", ":")))
        marks = "".join(id[-_MARK_LENGTH:] for id in stored)
        self.chunks.append([number, until_ms, marks, keys])
        self._changed = True

    def forget(self, moment_ms: int) -> tuple[list[str], int]:
        """Remove chunks that are over; return their dedup keys and the number of transactions."""
        over = [chunk for chunk in self.chunks if chunk[1] < moment_ms]
        for number, *_ in over:
            self._texts.write(f"{self.name} {number}", None)
        if over:
            self.chunks = [chunk for chunk in self.chunks if chunk[1] >= moment_ms]
            self._changed = True
        marks = sum(len(chunk[2]) for chunk in over)
        return [key for chunk in over for key in chunk[3]], marks // _MARK_LENGTH

    def put(self) -> int:
        """Write the slot back; return when it is due."""
        if self.entries or self._had:
            text = json.dumps(
                {id: entry.fields() for id, entry in self.entries.items()}, separators=(",", ":")
            )
            self._texts.write(self.name, text if self.entries else None)
        if self._changed:
            text = json.dumps(self.chunks, separators=(",", ":"))
            self._texts.write(f"{self.name} ended", text if self.chunks else None)
        dues_ms = [entry.due_ms for entry in self.entries.values()]
        return min([*dues_ms, *(chunk[1] + 1 for chunk in self.chunks)], default=ALWAYS)


class Bucket:
    """One bucket, for one examination."""

    def __init__(self, texts: TextStore, terms: StreamTerms) -> None:
        self._texts = texts
        self._terms = terms
        self._slots: dict[str, _Slot] = {}
        agenda = json.loads(texts.read(_AGENDA) or "[0, 0, {}]")
        self._tick_ms: int = agenda[0]
        self.moment_ms: int = agenda[1]
        self._due_ms: dict[str, int] = agenda[2]
        self._changes = BucketChanges([], Counter(), set(), None)

    def look(self, facts: Iterable[Fact], ticks: Iterable[Tick] = ()) -> BucketChanges:
        """Add new records, examine due transactions, and return the changes."""
        for tick in ticks:
            self._tick_ms = max(self._tick_ms, tick.at_ms)
            self.moment_ms = max(self.moment_ms, tick.moment_ms)
        changed = self._take(facts)
        due = [slot for slot, due_ms in self._due_ms.items() if due_ms <= self.moment_ms]
        for name in dict.fromkeys([*self._slots, *due]):
            slot = self._slot(name)
            self._examine(slot, changed)
            due_ms = slot.put()
            if due_ms == ALWAYS:
                self._due_ms.pop(name, None)
            else:
                self._due_ms[name] = due_ms
            # At the first moment all transactions are due: hold one slot at a time.
            del self._slots[name]
        agenda = [self._tick_ms, self.moment_ms, self._due_ms]
        self._texts.write(_AGENDA, json.dumps(agenda, separators=(",", ":")))
        return self._changes._replace(due_ms=min(self._due_ms.values(), default=None))

    # --- slots -------------------------------------------------------------------------------

    def _slot(self, name: str) -> _Slot:
        if name not in self._slots:
            self._slots[name] = _Slot(self._texts, name)
        return self._slots[name]

    def _examine(self, slot: _Slot, changed: set[str]) -> None:
        """Judge the transactions that are due or changed, and put away those that ended."""
        ended, until_ms = [], 0
        for entry in slot.entries.values():
            if entry.id in changed or entry.due_ms <= self.moment_ms:
                over_ms = self._visit(entry, entry.id in changed)
                if over_ms is not None:
                    ended.append(entry)
                    until_ms = max(until_ms, over_ms)
        if ended:
            keys = [_dedup_name(*key) for key in map(_TransactionEntry.dedup, ended) if key]
            slot.end(ended, until_ms, keys)
        keys, number = slot.forget(self.moment_ms)
        for name in keys:
            self._release(name)
        self._changes.counts["held", "open"] -= len(ended)
        self._changes.counts["held", "ended"] += len(ended) - number

    def _take(self, facts: Iterable[Fact]) -> set[str]:
        """Add rows to their transactions; return the ids of those."""
        changed = set()
        for fact in sorted(facts, key=_place):
            parts = read_id(fact.id)
            if parts is None:
                self._changes.counts["stranger", fact.table] += 1
                continue
            slot = self._slot(str(parts.time_ms // self._terms.slot_ms))
            was_open = fact.id in slot.entries
            entry = slot.find(fact.id)
            if entry is None:
                # Ended transactions are forgotten after this time. So the state may be gone, and
                # only a batch audit can compare the record.
                if parts.time_ms + self._terms.keep_ms < self.moment_ms:
                    self._changes.counts["stranger", fact.table] += 1
                    continue
                entry = slot.add(_TransactionEntry(fact.id))
            self._changes.counts["held", "open"] += not was_open
            table, row = _row(fact)
            if table == "half":
                self._name(HalfFact(*row), parts.time_ms, entry, row)
            entry.add(table, row)
            changed.add(fact.id)
        return changed

    def _name(self, half: HalfFact, id_ms: int, entry: _TransactionEntry, row: list[Any]) -> None:
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

    def _release(self, name: str) -> None:
        """Forget the holder of a `dedup_key`, unless it is one of which the window is not over."""
        text = self._texts.read(name)
        if text is not None:
            prepared_ms = json.loads(text)[1]
            if prepared_ms + self._terms.dedup_window_ms < self.moment_ms:
                self._texts.write(name, None)

    # --- one transaction ---------------------------------------------------------------------

    def _visit(self, entry: _TransactionEntry, changed: bool) -> int | None:
        """Judge a transaction, report what changed, and set when to examine it again. Return until
        when to remember it if it has ended."""
        moment_ms, terms = self.moment_ms, self._terms
        limits = JudgeTerms(moment_ms, *(getattr(terms, name) for name in JudgeTerms._fields[1:]))
        judged = judge(entry.facts(), limits, terms.horizon)
        if changed:
            entry.row_ms, entry.tick_ms = moment_ms, self._tick_ms
        suspected = [] if self._in_doubt(entry, judged) else judged.findings
        suspected = [kind for kind in suspected if kind not in COMPARED]
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
        if judged.state in _OVER and not waits:
            return self._over_ms(entry, judged)
        # Foreign records may bring times that, with a wait added, overflow 64 bits.
        entry.due_ms = min(self._due(entry, judged, waits), ALWAYS)
        return None

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
        if kind in BY_AGE or _is_open(entry, kind):
            return 0
        if kind == "marker_without_half":
            wait_ms = (judged.id_ms or 0) + self._terms.dedup_window_ms + CLOCKS_APART_MS
            return max(wait_ms, entry.tick_ms + 1)
        return entry.tick_ms + 1

    def _count(
        self, entry: _TransactionEntry, judged: JudgedTransaction, certain: Sequence[str]
    ) -> None:
        """Count and report the changes of a transaction's state and findings."""
        counts, moment_ms = self._changes.counts, self.moment_ms
        if judged.state != entry.state:
            if entry.state:
                counts["state", entry.state] -= 1
            counts["state", judged.state] += 1
            entry.state = judged.state
        for kind in sorted({*entry.found, *certain}, key=KIND_NAMES.index):
            was_open = _is_open(entry, kind)
            if kind in certain:
                known = entry.found.get(kind)
                first_ms = entry.suspected_ms if known is None else known[1]
                fault = _FoundFault(True, first_ms, moment_ms, judged.why or "", *self._at(judged))
            elif was_open:
                fault = _FoundFault(*entry.found[kind])
                fault.is_open = False
            else:
                continue
            entry.found[kind] = [getattr(fault, name) for name in fault.__slots__]
            if fault.is_open != was_open:
                counts["drift", kind] += 1 if fault.is_open else -1
                self._changes.findings.append(
                    FindingChange(
                        "opened" if fault.is_open else "healed",
                        entry.id,
                        kind,
                        judged.grp or "",
                        fault.why,
                        moment_ms,
                        *entry.found[kind][1:3],
                        *entry.found[kind][4:],
                    )
                )

    def _at(self, judged: JudgedTransaction) -> tuple[str | None, int | None, int | None]:
        """Return where the evidence is: the first visible message, else the deciding marker, else
        the half message."""
        if judged.places:
            return judged.places[0][:3]
        if judged.op_offset is not None:
            return self._terms.op, judged.half_partition, judged.op_offset
        if judged.half_offset is not None:
            return self._terms.half, judged.half_partition, judged.half_offset
        return None, None, None

    def _due(self, entry: _TransactionEntry, judged: JudgedTransaction, waits: list[int]) -> int:
        """Return when to examine a transaction that has not ended again."""
        terms = self._terms
        if judged.state == "committed" and judged.decided_at_ms is not None:
            parked_ms = [ParkedFact(*row).at_ms for row in entry.rows.get("parked", ())]
            since_ms = max([judged.decided_at_ms, *parked_ms])
            ages_ms = (since_ms + after for after in (terms.late_after_ms, terms.lost_after_ms))
            waits.extend(age_ms + 1 for age_ms in ages_ms if age_ms >= self.moment_ms)
            if "target_unreadable" in judged.findings:  # by then it may be readable
                waits.append(self.moment_ms + terms.late_after_ms)
        elif judged.state == "pending":
            dues_ms = [ParkedFact(*row).due_ms for row in entry.rows.get("parked", ())]
            if judged.prepared_at_ms is not None:
                after_ms = [HalfFact(*row).after_ms or 0 for row in entry.rows.get("half", ())]
                dues_ms = [judged.prepared_at_ms + max(after_ms)]
            ages_ms = (due_ms + terms.overdue_after_ms for due_ms in dues_ms if due_ms is not None)
            waits.extend(age_ms + 1 for age_ms in ages_ms if age_ms >= self.moment_ms)
        elif judged.state == "parked":
            # Its copy must be there by then; it may be read before the marker.
            parked_ms = [row.at_ms for row in entry.facts().op if row.kind == "park"]
            age_ms = max(parked_ms, default=0) + terms.lost_after_ms
            waits.extend([age_ms + 1] if age_ms >= self.moment_ms else [])
        elif judged.state == "refused":
            # Visible messages may belong to a promotion in flight, but not for ever.
            shown_ms = [row.at_ms for row in entry.facts().visible]
            age_ms = max(shown_ms, default=-terms.late_after_ms - 1) + terms.late_after_ms
            waits.extend([age_ms + 1] if age_ms >= self.moment_ms else [])
        return min(waits, default=ALWAYS)

    def _over_ms(self, entry: _TransactionEntry, judged: JudgedTransaction) -> int:
        """Return until when an ended transaction is remembered."""
        # The id's author may have dated it far into the future.
        latest_ms = entry.row_ms + self._terms.dedup_window_ms if entry.row_ms else ALWAYS
        id_ms = min(judged.id_ms or 0, latest_ms)
        times = (id_ms, judged.decided_at_ms, judged.prepared_at_ms, entry.row_ms)
        return min(max(time or 0 for time in times) + self._terms.keep_ms, ALWAYS - 1)


def _is_open(entry: _TransactionEntry, kind: str) -> bool:
    return kind in entry.found and bool(entry.found[kind][0])


def _place(fact: Fact) -> tuple[str, int, int]:
    return fact.table, fact.columns["partition"], fact.columns["offset"]


def _dedup_name(group: str, key: str) -> str:
    """Return the short name of the text with the holder of a key."""
    digest = hashlib.blake2b(f"{len(group)} {group} {key}".encode("utf-8", "surrogatepass"))
    return f"dedup {digest.hexdigest()[:32]}"
