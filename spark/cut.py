"""The cut: from where to where each topic is read, asked of Kafka itself and not of Spark."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from txbroker.config.settings import Settings
from txbroker.contract.audit import BATCH_TICK_KEY
from txbroker.core.records import Record
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.wiring import kafka_settings
from txbroker.kafka.tools.audit import KafkaAuditWriter
from txbroker.kafka.tools.audit_access import AuditAccess, TopicBounds
from txbroker.kafka.tools.audit_records import some_records
from txbroker.spark.errors import AuditError
from txbroker.spark.login import login_options
from txbroker.spark.rows import can_be_topic
from txbroker.spark.schema import Names, TopicRead

_Result = TypeVar("_Result")


class TopicEnds(Struct, frozen=True):
    """What of a topic can be read now, by partition: first kept offset and last stable offset; the
    rest as in `TopicBounds`."""

    topic: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    compacted: bool = False
    open: tuple[int, ...] = ()
    append_time: bool = True
    kept_ms: int = 0
    id: str = ""
    unread: str = ""
    passing: bool = False


class KafkaAccess:
    """One Kafka: asked by us where its topics end, and read by Spark.

    It may be used from any thread, also from one that runs an event loop.

    Attributes:
        settings: how we reach it.
        options: how Spark's Kafka source reaches it: names with their prefix, as
            `kafka.bootstrap.servers`.
    """

    def __init__(self, settings: KafkaSettings, options: Mapping[str, str] | None = None) -> None:
        self.settings = settings
        reached = {
            "kafka.bootstrap.servers": ",".join(settings.bootstrap_servers),
            # The broker holds an answer back for so long where there is nothing to read, as where a
            # part ends with the end of a transaction; 500 ms unless told. What is there it sends.
            "kafka.fetch.max.wait.ms": "20",
        }
        self.options = reached | dict(options or {})

    def ends(self, topics: Iterable[str], *, patient: bool = True) -> dict[str, TopicEnds]:
        """Return what of topics can be read; those that do not exist are left out.

        Args:
            topics: their names.
            patient: whether to wait for a topic that has no leader now.

        Raises:
            ConfigurationError: the settings contradict themselves.
            AuditError: Kafka does not answer.
        """
        # Anybody who may write to the half topic can name in it what no request to Kafka can hold.
        names = tuple(filter(can_be_topic, topics))
        try:
            found = _run(self._bounds(names, patient))
        except KafkaUnavailable as error:
            raise AuditError(f"Kafka cannot be asked where its topics end: {error}") from None
        return {
            name: TopicEnds(name, **msgspec.structs.asdict(bounds))
            for name, bounds in found.items()
        }

    def own_ends(self, topic: str) -> TopicEnds:
        """Return what of one of txbroker's own topics can be read.

        Raises:
            AuditError: it does not exist, or Kafka does not answer.
            ConfigurationError: no right to it, its timestamps are not the broker's, or the settings
                contradict themselves.
        """
        found = self.ends((topic,)).get(topic)
        if found is None:
            raise AuditError(
                f"there is no topic {topic}: is this the right Kafka, and the right topic_prefix?"
            )
        if found.unread:
            failure = AuditError if found.passing else ConfigurationError
            raise failure(f"topic {topic} cannot be read: {found.unread}")
        if not found.append_time:
            raise _clockless(topic)
        return found

    def now_ms(self, names: Names) -> int:
        """Return the time by the brokers' clocks, ms since 1970: that of a record written now to
        the audit topic of an installation.

        Raises:
            ConfigurationError: the topic is not there or may not be written, or its timestamps are
                not the broker's.
            AuditError: there is no such installation, or Kafka does not answer.
        """
        self.own_ends(names.op)
        try:
            at_ms = _run(self._tick(names.audit))
        except KafkaUnavailable as error:
            raise AuditError(f"Kafka cannot be asked what time it is: {error}") from None
        if at_ms < 0:
            raise _clockless(names.audit)
        return at_ms

    def some(self, topic: str, partition: int, position: int, end: int) -> tuple[list[Record], int]:
        """Return committed records from an offset on, some tens of MiB, and where to go on.

        Raises:
            AuditError: Kafka does not answer, or retention took them.
        """
        try:
            return _run(some_records(self.settings, topic, partition, position, end))
        except KafkaUnavailable as error:
            raise AuditError(f"{topic} cannot be read: {error}. Run the audit again") from None

    async def _tick(self, audit_topic: str) -> int:
        async with KafkaAuditWriter(self.settings) as writer:
            return await writer.put(audit_topic, BATCH_TICK_KEY, b"0")

    async def _bounds(self, topics: Sequence[str], patient: bool) -> dict[str, TopicBounds]:
        async with AuditAccess(self.settings) as access:
            return await access.bounds(topics, patient=patient)


def _clockless(topic: str) -> ConfigurationError:
    return ConfigurationError(
        f"{topic} must have message.timestamp.type=LogAppendTime, or nothing tells what came when: "
        "run `txbroker topics apply`"
    )


def access_from(settings: Settings) -> KafkaAccess:
    """Return the access to the Kafka that a configuration names.

    Raises:
        ConfigurationError: a file that it names cannot be read.
    """
    return KafkaAccess(kafka_settings(settings), login_options(settings))


# --- from where to where ---------------------------------------------------------------------


def read_on(
    now: TopicEnds, before: TopicRead | None, counted_from: TopicRead | None = None
) -> TopicRead:
    """Return how a topic is read: all of it, or from where it was read before.

    Args:
        before: how it was read by the run that this one goes on from.
        counted_from: how it was read last, where it is read from its start again: what retention
            took is counted from there on.

    Raises:
        AuditError: it is not the topic that was read before.
    """
    was = () if before is None else before.ends
    if not _is_same(now, before):
        raise AuditError(
            f"topic {now.topic} is another one than was read before: it was made anew, or this is "
            "another Kafka. Run a full audit"
        )
    if len(now.ends) < len(was) or any(end < old for end, old in zip(now.ends, was, strict=False)):
        raise AuditError(
            f"topic {now.topic} ends before it was read up to: it was truncated. Run a full audit"
        )
    wanted = (*was, *[0] * (len(now.ends) - len(was)))
    begins = tuple(max(start, old) for start, old in zip(now.starts, wanted, strict=True))
    last = counted_from if before is None else before
    taken = _taken(begins, last if _is_same(now, last) else None)
    # Retention may have taken what was below the last stable offset in the meantime.
    ends = tuple(max(begin, end) for begin, end in zip(begins, now.ends, strict=True))
    told = now.compacted, now.open, now.kept_ms, now.id
    return TopicRead(now.topic, now.starts, begins, ends, taken, *told)


def _is_same(now: TopicEnds, last: TopicRead | None) -> bool:
    """Say whether a topic may be the one that was read last, as far as it matters: earlier versions
    kept no ids, and of one that had held nothing any other will do."""
    return last is None or last.id in ("", now.id) or not any(last.ends)


def _taken(begins: Sequence[int], last: TopicRead | None) -> int:
    """Return how many offsets retention took since the last run, and before this one.

    A topic may be older than the first run that reads it, or than its first half message: where it
    begins then tells nothing of what it held.
    """
    if last is None or not last.ends:
        return 0
    ends = (*last.ends, *[0] * (len(begins) - len(last.ends)))
    return sum(max(0, begin - end) for begin, end in zip(begins, ends, strict=False))


def read_target(
    topic: str,
    now: TopicEnds | None,
    before: TopicRead | None,
    counted_from: TopicRead | None = None,
) -> TopicRead:
    """Return how a target is read: as `read_on` says, or why it is not read.

    Args:
        topic: as a half message names it.
        now: what of it can be read; None: it does not exist.
        before: as in `read_on`.
        counted_from: as in `read_on`.

    Raises:
        AuditError: it is not the topic that was read before.
    """
    why = (now.unread if now else "") if can_be_topic(topic) else "no topic can have this name"
    if why:
        # The next run that may read it goes on from where the last one has.
        was = gone(topic) if before is None else before
        return msgspec.structs.replace(was, begins=was.ends, taken=0, open=(), unread=why)
    return gone(topic) if now is None else read_on(now, before, counted_from)


def gone(topic: str) -> TopicRead:
    """Return how a topic is read that exists no more: nothing can be said about what it held."""
    return TopicRead(topic, (), (), ())


def to_end(read: TopicRead, now: TopicEnds) -> TopicRead:
    """Return a read that goes on to where the topic ends now.

    Raises:
        AuditError: the topic is not the same any more.
    """
    if len(now.ends) != len(read.ends):
        raise AuditError(f"topic {read.topic} was given other partitions meanwhile: run again")
    ends = tuple(max(old, end) for old, end in zip(read.ends, now.ends, strict=True))
    return msgspec.structs.replace(read, ends=ends)


def held(reads: Iterable[TopicRead], now: Mapping[str, TopicEnds]) -> tuple[str, ...]:
    """Return the partitions, as `topic-0`, that ended in an open transaction and still do at the
    same place, as no proxy's turn does that goes well."""
    return tuple(
        f"{read.topic}-{partition}"
        for read in reads
        for partition in read.open
        if read.topic in now and partition in now[read.topic].open
        if now[read.topic].ends[partition] <= read.ends[partition]
    )


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end in an event loop of its own, beside any that runs here."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
