"""No false all-clear: runs of all kinds, in any order, over topics that lose what they held.

Between two runs transactions go on, some of them faulty; targets are deleted, created again with
some of their records or with fewer partitions, cut off at either end, or not readable for one run;
and clocks go back. After each run the findings and the rows of `transactions` are compared with a
judge in plain Python, which knows everything that any run has seen and shares nothing with `spark`.

By default one seed. For more of them, half a minute each:
`TXBROKER_TEST_HISTORIES=20 pytest -q tests/spark/test_audit_history.py`.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from tests.spark.any_records import AT_MS, PARTITION
from tests.spark.test_audit_any_record import NAMES, Audits, Logs, audit
from tests.spark.test_audit_stream_state import Stream
from txbroker.core.encoding import encode_half, encode_marker, promoted_headers
from txbroker.core.records import Half, Marker, MarkerKind, Message, Record
from txbroker.core.routing import make_id
from txbroker.kafka.tools.audit_access import StoredRecord
from txbroker.spark.access import TopicEnds
from txbroker.spark.facts.bounds import as_row
from txbroker.spark.facts.topics import KAFKA
from txbroker.spark.schema import Part
from txbroker.spark.stream.state import Fact, StreamTerms
from txbroker.spark.tables.layout import DRIFT, TRANSACTIONS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["audit"]  # a fixture
FIRST = 3
"""A seed with runs of all kinds and all that can happen to a target."""
HISTORIES = int(os.environ.get("TXBROKER_TEST_HISTORIES", "1"))
LATE_MS, LOST_MS, WINDOW_MS, LAG_MS = 60_000, 600_000, 120_000, 3_600_000
EARLY_MS = 2000
STEADY = ("steady", "calm")
TARGETS = ("orders", "bills", "mails", "rare", *STEADY)
EVER = 1 << 62
Tx = dict[str, Any]
Life = Iterator[None]
Finding = tuple[str, str]
SEEN = frozenset(
    ("rolled_back_visible", "visible_without_commit", "visible_without_half", "visible_twice",
     "body_changed")
)  # fmt: skip
"""Findings of which records in targets are the evidence."""
WAITING = frozenset(("late", "lost"))
"""Findings of which the evidence is that records are not there."""


# --- what happens ------------------------------------------------------------------------------


class World(Logs):
    """Topics in which transactions live, and which lose records.

    Attributes:
        written: of each topic's records, the transactions: id, message, whether it was changed.
        former: how often a target was deleted or cut off at its end.
        narrow: targets that were created again with a single partition, and are empty.
    """

    def __init__(self, spark: SparkSession, seed: int) -> None:
        self.random = random.Random(seed)
        self.spark = spark
        self.at_ms, self.options, self.unread = AT_MS, {}, set()
        topics = (NAMES.half, NAMES.op, NAMES.parked, *TARGETS)
        self._stored: dict[str, list[StoredRecord]] = {topic: [] for topic in topics}
        self.written: dict[str, list[Tx]] = {topic: [] for topic in topics}
        self.ends_at, self.starts_at = dict.fromkeys(topics, 0), dict.fromkeys(topics, 0)
        self._ids = {topic: topic for topic in topics}
        self.former = Counter[str]()
        self.narrow: set[str] = set()
        self.txs: dict[str, Tx] = {}
        self._lives: list[Life] = []
        self.acts: list[str] = []
        self.back_ms = 0

    def now_ms(self, names: Any) -> int:
        return self.at_ms - self.back_ms

    def ends(self, topics: Any) -> dict[str, TopicEnds]:
        found = super().ends(topics)
        for topic in self.narrow & found.keys() - self.unread:
            found[topic] = structs.replace(found[topic], starts=(0,), ends=(0,))
        return found

    def offsets_at(self, topics: Mapping[str, int], time_ms: int) -> dict[str, tuple[int, ...]]:
        return {
            topic: tuple(
                self.offset_at(topic, time_ms) if n == PARTITION else 0 for n in range(count)
            )
            for topic, count in topics.items()
        }

    def offset_at(self, topic: str, time_ms: int) -> int:
        later = (r.offset for r in self._stored[topic] if r.timestamp_ms >= time_ms)
        return next(later, len(self._stored[topic]))

    def id_of(self, topic: str) -> str:
        return self._ids[topic]

    def at_of(self, topic: str, offset: int) -> int:
        return self._stored[topic][offset].timestamp_ms

    def load(self, options: Mapping[str, str]) -> DataFrame:
        from pyspark.sql import functions as F

        begins, ends = (json.loads(options[f"{which}Offsets"]) for which in ("starting", "ending"))
        place, rows = str(PARTITION), []
        for topic in json.loads(options["assign"]):
            some = self._stored[topic][begins[topic][place] : ends[topic][place]]
            rows += [as_row(topic, PARTITION, record) for record in some]
        frame = self.spark.createDataFrame(rows, KAFKA)
        return frame.withColumn("timestamp", F.timestamp_millis("at_ms")).drop("at_ms")

    def _write(self, topic: str, record: Record, **what: Any) -> int:
        if topic not in self.ends_at or topic in self.narrow:
            self._again(topic, [])
        log = self._stored[topic]
        key, value, headers = record.key, record.value, tuple(record.headers)
        self.at_ms += 1
        log.append(StoredRecord(key, value, headers, self.at_ms, len(log), append_time=True))
        self.written[topic].append(what)
        self.ends_at[topic] = len(log)
        return self.at_ms

    # --- transactions --------------------------------------------------------------------------

    def prepare(self, *topics: str, stored: bool = True) -> Tx:
        key = b"%d" % len(self.txs)  # of this transaction alone: no order to keep
        messages = tuple(Message(topic, key, b"v", (), PARTITION) for topic in topics)
        id = make_id(PARTITION, self.at_ms, len(self.txs))
        half = Half(id, f"g{len(self.txs) % 2}", messages)
        tx = {"id": id, "group": half.group, "topics": topics, "half": half, "id_ms": self.at_ms}
        tx |= {"prepared": None, "decision": None, "decided": None}
        self.txs[id] = tx
        if stored:
            for record in encode_half(half):
                tx["prepared"] = self._write(NAMES.half, record, id=id)
        return tx

    def decide(self, tx: Tx, decision: str) -> None:
        marker = Marker(1, MarkerKind(decision), tx["id"], group=tx["group"])
        tx["decided"] = self._write(NAMES.op, encode_marker(marker), id=tx["id"])
        tx["decision"], tx["marked"] = decision, len(self.written[NAMES.op]) - 1

    def show(self, tx: Tx, *numbers: int, changed: bool = False) -> None:
        """Promote messages; without numbers all of them."""
        for seq in numbers or range(len(tx["topics"])):
            message, count = tx["half"].messages[seq], len(tx["topics"])
            headers = promoted_headers(tx["id"], seq, count, message)
            record = Record(message.key, b"other" if changed else b"v", headers)
            what = {"id": tx["id"], "seq": seq, "changed": changed}
            self._write(message.topic, record, **what)
            self.written[message.topic][-1]["at"] = self.at_ms

    def pick(self) -> tuple[str, ...]:
        return tuple(self.random.sample(TARGETS, self.random.choice((1, 1, 2))))

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.at_ms += self.random.choice((1, 50, 1000))
            if not self._lives or self.random.random() < 0.5:
                self._lives.append(self.random.choice(LIVES)(self))
            life = self.random.choice(self._lives)
            if next(life, self) is self:
                self._lives.remove(life)

    # --- topics --------------------------------------------------------------------------------

    def _again(self, topic: str, records: Sequence[int]) -> None:
        """Create a topic with copies of some of its former records."""
        old, what = self._stored[topic], self.written[topic]
        self._stored[topic] = [
            structs.replace(old[was], offset=at, timestamp_ms=self.at_ms)
            for at, was in enumerate(records)
        ]
        self.written[topic] = [what[was] | {"at": self.at_ms} for was in records]
        self._ids[topic] += "'"
        self.former[topic] += 1
        self.narrow.discard(topic)
        self.starts_at[topic], self.ends_at[topic] = 0, len(records)

    def lose(self, read: Mapping[str, int]) -> None:
        """Do something to some targets. `read`: how far the last run has read them."""
        self.unread = set()
        for topic in TARGETS:
            if topic in STEADY or self.random.random() < 0.4:
                continue
            there, count = topic in self.ends_at, len(self._stored[topic])
            does = self.random.choice(("delete", "again", "again", "narrow", "taken", "shorter",
                                       "unread"))  # fmt: skip
            if does == "delete" and there:
                del self.ends_at[topic]
                self.former[topic] += 1
                self.narrow.discard(topic)
            elif does == "again":
                self._again(topic, [n for n in range(count) if self.random.random() < 0.6])
            elif does == "narrow":
                self._again(topic, [])
                self.narrow.add(topic)
            elif does == "taken" and there and topic not in self.narrow:
                last = min(read.get(topic, 0), count)
                if last <= self.starts_at[topic]:
                    continue
                self.starts_at[topic] = self.random.randint(self.starts_at[topic] + 1, last)
            elif does == "shorter" and there and read.get(topic, 0) > self.starts_at[topic] + 1:
                last = self.random.randint(self.starts_at[topic], read[topic] - 1)
                del self._stored[topic][last:], self.written[topic][last:]
                self.ends_at[topic] = last
                self.former[topic] += 1
            elif does == "unread" and there:
                self.unread.add(topic)
            else:
                continue
            self.acts.append(f"{does} {topic}")


def _clean(world: World) -> Life:
    tx = world.prepare(*world.pick())
    yield
    world.decide(tx, "commit")
    world.show(tx)


def _twice(world: World) -> Life:
    tx = world.prepare(*world.pick())
    world.decide(tx, "commit")
    world.show(tx)
    yield
    yield
    world.show(tx, 0)


def _rolled_back(world: World) -> Life:
    tx = world.prepare(*world.pick())
    world.decide(tx, "rollback")
    yield
    yield
    if world.random.random() < 0.7:
        world.show(tx)


def _unasked(world: World) -> Life:
    tx = world.prepare(*world.pick())
    world.show(tx)
    yield
    yield
    world.at_ms += EARLY_MS
    world.decide(tx, world.random.choice(("commit", "rollback")))


def _changed(world: World) -> Life:
    tx = world.prepare(*world.pick())
    world.decide(tx, "commit")
    yield
    world.show(tx, changed=True)


def _partly(world: World) -> Life:
    tx = world.prepare(*world.random.sample(TARGETS, 2))
    world.decide(tx, "commit")
    world.show(tx, 0)
    for _ in range(4):
        yield
    world.show(tx, 1)


def _never(world: World) -> Life:
    tx = world.prepare(*world.pick())
    world.decide(tx, "commit")
    yield
    yield
    yield
    if world.random.random() < 0.3:
        world.show(tx)


def _unprepared(world: World) -> Life:
    tx = world.prepare(*world.pick(), stored=False)
    world.decide(tx, world.random.choice(("commit", "rollback")))
    yield
    if world.random.random() < 0.7:
        world.show(tx)


def _open(world: World) -> Life:
    world.prepare(*world.pick())
    yield


LIVES: tuple[Callable[[World], Life], ...] = (
    _clean, _clean, _clean, _twice, _rolled_back, _unasked, _changed, _partly, _never, _never,
    _unprepared, _open,
)  # fmt: skip


# --- the judge ---------------------------------------------------------------------------------


class View:
    """What a run can know.

    Attributes:
        now, markers: its time, and how many markers it knows.
        held: of each target, the records that it knows to be there, by offset.
        missing, unread: targets that it could not read.
        taken: up to which decision a target's messages may have been removed.
        former: messages that an earlier run saw, and that are there no more.
        since: the number of the first run that has read a target as it is.
        renewed: targets that are others than the last run read.
        new: the records that it has read, as `held`.
        starts: the first offsets of the targets.
    """

    def __init__(self, now: int, markers: int) -> None:
        self.now, self.markers = now, markers
        self.held: dict[str, dict[int, Tx]] = {}
        self.missing, self.unread = set[str](), set[str]()
        self.taken: dict[str, int] = {}
        self.former: set[tuple[str, int]] = set()
        self.since: dict[str, int] = {}
        self.renewed, self.new = set[str](), dict[str, dict[int, Tx]]()
        self.starts: dict[str, int] = {}

    def shown(self, id: str) -> list[tuple[int, str, int, Tx]]:
        """Return a transaction's visible messages: number, topic, offset, record."""
        return sorted(
            (
                (what["seq"], topic, offset, what)
                for topic, records in self.held.items()
                for offset, what in records.items()
                if what["id"] == id
            ),
            key=lambda each: each[:3],
        )

    def decision(self, tx: Tx) -> str | None:
        decided = tx["decision"] is not None and tx["marked"] < self.markers
        return tx["decision"] if decided else None

    def judge(self, tx: Tx) -> tuple[str, frozenset[str]]:
        """Return the state of a transaction, and its findings."""
        shown, decision = self.shown(tx["id"]), self.decision(tx)
        seen = Counter(seq for seq, *_ in shown)
        found = {"visible_twice"} if any(n > 1 for n in seen.values()) else set()
        if tx["prepared"] is None:
            found |= {"marker_without_half"} if decision else set()
            how = {"commit": "visible_without_half", "rollback": "rolled_back_visible"}
            found |= {how.get(decision, "visible_without_commit")} if shown else set()
            return "void", frozenset(found)
        if decision is None:
            return "pending", frozenset(found | ({"visible_without_commit"} if shown else set()))
        if decision == "rollback":
            found |= {"rolled_back_visible"} if shown else set()
            return "rolled_back", frozenset(found)
        early = any(what["at"] < tx["decided"] - EARLY_MS for *_, what in shown)
        found |= {"visible_without_commit"} if early else set()
        found |= {"body_changed"} if any(what["changed"] for *_, what in shown) else set()
        state, more = self._ended(tx, seen)
        return state, frozenset(found | more)

    def _ended(self, tx: Tx, seen: Mapping[int, int]) -> tuple[str, set[str]]:
        absent = [(n, topic) for n, topic in enumerate(tx["topics"]) if n not in seen]
        if not absent:
            return "promoted", set()
        unread = any(topic in self.unread for _, topic in absent)
        found = {"target_unreadable"} if unread else set()
        absent = [(n, topic) for n, topic in absent if topic not in self.unread]
        age, vanished = (
            self.now - tx["decided"],
            any((tx["id"], n) in self.former for n, _ in absent),
        )
        if not absent or (age <= LATE_MS and not vanished):
            return "committed", found
        if all(tx["decided"] <= self.taken.get(topic, -1) for _, topic in absent):
            return ("committed" if unread else "gone"), found
        return "committed", found | {"lost" if vanished or age > LOST_MS else "late"}


def ids_of(*records: Iterable[Tx]) -> set[str]:
    return {what["id"] for some in records for what in some}


class Oracle:
    """What the tables should hold after each run, as plain dicts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs = 0
        self.open: dict[Finding, dict[str, Any]] = {}
        self.closed: dict[Finding, str] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.view = View(0, 0)
        """Of the last run that others continue."""
        self.read: dict[str, tuple[int, int]] = {}
        """By target, which one it read, and how far."""
        self.ids: dict[str, str] = {}
        """The ids of those."""
        self.own_read = {NAMES.half: 0, NAMES.op: 0}
        self.carried: set[str] = set()

    def run(self, mode: str, part: Part) -> dict[str, tuple[str, frozenset[str]]]:
        """Note a run; return its verdicts by id."""
        self.runs += 1
        view, judged = self._looked(mode, part)
        verdicts = {id: view.judge(self.world.txs[id]) for id in judged}
        if mode == "part":
            verdicts = {id: each for id, each in verdicts.items() if self._is_in(part, id, view)}
        self._settle(verdicts, view)
        self._find(mode, verdicts, view)
        if mode in ("full", "incremental"):
            self.view = view
            self.carried = {id for id, each in verdicts.items() if self._is_open(id, each[0], view)}
        return verdicts

    def _looked(self, mode: str, part: Part) -> tuple[View, set[str]]:
        """Return what a run knows, and whom it judges."""
        world, last = self.world, self.view
        if mode == "rejudged":
            last.former |= self._former(last, last.since.keys())
            own = [world.written[topic][:end] for topic, end in self.own_read.items()]
            return last, ids_of(*own, *(each.values() for each in last.held.values()))
        view = View(world.now_ms(NAMES), len(world.written[NAMES.op]))
        view.since, goes_on = dict(last.since), mode == "incremental"
        if goes_on:
            view.taken = {topic: min(ms, last.now) for topic, ms in last.taken.items()}
            view.former = set(last.former)
        named = {topic for tx in self._prepared() for topic in tx["topics"]} | self.read.keys()
        for topic in named:
            if topic in world.unread:
                view.unread.add(topic)
                if goes_on:
                    view.held[topic] = last.held.get(topic, {})
            else:
                self._look(view, topic, mode, part)
        view.former |= self._former(view, view.renewed if goes_on else view.since.keys())
        fresh = ids_of(*(each.values() for each in view.new.values()))
        own = [world.written[topic][end * goes_on :] for topic, end in self.own_read.items()]
        judged = fresh | ids_of(*own)
        if goes_on:
            lost = [last.held.get(topic, {}).values() for topic in view.renewed]
            view.former |= {(what["id"], what["seq"]) for each in lost for what in each}
            judged |= self.carried | {
                id
                for id, row in self.rows.items()
                if view.renewed & ({*row["topics"]} | {topic for topic, *_ in row["places"]})
            }
        if mode != "part":
            self._note_ends(view, named, goes_on=goes_on)
        return view, judged

    def _look(self, view: View, topic: str, mode: str, part: Part) -> None:
        """Read a target."""
        world, last, goes_on = self.world, self.view, mode == "incremental"
        was = self.read.get(topic)
        another = was is not None and was[1] > 0 and was[0] != world.former[topic]
        if topic in last.unread and self.ids[topic]:
            another |= topic not in world.ends_at or self.ids[topic] != world.id_of(topic)
        if another:
            view.since[topic] = self.runs
            view.renewed.add(topic)
        if topic not in world.ends_at:
            view.missing.add(topic)
            view.taken[topic] = EVER
            return
        if topic in last.missing:
            view.renewed.add(topic)
        start = view.starts[topic] = 0 if topic in world.narrow else world.starts_at[topic]
        known: dict[int, Tx] = {}
        begin, gap = start, not goes_on or was is None or topic in view.renewed
        if goes_on and topic in view.renewed:
            view.taken.pop(topic, None)
        elif goes_on and was is not None:
            known, begin, gap = last.held.get(topic, {}), max(start, was[1]), start > was[1]
        elif mode == "part" and part.from_ms:
            begin = max(start, world.offset_at(topic, part.from_ms - 2 * WINDOW_MS - LOST_MS))
        new = view.new[topic] = dict(enumerate(world.written[topic]))
        for offset in range(begin):
            del new[offset]
        view.held[topic] = {**known, **new}
        if gap and begin == start > 0:
            taken = self._taken(new, self.own_read[NAMES.op] if goes_on else 0)
            view.taken[topic] = max(taken, view.taken.get(topic, -1))

    def _note_ends(self, view: View, named: set[str], *, goes_on: bool) -> None:
        """Note where the next run continues."""
        world = self.world
        for topic in named - view.unread:
            end = 0 if topic in view.missing else len(world.written[topic])
            self.read[topic] = world.former[topic], end
            self.ids[topic] = "" if topic in view.missing else world.id_of(topic)
        if not goes_on:
            self.read |= {topic: (world.former[topic], 0) for topic in view.unread}
        for topic in view.unread:
            self.ids.setdefault(topic, "")
        self.own_read = {topic: len(world.written[topic]) for topic in self.own_read}

    def _prepared(self) -> list[Tx]:
        return [tx for tx in self.world.txs.values() if tx["prepared"] is not None]

    def _former(self, view: View, topics: Any) -> set[tuple[str, int]]:
        """Return the messages that rows prove, in targets that are others now."""
        return {
            (id, seq)
            for id, row in self.rows.items()
            if row["state"] == "promoted"
            for topic, seq, _ in row["places"]
            if topic in topics and row["run"] < view.since.get(topic, 0)
        }

    def _taken(self, records: Mapping[int, Tx], since: int) -> int:
        """Return up to which decision messages may have been removed before these records.
        `since`: the first marker that the run has read."""
        if not records:
            return EVER
        txs = [self.world.txs[what["id"]] for what in records.values()]
        commits = [tx for tx in txs if tx["decision"] == "commit"]
        decided = [tx["decided"] for tx in commits if tx["marked"] >= since]
        decided += [self.world.at_of(NAMES.op, since - 1)] if since and not decided else []
        return max(decided) + LAG_MS if decided else -1

    def _is_in(self, part: Part, id: str, view: View) -> bool:
        tx = self.world.txs[id]
        at_ms = tx["prepared"] or tx["decided"] or tx["id_ms"]
        topics = tx["topics"]
        if tx["prepared"] is None:
            topics = tuple(topic for _, topic, *_ in view.shown(id))
        return (
            part.from_ms <= at_ms < part.to_ms
            and tx["group"] in (part.groups or (tx["group"],))
            and (not part.topics or bool({*topics} & {*part.topics}))
        )

    def _is_open(self, id: str, state: str, view: View) -> bool:
        young = view.now <= self.world.txs[id]["id_ms"] + WINDOW_MS
        return state in ("pending", "committed") or (state == "void" and young)

    def _settle(self, verdicts: Mapping[str, tuple[str, frozenset[str]]], view: View) -> None:
        """Replace rows of `transactions`."""
        for id, (state, found) in verdicts.items():
            row = self.rows.get(id)
            if row is not None and state == "gone" and not found:
                continue
            if self._is_open(id, state, view):
                if row is not None and row["state"] != "promoted":
                    del self.rows[id]
                continue
            tx = self.world.txs[id]
            places = [(topic, seq, offset) for seq, topic, offset, _ in view.shown(id)]
            topics = tx["topics"] if tx["prepared"] else tuple(topic for topic, *_ in places)
            self.rows[id] = {"state": state, "places": places, "topics": topics, "run": self.runs}

    def _find(
        self, mode: str, verdicts: Mapping[str, tuple[str, frozenset[str]]], view: View
    ) -> None:
        found = {(id, kind) for id, (_, kinds) in verdicts.items() for kind in kinds}
        for tx in self._prepared():
            id = tx["id"]
            known = verdicts.get(id) if id in verdicts or mode == "part" else self._known(id)
            missing = view.missing & {*tx["topics"]}
            if known is None or view.decision(tx) != "commit" or not missing:
                continue
            state = self.rows[id]["state"] if known[0] == "gone" and id in self.rows else known[0]
            if state != "committed" or view.now - tx["decided"] > LATE_MS:
                found.add((id, "target_missing"))
        for finding in list(self.open):
            if finding not in found:
                end = self._end(finding, verdicts.get(finding[0]), view)
                if end:
                    del self.open[finding]
                    self.closed[finding] = end
        for id, kind in found:
            places = [(topic, offset) for _, topic, offset, _ in view.shown(id)]
            where = places[0] if places and kind != "target_missing" else None
            self.open[id, kind] = {"run": self.runs, "seen": view.now, "place": where}
            self.closed.pop((id, kind), None)

    def _known(self, id: str) -> tuple[str, frozenset[str]] | None:
        row = self.rows.get(id)
        return None if row is None else (row["state"], frozenset())

    def _end(
        self, finding: Finding, verdict: tuple[str, frozenset[str]] | None, view: View
    ) -> str | None:
        """Return how a finding ended that was not found again; None: it is still open."""
        (id, kind), was = finding, self.open[finding]
        if verdict is None:
            return None
        (state, found), tx = verdict, self.world.txs[id]
        place = was["place"]
        topics = tx["topics"] if tx["prepared"] else {topic for _, topic, *_ in view.shown(id)}
        about = {*topics} | ({place[0]} if place else set())
        if kind in SEEN | WAITING | {"target_missing"} and about & view.unread:
            return None
        if kind == "target_missing":
            return (
                None if {*topics} & view.missing or (state, found) == ("gone", set()) else "healed"
            )
        if state == "gone" and not found:
            return "expired"
        if kind in SEEN and place is not None:
            topic, offset = place
            if view.since.get(topic, 0) > was["run"] or offset < view.starts.get(topic, EVER):
                return "expired"
        if kind in WAITING and state == "committed" and "lost" not in found:
            return None
        if was["seen"] > view.now and state == "pending":
            return None
        return "healed"


# --- the comparison ----------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
def test_no_run_clears_what_it_has_not_seen(
    spark: SparkSession, tmp_path: Path, audit: Audits, seed: int
) -> None:
    world = World(spark, seed)
    oracle, stream = Oracle(world), steady_stream()
    modes = world.random.sample(["incremental", "incremental", "full", "part", "rejudged"], 4)
    if "part rejudged" in " ".join(modes):
        modes.reverse()  # the facts of a part are not stored
    kinds = Counter[str]()
    for mode in ("full", *modes):
        world.at_ms += world.random.choice((5000, 40_000, 90_000, 700_000))
        world.live(25)
        if oracle.runs:
            read = oracle.read.items()
            world.lose({topic: end for topic, (n, end) in read if n == world.former[topic]})
        world.back_ms = world.random.choice((0, 0, 0, 200_000)) if oracle.runs else 0
        part = some_part(world) if mode == "part" else Part()
        world.acts.append(f"{mode} at {world.now_ms(NAMES) - AT_MS}: {part}")
        summary = audit(world, "all", mode, part=part)
        assert summary.mode == mode, world.acts
        verdicts = oracle.run(mode, part)
        compare(audit, oracle, verdicts)
        kinds.update(kind for _, kind in oracle.open)
        if summary.continues:
            follow(stream, tmp_path / "all/out/facts", summary.run, world.now_ms(NAMES))
            assert_alike(stream, oracle)
    assert len(kinds) > 5, kinds


def some_part(world: World) -> Part:
    return world.random.choice(
        (
            Part(topics=tuple(world.random.sample(TARGETS, 2))),
            Part(groups=("g1",)),
            Part(from_ms=world.at_ms - 600_000),
            Part(to_ms=world.at_ms - 600_000),
        )
    )


def compare(
    audit: Audits, oracle: Oracle, verdicts: Mapping[str, tuple[str, frozenset[str]]]
) -> None:
    acts = "; ".join(oracle.world.acts)
    judged = {
        id: (row["state"], frozenset(row["findings"])) for id, row in audit.last("all").items()
    }
    assert differing(judged, verdicts) == {}, acts
    found = {key: row["state"] for key, row in audit.rows("all", DRIFT).items()}
    assert differing(found, dict.fromkeys(oracle.open, "open") | oracle.closed) == {}, acts
    rows = {
        id: (row["state"], sorted((p["topic"], p["seq"], p["offset"]) for p in row["places"]))
        for id, row in audit.rows("all", TRANSACTIONS).items()
    }
    expected = {id: (row["state"], sorted(row["places"])) for id, row in oracle.rows.items()}
    assert differing(rows, expected) == {}, acts


def differing(found: Mapping[Any, Any], expected: Mapping[Any, Any]) -> dict[Any, Any]:
    keys = found.keys() | expected.keys()
    return {
        key: (found.get(key), expected.get(key))
        for key in keys
        if found.get(key) != expected.get(key)
    }


# --- the stream --------------------------------------------------------------------------------


def steady_stream() -> Stream:
    """Return a stream of targets that lose nothing."""
    stream = Stream(StreamTerms(keep_ms=EVER >> 8, targets=frozenset(TARGETS)))
    stream.moment_ms = 0
    return stream


def follow(stream: Stream, facts: Path, run: str, now_ms: int) -> None:
    """Read what a run has read, then the next tick at the time of the run."""
    import pyarrow.parquet as pq

    stream.moment_ms = max(stream.moment_ms, now_ms - 1000)
    for table in ("half", "op", "visible"):
        for path in sorted((facts / f"run={run}" / table).glob("*.parquet")):
            rows = pq.ParquetFile(path).read().to_pylist()
            stream.read(*(Fact(table, row.pop("id"), row) for row in rows))
    stream.moment_ms = max(stream.moment_ms, now_ms)
    stream.read()


def assert_alike(stream: Stream, oracle: Oracle) -> None:
    """Compare the findings of transactions whose targets lose nothing."""
    if stream.moment_ms > oracle.view.now:
        return  # a stream's time does not go back
    # A stream waits for half messages that may come.
    surely_ms = stream.moment_ms - WINDOW_MS - 2000
    steady = {
        (id, kind)
        for id, tx in oracle.world.txs.items()
        for kind in (*SEEN, *WAITING, "marker_without_half")
        if {*tx["topics"]} <= {*STEADY}
        if kind != "marker_without_half" or tx["id_ms"] < surely_ms
    }
    found = Counter(stream.reported)
    found.subtract(stream.healed)
    reported = {each for each, number in found.items() if number > 0}
    assert reported & steady == oracle.open.keys() & steady, oracle.world.acts
