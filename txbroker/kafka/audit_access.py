"""Where topics begin and end, for readers of other makes that are told exact offsets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.protocol.offset import OffsetRequest
from msgspec import Struct

from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.admin import Admin
from txbroker.kafka.client import (
    Client,
    KafkaRefused,
    NotSent,
    Patience,
    TopicFacts,
    Unanswered,
    may_pass,
)
from txbroker.kafka.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.settings import KafkaSettings
from txbroker.kafka.topic_ids import topic_ids

_LANE = "audit"
_CONSUMER = -1
_EARLIEST, _LATEST = -2, -1
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1

_APPEND_TIME = "LogAppendTime"

_Place = tuple[str, int]


class TopicBounds(Struct, frozen=True):
    """What of a topic can be read, by partition: the first offset that is kept, and the last stable
    offset, below which every transaction has ended. `compacted`: older records of a key may be
    missing. `open`: the partitions that end in an open transaction, so that records behind the last
    stable offset may be committed and cannot be read yet. `append_time`: whether the broker's clock
    gives the timestamps; taken for granted where settings may not be read. `kept_ms`: so long
    retention leaves a record, by its timestamp; 0 where size or compaction may take it sooner.
    `id`: another one for each topic that is made, also under a name used before."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    compacted: bool
    open: tuple[int, ...] = ()
    append_time: bool = True
    kept_ms: int = 0
    id: str = ""


class AuditAccess:
    """Asks one Kafka where its topics begin and end.

    Used as `async with`. Made inside a running event loop.

    Raises:
        ConfigurationError: the settings contradict themselves.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        settings.validate()
        self._settings = settings
        self._client = Client(settings)

    async def __aenter__(self) -> AuditAccess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def bounds(self, topics: Iterable[str]) -> dict[str, TopicBounds]:
        """Return what of topics can be read; those that do not exist are left out.

        The starts are asked for before the ends, and these last of all.

        Raises:
            ConfigurationError: no right to a topic.
            KafkaUnavailable: Kafka does not answer, or a partition has no leader.
        """
        names = sorted(set(topics))
        if not names:
            return {}
        patience = Patience(
            self._settings.write_timeout_s, self._settings.retry_backoff_s, pause_max_s=1.0
        )
        while True:
            try:
                return await self._bounds(names)
            except KafkaUnavailable as error:
                if not may_pass(error) or not await patience.pause():
                    raise

    async def _bounds(self, names: list[str]) -> dict[str, TopicBounds]:
        found = await self._client.refresh(names)
        there = {name: found[name] for name in names if _exists(name, found.get(name))}
        if not there:
            return {}
        leaders = _leaders(there)
        starts = await self._offsets(leaders, _EARLIEST, _READ_UNCOMMITTED)
        high = await self._offsets(leaders, _LATEST, _READ_UNCOMMITTED)
        ends = await self._offsets(leaders, _LATEST, _READ_COMMITTED)
        all_configs = await Admin(self._client).configs(there)
        ids = await topic_ids(self._client, list(there))
        bounds = {}
        for name, facts in there.items():
            if name not in ids:
                raise KafkaRefused(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was just deleted")
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
        self, leaders: Mapping[_Place, int], which: int, isolation: int
    ) -> dict[_Place, int]:
        """Ask each broker once for all partitions that it leads."""
        asked: dict[int, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for (topic, partition), leader in leaders.items():
            asked[leader][topic].append((partition, which))
        offsets: dict[_Place, int] = {}
        for leader, topics in asked.items():
            request = OffsetRequest(_CONSUMER, isolation, list(topics.items()))
            offsets |= self._told(await self._client.ask(leader, request, _LANE))
        missing = leaders.keys() - offsets.keys()
        if missing:
            raise Unanswered(f"Kafka did not say where {min(missing)} begins and ends")
        return offsets

    def _told(self, answer: Any) -> dict[_Place, int]:
        offsets: dict[_Place, int] = {}
        for topic, partitions in answer.topics:
            for partition, code, *_, offset in partitions:
                if code in LEADER_MOVED:
                    self._client.forget_leader(topic, partition)
                if code == Code.TOPIC_AUTHORIZATION_FAILED:
                    raise _no_right(topic)
                if code != Code.NONE:
                    raise KafkaRefused(code)
                offsets[topic, partition] = int(offset)
        return offsets


def kept_ms(configs: Mapping[str, str]) -> int:
    """Return for how long a topic keeps a record, by its timestamp; 0: its settings do not tell."""
    if configs.get("cleanup.policy") != "delete" or configs.get("retention.bytes") != "-1":
        return 0
    # Where nothing is taken by age, what is gone was taken otherwise, or by an earlier setting.
    return max(int(configs.get("retention.ms", "0")), 0)


def _exists(topic: str, facts: TopicFacts | None) -> bool:
    if facts is None or facts.error in (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.INVALID_TOPIC):
        return False
    if facts.error == Code.TOPIC_AUTHORIZATION_FAILED:
        raise _no_right(topic)
    if facts.error not in (Code.NONE, Code.LEADER_NOT_AVAILABLE):
        raise KafkaRefused(facts.error, f"topic {topic}: {describe(facts.error)}")
    return True


def _leaders(topics: Mapping[str, TopicFacts]) -> dict[_Place, int]:
    leaders = {}
    for topic, facts in topics.items():
        for partition, fact in facts.partitions.items():
            if fact.leader < 0:
                raise NotSent(f"partition {partition} of {topic} has no leader")
            leaders[topic, partition] = fact.leader
    return leaders


def _no_right(topic: str) -> ConfigurationError:
    return ConfigurationError(
        f"no right to topic {topic}: grant Describe and Read on it to the audit"
    )
