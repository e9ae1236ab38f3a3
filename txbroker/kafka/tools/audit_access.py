"""Where topics begin and end, for readers of other makes that are told exact offsets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, KafkaRefused, TopicFacts, Unanswered, may_pass
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.protocol.packed import ListOffsetsV3
from txbroker.kafka.protocol.schemas import NO_RIGHTS_TOLD, RightsRequest
from txbroker.kafka.protocol.topic_ids import topic_ids
from txbroker.net.backoff import Backoff

_LANE = "audit"
_EARLIEST, _LATEST = -2, -1
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1

_READ = 1 << 3
"""The bit of the right to read."""
_NOT_THERE = (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.INVALID_TOPIC)

_APPEND_TIME = "LogAppendTime"

_Place = tuple[str, int]


class TopicBounds(Struct, frozen=True):
    """What of a topic can be read, by partition: the first offset that is kept, and the last stable
    offset, below which every transaction has ended. `compacted`: older records of a key may be
    missing. `open`: the partitions that end in an open transaction, so that records behind the last
    stable offset may be committed and cannot be read yet. `append_time`: whether the broker's clock
    gives the timestamps; taken for granted where settings may not be read. `kept_ms`: so long
    retention leaves a record, by its timestamp; 0 where size or compaction may take it sooner.
    `id`: another one for each topic that is made, also under a name used before. `unread`: why the
    topic cannot be read, empty where it can; `passing`: whether that may change by itself."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    compacted: bool
    open: tuple[int, ...] = ()
    append_time: bool = True
    kept_ms: int = 0
    id: str = ""
    unread: str = ""
    passing: bool = False


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

    async def bounds(
        self, topics: Iterable[str], *, patient: bool = True
    ) -> dict[str, TopicBounds]:
        """Return what of topics can be read; those that do not exist are left out.

        The starts are asked for before the ends, and these last of all. One topic that cannot be
        read, for want of a right or a leader, says so in its `unread` and does not affect others.

        Args:
            topics: their names.
            patient: whether to wait, for as long as for a write, for a topic that has no leader.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        names = sorted(set(topics))
        if not names:
            return {}
        backoff = Backoff(
            self._settings.write_timeout_s, self._settings.retry_backoff_s, pause_max_s=1.0
        )
        while True:
            try:
                found = await self._bounds(names)
            except KafkaUnavailable as error:
                if not may_pass(error) or not await backoff.pause():
                    raise
                continue
            passing = patient and any(each.passing for each in found.values())
            if not passing or not await backoff.pause():
                return found

    async def _bounds(self, names: list[str]) -> dict[str, TopicBounds]:
        found = await self._client.refresh(names)
        rights = await self._client.ask_any(RightsRequest(names), _LANE)
        denied = {
            topic
            for error, topic, *_, bits in rights.topics
            if error == Code.NONE and bits != NO_RIGHTS_TOLD and not bits & _READ
        }
        there = {name: facts for name, facts in found.items() if facts.error not in _NOT_THERE}
        unread = {name: _unread(facts, name in denied) for name, facts in there.items()}
        bounds = {name: why for name, why in unread.items() if why is not None}
        there = {name: facts for name, facts in there.items() if name not in bounds}
        starts = await self._offsets(there, _EARLIEST, _READ_UNCOMMITTED, bounds)
        high = await self._offsets(there, _LATEST, _READ_UNCOMMITTED, bounds)
        ends = await self._offsets(there, _LATEST, _READ_COMMITTED, bounds)
        there = {name: facts for name, facts in there.items() if name not in bounds}
        if not there:
            return bounds
        all_configs = await Admin(self._client).configs(there)
        ids = await topic_ids(self._client, list(there))
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
        self,
        topics: Mapping[str, TopicFacts],
        which: int,
        isolation: int,
        unread: dict[str, TopicBounds],
    ) -> dict[_Place, int]:
        """Ask each broker once for all partitions that it leads; add to `unread` the topics of
        which one was refused, and do not ask for those that are in it."""
        asked: dict[int, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        missing = set[_Place]()
        for topic, facts in topics.items():
            for partition, fact in facts.partitions.items():
                if topic not in unread:
                    asked[fact.leader][topic].append((partition, which))
                    missing.add((topic, partition))
        offsets: dict[_Place, int] = {}
        for leader, of_leader in asked.items():
            request = ListOffsetsV3(isolation, list(of_leader.items()))
            answer = await self._client.ask(leader, request, _LANE)
            for topic, partitions in answer.topics:
                for partition, code, *_, offset in partitions:
                    missing.discard((topic, partition))
                    offsets[topic, partition] = int(offset)
                    if code in LEADER_MOVED:
                        self._client.forget_leader(topic, partition)
                    if code != Code.NONE:
                        unread[topic] = _refused(code)
        if missing:
            raise Unanswered(f"Kafka did not say where {min(missing)} begins and ends")
        return offsets


def kept_ms(configs: Mapping[str, str]) -> int:
    """Return for how long a topic keeps a record, by its timestamp; 0: its settings do not tell."""
    if configs.get("cleanup.policy") != "delete" or configs.get("retention.bytes") != "-1":
        return 0
    # Where nothing is taken by age, what is gone was taken otherwise, or by an earlier setting.
    return max(int(configs.get("retention.ms", "0")), 0)


def _unread(facts: TopicFacts, denied: bool) -> TopicBounds | None:
    """Return why a topic that exists cannot be read, None where it can."""
    if facts.error not in (Code.NONE, Code.LEADER_NOT_AVAILABLE):
        return _refused(facts.error)
    if denied:
        return _refused(Code.TOPIC_AUTHORIZATION_FAILED)
    for partition, fact in sorted(facts.partitions.items()):
        if fact.leader < 0:
            return _without(f"partition {partition} has no leader", passing=True)
    return None


def _refused(code: int) -> TopicBounds:
    if code == Code.TOPIC_AUTHORIZATION_FAILED:
        return _without("no right to it: grant Describe and Read on it to the audit")
    return _without(describe(code), passing=may_pass(KafkaRefused(code)))


def _without(why: str, *, passing: bool = False) -> TopicBounds:
    return TopicBounds((), (), compacted=False, unread=why, passing=passing)
