"""txbroker's own topics: the settings that they need, what differs, and what cannot work.

The settings are data, the difference is a pure function; only `apply` changes anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from txbroker.door.own_topics import Layout, partition_problems
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.admin import Admin, NewTopic
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.codes import Code
from txbroker.net.backoff import Backoff

_DAY_MS = 24 * 60 * 60 * 1000
_ROOM_BYTES = 64 * 1024
"""What a marker's or a kept transaction's own fields add to a half batch."""

_CHECKPOINT_BYTES_MIN = 1 << 20
"""Pieces of snapshots are as large as they are, however small half batches may be."""

_REPLICATION_WANTED = 3
_FOREVER = -1
_DRIFT_MS = 7 * _DAY_MS
_SHOWN_S, _PAUSE_S = 10.0, 0.01
# An operator may keep half messages longer or allow larger ones; that is no drift.
_AT_LEAST = frozenset({"retention.ms", "max.message.bytes"})
_CODECS = frozenset({"snappy", "lz4", "zstd"})
"""Of brokers that compress by themselves; under `producer` ours stay plain, and gzip decodes."""


class WantedTopic(Struct, frozen=True):
    """A topic as it should be."""

    name: str
    partitions: int
    replication: int
    configs: Mapping[str, str]


class FoundTopic(Struct, frozen=True):
    """A topic as it is; `configs` empty where they may not be read."""

    name: str
    partitions: int
    replication: int
    configs: Mapping[str, str]


class SettingChange(Struct, frozen=True):
    """A setting to change, from what to what."""

    topic: str
    name: str
    found: str | None
    wanted: str


class Plan(Struct, frozen=True):
    """What separates the topics from what they should be.

    Attributes:
        create: topics that are missing.
        change: settings that differ.
        remarks: what cannot be changed by itself, in sentences.
    """

    create: tuple[NewTopic, ...]
    change: tuple[SettingChange, ...]
    remarks: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.create and not self.change


def op_retention_ms(half_retention_ms: int, half_segment_ms: int) -> int:
    """Return how long markers have to be kept, milliseconds; -1 for ever.

    Longer than any half message, which lives until its whole segment is old: a half message
    without its marker would look pending, and a full replay would promote it again.
    """
    if half_retention_ms == _FOREVER:
        return _FOREVER
    return half_retention_ms + half_segment_ms + _DAY_MS


def wanted_topics(
    settings: KafkaSettings, brokers: int, found: FoundTopic | None, layout: Layout | None = None
) -> list[WantedTopic]:
    """Return txbroker's topics as they should be, on a cluster of `brokers`.

    `found` is the half topic where it exists: its number of partitions stands, and where it keeps
    messages longer or takes larger ones than we would ask, the other topics follow it. `layout`
    is what the installation was made with; without a half topic its number counts.
    """
    copies = settings.replication or max(1, min(_REPLICATION_WANTED, brokers))
    made_with = settings.partitions if layout is None else layout.partitions
    partitions = made_with if found is None else found.partitions
    size = _larger(settings.message_bytes_max, found, "max.message.bytes")
    retention_ms = _larger(settings.half_retention_ms, found, "retention.ms")
    common = {
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": str(max(1, copies - 1)),
        "unclean.leader.election.enable": "false",
        # Brokers then inflate what other clients compress, which our readers may not decode.
        "compression.type": "uncompressed",
    }
    larger = str(size + _ROOM_BYTES)
    log = {**common, "cleanup.policy": "delete", "retention.bytes": "-1"}
    compacted = {**common, "cleanup.policy": "compact"}
    half = {
        **log,
        "retention.ms": str(retention_ms),
        "segment.ms": str(settings.half_segment_ms),
        "max.message.bytes": str(size),
    }
    op = {
        **log,
        "retention.ms": str(op_retention_ms(retention_ms, settings.half_segment_ms)),
        "max.message.bytes": larger,
    }
    checkpoint = {
        **compacted,
        "segment.bytes": str(16 << 20),
        "segment.ms": str(10 * 60 * 1000),
        "min.cleanable.dirty.ratio": "0.1",
        "max.message.bytes": str(max(size + _ROOM_BYTES, _CHECKPOINT_BYTES_MIN)),
    }
    return [
        WantedTopic(settings.half_topic, partitions, copies, half),
        WantedTopic(settings.op_topic, partitions, copies, op),
        WantedTopic(settings.checkpoint_topic, partitions, copies, checkpoint),
        WantedTopic(
            settings.parked_topic, partitions, copies, {**compacted, "max.message.bytes": larger}
        ),
        WantedTopic(settings.groups_topic, 1, copies, compacted),
        *_audit_topics(settings, copies, common),
    ]


def _audit_topics(
    settings: KafkaSettings, copies: int, common: Mapping[str, str]
) -> list[WantedTopic]:
    """Return the topics of the audits: the newest summaries, and what a stream found."""
    news = {
        **common,
        "cleanup.policy": "compact",
        # A stream tells often, and every proxy reads the topic when it starts.
        "segment.bytes": str(16 << 20),
        "segment.ms": str(10 * 60 * 1000),
        "min.cleanable.dirty.ratio": "0.1",
    }
    drift = {**common, "cleanup.policy": "delete", "retention.ms": str(_DRIFT_MS)}
    return [
        WantedTopic(settings.audit_topic, 1, copies, news),
        WantedTopic(settings.drift_topic, 1, copies, drift),
    ]


def _larger(wanted: int, found: FoundTopic | None, name: str) -> int:
    """Return the larger of a wanted limit and the one found; -1 is none at all."""
    has = None if found is None else _number(found, name)
    if has is None:
        return wanted
    return _FOREVER if _FOREVER in (wanted, has) else max(wanted, has)


def plan(wanted: list[WantedTopic], found: Mapping[str, FoundTopic]) -> Plan:
    """Return the difference between topics as they should be and as they are. Pure."""
    create: list[NewTopic] = []
    change: list[SettingChange] = []
    remarks: list[str] = []
    for topic in wanted:
        is_ = found.get(topic.name)
        if is_ is None:
            create.append(
                NewTopic(topic.name, topic.partitions, topic.replication, dict(topic.configs))
            )
            continue
        if is_.partitions != topic.partitions:
            remarks.append(
                f"{topic.name} has {is_.partitions} partitions, not {topic.partitions}; their "
                "number is fixed when a topic is created"
            )
        if is_.replication < topic.replication:
            remarks.append(
                f"{topic.name} has {is_.replication} copies, not {topic.replication}: "
                "use kafka-reassign-partitions to add some"
            )
        for name, value in topic.configs.items():
            has = is_.configs.get(name)
            if is_.configs and not _fits(name, has, value):
                change.append(SettingChange(topic.name, name, has, value))
    return Plan(tuple(create), tuple(change), tuple(remarks))


def _fits(name: str, found: str | None, wanted: str) -> bool:
    if found == wanted:
        return True
    if found is None or name not in _AT_LEAST:
        return False
    if int(found) == _FOREVER:
        return True
    return int(wanted) != _FOREVER and int(found) >= int(wanted)


def contradictions(
    settings: KafkaSettings, found: Mapping[str, FoundTopic], layout: Layout | None = None
) -> list[str]:
    """Return, as sentences, why txbroker cannot work with the topics as they are. Pure."""
    missing = [name for name in settings.own_topics if name not in found]
    if missing:
        return [f"missing: {', '.join(missing)}; create them with `txbroker topics apply`"]
    return [
        *_partition_contradictions(settings, found, layout),
        *(
            line
            for name in settings.own_topics
            for line in _topic_contradictions(settings, found[name])
        ),
        *_size_contradictions(settings, found),
        *_retention_contradictions(settings, found),
    ]


def _partition_contradictions(
    settings: KafkaSettings, found: Mapping[str, FoundTopic], layout: Layout | None
) -> list[str]:
    half = settings.half_topic
    names = (half, settings.op_topic, settings.checkpoint_topic, settings.parked_topic)
    lines = partition_problems(half, {name: found[name].partitions for name in names}, layout)
    if found[settings.groups_topic].partitions != 1:
        lines.append(f"{settings.groups_topic} must have 1 partition")
    return lines


def _topic_contradictions(settings: KafkaSettings, topic: FoundTopic) -> list[str]:
    configs = topic.configs
    if not configs:
        return []
    lines = []
    if configs.get("message.timestamp.type") != "LogAppendTime":
        lines.append(
            f"{topic.name} needs message.timestamp.type=LogAppendTime: txbroker's only clock is "
            "the brokers'"
        )
    if configs.get("unclean.leader.election.enable") == "true":
        lines.append(
            f"{topic.name} needs unclean.leader.election.enable=false, or acknowledged records "
            "can disappear"
        )
    if configs.get("compression.type") in _CODECS:
        lines.append(
            f"{topic.name} needs compression.type=uncompressed: txbroker does not decode "
            f"{configs['compression.type']}, and would not find its own records again"
        )
    in_sync = int(configs.get("min.insync.replicas", "1"))
    if in_sync > topic.replication:
        lines.append(
            f"{topic.name} has min.insync.replicas={in_sync} but {topic.replication} copies: "
            "nothing could be written"
        )
    policy = "delete" if topic.name in (settings.half_topic, settings.op_topic) else "compact"
    if configs.get("cleanup.policy") != policy:
        lines.append(f"{topic.name} needs cleanup.policy={policy}")
    if policy == "delete" and int(configs.get("retention.bytes", "-1")) != _FOREVER:
        lines.append(
            f"{topic.name} needs retention.bytes=-1: a limit by size deletes what is undecided"
        )
    return lines


def _size_contradictions(settings: KafkaSettings, found: Mapping[str, FoundTopic]) -> list[str]:
    half = _number(found[settings.half_topic], "max.message.bytes")
    if half is None:
        return []
    lines = []
    for name in (settings.op_topic, settings.parked_topic):
        size = _number(found[name], "max.message.bytes")
        if size is not None and size < half + _ROOM_BYTES:
            lines.append(
                f"{name} needs max.message.bytes of at least {half + _ROOM_BYTES}: 64 KiB more "
                f"than {settings.half_topic}'s"
            )
    return lines


def _retention_contradictions(
    settings: KafkaSettings, found: Mapping[str, FoundTopic]
) -> list[str]:
    half = _number(found[settings.half_topic], "retention.ms")
    segment = _number(found[settings.half_topic], "segment.ms")
    op = _number(found[settings.op_topic], "retention.ms")
    if half is None or segment is None or op is None:
        return []
    lines = []
    wanted = op_retention_ms(half, segment)
    if op != _FOREVER and (wanted == _FOREVER or op < wanted):
        lines.append(
            f"{settings.op_topic} needs retention.ms of at least {wanted}: {settings.half_topic}'s "
            "and its segment.ms and a day, or a replay would promote settled transactions again"
        )
    window_ms = max(settings.check_window_s, settings.dedup_window_s) * 1000
    # At half of the retention undecided bodies are copied out, which needs time of its own.
    if half != _FOREVER and window_ms * 2 > half:
        lines.append(
            f"{settings.half_topic} keeps messages for {half / 1000:g} s, but the checks take "
            f"{window_ms / 1000:g} s: retention.ms must be at least twice that"
        )
    return lines


def _number(topic: FoundTopic, name: str) -> int | None:
    value = topic.configs.get(name)
    return None if value is None else int(value)


# --- on a real Kafka -------------------------------------------------------------------------


async def find(admin: Admin, names: tuple[str, ...]) -> dict[str, FoundTopic]:
    """Return those of the named topics that exist.

    Raises:
        ConfigurationError: a topic may not be seen.
        KafkaUnavailable: Kafka does not answer.
    """
    facts = await admin.topics(names)
    for name, fact in facts.items():
        if fact.error == Code.TOPIC_AUTHORIZATION_FAILED:
            raise ConfigurationError(f"no right to see topic {name}: grant Describe on it")
    there = [name for name in names if name in facts and facts[name].partitions]
    configs = await admin.configs(there) if there else {}
    return {
        name: FoundTopic(
            name,
            len(facts[name].partitions),
            min(fact.replicas for fact in facts[name].partitions.values()),
            configs.get(name, {}),
        )
        for name in there
    }


async def make_plan(
    admin: Admin,
    settings: KafkaSettings,
    brokers: int,
    read_layout: Callable[[], Awaitable[Layout | None]],
    names: tuple[str, ...],
) -> Plan:
    """Return what `apply` would do with the topics named, `own_topics` or `audit_topics` or both.

    `read_layout` reads the groups topic, where it exists.

    Raises:
        ConfigurationError, KafkaUnavailable
    """
    found = await find(admin, names)
    layout = await read_layout() if settings.groups_topic in found else None
    wanted = wanted_topics(settings, brokers, found.get(settings.half_topic), layout)
    return plan([topic for topic in wanted if topic.name in names], found)


async def apply(admin: Admin, wanted: Plan) -> None:
    """Create what is missing and change what differs; returns when brokers show the new settings.

    Raises:
        KafkaUnavailable: Kafka does not answer, or refuses.
    """
    await admin.create(wanted.create)
    by_topic: dict[str, dict[str, str]] = {}
    for change in wanted.change:
        by_topic.setdefault(change.topic, {})[change.name] = change.wanted
    for topic, configs in by_topic.items():
        await admin.alter(topic, configs)
    if by_topic:
        await _shown(admin, by_topic)


async def _shown(admin: Admin, wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Wait until brokers have heard of settings that the controller has taken."""
    backoff = Backoff(_SHOWN_S, _PAUSE_S)
    while True:
        found = await admin.configs(wanted)
        late = [
            topic
            for topic, configs in wanted.items()
            if not configs.items() <= found.get(topic, {}).items()
        ]
        if not late:
            return
        if not await backoff.pause():
            raise KafkaUnavailable(f"changed settings do not show yet: {', '.join(late)}")
