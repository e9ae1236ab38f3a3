"""Stored by a stream: its findings, each once, and its progress in Kafka; its manifest, and Spark's
offsets where they must change, in the checkpoint folder.

Spark's offset files record where each batch ends, and the next one begins there. Spark cannot hold
some timestamps (see `bounds`). After such a failure, while no query runs, `read_around` moves the
end of the failed batch to the first such record. Then the next batch fails at its first record, and
the end of the batch before is moved past it. So each stretch of such records costs two restarts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from threading import Lock, Thread
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from pyspark.sql import DataFrame, Row, SparkSession

from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.tools.audit_results import KafkaDrift
from txbroker.spark import expressions as F
from txbroker.spark.access import AuditKafka
from txbroker.spark.facts.bounds import far_offsets
from txbroker.spark.judge.rows import ALWAYS, Horizon
from txbroker.spark.schema import TEXT_MAX, BrokenRecord, Example
from txbroker.spark.storage.storage import storage_of
from txbroker.spark.stream.query import FINDING, SET_ASIDE_MAX, TARGETS_SOURCE
from txbroker.spark.tables.events import EvidencePlace, drift_event

EXAMPLES_MAX = 20
_WRITES_MAX = 5
_NONE = {name: FINDING[name] for name in ("topic", "partition", "offset")}
_Result = TypeVar("_Result")
_Step = tuple["StreamProgress", Iterable[tuple[str, bytes]]]


class StreamProgress(Struct, frozen=True, kw_only=True):
    """Progress of a stream, stored with the findings in one Kafka transaction.

    Attributes:
        v: version of this record.
        batch: Spark's last batch with a result; -1: none.
        states, drift: number of transactions in each state, and with each kind of finding.
        strangers: records of transactions that the stream no longer knows.
        quarantined: unreadable records.
        set_aside: some of them, ours first, then the newest.
        passed: by partition (`TOPIC-NUMBER`), the offset from which on no record that Spark cannot
            hold was counted yet.
        examples: the newest transactions with findings.
        held: number of transactions in the state: `open`, and `ended` ones that are remembered.
        replaced: targets that were deleted after the stream had read them.
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
    held: dict[str, int] = {}
    replaced: frozenset[str] = frozenset()


class EventLoopThread:
    """An event loop in a dedicated thread, for calls from other threads."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Stop the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class FindingSink:
    """Stores the results of Spark's batches one after the other.
    Spark repeats a batch when it does not know whether it was stored. The results of a batch are
    the same each time, and its number is stored with them, so each batch counts once.

    Args:
        kafka: the topics for findings and progress.
        call: runs coroutines in the event loop of `kafka`.
        name: the stream's.
        installation: its `topic_prefix`.
        on_targets: called with names of topics that are not read yet and the number of their batch,
            before that batch ends.
    """

    def __init__(
        self,
        kafka: KafkaDrift,
        call: EventLoopThread,
        name: str,
        installation: str,
        on_targets: Callable[[frozenset[str], int], None],
    ) -> None:
        self._kafka, self._call = kafka, call
        self._source, self._installation = f"stream-{name}", installation
        self._on_targets = on_targets
        self._key = f"stream-progress:{name}"
        self._confirmed = False
        self._one_at_a_time = Lock()
        self.progress = StreamProgress()

    def begin(self) -> None:
        """Fence every earlier stream of this name, and read its progress."""
        value = self._call(self._kafka.begin(self._key))
        if value is not None:
            self.progress = msgspec.json.decode(value, type=StreamProgress)
        self._confirmed = True

    def set_aside(self, records: Sequence[BrokenRecord]) -> None:
        """Store records that no batch will read; repeated ones count once."""
        with self._one_at_a_time:
            self._write(lambda before: (_passed(before, records), ()))

    def find_replaced(self, topics: Mapping[str, str], at_ms: int) -> None:
        """Store a finding of each of these targets, with the reason; repeated ones count once."""

        def step(before: StreamProgress) -> _Step:
            new = {name: why for name, why in topics.items() if name not in before.replaced}
            if not new:
                return before, ()
            kind = "target_missing"
            shown = [Example(name, (kind,), "", why) for name, why in new.items()]
            drift = {**before.drift, kind: before.drift.get(kind, 0) + len(new)}
            progress = msgspec.structs.replace(
                before,
                drift=drift,
                examples=tuple([*shown, *before.examples][:EXAMPLES_MAX]),
                replaced=before.replaced | new.keys(),
            )
            row = {**FINDING, "state": "opened", "kind": kind}
            row |= dict.fromkeys(("at_ms", "first_ms", "last_ms"), at_ms)
            rows = ({**row, "id": name, "topic": name, "why": why} for name, why in new.items())
            return progress, self._findings(rows)

        with self._one_at_a_time:
            self._write(step)

    def take(self, rows: DataFrame, batch: int) -> None:
        """Store a batch; Spark's `foreachBatch` calls this."""
        # The last call of a stopped query may still run when the next query begins.
        with self._one_at_a_time:
            self._take(rows, batch)

    def _take(self, rows: DataFrame, batch: int) -> None:
        rows.persist()
        try:
            # A few rows for each bucket, independent of the number of transactions.
            changes = rows.where(F.col("what") != "finding").collect()
            targets = frozenset(row["name"] for row in changes if row["what"] == "target")
            if targets:
                self._on_targets(targets, batch)
            if any(row["what"] != "target" for row in changes):
                self._store(rows, changes, batch)
        finally:
            rows.unpersist()

    def _store(self, rows: DataFrame, changes: Iterable[Row], batch: int) -> None:
        has_findings = any(row["what"] == "drift" for row in changes)
        changed = rows.where(F.col("what") == "finding")
        opened = changed.where("state = 'opened'")

        def advance(before: StreamProgress) -> _Step:
            if before.batch >= batch:
                return before, ()
            examples = opened.limit(EXAMPLES_MAX).collect() if has_findings else []
            findings = self._findings(changed.toLocalIterator()) if has_findings else ()
            return _advanced(before, batch, changes, examples), findings

        self._write(advance)

    def _write(self, step: Callable[[StreamProgress], _Step]) -> None:
        """Apply a step to the stored progress, until it is certainly stored."""
        for left in reversed(range(_WRITES_MAX)):
            try:
                if not self._confirmed:
                    self.begin()
                progress, findings = step(self.progress)
                if progress == self.progress:
                    return
                self._confirmed = False
                self._call(self._kafka.write(findings, self._key, msgspec.json.encode(progress)))
                self.progress, self._confirmed = progress, True
            except KafkaUnavailable:
                if not left:
                    raise
            else:
                return

    def _findings(self, rows: Iterable[Row | Mapping[str, Any]]) -> Iterator[tuple[str, bytes]]:
        for row in rows:
            place = [None if row[name] == none else row[name] for name, none in _NONE.items()]
            yield drift_event(
                row["state"],
                row["id"],
                row["kind"],
                group=row["group"],
                place=EvidencePlace(*place),
                why=row["why"],
                at_ms=row["at_ms"],
                first_ms=row["first_ms"],
                last_ms=row["last_ms"],
                installation=self._installation,
                source=self._source,
            )


def _advanced(
    before: StreamProgress, batch: int, changes: Iterable[Row], examples: Iterable[Row]
) -> StreamProgress:
    sums = {
        "state": dict(before.states),
        "drift": dict(before.drift),
        "held": dict(before.held),
    }
    aside: list[BrokenRecord] = []
    others = {"stranger": before.strangers, "quarantined": before.quarantined}
    for row in changes:
        what, name, number = row["what"], row["name"], row["number"]
        if what in sums:
            sums[what][name] = sums[what].get(name, 0) + number
        elif what in others:
            others[what] += number
        elif what == "set_aside":
            aside.append(msgspec.json.decode(row["why"], type=BrokenRecord))
    newest = [
        Example(row["id"], (row["kind"],), row["group"][:TEXT_MAX], row["why"][:TEXT_MAX])
        for row in examples
    ]
    return msgspec.structs.replace(
        before,
        batch=batch,
        states={name: number for name, number in sums["state"].items() if number},
        drift={name: number for name, number in sums["drift"].items() if number},
        held=sums["held"],
        strangers=others["stranger"],
        quarantined=others["quarantined"],
        set_aside=_newest(aside, before),
        examples=tuple([*newest, *before.examples][:EXAMPLES_MAX]),
    )


def _passed(before: StreamProgress, records: Iterable[BrokenRecord]) -> StreamProgress:
    """Return the progress with these records counted once."""
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
    return tuple(
        sorted([*aside, *before.set_aside], key=lambda record: not record.own)[:SET_ASIDE_MAX]
    )


# --- the checkpoint folder -----------------------------------------------------------------------

_FILE = "txbroker-stream.json"
_VERSION = 2
"""Version 1 had another layout of the state."""


class TakenPartition(Struct, frozen=True):
    """A partition of which the stream does not read the first records: they were gone when it
    reached them, or are older than it is to begin.

    Attributes:
        topic, partition: the partition.
        start: the first offset that is read.
        at_ms: no record from this time on is missing; `ALWAYS` where records may go at any time.
        kept_from_ms: no record with this timestamp or a later one is missing; 0 where it is
            unknown.
    """

    topic: str
    partition: int
    start: int
    at_ms: int
    kept_from_ms: int = 0


class _StateVersion(Struct, frozen=True):
    v: int


class StreamManifest(Struct, frozen=True, kw_only=True):
    """Facts that live as long as the checkpoint.

    Attributes:
        v: version of the file.
        name: of the stream.
        installation: the half topic; another installation's checkpoint is refused.
        started_ms: when the stream began.
        since_ms: it skips earlier records; 0: none.
        buckets, slot_ms: layout of the state; fixed.
        targets: topics that half messages name, whether they exist or not.
        read: those of them that the checkpoint knows.
        ids: the ids of the topics that are read, by name.
        taken: partitions of which records were gone.
    """

    v: int = _VERSION
    name: str
    installation: str
    started_ms: int
    since_ms: int = 0
    buckets: int
    slot_ms: int
    targets: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    ids: dict[str, str] = {}
    taken: tuple[TakenPartition, ...] = ()

    def horizon(self, half: str, op: str) -> Horizon:
        """Return the horizon: records that may have gone before the stream came."""
        halves = {taken.partition: taken for taken in self.taken if taken.topic == half}
        ops = {taken.partition: taken.at_ms for taken in self.taken if taken.topic == op}
        targets = [taken for taken in self.taken if taken.topic not in (half, op)]
        at_any_time = {taken.topic for taken in targets if taken.at_ms == ALWAYS}
        return Horizon(
            half_start={number: taken.start for number, taken in halves.items()},
            half_begin_ms={number: taken.at_ms for number, taken in halves.items()},
            op_begin_ms=ops,
            taken_ms={(taken.topic, taken.partition): taken.at_ms for taken in targets},
            kept_from_ms={
                taken.topic: taken.kept_from_ms
                for taken in targets
                if taken.kept_from_ms and taken.topic not in at_any_time
            },
        )

    def with_taken(
        self, new: "list[TakenPartition]", renewed: Set[str] = frozenset()
    ) -> "StreamManifest":
        """Return the manifest with more such partitions; earlier entries stay, except those of
        topics that are `renewed`: deleted, or created again."""
        known = {(taken.topic, taken.partition): taken for taken in new}
        for taken in self.taken:
            if taken.topic in renewed:
                continue
            place = (taken.topic, taken.partition)
            if taken.at_ms == ALWAYS or place not in known:
                known[place] = taken
        return msgspec.structs.replace(self, taken=tuple(known.values()))

    @property
    def deleted(self) -> frozenset[str]:
        """The targets that were deleted and do not exist, as far as the stream knows."""
        return frozenset(
            taken.topic for taken in self.taken if taken.partition < 0 and taken.at_ms == ALWAYS
        )

    def starts(self, topic: str) -> dict[str, int]:
        """Return the first offset to read of a topic's partitions, where it is not 0."""
        return {
            str(taken.partition): taken.start
            for taken in self.taken
            if taken.topic == topic and taken.start
        }


def read_home(spark: SparkSession, checkpoint: str) -> StreamManifest | None:
    """Return a checkpoint's manifest, None where no stream has begun there."""
    content = storage_of(spark, checkpoint).read(_path(checkpoint))
    return None if content is None else decode_home(checkpoint, content)


def decode_home(checkpoint: str, content: bytes) -> StreamManifest:
    """Return the manifest in a file; raise a ConfigurationError if it cannot be continued."""
    try:
        version = msgspec.json.decode(content, type=_StateVersion).v
        if version == _VERSION:
            return msgspec.json.decode(content, type=StreamManifest)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{_path(checkpoint)} does not parse ({error}): name another --checkpoint"
        ) from None
    if version > _VERSION:
        raise ConfigurationError(
            f"{_path(checkpoint)}: a newer version of txbroker wrote it: install that "
            "version, or name another --checkpoint"
        )
    raise ConfigurationError(
        f"{checkpoint}: an earlier version of txbroker wrote this state, which this one cannot "
        "continue: name another --checkpoint. The new stream reads the topics from their "
        "beginnings, or from a time that --since names"
    )


def write_home(spark: SparkSession, checkpoint: str, home: StreamManifest) -> None:
    """Store the manifest."""
    storage_of(spark, checkpoint).write(_path(checkpoint), msgspec.json.encode(home))


def _path(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/{_FILE}"


_NO_SOURCE = "-"
_HEAD_LINES = 2
"""Spark's version of the file, and settings."""
_WHY = "its timestamp is beyond what Spark can hold"

_Offsets = dict[str, dict[str, int]]
"""Of a source, by topic and partition."""


class _BatchOffsets:
    """Where a batch ends, by source."""

    def __init__(self, spark: SparkSession, folder: str, number: int) -> None:
        self._files, self._path = storage_of(spark, folder), f"{folder}/{number}"
        lines = (self._files.read(self._path) or b"").decode().split("\n")
        self._head, sources = lines[:_HEAD_LINES], lines[_HEAD_LINES:]
        self.sources: list[_Offsets] = [
            {} if each == _NO_SOURCE else msgspec.json.decode(each) for each in sources if each
        ]

    def write(self) -> None:
        sources = [
            msgspec.json.encode(each).decode() if each else _NO_SOURCE for each in self.sources
        ]
        self._files.write(self._path, "\n".join((*self._head, *sources)).encode())


def _batches(spark: SparkSession, folder: str) -> list[int]:
    """Return the numbers of the batches whose offsets are in a folder."""
    names = storage_of(spark, folder).names(folder)
    return sorted(int(name) for name in names if name.isdigit())


def begin_at(
    spark: SparkSession,
    checkpoint: str,
    starts: Mapping[str, dict[str, int]],
    renewed: Mapping[str, dict[str, int]] = {},
) -> None:
    """Let new targets be read from these offsets, by partition; Spark would read them whole.

    No query may run. A stream without a batch yet begins by its reader's options. `renewed`: the
    same for targets that Spark has read before; without offsets it forgets them.
    """
    if not (starts or renewed):
        return
    folder = f"{checkpoint.rstrip('/')}/offsets"
    # The last batch may be repeated. It then begins where the one before it ended.
    for number in _batches(spark, folder)[-2:]:
        offsets = _BatchOffsets(spark, folder, number)
        known = {**starts, **offsets.sources[TARGETS_SOURCE], **renewed}
        offsets.sources[TARGETS_SOURCE] = {topic: at for topic, at in known.items() if at}
        offsets.write()


def read_around(
    spark: SparkSession,
    checkpoint: str,
    access: AuditKafka,
    set_aside: Callable[[Sequence[BrokenRecord]], None],
) -> bool:
    """Make the failed batch skip records that Spark cannot hold; return whether it has any.

    `set_aside` stores records that no batch will read any more, before the offsets move.
    """
    folder = f"{checkpoint.rstrip('/')}/offsets"
    numbers = _batches(spark, folder)
    if not numbers:
        return False
    number = numbers[-1]
    failed = _BatchOffsets(spark, folder, number)
    before = _BatchOffsets(spark, folder, number - 1)
    begins = before.sources or [{} for _ in failed.sources]
    has_far = False
    aside: list[BrokenRecord] = []
    for begin, end in zip(begins, failed.sources, strict=True):
        for topic, partition in [(t, p) for t, of_topic in end.items() for p in of_topic]:
            some = _cut(access, topic, partition, begin, end)
            has_far = has_far or some is not None
            aside += some or []
    if aside:
        set_aside(aside)
    if has_far:
        # This one first: if the second write fails, the next start fails and returns here.
        failed.write()
        if aside:
            before.write()
    return has_far


def _cut(
    access: AuditKafka, topic: str, partition: str, begins: _Offsets, ends: _Offsets
) -> list[BrokenRecord] | None:
    """Let a partition's part of a batch end before its first far record, or begin after the far
    records at its start; return those, None where there is no such record."""
    number, end = int(partition), ends[topic][partition]
    begin = begins.get(topic, {}).get(partition, -1)
    start = begin if begin >= 0 else access.ends((topic,))[topic].starts[number]
    far = far_offsets(access, topic, number, start, end)
    if not far:
        return None
    if begin < 0 or far[0] > begin:
        ends[topic][partition] = far[0]
        return []
    passed = [offset for at, offset in enumerate(far) if offset == begin + at]
    begins[topic][partition] = passed[-1] + 1
    if len(passed) < len(far):
        ends[topic][partition] = far[len(passed)]
    return [BrokenRecord(topic, number, offset, _WHY) for offset in passed]
