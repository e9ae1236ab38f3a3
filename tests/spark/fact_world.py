"""A random installation as tables of facts, without Kafka: what its topics hold, and when.

Lives of transactions run in turns, a step at a time, so that a cut anywhere meets all of them half
way. The same world is read by one full run or by many incremental ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import structs
from pyspark.sql import SparkSession

from txbroker.core.routing import make_id, parse_id
from txbroker.spark import schema
from txbroker.spark.schema import (
    Extract,
    Facts,
    Part,
    SnapshotBounds,
    TableCount,
    Terms,
    TimeSpan,
    TopicNames,
    TopicRead,
)

START_MS = 1_700_000_000_000
NAMES = TopicNames("half", "op", "parked", "audit", "drift")
TOPICS = {"orders": 2, "bills": 1, "rare": 1}
STARTS = {("orders", 0): 100, ("rare", 0): 50}
"""First offsets of targets from which retention removed other producers' records."""
KEPT_MS = 7 * 86_400_000
"""Their retention time."""
Row = dict[str, Any]
Life = Iterator[None]


class Moment(NamedTuple):
    """How far a run reads: `early`, then the targets, then the rest; counts of records."""

    early: int
    targets: int
    rest: int


class Written(NamedTuple):
    table: str
    topic: str
    partition: int
    row: Row


class World:
    """The records of an installation in the order in which they were written."""

    def __init__(self, seed: int, partitions: int = 2) -> None:
        self.random = random.Random(seed)
        self.partitions = partitions
        self.now_ms = START_MS
        self.records: list[Written] = []
        self.reads: list[Moment] = []
        """What the next runs read, in turn."""
        self._offsets: Counter[tuple[str, int]] = Counter(STARTS)
        self._clocks: dict[tuple[str, int], int] = {}
        self._marks = 0

    def live(self, steps: int, starting: float = 0.4) -> None:
        """Run `steps` steps of old and new transactions."""
        lives: list[Life] = getattr(self, "_lives", [])
        for _ in range(steps):
            self.now_ms += self.random.choice((1, 5, 50, 2000, 15_000))
            if not lives or self.random.random() < starting:
                lives.append(self.random.choice(LIVES)(self))
            life = self.random.choice(lives)
            if next(life, self) is self:
                lives.remove(life)
        self._lives = lives

    # --- steps of lives --------------------------------------------------------------------------

    def prepare(
        self,
        topics: tuple[str, ...] = ("orders",),
        *,
        mark: int | None = None,
        partition: int | None = None,
        void: str | None = None,
        again: list[Row] | None = None,
    ) -> list[Row]:
        if again is not None:
            return [self._put("half", NAMES.half, row["partition"], row) for row in again]
        home = self.random.randrange(self.partitions) if partition is None else partition
        id = make_id(
            home, self.now_ms - self.random.choice((0, 3, 40)), self.random.getrandbits(64)
        )
        if mark is None:
            self._marks += 1
            mark = self._marks
        policy = {"after_ms": 0, "interval_ms": 0, "attempts_max": 2, "timeout_ms": 0}
        rows = []
        for seq, topic in enumerate(topics):
            row = {
                "id": id, "void": void, "grp": f"g{self.random.randrange(3)}", "seq": seq,
                "count": len(topics), "topic": topic, "target_partition": 0,
                "body": self.random.getrandbits(32), "headers": self.random.getrandbits(32),
                "timestamp_ms": None, "order_mark": mark if seq == 0 else None, "dedup": None,
                **(policy if seq == 0 else dict.fromkeys(policy)),
            }  # fmt: skip
            row["grp"] = rows[0]["grp"] if rows else row["grp"]
            rows.append(self._put("half", NAMES.half, home, row))
        return rows

    def mark(self, half: list[Row], kind: str, **fields: Any) -> Row:
        row = {
            "id": half[0]["id"], "kind": kind, "source": "producer", "grp": half[0]["grp"],
            "round": 1, "number": 0, "reason": "", "later_ms": 0, "contents": None,
            "contents_count": 0, **fields,
        }  # fmt: skip
        return self._put("op", NAMES.op, parse_id(row["id"]).partition, row)

    def promote(
        self, half: list[Row], marker: Row, only: tuple[int, ...] = (), **fields: Any
    ) -> None:
        for each in half:
            if only and each["seq"] not in only:
                continue
            row = {
                "id": each["id"], "seq": each["seq"], "count": each["count"],
                "body": each["body"], "headers": each["headers"], "append_time": False,
                "at_ms": marker["at_ms"], **fields,
            }  # fmt: skip
            topic = row.pop("topic", each["topic"])
            self._put("visible", topic, each["target_partition"], row)

    def park(self, half: list[Row], state: str | None) -> None:
        """Write to the parked topic; None: tombstones."""
        for each in half:
            row = {
                "id": each["id"], "seq": each["seq"], "state": state,
                "cause": "unknown_topic" if state == "refused" else None,
                "tombstone": state is None,
            }  # fmt: skip
            if state is not None:
                held = ("grp", "count", "topic", "target_partition", "body", "headers")
                row |= {name: each[name] for name in held}
            self._put("parked", NAMES.parked, each["partition"], row)

    def _put(self, table: str, topic: str, partition: int, row: Row) -> Row:
        place = topic, partition
        self.now_ms += 1
        at_ms = row["at_ms"] if table == "visible" else self.now_ms
        clock_ms = self._clocks[place] = max(self._clocks.get(place, 0), at_ms)
        where = {"partition": partition, "offset": self._offsets[place], "at_ms": at_ms}
        row = {**row, **where, "id_ms": parse_id(row["id"]).time_ms}
        if table in ("half", "op"):
            row["clock_ms"] = clock_ms
        if table == "visible":
            row["topic"] = topic
        self._offsets[place] += 1
        self.records.append(Written(table, topic, partition, row))
        return row

    # --- being read ------------------------------------------------------------------------------

    def end(self) -> Moment:
        """Return the moment at which everything is read, at a quiet point."""
        return Moment(len(self.records), len(self.records), len(self.records))

    def moments(self, count: int) -> list[Moment]:
        """Return random moments under traffic, in the order of time."""
        places = sorted(self.random.sample(range(1, len(self.records)), 3 * count))
        return [Moment(*places[n : n + 3]) for n in range(0, 3 * count, 3)]

    def naming_late(self, topic: str) -> Moment:
        """Return a moment at which a topic is first named after the early end of half."""
        halves = (n for n, each in enumerate(self.records) if each.table == "half")
        early = next(n for n in halves if self.records[n].row["topic"] == topic)
        return Moment(early, early + 2, early + 4)

    def now_at(self, moment: Moment) -> int:
        """Return the brokers' time when a run at this moment began."""
        seen = self.records[: moment.early]
        return max(each.row["at_ms"] for each in seen)

    def ends(self, topic: str, records: int) -> tuple[int, ...]:
        count = TOPICS.get(topic, self.partitions)
        seen = Counter(r.partition for r in self.records[:records] if r.topic == topic)
        return tuple(seen[p] + STARTS.get((topic, p), 0) for p in range(count))

    def cut(self, moment: Moment, before: SnapshotBounds | None) -> SnapshotBounds:
        was = {} if before is None else {t.topic: t.ends for t in before.targets}
        named = self._named(moment.early) | was.keys() | set(before.named_late if before else ())

        def read(topic: str, records: int, begins: tuple[int, ...] | None) -> TopicRead:
            ends = self.ends(topic, records)
            return TopicRead(topic, (0,) * len(ends), begins or (0,) * len(ends), ends)

        targets = [self._target(topic, moment, was.get(topic)) for topic in sorted(named)]
        unended = [f"{target.topic}-{p}" for target in targets for p in target.open]
        return SnapshotBounds(
            read(NAMES.half, moment.rest, before and before.half.ends),
            read(NAMES.op, moment.rest, before and before.op.ends),
            read(NAMES.parked, moment.targets, before and before.parked.ends),
            tuple(targets),
            self.ends(NAMES.op, moment.early),
            self.ends(NAMES.half, moment.early),
            self._clock(NAMES.half, moment.rest),
            self._clock(NAMES.op, moment.rest),
            tuple(sorted(self._named(moment.rest) - named)),
            tuple(place for place in unended if self.random.random() < 0.5),
        )

    def _named(self, records: int) -> set[str]:
        halves = (r.row for r in self.records[:records] if r.table == "half")
        return {row["topic"] for row in halves if row["void"] is None}

    def _target(self, topic: str, moment: Moment, was: tuple[int, ...] | None) -> TopicRead:
        """Return how a target is read; under traffic some partitions end in open transactions."""
        starts = tuple(STARTS.get((topic, p), 0) for p in range(TOPICS[topic]))
        begins, ends = was or starts, self.ends(topic, moment.targets)
        if moment == self.end():
            return TopicRead(topic, starts, begins, ends, kept_ms=KEPT_MS)
        unended = tuple(p for p in range(len(ends)) if self.random.random() < 0.4)
        before = self.ends(topic, self.random.randint(0, moment.targets))
        ends = tuple(
            max(begin, earlier if p in unended else end)
            for p, (begin, earlier, end) in enumerate(zip(begins, before, ends, strict=True))
        )
        return TopicRead(topic, starts, begins, ends, open=unended, kept_ms=KEPT_MS)

    def _clock(self, topic: str, records: int) -> tuple[int, ...]:
        seen = [r for r in self.records[:records] if r.topic == topic]
        return tuple(
            max((r.row["clock_ms"] for r in seen if r.partition == partition), default=0)
            for partition in range(self.partitions)
        )

    def stage(
        self,
        spark: SparkSession,
        access: object,
        names: TopicNames,
        terms: Terms,
        folder: str,
        secret: str,
        before: SnapshotBounds | None = None,
        keys_before: object = None,
        counted_from: SnapshotBounds | None = None,
        part: Part | None = None,
    ) -> Extract:
        """Stand in for `txbroker.spark.facts.extract.extract`: read the next of `reads`."""
        cut = structs.replace(self.cut(self.reads.pop(0), before), asked_ms=terms.now_ms)
        topics = {read.topic: read for read in (cut.half, cut.op, cut.parked, *cut.targets)}
        early = {NAMES.half: cut.half_early, NAMES.op: cut.op_early}
        rows: dict[str, list[Row]] = {"half": [], "op": [], "visible": [], "parked": []}
        for record in self.records:
            read, row = topics.get(record.topic), dict(record.row)
            p, offset = record.partition, row["offset"]
            if read is None or not read.begins[p] <= offset < read.ends[p]:
                continue
            if record.topic in early:
                row["early"] = offset < early[record.topic][p]
            rows[record.table].append(row)
        tables = {}
        for name, some in rows.items():
            ddl = getattr(schema, name.upper())
            path = f"{folder}/{name}"
            spark.createDataFrame(some, ddl).coalesce(1).write.parquet(path)
            tables[name] = spark.read.schema(ddl).parquet(path)
        read = {name: _counted(some) for name, some in rows.items()}
        return Extract(Facts(**tables), schema.no_rows(spark, schema.BROKEN), cut, read)


def _counted(rows: Sequence[Row]) -> TableCount:
    times_ms = [row["id_ms"] for row in rows if row["id_ms"] is not None]
    span = TimeSpan(min(times_ms), max(times_ms)) if times_ms else None
    keyed = sum(row.get("dedup") is not None for row in rows)
    return TableCount(len(rows), keyed, span, sum(row.get("kind") == "check" for row in rows))


def tables_held(spark: SparkSession) -> int:
    context: Any = spark.sparkContext
    return int(context._jsc.getPersistentRDDs().size())


# --- lives ---------------------------------------------------------------------------------------


def _clean(world: World) -> Life:
    half = world.prepare(("orders", "bills") if world.random.random() < 0.3 else ("orders",))
    yield
    marker = world.mark(half, "commit")
    yield
    world.promote(half, marker)


def _twice(world: World) -> Life:
    half = world.prepare()
    marker = world.mark(half, "commit")
    yield
    world.promote(half, marker)
    yield
    world.promote(half, marker)
    yield
    world.promote(half, marker)


def _rolled_back(world: World) -> Life:
    half = world.prepare()
    yield
    marker = world.mark(half, "rollback")
    yield
    if world.random.random() < 0.5:
        world.promote(half, marker)


def _contrary(world: World) -> Life:
    half = world.prepare()
    kinds = world.random.sample(("commit", "rollback"), 2)
    marker = world.mark(half, kinds[0])
    yield
    if kinds[0] == "commit" or world.random.random() < 0.5:
        world.promote(half, marker)
    yield
    world.mark(half, kinds[1])
    yield
    world.mark(half, kinds[0])


def _undecided(world: World) -> Life:
    half = world.prepare()
    yield
    world.mark(half, "check", number=1, reason="due", source="schedule")
    yield
    world.mark(half, "check", number=2, reason="due", source="schedule")
    yield
    if world.random.random() < 0.5:
        world.mark(half, "park", source="schedule")
        yield
        world.park(half, "parked")
        yield
    else:
        world.mark(half, "check", number=3, reason="due", source="schedule")
        yield
    marker = world.mark(half, "commit")
    yield
    world.promote(half, marker)
    world.park(half, None)


def _unasked(world: World) -> Life:
    half = world.prepare()
    yield
    world.promote(half, {"at_ms": world.now_ms})
    yield
    if world.random.random() < 0.5:
        world.mark(half, "commit")


def _strange(world: World) -> Life:
    half = [
        {
            "id": make_id(world.random.randrange(2), world.now_ms, world.random.getrandbits(64)),
            "grp": "g0", "seq": 0, "count": 1, "topic": "orders", "target_partition": 0,
            "body": 1, "headers": 1,
        }
    ]  # fmt: skip
    marker = world.mark(half, world.random.choice(("commit", "rollback", "check")))
    yield
    if world.random.random() < 0.5:
        world.promote(half, marker)
        yield
    world.mark(half, "rollback")


def _changed(world: World) -> Life:
    half = world.prepare(("orders", "bills"))
    yield
    marker = world.mark(half, "commit")
    yield
    field = world.random.choice(("body", "headers", "at_ms"))
    world.promote(half, marker, **{field: 7})
    yield
    world.promote(half[:1], marker, topic="bills")


def _partly(world: World) -> Life:
    half = world.prepare(("orders", "bills"))
    marker = world.mark(half, "commit")
    yield
    world.promote(half, marker, only=(0,))
    yield
    yield
    yield
    world.promote(half, marker, only=(1,))


def _refused(world: World) -> Life:
    half = world.prepare()
    marker = world.mark(half, "commit")
    yield
    world.park(half, "refused")
    yield
    yield
    world.promote(half, marker)
    world.park(half, None)


def _swapped(world: World) -> Life:
    """Two of one key become visible in the wrong order, or the first one again after both."""
    first = world.prepare(mark=1_000_000 + world.now_ms, partition=0)
    second = world.prepare(mark=first[0]["order_mark"], partition=0)
    yield
    one = world.mark(first, "commit")
    early = world.random.random() < 0.4
    if early:
        world.promote(first, one)
    yield
    two = world.mark(second, "commit")
    yield
    world.promote(second, two)
    yield
    world.promote(first, one)


def _crowded(world: World) -> Life:
    """Many of one key, in order but for one that is late."""
    key = 2_000_000 + world.random.randrange(2)
    half = world.prepare(mark=key, partition=1)
    marker = world.mark(half, "commit")
    if world.random.random() < 0.4:
        yield
        yield
    world.promote(half, marker)


def _void(world: World) -> Life:
    half = world.prepare(void="expired")
    yield
    marker = world.mark(half, "commit")
    yield
    if world.random.random() < 0.5:
        world.promote(half, marker)


def _repeated(world: World) -> Life:
    half = world.prepare()
    yield
    marker = world.mark(half, "commit")
    world.promote(half, marker)
    yield
    world.prepare(again=half)
    yield
    world.mark(half, "commit")


def _rare(world: World) -> Life:
    """To a topic that is seldom used, and sometimes lost."""
    half = world.prepare(("rare",))
    marker = world.mark(half, "commit")
    yield
    if world.random.random() < 0.5:
        world.promote(half, marker)


LIVES: tuple[Callable[[World], Life], ...] = (
    _clean, _clean, _clean, _clean, _twice, _rolled_back, _contrary, _undecided, _unasked,
    _strange, _changed, _partly, _refused, _swapped, _crowded, _crowded, _void, _repeated, _rare,
)  # fmt: skip
