"""What a stream tells: each finding once, and how things stand."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from threading import Lock, Thread
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.tools.drift import KafkaDrift
from txbroker.spark.schema import TEXT_MAX, BrokenRecord, Example
from txbroker.spark.stream.query import SET_ASIDE_MAX

EXAMPLES_MAX = 20
_WRITES_MAX = 5
_Result = TypeVar("_Result")
_Step = tuple["StreamProgress", Iterable[tuple[str, bytes]]]


class DriftEvent(Struct, frozen=True, kw_only=True):
    """The value of a record of the drift topic, as JSON; its key is `event`.

    Attributes:
        v: version of this record.
        event: its name, `ID:KIND`; there is one of each.
        id, kind, group, why: of the finding.
        at: when it was certain, by the brokers' clocks.
        first_seen: when it was first suspected.
        stream: whose finding it is.
    """

    v: int = 1
    event: str
    id: str
    kind: str
    group: str
    why: str
    at: str
    first_seen: str
    stream: str


class StreamProgress(Struct, frozen=True, kw_only=True):
    """How far a stream is: stored with the findings, in one Kafka transaction.

    Attributes:
        v: version of this record.
        batch: the last batch of Spark that anything came of; -1: none.
        states, drift: how many transactions are in each state, and have each kind of finding.
        strangers: records of transactions that the stream knows nothing of any more.
        quarantined: records that did not read.
        set_aside: some of them, ours first, then the newest.
        passed: by partition (`TOPIC-NUMBER`), the offset from which on no record that Spark cannot
            hold was counted yet.
        examples: the newest transactions with findings.
    """

    v: int = 1
    batch: int = -1
    states: dict[str, int] = {}
    drift: dict[str, int] = {}
    strangers: int = 0
    quarantined: int = 0
    examples: tuple[Example, ...] = ()
    set_aside: tuple[BrokenRecord, ...] = ()
    passed: dict[str, int] = {}


class EventLoopThread:
    """An event loop in a thread of its own, which other threads have work done in."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Do some work and return what comes of it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class FindingSink:
    """Takes what comes of Spark's batches, one after the other.

    Spark gives a batch again when it does not know whether it was taken. What comes of a batch is
    the same each time, and its number is stored with it, so it counts once.

    Args:
        kafka: where it is told.
        call: has work done in the event loop that `kafka` belongs to.
        name: the stream's.
        on_targets: told names of topics that are not read yet, and the number of the batch that
            they came with, before that batch is done.
    """

    def __init__(
        self,
        kafka: KafkaDrift,
        call: EventLoopThread,
        name: str,
        on_targets: Callable[[frozenset[str], int], None],
    ) -> None:
        self._kafka, self._call, self._name = kafka, call, name
        self._on_targets = on_targets
        self._key = f"stream-progress:{name}"
        self._sure = False
        self._one_at_a_time = Lock()
        self.progress = StreamProgress()

    def begin(self) -> None:
        """Shut out every earlier stream of this name, and learn what it has told.

        Raises:
            ConfigurationError: a topic is missing, or there is no right to it.
            KafkaUnavailable: Kafka does not answer.
        """
        value = self._call(self._kafka.begin(self._key))
        if value is not None:
            self.progress = msgspec.json.decode(value, type=StreamProgress)
        self._sure = True

    def set_aside(self, records: Sequence[BrokenRecord]) -> None:
        """Store records that no batch will bring; each counts once, however often it comes.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        with self._one_at_a_time:
            self._write(lambda before: (_passed(before, records), ()))

    def take(self, rows: DataFrame, batch: int) -> None:
        """Take a batch; what Spark's `foreachBatch` calls.

        Raises:
            ConfigurationError: a topic does not take what is told, or another stream has begun.
            KafkaUnavailable: Kafka does not answer.
        """
        # A query that is stopped may leave its last call behind when the next one begins.
        with self._one_at_a_time:
            self._take(rows, batch)

    def _take(self, rows: DataFrame, batch: int) -> None:
        rows.persist()
        try:
            # A few rows for each bucket, however many transactions there are.
            changes = rows.where(F.col("what") != "told").collect()
            targets = frozenset(row["name"] for row in changes if row["what"] == "target")
            if targets:
                self._on_targets(targets, batch)
            if any(row["what"] != "target" for row in changes):
                self._store(rows, changes, batch)
        finally:
            rows.unpersist()

    def _store(self, rows: DataFrame, changes: Iterable[Row], batch: int) -> None:
        """Store what came of a batch, once."""
        some = any(row["what"] == "drift" and row["number"] > 0 for row in changes)
        told = rows.where(F.col("what") == "told")

        def advance(before: StreamProgress) -> _Step:
            if before.batch >= batch:
                return before, ()
            examples = told.limit(EXAMPLES_MAX).collect() if some else []
            findings = self._findings(told.toLocalIterator()) if some else ()
            return _advanced(before, batch, changes, examples), findings

        self._write(advance)

    def _write(self, step: Callable[[StreamProgress], _Step]) -> None:
        """Store a step from what is stored, until it is known that it is stored."""
        for left in reversed(range(_WRITES_MAX)):
            try:
                if not self._sure:
                    self.begin()
                progress, findings = step(self.progress)
                if progress == self.progress:
                    return
                self._sure = False
                self._call(self._kafka.write(findings, self._key, msgspec.json.encode(progress)))
                self.progress, self._sure = progress, True
            except KafkaUnavailable:
                if not left:
                    raise
            else:
                return

    def _findings(self, rows: Iterable[Row]) -> Iterator[tuple[str, bytes]]:
        for row in rows:
            event = f"{row['id']}:{row['name']}"
            value = DriftEvent(
                event=event,
                id=row["id"],
                kind=row["name"],
                group=row["grp"][:TEXT_MAX],
                why=row["why"][:TEXT_MAX],
                at=_iso(row["at_ms"]),
                first_seen=_iso(row["first_seen_ms"]),
                stream=self._name,
            )
            yield event, msgspec.json.encode(value)


def _advanced(
    before: StreamProgress, batch: int, changes: Iterable[Row], examples: Iterable[Row]
) -> StreamProgress:
    states, drift = dict(before.states), dict(before.drift)
    aside: list[BrokenRecord] = []
    others = {"stranger": before.strangers, "quarantined": before.quarantined}
    for row in changes:
        what, name, number = row["what"], row["name"], row["number"]
        if what == "state":
            states[name] = states.get(name, 0) + number
        elif what == "drift":
            drift[name] = drift.get(name, 0) + number
        elif what in others:
            others[what] += number
        elif what == "set_aside":
            aside.append(msgspec.json.decode(row["why"], type=BrokenRecord))
    newest = [
        Example(row["id"], (row["name"],), row["grp"][:TEXT_MAX], row["why"][:TEXT_MAX])
        for row in examples
    ]
    return msgspec.structs.replace(
        before,
        batch=batch,
        states={name: number for name, number in states.items() if number},
        drift={name: number for name, number in drift.items() if number},
        strangers=others["stranger"],
        quarantined=others["quarantined"],
        set_aside=_newest(aside, before),
        examples=tuple([*newest, *before.examples][:EXAMPLES_MAX]),
    )


def _passed(before: StreamProgress, records: Iterable[BrokenRecord]) -> StreamProgress:
    """Return a progress with records that were not counted yet."""
    passed, new = dict(before.passed), []
    for record in records:
        place = f"{record.topic}-{record.partition}"
        if record.offset >= passed.get(place, 0):
            passed[place] = record.offset + 1
            new.append(record)
    return msgspec.structs.replace(
        before,
        quarantined=before.quarantined + len(new),
        set_aside=_newest(new, before),
        passed=passed,
    )


def _newest(aside: Sequence[BrokenRecord], before: StreamProgress) -> tuple[BrokenRecord, ...]:
    """Return the records to show: ours first, then the newest."""
    return tuple(sorted([*aside, *before.set_aside], key=lambda each: not each.own)[:SET_ASIDE_MAX])


def _iso(at_ms: int) -> str:
    moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
