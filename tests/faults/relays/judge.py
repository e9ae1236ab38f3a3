"""Judges what a relay or a capture has delivered: rows of a database against records of topics.

It imports nothing of txbroker. The rules:

| | |
| --- | --- |
| R1 | each committed row has exactly one visible record |
| R2 | nothing else is visible: no row that was rolled back, no record without a row |
| R3 | key and value are those of the row, and the headers name the relay and a unique id |
| R4 | the rows of a transaction are in one delivery: one Kafka transaction, with one position |
| R5 | per key, a transaction that ended before another began comes first; within one, its order |
| R6 | each committed row is in the outbox, and GLOBAL_COMMIT if and only if it is visible |
| R7 | what a database may forget is never ahead of the position in Kafka |
| R8 | inserts and deletes of a mirrored table come to its rows |

After a restore of the database, rows that it took away may be visible once (R1, R2), and rows of a
capture that an operator filled in may be missing.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

INSTALLATION, ID = "txb-installation", "txb-id"
Key = tuple[str, str]
"""A table, and the key of a row."""


class Change(NamedTuple):
    """A row of the business, committed.

    Attributes:
        txn, number: its transaction, and its place in it.
        value: begins with the id and `|`.
    """

    id: str
    txn: int
    number: int
    key: str | None
    value: str


class Queued(NamedTuple):
    """A row of the outbox."""

    position: int
    id: str
    state: str
    shard: int
    value: str


class Txn(NamedTuple):
    """A transaction, as its program knows it; times are of one clock, seconds.

    Attributes:
        ended: infinite if the program does not know.
    """

    number: int
    began: float
    ended: float


class Rec(NamedTuple):
    """A visible record."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: str
    headers: Mapping[str, str]

    @property
    def row(self) -> str:
        """The id of its row."""
        return self.value.partition("|")[0]


class Sample(NamedTuple):
    """What a database may forget, asked for first, and the position in Kafka, asked for then."""

    forgotten: int
    position: int


class Violation(NamedTuple):
    """A broken rule."""

    rule: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.rule} {self.what}: {self.why}"


@dataclass
class Found:
    """Everything that a run has left.

    Attributes:
        queued: the rows of the outbox; None: it is a capture.
        positions: the stored positions of an outbox, as JSON, in order.
        shards: how many the outbox is divided into; 0: other outboxes write to the topics, too.
        undone: rows that were committed, and that restores of the database took away.
        settled: ids of rows that an operator settled by hand: of a capture they may be missing, of
            an outbox they are visible, and their deliveries are not among `positions`.
        names: how many names the relay has had.
        mirrored: the keys of the rows of mirrored tables, each with its table.
        mirror: their records, as operation, table and key.
        unshown: keys whose changes were refused or accepted as missing.
    """

    changes: Sequence[Change]
    txns: Sequence[Txn]
    records: Sequence[Rec]
    queued: Sequence[Queued] | None = None
    positions: Sequence[str] = ()
    shards: int = 1
    samples: Sequence[Sample] = field(default_factory=list)
    undone: Sequence[Change] = ()
    settled: Set[str] = frozenset()
    names: int = 1
    mirrored: Set[Key] = frozenset()
    mirror: Sequence[tuple[str, Key]] = ()
    unshown: Set[Key] = frozenset()


class Judge:
    """Judges one run."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._changes = {change.id: change for change in (*found.undone, *found.changes)}
        self._records: dict[str, list[Rec]] = defaultdict(list)
        for record in found.records:
            self._records[record.row].append(record)

    def judge(self) -> list[Violation]:
        """Return all broken rules."""
        return [
            *self._once(),
            *self._content(),
            *self._in_one_transaction(),
            *self._in_one_delivery(),
            *self._ordered(),
            *self._states(),
            *self._acknowledged(),
            *self._mirrored(),
        ]

    def _once(self) -> Iterator[Violation]:
        filled = self._found.settled if self._found.queued is None else frozenset[str]()
        missing = filled | {change.id for change in self._found.undone}
        for id in self._changes:
            count = len(self._records.get(id, ()))
            if count != 1 and (count or id not in missing):
                yield Violation("R1", id, f"{count} records")
        for id in self._records.keys() - self._changes.keys():
            yield Violation("R2", id, f"visible without a row: {self._records[id][0]}")

    def _content(self) -> Iterator[Violation]:
        ids: dict[str, str] = {}
        names = set()
        for row, records in self._records.items():
            change = self._changes.get(row)
            for record in records[:1]:
                if change is not None and (record.key, record.value) != (change.key, change.value):
                    yield Violation("R3", row, f"{record} is not {change}")
                id = record.headers.get(ID, "")
                if not id or ids.setdefault(id, row) != row:
                    yield Violation("R3", row, f"its id {id!r} is also that of {ids.get(id)}")
                names.add(record.headers.get(INSTALLATION, ""))
        if len(names) > self._found.names or "" in names:
            yield Violation("R3", "all", f"the headers name {names}")

    def _in_one_transaction(self) -> Iterator[Violation]:
        """With one writer, only ends of Kafka transactions, and aborted ones, take offsets between
        records."""
        if self._found.shards != 1:
            return
        places = defaultdict(list)
        offsets = defaultdict(set)
        for record in self._found.records:
            at = (record.topic, record.partition)
            offsets[at].add(record.offset)
            if (change := self._changes.get(record.row)) is not None:
                places[change.txn, at].append(record.offset)
        for (txn, at), own in places.items():
            missing = set(range(min(own), max(own))) - offsets[at]
            if missing:
                yield Violation("R4", f"transaction {txn}", f"divided in {at} at {min(missing)}")

    def _in_one_delivery(self) -> Iterator[Violation]:
        if self._found.queued is None or not self._found.shards:
            return
        # A page comes again as long as its rows cannot be marked, as where others lock them.
        begun: dict[str, tuple[int, Any]] = {}
        for number, text in enumerate(self._found.positions):
            for page in json.loads(text).get("pages", ()):
                begun.setdefault(json.dumps(page), (number, page["runs"]))
        runs = sorted(
            (first, last, number)
            for number, packed in begun.values()
            for first, last in runs_of(packed)
        )
        deliveries = defaultdict(set)
        for queued in self._found.queued:
            change = self._changes.get(queued.value.partition("|")[0])
            if (
                change is None
                or queued.state != "GLOBAL_COMMIT"
                or change.id in self._found.settled
            ):
                continue
            found = [number for first, last, number in runs if first <= queued.position <= last]
            shard = queued.shard % self._found.shards
            deliveries[change.txn, shard].update(found or [-1])
            if len(found) != 1:
                yield Violation("R4", change.id, f"its position is in {len(found)} deliveries")
        for (txn, shard), numbers in deliveries.items():
            if len(numbers) > 1:
                yield Violation(
                    "R4", f"transaction {txn}", f"in {len(numbers)} deliveries of shard {shard}"
                )

    def _ordered(self) -> Iterator[Violation]:
        txns = {txn.number: txn for txn in self._found.txns}
        lanes = defaultdict(list)
        for record in self._found.records:
            change = self._changes.get(record.row)
            if change is not None and change.key is not None:
                lanes[change.key, record.topic, record.partition].append((record.offset, change))
        for (key, *_at), found in lanes.items():
            latest, last = (-math.inf, -1), (-1, -1)
            for _offset, change in sorted(found):
                txn = txns[change.txn]
                if txn.ended < latest[0]:
                    yield Violation("R5", change.id, f"of key {key}, after transaction {latest[1]}")
                latest = max(latest, (txn.began, txn.number))
                if change.txn == last[0] and change.number < last[1]:
                    yield Violation("R5", change.id, f"of key {key}, after number {last[1]}")
                last = change.txn, change.number

    def _states(self) -> Iterator[Violation]:
        if self._found.queued is not None:
            known = {queued.value.partition("|")[0] for queued in self._found.queued}
            for change in self._found.changes:
                if change.id not in known | self._found.settled:  # these may be purged at once
                    yield Violation("R6", change.id, "it is not in the outbox")
        for queued in self._found.queued or ():
            row = queued.value.partition("|")[0]
            if (queued.state == "GLOBAL_COMMIT") != (row in self._records):
                yield Violation("R6", row, f"{queued.state}, visible: {row in self._records}")
            for record in self._records.get(row, ())[:1]:
                if record.headers.get(ID) != queued.id:
                    yield Violation("R3", row, f"its record has the id {record.headers.get(ID)}")

    def _acknowledged(self) -> Iterator[Violation]:
        for sample in self._found.samples:
            if sample.forgotten > sample.position:
                yield Violation(
                    "R7", "the database", f"forgets {sample.forgotten}, Kafka has {sample.position}"
                )

    def _mirrored(self) -> Iterator[Violation]:
        rows: set[Key] = set()
        for operation, key in self._found.mirror:
            if operation == "insert":
                rows.add(key)
            else:
                rows.discard(key)
        for key in sorted((rows ^ self._found.mirrored) - self._found.unshown):
            where = "records" if key in rows else "table"
            yield Violation("R8", " ".join(key), f"only in the {where}")


def runs_of(packed: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of each run of a page."""
    numbers = iter(json.loads(zlib.decompress(base64.b64decode(packed))))
    end = 0
    for gap, length in zip(numbers, numbers, strict=True):
        yield end + gap, end + gap + length - 1
        end += gap + length
