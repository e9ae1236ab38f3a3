"""Offset ranges of topics for Spark, and their records without it: any codec and timestamp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from msgspec import Struct

from txbroker.core.records import Partition, Record
from txbroker.door.protocols import LogTruncated
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import (
    Client,
    ClientOwner,
    KafkaRefused,
    TopicFacts,
    Unanswered,
    is_retriable,
)
from txbroker.kafka.client.reader import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Reader,
    offsets_at,
)
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.batch import decode_batch
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.protocol.schemas import RIGHTS_NOT_REQUESTED, ListOffsetsV3, metadata
from txbroker.net.timers import Backoff

_CHANNEL = "audit"
_READ = 1 << 3
"""The bit of the Read operation."""
_NOT_THERE = (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.INVALID_TOPIC)

_APPEND_TIME = "LogAppendTime"


class TopicBounds(Struct, frozen=True):
    """The readable offset range of a topic.

    Attributes:
        starts: log start offset of each partition.
        ends: last stable offset of each partition.
        compacted: whether older records of a key may be missing.
        open: partitions with an open transaction, which may hide committed records after `ends`.
        append_time: whether timestamps are the brokers'; True if settings may not be read.
        kept_ms: retention of a record by its timestamp; 0 if size or compaction may remove it
            earlier.
        id: the topic id in hexadecimal, which changes when a topic is created again.
        unread: why the topic cannot be read, else "".
        passing: whether a retry may cure that.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    compacted: bool
    open: tuple[int, ...] = ()
    append_time: bool = True
    kept_ms: int = 0
    id: str = ""
    unread: str = ""
    passing: bool = False


class AuditAccess(ClientOwner):
    """Returns offset ranges of topics of one Kafka cluster."""

    async def bounds(
        self, topics: Iterable[str], *, patient: bool = True
    ) -> dict[str, TopicBounds]:
        """Return the offset ranges of the topics that exist.

        Starts are requested first, last stable offsets last. A topic that cannot be read, for lack
        of a right or a leader, has `unread` set and does not affect others.

        Args:
            patient: whether to wait, up to the write timeout, for a topic without a leader.
        """
        names = sorted(set(topics))
        if not names:
            return {}
        settings = self._client.settings
        backoff = Backoff(settings.write_timeout_s, settings.retry_backoff_s, pause_max_s=1.0)
        while True:
            try:
                bounds = await self._bounds(names)
            except KafkaUnavailable as error:
                if not is_retriable(error) or not await backoff.pause():
                    raise
                continue
            passing = patient and any(topic.passing for topic in bounds.values())
            if not passing or not await backoff.pause():
                return bounds

    async def offsets_at(
        self, topics: Mapping[str, int], time_ms: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the first offset with this timestamp or a later one, else the last stable offset,
        of each partition. `topics`: their numbers of partitions."""
        places = [(topic, number) for topic, count in topics.items() for number in range(count)]
        found = await offsets_at(self._client, places, time_ms, _CHANNEL)
        return {
            topic: tuple(found[topic, number] for number in range(count))
            for topic, count in topics.items()
        }

    async def _bounds(self, names: list[str]) -> dict[str, TopicBounds]:
        topics = await self._client.refresh(names)
        rights = await self._client.ask_any(metadata(names, rights=True), _CHANNEL)
        denied = {
            topic
            for error, topic, *_, bits in rights.topics
            if error == Code.NONE and bits != RIGHTS_NOT_REQUESTED and not bits & _READ
        }
        there = {name: facts for name, facts in topics.items() if facts.error not in _NOT_THERE}
        unread = {name: _unread(facts, name in denied) for name, facts in there.items()}
        bounds = {name: why for name, why in unread.items() if why is not None}
        there = {name: facts for name, facts in there.items() if name not in bounds}
        starts = await self._offsets(there, EARLIEST, READ_UNCOMMITTED, bounds)
        high = await self._offsets(there, LATEST, READ_UNCOMMITTED, bounds)
        ends = await self._offsets(there, LATEST, READ_COMMITTED, bounds)
        there = {name: facts for name, facts in there.items() if name not in bounds}
        if not there:
            return bounds
        admin = Admin(self._client)
        all_configs = await admin.configs(there)
        ids = await admin.topic_ids(list(there))
        for name, facts in there.items():
            if name not in ids:
                raise KafkaRefused(
                    Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} was just deleted"
                )
            configs, partitions = all_configs.get(name, {}), sorted(facts.partitions)
            bounds[name] = TopicBounds(
                tuple(starts[name, p] for p in partitions),
                tuple(ends[name, p] for p in partitions),
                "compact" in configs.get("cleanup.policy", ""),
                tuple(p for p in partitions if high[name, p] > ends[name, p]),
                configs.get("message.timestamp.type", _APPEND_TIME) == _APPEND_TIME,
                kept_ms(configs),
                ids[name].hex() if any(ids[name]) else "",
            )
        return bounds

    async def _offsets(
        self,
        topics: Mapping[str, TopicFacts],
        which: int,
        isolation: int,
        unread: dict[str, TopicBounds],
    ) -> dict[Partition, int]:
        """Return offsets, with one request to each leader.

        Adds topics that are refused to `unread`, and skips topics that are in it.
        """
        asked: dict[int, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        missing = set[Partition]()
        for topic, facts in topics.items():
            for partition, fact in facts.partitions.items():
                if topic not in unread:
                    asked[fact.leader][topic].append((partition, which))
                    missing.add((topic, partition))
        offsets: dict[Partition, int] = {}
        for leader, of_leader in asked.items():
            request = ListOffsetsV3(isolation, list(of_leader.items()))
            answer = await self._client.ask(leader, request, _CHANNEL)
            for topic, partitions in answer.topics:
                for partition, code, *_, offset in partitions:
                    missing.discard((topic, partition))
                    offsets[topic, partition] = int(offset)
                    if code in LEADER_MOVED:
                        self._client.forget_leader(topic, partition)
                    if code != Code.NONE:
                        unread[topic] = _refusal(code)
        if missing:
            raise Unanswered("Kafka returned no offset of {}-{}".format(*min(missing)))
        return offsets


def kept_ms(configs: Mapping[str, str]) -> int:
    """Return how long a topic keeps a record by its timestamp; 0 if the settings do not define
    it."""
    if configs.get("cleanup.policy") != "delete" or configs.get("retention.bytes") != "-1":
        return 0
    # With infinite retention, missing records were removed otherwise, or by an earlier setting.
    return max(int(configs.get("retention.ms", "0")), 0)


def _unread(facts: TopicFacts, denied: bool) -> TopicBounds | None:
    """Return why an existing topic cannot be read; None if it can."""
    if facts.error not in (Code.NONE, Code.LEADER_NOT_AVAILABLE):
        return _refusal(facts.error)
    if denied:
        return _refusal(Code.TOPIC_AUTHORIZATION_FAILED)
    for partition, fact in sorted(facts.partitions.items()):
        if fact.leader < 0:
            return _without(f"partition {partition} has no leader", passing=True)
    return None


def _refusal(code: int) -> TopicBounds:
    if code == Code.TOPIC_AUTHORIZATION_FAILED:
        return _without("not authorized: grant the audit Describe and Read on the topic")
    return _without(describe(code), passing=is_retriable(KafkaRefused(code)))


def _without(why: str, *, passing: bool = False) -> TopicBounds:
    return TopicBounds((), (), compacted=False, unread=why, passing=passing)


# --- records -------------------------------------------------------------------------------------

_SOME_BYTES = 32 << 20
_SOME_RECORDS = 50_000
"""A small record takes many times its bytes in memory."""
_INFLATED_BYTES_MAX = 256 << 20


class StoredRecord(Record, frozen=True):
    """A record, and whether its timestamp is the broker's append time."""

    append_time: bool = False


async def some_records(
    settings: KafkaSettings, topic: str, partition: int, position: int, end: int
) -> tuple[list[Record], int]:
    """Return some committed records from `position` on, before `end`, and the next position.

    A batch that does not decode becomes one record that is no `StoredRecord`.

    Raises:
        KafkaUnavailable: Kafka does not answer, or retention removed the records.
    """
    client = Client(settings)
    try:
        reader = Reader(client, topic, partition, _CHANNEL, append_time=False, decode=_decode)
        return await _some(reader, position, end)
    except (LogTruncated, InvariantBroken) as error:
        raise KafkaUnavailable(str(error)) from None
    finally:
        await client.close()


async def _some(reader: Reader, position: int, end: int) -> tuple[list[Record], int]:
    taken: list[Record] = []
    size = 0
    async with aclosing(reader.read(position, end)) as pieces:
        async for records in pieces:
            taken += records
            size += sum(map(_size, records))
            if size > _SOME_BYTES or len(taken) >= _SOME_RECORDS:
                return taken, taken[-1].offset + 1
    return taken, end


def _size(record: Record) -> int:
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(content or b"") for name, content in record.headers)


def _decode(
    batch: Any, data: bytes | memoryview, offsets: Container[int], producer: int
) -> list[Record]:
    """Decode a batch like `decode_batch`, also a large one."""
    append_time = bool(batch.timestamp_type)
    return [
        StoredRecord(r.key, r.value, r.headers, r.timestamp_ms, r.offset, append_time=append_time)
        for r in decode_batch(batch, data, offsets, producer, _INFLATED_BYTES_MAX)
    ]
