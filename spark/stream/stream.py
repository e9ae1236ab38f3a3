"""`txbroker audit stream`: judge every transaction as its records arrive.
Spark reads all topics at once and independently, so at any time one topic is ahead of another. The
*tick* relates them: a record of the audit topic, which the stream writes every second. Its append
time is the brokers' now. After it, the stream reads the ends of all topics. Once Spark has read
past those ends, everything up to the tick was read: it is the *moment* that the next tick names.
All rules about time and about absent records use it; see `state`.

Half messages name the target topics. A new topic is added by restarting the query from its
checkpoint with the longer list; no tick follows before the restart.
"""

import contextlib
import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from txbroker.contract.audit import StreamFigures
from txbroker.errors import ConfigurationError, KafkaUnavailable, TxbrokerError
from txbroker.kafka.tools.audit_results import KafkaDrift
from txbroker.spark.access import AuditError, AuditKafka, TopicEnds, publish
from txbroker.spark.facts.bounds import OVERFLOW
from txbroker.spark.facts.topics import DELETED_TOPIC, TAKEN_BY_RETENTION
from txbroker.spark.judge.rows import can_be_topic
from txbroker.spark.launch.failures import in_words
from txbroker.spark.launch.versions import check_streams
from txbroker.spark.schema import RunSummary, Terms, TopicNames
from txbroker.spark.session import spread
from txbroker.spark.stream.query import GRACE_MS, STATE_CONF, Sources, plan, ship_by_value
from txbroker.spark.stream.state import StreamTerms
from txbroker.spark.stream.stored import (
    EventLoopThread,
    FindingSink,
    StreamManifest,
    TakenPartition,
    begin_at,
    read_around,
    read_home,
    write_home,
)
from txbroker.spark.stream.targets import (
    changed_targets,
    renewed_home,
    skipped,
    starts_of,
    taken_of,
)

_LOOK_S = 0.1
NO_BATCH = -2
_END_S = 20.0
"""Maximum wait for a running batch at the end; then it is aborted."""
_DEAF_S = 60.0
"""Maximum time of retries while Kafka does not answer."""
_TICKS_MAX = 30
"""Ticks whose ends Spark has not read; then the next one waits."""

_DELETION_S = 5.0
"""Maximum wait until a broker knows of the deletion on which Spark has failed."""
_DELETED = (
    "the topic was deleted: run `txbroker audit run`, which finds the messages that only it held"
)
_GAP = (
    "retention removed {} before the stream read them: start a new stream with another "
    "--checkpoint, and run a full audit (txbroker audit run --full) for the gap"
)

Positions = dict[tuple[str, int], int]


class StreamSettings(Struct, frozen=True):
    """Settings of a stream.

    Attributes:
        checkpoint: folder or URI of Spark's checkpoint.
        names: the installation's topics.
        terms: the terms of the judgement; `now_ms` has no effect.
        since_ms: a new stream skips records of transactions that were prepared earlier; 0: none.
        every_s: interval of Spark's batches, seconds.
        tick_s: interval of ticks, seconds.
        summary_s: interval of the summaries sent to the proxies, seconds.
        keep_s: how long ended transactions are remembered, so that records after their end are
            recognised; at least the dedup window.
        records_max: records that one batch reads from each of half, op, parked and targets.
        buckets: parts of the state; more of them spread the work over more executors. Fixed by the
            first start.
        targets: topics read from the start, besides those that half messages name.
    """

    checkpoint: str
    names: TopicNames
    terms: Terms = Terms(0)
    since_ms: int = 0
    every_s: float = 3.0
    tick_s: float = 1.0
    summary_s: float = 10.0
    keep_s: float = 300.0
    records_max: int = 200_000
    buckets: int = 16
    targets: frozenset[str] = frozenset()

    def validate(self) -> None:
        """Raise a `ConfigurationError` where settings contradict one another."""
        if self.keep_s * 1000 <= self.terms.dedup_window_ms + self.terms.late_after_ms:
            raise ConfigurationError(
                "keep_s must exceed the dedup window plus the time after which a commit is late"
            )


def start_stream(
    spark: SparkSession, access: AuditKafka, settings: StreamSettings
) -> "AuditStream":
    """Start auditing, or resume from the checkpoint, in a background thread.

    Raises:
        ConfigurationError: a setting, a right or a topic is missing or wrong, or this version of
            Spark cannot continue a stream.
        AuditError, KafkaUnavailable: Kafka does not answer.
    """
    settings.validate()
    check_streams(spark.version)
    stream = AuditStream(spark, access, settings)
    stream.start()
    return stream


class WrittenTick(NamedTuple):
    """A tick that was written: its offset and append time, and the moment that it names."""

    offset: int
    at_ms: int
    moment_ms: int


class AuditStream:
    """A running stream; created by `start_stream`."""

    def __init__(self, spark: SparkSession, access: AuditKafka, settings: StreamSettings) -> None:
        self._spark, self._access, self._settings = spark, access, settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txbroker audit stream", daemon=True)
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._unread: dict[str, str] = {}
        """Why targets of half messages are not read, by topic."""
        self._grown_with = NO_BATCH
        self._moment_ms = self._judged_ms = 0
        self._pending: deque[tuple[WrittenTick, Positions]] = deque()
        """Ticks with the ends after them that Spark has not read past."""
        self._unjudged: deque[WrittenTick] = deque()
        """Ticks that Spark has not read."""
        self._figures: StreamFigures | None = None
        self._summary_at_s = 0.0
        self._first: Mapping[str, Any] | None = None
        """Progress of the first batch of this query: Spark keeps the last hundred only."""

    # --- from outside ------------------------------------------------------------------------

    def start(self) -> None:
        """Start; called once."""
        home = read_home(self._spark, self._settings.checkpoint)
        name = secrets.token_hex(8) if home is None else home.name
        self._tick_key = f"stream-tick:{name}"
        self._call = EventLoopThread(f"txbroker audit {name}")
        try:
            self._kafka = self._call(_open(self._access, name))
            self._now_ms = self._call(self._kafka.mark(self._tick_key, b"0")).timestamp_ms
            self._home = self._founded(name) if home is None else home
            if self._home.installation != self._settings.names.half:
                raise ConfigurationError(
                    f"{self._settings.checkpoint} belongs to the topic {self._home.installation}: "
                    "name another --checkpoint"
                )
            self._add_targets(self._settings.targets, NO_BATCH)
            self._sink = FindingSink(
                self._kafka, self._call, name, self._settings.names.prefix, self._add_targets
            )
            self._sink.begin()
        except BaseException:
            self._call.close()
            raise
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Stop; the next start continues from the checkpoint."""
        self._stop.set()
        self._thread.join(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; return whether it has. Raise its error if it failed."""
        self._thread.join(timeout_s)
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    @property
    def judged_ms(self) -> int:
        """The moment up to which everything was judged, ms by the brokers' clocks."""
        return self._judged_ms

    def summary(self) -> RunSummary:
        """Return the current counts as a run's summary."""
        progress, home = self._sink.progress, self._home
        states = {state: number for state, number in progress.states.items() if number > 0}
        over = {"promoted", "rolled_back", "void", "gone"}
        return RunSummary(
            run=f"stream-{home.name}",
            mode="stream",
            started_ms=home.started_ms,
            took_s=max(self._judged_ms - home.started_ms, 0) / 1000,
            cut=None,
            records={},
            transactions=sum(states.values()),
            states=states,
            drift={kind: number for kind, number in progress.drift.items() if number > 0},
            carried=sum(number for state, number in states.items() if state not in over),
            quarantined=progress.quarantined,
            set_aside=progress.set_aside,
            examples=progress.examples,
            strangers=progress.strangers,
            unread_targets=self._unread,
            stream=self._figures,
        )

    # --- sources -----------------------------------------------------------------------------

    def _founded(self, name: str) -> StreamManifest:
        """Return the manifest of a new stream, with the records that retention removed before
        its start."""
        settings = self._settings
        home = StreamManifest(
            name=name,
            installation=settings.names.half,
            started_ms=self._now_ms,
            since_ms=settings.since_ms,
            buckets=settings.buckets,
            slot_ms=StreamTerms().slot_ms,
        )
        names = settings.names
        half, op, parked = map(self._access.own_ends, (names.half, names.op, names.parked))
        taken = taken_of(self._access, names, (half, op), home, self._now_ms)
        taken += skipped(self._access, names, parked, home.since_ms, self._now_ms).values()
        home = home.with_taken(taken)
        write_home(self._spark, settings.checkpoint, home)
        return home

    def _add_targets(self, topics: frozenset[str], batch: int) -> None:
        """Store topics that half messages name, so that they survive restarts."""
        topics = frozenset(filter(can_be_topic, topics))
        with self._lock:
            if topics <= self._home.targets:
                return
            self._keep(msgspec.structs.replace(self._home, targets=self._home.targets | topics))
            self._grown_with = batch

    def _keep(self, home: StreamManifest) -> None:
        write_home(self._spark, self._settings.checkpoint, home)
        self._home = home

    def _sources(self) -> tuple[Sources, set[str]]:
        """Return the sources to read, and the targets that the checkpoint does not know."""
        with self._lock:
            self._grown_with = NO_BATCH
            home = self._home
            ends, self._unread = self._ends(home.read, home.targets - home.read)
            new = ends.keys() - home.read
            fresh = [ends[topic] for topic in sorted(new)]
            lenient = any(any(topic.starts) for topic in fresh)
            back = home.deleted & ends.keys()
            former = [TakenPartition(topic, -1, 0, self._now_ms) for topic in back]
            names, now_ms = self._settings.names, self._now_ms
            taken = taken_of(self._access, names, fresh, home, now_ms)
            updated = home.with_taken([*taken, *former], back)
            ids = {topic: each.id for topic, each in ends.items() if each.id}
            updated = msgspec.structs.replace(updated, ids={**ids, **updated.ids})
            if updated != home:
                self._keep(updated)
            starts = self._starts(updated, ends) if updated.since_ms else {}
            begin_at(
                self._spark,
                self._settings.checkpoint,
                {topic: starts[topic] for topic in new & starts.keys()},
            )
        sources = Sources(
            names=self._settings.names,
            targets=frozenset(ends),
            options=self._access.options,
            tick_key=self._tick_key,
            records_max=self._settings.records_max,
            lenient=lenient,
            starts=starts,
        )
        return sources, set(new)

    def _renew(self) -> None:
        """Read targets that were created again from their starts, and deleted ones no longer; each
        is a finding."""
        changed = changed_targets(self._access, self._home)
        if not changed:
            return
        self._sink.find_replaced(
            {
                topic: _DELETED if ends is None else f"{_DELETED}, and created again"
                for topic, ends in changed.items()
            },
            self._now_ms,
        )
        begin_at(self._spark, self._settings.checkpoint, {}, starts_of(changed))
        there = [ends for ends in changed.values() if ends is not None]
        with self._lock:
            taken = taken_of(self._access, self._settings.names, there, self._home, self._now_ms)
            self._keep(renewed_home(self._home, changed, taken, self._now_ms))

    def _starts(
        self, home: StreamManifest, targets: Mapping[str, TopicEnds]
    ) -> dict[str, dict[str, int]]:
        """Return the first offsets of all topics, by partition."""
        names = self._settings.names
        own = (names.half, names.op, names.parked, names.audit)
        ends = {**targets, **self._access.ends(own)}
        return {
            topic: {
                **{str(number): start for number, start in enumerate(each.starts)},
                **home.starts(topic),
            }
            for topic, each in ends.items()
        }

    def _ends(
        self, read: Iterable[str], others: Iterable[str]
    ) -> tuple[dict[str, TopicEnds], dict[str, str]]:
        """Return the ends of readable topics, and why others are not readable."""
        ends = self._access.ends(read)
        for topic, topic_ends in ends.items():
            if topic_ends.unread:
                raise AuditError(
                    f"topic {topic} is readable no longer: {topic_ends.unread}; "
                    "make it readable and start the stream again"
                )
        more = self._access.ends(others, patient=False)
        ends |= {topic: topic_ends for topic, topic_ends in more.items() if not topic_ends.unread}
        return ends, {topic: one.unread for topic, one in more.items() if one.unread}

    def _terms(self) -> StreamTerms:
        terms, home = self._settings.terms, self._home
        return StreamTerms(
            terms.dedup_window_ms,
            terms.late_after_ms,
            terms.lost_after_ms,
            terms.overdue_after_ms,
            round(self._settings.keep_s * 1000),
            home.slot_ms,
            home.targets,
            home.horizon(self._settings.names.half, self._settings.names.op)._replace(
                unread=frozenset(self._unread)
            ),
            self._settings.names.half,
            self._settings.names.op,
        )

    # --- running -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            ship_by_value()
            while not self._stop.is_set():
                with in_words(None), gaps_in_words():
                    self._follow()
        except BaseException as error:
            self._failure = error if isinstance(error, TxbrokerError) else _unexpected(error)
        finally:
            with contextlib.suppress(Exception):
                self._call(self._kafka.__aexit__())
            self._call.close()

    def _follow(self) -> None:
        """Run the query once; where it fails on a timestamp, make the next one skip it."""
        try:
            self._follow_once()
        except (Py4JError, PySparkException) as error:
            if self._is_of_deletion(error):
                return
            if OVERFLOW not in str(error):
                raise
            checkpoint, aside = self._settings.checkpoint, self._sink.set_aside
            if not read_around(self._spark, checkpoint, self._access, aside):
                raise

    def _is_of_deletion(self, error: Exception) -> bool:
        """Return whether Spark has failed because a target was deleted."""
        until_s = time.monotonic() + _DELETION_S
        while re.search(f"{TAKEN_BY_RETENTION}|{DELETED_TOPIC}", str(error)):
            if self._ask(lambda: changed_targets(self._access, self._home)):
                return True
            if time.monotonic() > until_s or self._stop.wait(_LOOK_S):
                break
        return False

    def _follow_once(self) -> None:
        """Run the query until it must be restarted or is stopped."""
        self._renew()
        sources, new = self._sources()
        for name, value in STATE_CONF.items():
            self._spark.conf.set(name, value)
        begins = self._access.ends(sources.topics) if sources.lenient else {}
        query = self._query(sources)
        self._pending.clear()
        self._unjudged.clear()
        try:
            while not self._stop.is_set():
                began_s = time.monotonic()
                last = self._progress(query)
                has_moved = self._move(last)
                if has_moved and sources.lenient and self._first is not None:
                    _refuse_gaps(self._first, begins, new)
                if has_moved and (new or sources.lenient):
                    with self._lock:
                        self._keep(msgspec.structs.replace(self._home, read=sources.targets))
                    new = set()
                    if sources.lenient:
                        return
                self._publish()
                if self._grown_with != NO_BATCH:
                    # That batch ends first, or it would be repeated.
                    if last is not None and last["batchId"] >= self._grown_with:
                        return
                elif len(self._pending) < _TICKS_MAX and not self._tick(sources):
                    return
                self._stop.wait(max(self._settings.tick_s - (time.monotonic() - began_s), 0))
        finally:
            _end(query)

    def _query(self, sources: Sources) -> StreamingQuery:
        rows = plan(self._spark, sources, self._terms(), self._home.buckets)
        writer = (
            rows.writeStream.foreachBatch(self._sink.take)
            .queryName(f"txbroker audit {self._home.name}")
            .option("checkpointLocation", self._settings.checkpoint)
            .trigger(processingTime=f"{round(self._settings.every_s * 1000)} milliseconds")
        )
        self._first = None
        # The checkpoint fixes the number of tasks of the first start.
        with spread(self._spark, None):
            return writer.start()

    def _progress(self, query: StreamingQuery) -> Mapping[str, Any] | None:
        """Return Spark's progress of the last batch; raise the error of a query that has ended."""
        # First: the last batch may have ended before the query did.
        is_active, last = query.isActive, _progress(query)
        if not is_active:
            raise query.exception() or AuditError("Spark has ended the stream: start it again")
        if self._first is None and last is not None:
            self._first = json.loads(_java(query).recentProgress()[0].json())
        return last

    def _move(self, last: Mapping[str, Any] | None) -> bool:
        """Note how far Spark has read; return whether the moment has moved."""
        if last is None:
            return False
        read, has_moved = _offsets(last, "endOffset"), False
        ticked = read.get((self._settings.names.audit, 0), -1)
        while self._unjudged and self._unjudged[0].offset < ticked:
            self._judged_ms = max(self._judged_ms, self._unjudged.popleft().moment_ms - GRACE_MS)
        self._figures = _figures(last, self._sink.progress.held, self._unread_records(read))
        # A batch that names a new target has not read it, so the moment waits for the next query.
        grown = self._grown_with != NO_BATCH
        while not grown and self._pending and _passed(read, self._pending[0][1]):
            self._moment_ms, has_moved = self._pending.popleft()[0].at_ms, True
        return has_moved

    def _unread_records(self, read: Positions) -> int:
        """Return the number of records before the newest known ends that Spark has not read."""
        newest = self._pending[-1][1] if self._pending else {}
        return sum(max(end - max(read.get(place, 0), 0), 0) for place, end in newest.items())

    def _tick(self, sources: Sources) -> bool:
        """Write a tick, and read the ends after it; return whether to keep this query."""
        moment_ms = self._moment_ms
        value = str(moment_ms).encode()
        stored = self._ask(lambda: self._call(self._kafka.mark(self._tick_key, value)))
        self._now_ms = stored.timestamp_ms
        others = self._home.targets - sources.targets
        # A missing topic that is created after this held no message that was visible by now.
        ends, unread = self._ask(lambda: self._ends(sources.topics, others))
        if any(topic in ends for topic in others) or unread.keys() != self._unread.keys():
            return False
        for topic in sources.topics:
            if topic in sources.targets:
                if topic not in ends or ends[topic].id != self._home.ids.get(topic, ""):
                    return False
            elif topic not in ends:
                raise AuditError(f"topic {topic} was deleted: restore it, and start another stream")
        cut = {
            (topic, number): end
            for topic in sources.topics
            for number, end in enumerate(ends[topic].ends)
            if end
        }
        tick = WrittenTick(stored.base_offset, stored.timestamp_ms, moment_ms)
        self._pending.append((tick, cut))
        self._unjudged.append(tick)
        return True

    def _ask(self, question: Any) -> Any:
        """Call Kafka, with retries for a while where it does not answer."""
        until_s = time.monotonic() + _DEAF_S
        while True:
            try:
                return question()
            except (KafkaUnavailable, AuditError):
                if time.monotonic() > until_s or self._stop.wait(1.0):
                    raise

    def _publish(self) -> None:
        if not self._judged_ms or time.monotonic() < self._summary_at_s:
            return
        self._summary_at_s = time.monotonic() + self._settings.summary_s
        # The next summary follows soon, so an unavailable Kafka is no reason to end.
        with contextlib.suppress(KafkaUnavailable):
            self._call(publish(self._access.settings, self.summary()))


async def _open(access: AuditKafka, name: str) -> KafkaDrift:
    return KafkaDrift(access.settings, name)


def _end(query: StreamingQuery) -> None:
    """Stop a query between two batches: an aborted batch is repeated."""
    until_s = time.monotonic() + _END_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    query.stop()


def _progress(query: StreamingQuery) -> Mapping[str, Any] | None:
    last = _java(query).lastProgress()
    return None if last is None else json.loads(last.json())


def _java(query: StreamingQuery) -> Any:
    """Return a query's Java object: pyspark's `lastProgress` calls Java for each single field."""
    return query._jsq


def _offsets(progress: Mapping[str, Any], which: str) -> Positions:
    """Return the offsets at which a batch began (`startOffset`) or ended (`endOffset`); where two
    sources read a topic, the earlier ones."""
    found: Positions = {}
    for source in progress["sources"]:
        for topic, offsets in (source[which] or {}).items():
            for number, offset in offsets.items():
                place = topic, int(number)
                found[place] = min(offset, found.get(place, offset))
    return found


def _figures(progress: Mapping[str, Any], held: Mapping[str, int], unread: int) -> StreamFigures:
    operator = progress["stateOperators"][0] if progress["stateOperators"] else {}
    return StreamFigures(
        unread=unread,
        open=max(held.get("open", 0), 0),
        ended=max(held.get("ended", 0), 0),
        state_bytes=operator.get("customMetrics", {}).get("rocksdbSstFileSize", 0),
        batch_ms=progress["batchDuration"],
    )


def _passed(positions: Positions, cut: Positions) -> bool:
    return all(positions.get(place, -1) >= end for place, end in cut.items())


def _refuse_gaps(
    first: Mapping[str, Any], begins: Mapping[str, TopicEnds], new: Iterable[str]
) -> None:
    """Check that Spark skipped no record while it was configured to tolerate gaps.

    `first`: Spark's progress of the first batch. `begins`: the topics' start offsets before it.
    `new`: targets that are read for the first time.
    """
    for (topic, number), offset in _offsets(first, "startOffset").items():
        starts = begins[topic].starts if topic in begins and topic not in new else ()
        if number < len(starts) and offset < starts[number]:
            raise AuditError(_GAP.format(f"records of {topic}"))


@contextlib.contextmanager
def gaps_in_words() -> Iterator[None]:
    """Turn Spark's error for removed records into an `AuditError`; a retry does not help."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        if re.search(TAKEN_BY_RETENTION, str(error)):
            raise AuditError(_GAP.format("records")) from error
        raise


def _unexpected(error: BaseException) -> AuditError:
    failure = AuditError(f"the stream failed: {error}")
    failure.__cause__ = error
    return failure
