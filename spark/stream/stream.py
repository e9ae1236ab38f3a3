"""`txbroker audit stream`: judge every transaction as its records arrive.
Spark reads all topics at once and independently, so at any time one topic is ahead of another. The
*tick* relates them: a record of the audit topic, written by the stream. Its append time is the
brokers' now. After it, the stream reads the ends of all topics; once Spark has read past those
ends, the next tick records that, and Spark's watermark moves there. All rules about time and about
absent records use that watermark; see `state`.

Half messages name the target topics. A new topic is added by restarting the query from its
checkpoint with the longer list; no tick follows before it was read too.
"""

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from txbroker.errors import ConfigurationError, KafkaUnavailable, TxbrokerError
from txbroker.kafka.tools.audit_results import KafkaDrift
from txbroker.spark.access import AuditError, AuditKafka, TopicEnds, publish
from txbroker.spark.facts.bounds import OVERFLOW
from txbroker.spark.facts.topics import TAKEN_BY_RETENTION
from txbroker.spark.judge.rows import ALWAYS, can_be_topic
from txbroker.spark.schema import RunSummary, Terms, TopicNames
from txbroker.spark.session import in_words, spread
from txbroker.spark.stream.query import STATE_CONF, Sources, plan, ship_by_value
from txbroker.spark.stream.state import StreamTerms
from txbroker.spark.stream.stored import (
    EventLoopThread,
    FindingSink,
    StreamManifest,
    TakenPartition,
    read_around,
    read_home,
    write_home,
)

_LOOK_S = 0.1
_NO_BATCH = -2
_END_S = 20.0
"""Maximum wait for a running batch at the end; then it is aborted."""
_DEAF_S = 60.0
"""Maximum time of retries while Kafka does not answer."""

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
        every_s: interval of Spark's batches, seconds.
        tick_s: minimum interval of ticks, seconds: a suspicion becomes a finding with the third
            tick, and by then the end of a Kafka transaction has reached all its partitions.
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
                "keep_s must exceed the dedup window plus the time after which a commit is late: "
                "raise --keep-s"
            )


def start_stream(
    spark: SparkSession, access: AuditKafka, settings: StreamSettings
) -> "AuditStream":
    """Start auditing, or resume from the checkpoint, in a background thread.

    Raises:
        ConfigurationError: a setting, a right or a topic is missing or wrong.
        AuditError, KafkaUnavailable: Kafka does not answer.
    """
    settings.validate()
    stream = AuditStream(spark, access, settings)
    stream.start()
    return stream


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
        self._grown_with = _NO_BATCH
        self._moment_ms = self._judged_ms = 0
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
            self._now_ms = self._call(self._kafka.mark(self._tick_key, b"0"))
            self._home = self._founded(name) if home is None else home
            if self._home.installation != self._settings.names.half:
                raise ConfigurationError(
                    f"{self._settings.checkpoint} belongs to the topic {self._home.installation}: "
                    "name another --checkpoint"
                )
            self._add_targets(self._settings.targets, _NO_BATCH)
            self._sink = FindingSink(self._kafka, self._call, name, self._add_targets)
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
            buckets=settings.buckets,
            slot_ms=StreamTerms().slot_ms,
        )
        own = [self._access.own_ends(topic) for topic in (settings.names.half, settings.names.op)]
        home = home.with_taken(_taken(own, self._now_ms))
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
            self._grown_with = _NO_BATCH
            home = self._home
            ends, self._unread = self._ends(home.read, home.targets - home.read)
            new = ends.keys() - home.read
            fresh = [ends[topic] for topic in sorted(new)]
            lenient = bool(home.read - ends.keys())
            lenient |= any(any(topic.starts) for topic in fresh)
            gone = [TakenPartition(topic, -1, 0, ALWAYS) for topic in home.read - ends.keys()]
            updated = home.with_taken([*_taken(fresh, self._now_ms), *gone])
            if updated != home:
                self._keep(updated)
        sources = Sources(
            names=self._settings.names,
            targets=frozenset(ends),
            options=self._access.options,
            tick_key=self._tick_key,
            records_max=self._settings.records_max,
            lenient=lenient,
        )
        return sources, set(new)

    def _ends(
        self, read: Iterable[str], others: Iterable[str]
    ) -> tuple[dict[str, TopicEnds], dict[str, str]]:
        """Return the ends of readable topics, and why others are not readable."""
        ends = self._access.ends(read)
        for topic, topic_ends in ends.items():
            if topic_ends.unread:
                raise AuditError(f"topic {topic} is readable no longer: {topic_ends.unread}")
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
            if OVERFLOW not in str(error):
                raise
            checkpoint, aside = self._settings.checkpoint, self._sink.set_aside
            if not read_around(self._spark, checkpoint, self._access, aside):
                raise

    def _follow_once(self) -> None:
        """Run the query until it must be restarted or is stopped."""
        sources, new = self._sources()
        for name, value in STATE_CONF.items():
            self._spark.conf.set(name, value)
        begins = self._access.ends(self._topics(sources)) if sources.lenient else {}
        query = self._query(sources)
        try:
            while not self._stop.is_set():
                began_s = time.monotonic()
                # Missing topics are checked before the moment advances: a topic that is created
                # later held no message that was visible by then.
                if not self._round(query, sources):
                    return
                if sources.lenient and self._first is not None:
                    _refuse_gaps(self._first, begins, new)
                if new or sources.lenient:
                    with self._lock:
                        self._keep(msgspec.structs.replace(self._home, read=sources.targets))
                    new = set()
                    if sources.lenient:
                        return
                self._publish()
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
        with spread(self._spark, 0):
            return writer.start()

    def _topics(self, sources: Sources) -> list[str]:
        names = sources.names
        return [names.half, names.op, names.parked, *sorted(sources.targets)]

    def _round(self, query: StreamingQuery, sources: Sources) -> bool:
        """Tick, and wait until Spark has read past it; return whether to keep this query."""
        tick = str(self._moment_ms).encode()
        self._now_ms = at_ms = self._ask(lambda: self._call(self._kafka.mark(self._tick_key, tick)))
        others = self._home.targets - sources.targets
        ends, unread = self._ask(lambda: self._ends(self._topics(sources), others))
        if any(topic in ends for topic in others) or unread.keys() != self._unread.keys():
            return False
        for topic in self._topics(sources):
            if topic not in ends:
                raise AuditError(f"topic {topic} was deleted: start the stream again")
        cut = {
            (topic, number): end
            for topic in self._topics(sources)
            for number, end in enumerate(ends[topic].ends)
            if end
        }
        while True:
            # First: the last batch may reach far enough, with no query to read on.
            if not query.isActive:
                raise query.exception() or AuditError("Spark has ended the stream")
            last = _progress(query)
            if self._first is None and last is not None:
                self._first = json.loads(query.recentProgress[0].json)
            batch = -1 if last is None else last["batchId"]
            self._judged_ms = max(self._judged_ms, 0 if last is None else _watermark_ms(last))
            if self._grown_with != _NO_BATCH:
                # That batch ends first, or it would be repeated.
                if batch >= self._grown_with:
                    return False
            elif last is not None and _passed(_offsets(last, "endOffset"), cut):
                self._moment_ms = at_ms
                return True
            if self._stop.wait(_LOOK_S):
                return False

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
        if time.monotonic() < self._summary_at_s:
            return
        self._summary_at_s = time.monotonic() + self._settings.summary_s
        # The next summary follows soon, so an unavailable Kafka is no reason to end.
        with contextlib.suppress(KafkaUnavailable):
            self._call(publish(self._access.settings, self.summary()))


async def _open(access: AuditKafka, name: str) -> KafkaDrift:
    return KafkaDrift(access.settings, name)


def _taken(topics: Iterable[TopicEnds], now_ms: int) -> list[TakenPartition]:
    """Return the partitions of which records are gone or may go."""
    return [
        TakenPartition(
            topic.topic, number, start, ALWAYS if topic.compacted else now_ms, topic.kept_ms
        )
        for topic in topics
        for number, start in enumerate(topic.starts)
        if start or topic.compacted
    ]


def _end(query: StreamingQuery) -> None:
    """Stop a query between two batches: an aborted batch is repeated."""
    until_s = time.monotonic() + _END_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    query.stop()


def _progress(query: StreamingQuery) -> Mapping[str, Any] | None:
    last = query.lastProgress
    return None if last is None else json.loads(last.json)


def _offsets(progress: Mapping[str, Any], which: str) -> Positions:
    """Return the offsets at which a batch began (`startOffset`) or ended (`endOffset`)."""
    return {
        (topic, int(number)): offset
        for source in progress["sources"]
        for topic, offsets in (source[which] or {}).items()
        for number, offset in offsets.items()
    }


def _watermark_ms(progress: Mapping[str, Any]) -> int:
    """Return the moment that a batch was judged by; 0: none yet."""
    text = progress.get("eventTime", {}).get("watermark", "1970-01-01T00:00:00.000Z")
    return round(datetime.fromisoformat(text).timestamp() * 1000)


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
