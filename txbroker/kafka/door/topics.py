"""txbroker's own topics: required settings, differences, and contradictions.

The settings are data, the plan is a pure function; only `apply` changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, structs

from txbroker.door.consuming import TopicSpec
from txbroker.door.own_topics import Layout, partition_problems
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.codes import Code
from txbroker.net.timers import Backoff

_DAY_MS = 24 * 60 * 60 * 1000
_OVERHEAD_BYTES = 64 * 1024
"""Maximum size of the fields that a marker or a parked transaction adds to a half batch."""

_CHECKPOINT_BYTES_MIN = 1 << 20
"""Parts of snapshots do not depend on the size of half batches."""

_REPLICATION_WANTED = 3
_FOREVER = -1
_DRIFT_MS = 7 * _DAY_MS
_CLEANED_OFTEN = {
    "segment.bytes": str(16 << 20),
    "segment.ms": str(10 * 60 * 1000),
    "min.cleanable.dirty.ratio": "0.1",
}
_CONFIGS_TIMEOUT_S, _PAUSE_S = 10.0, 0.01
# An operator may raise these: that is no difference.
_AT_LEAST = frozenset({"retention.ms", "max.message.bytes"})
_CODECS = frozenset({"snappy", "lz4", "zstd"})
"""Codecs of brokers that compress. With `producer` our batches stay uncompressed; gzip is
supported."""


class SettingChange(Struct, frozen=True):
    """A setting to change."""

    topic: str
    name: str
    found: str | None
    wanted: str


class Plan(Struct, frozen=True):
    """The differences between required and existing topics.

    Attributes:
        create: missing topics.
        change: settings that differ.
        remarks: differences that an operator must resolve, as sentences.
    """

    create: tuple[TopicSpec, ...]
    change: tuple[SettingChange, ...]
    remarks: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return not self.create and not self.change


def op_retention_ms(half_retention_ms: int, half_segment_ms: int) -> int:
    """Return the required retention of markers in milliseconds; -1 is infinite.

    Longer than that of any half message, which lives until its whole segment has expired: a half
    message without its marker would look pending, and a full replay would promote it again.
    """
    if half_retention_ms == _FOREVER:
        return _FOREVER
    return half_retention_ms + half_segment_ms + _DAY_MS


def wanted_topics(
    settings: KafkaSettings, brokers: int, found: TopicSpec | None, layout: Layout | None = None
) -> list[TopicSpec]:
    """Return txbroker's topics with the required settings.

    Args:
        found: the half topic if it exists. Its number of partitions stands, and other topics follow
            its retention and maximum message size if they exceed the settings.
        layout: that the installation was created with. Defines the number of partitions without a
            half topic.
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
        # Brokers then uncompress batches of other clients, which our readers may not decode.
        "compression.type": "uncompressed",
    }
    larger = str(size + _OVERHEAD_BYTES)
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
        **_CLEANED_OFTEN,
        "max.message.bytes": str(max(size + _OVERHEAD_BYTES, _CHECKPOINT_BYTES_MIN)),
    }
    drift = {**common, "cleanup.policy": "delete", "retention.ms": str(_DRIFT_MS)}
    return [
        TopicSpec(settings.half_topic, partitions, copies, half),
        TopicSpec(settings.op_topic, partitions, copies, op),
        TopicSpec(settings.checkpoint_topic, partitions, copies, checkpoint),
        TopicSpec(
            settings.parked_topic, partitions, copies, {**compacted, "max.message.bytes": larger}
        ),
        TopicSpec(settings.groups_topic, 1, copies, compacted),
        # Streams write often, and every proxy reads the topic at its start.
        TopicSpec(settings.audit_topic, 1, copies, {**compacted, **_CLEANED_OFTEN}),
        TopicSpec(settings.drift_topic, 1, copies, drift),
    ]


def _larger(required: int, found: TopicSpec | None, name: str) -> int:
    """Return the larger of a required and an existing limit; -1 is unlimited."""
    existing = None if found is None else _number(found, name)
    if existing is None:
        return required
    return _FOREVER if _FOREVER in (required, existing) else max(required, existing)


def partitions_remark(settings: KafkaSettings, found: TopicSpec | None) -> str:
    """Return that the chosen number of half partitions has no effect; "" if it has, or none was
    chosen."""
    if found is None or not settings.partitions_given or settings.partitions == found.partitions:
        return ""
    return (
        f"partitions = {settings.partitions} has no effect: {found.name} was made with "
        f"{found.partitions}, and that number is fixed; docs/operate/partition-count.md shows how "
        "to move to an installation with more"
    )


def own_plan(
    settings: KafkaSettings,
    brokers: int,
    found: Mapping[str, TopicSpec],
    layout: Layout | None,
    names: Collection[str] = (),
) -> Plan:
    """Return the difference between txbroker's required topics and existing ones. Pure.

    Args:
        names: only of these topics; () for all.
    """
    half = found.get(settings.half_topic)
    wanted = wanted_topics(settings, brokers, half, layout)
    planned = plan([topic for topic in wanted if not names or topic.name in names], found)
    remark = partitions_remark(settings, half)
    return structs.replace(planned, remarks=(remark, *planned.remarks)) if remark else planned


def plan(
    wanted: Sequence[TopicSpec], found: Mapping[str, TopicSpec], *, growing: bool = False
) -> Plan:
    """Return the difference between required and existing topics. Pure.

    Args:
        growing: topics may have more partitions than required.
    """
    create: list[TopicSpec] = []
    change: list[SettingChange] = []
    remarks: list[str] = []
    for topic in wanted:
        existing = found.get(topic.name)
        if existing is None:
            create.append(topic)
            continue
        if growing and existing.partitions < topic.partitions:
            remarks.append(
                f"{topic.name} has {existing.partitions} partitions and needs {topic.partitions}: "
                f"add some with kafka-topics.sh --alter --partitions {topic.partitions}"
            )
        elif not growing and existing.partitions != topic.partitions:
            remarks.append(
                f"{topic.name} has {existing.partitions} partitions, not {topic.partitions}: the "
                "number is fixed at creation"
            )
        if existing.replication < topic.replication:
            remarks.append(
                f"{topic.name} has {existing.replication} replicas, not {topic.replication}: "
                "add some with kafka-reassign-partitions"
            )
        for name, value in topic.configs.items():
            current = existing.configs.get(name)
            if existing.configs and not _fits(name, current, value):
                change.append(SettingChange(topic.name, name, current, value))
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
    settings: KafkaSettings, found: Mapping[str, TopicSpec], layout: Layout | None = None
) -> list[str]:
    """Return, as sentences, why txbroker cannot work with the existing topics. Pure."""
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
    settings: KafkaSettings, found: Mapping[str, TopicSpec], layout: Layout | None
) -> list[str]:
    half = settings.half_topic
    names = (half, settings.op_topic, settings.checkpoint_topic, settings.parked_topic)
    lines = partition_problems(half, {name: found[name].partitions for name in names}, layout)
    if found[settings.groups_topic].partitions != 1:
        lines.append(f"{settings.groups_topic} must have 1 partition")
    return lines


def _topic_contradictions(settings: KafkaSettings, topic: TopicSpec) -> list[str]:
    configs = topic.configs
    if not configs:
        return []
    in_sync = int(configs.get("min.insync.replicas", "1"))
    policy = "delete" if topic.name in (settings.half_topic, settings.op_topic) else "compact"
    codec = configs.get("compression.type")
    wrong = {
        "needs message.timestamp.type=LogAppendTime: txbroker relies on the brokers' clock": (
            configs.get("message.timestamp.type") != "LogAppendTime"
        ),
        "needs unclean.leader.election.enable=false, or acknowledged records can be lost": (
            configs.get("unclean.leader.election.enable") == "true"
        ),
        f"needs compression.type=uncompressed: txbroker does not decode {codec}, so it could not "
        "read its own records": codec in _CODECS,
        f"has min.insync.replicas={in_sync} but {topic.replication} replicas: no write could "
        "succeed": in_sync > topic.replication,
        f"needs cleanup.policy={policy}": configs.get("cleanup.policy") != policy,
        "needs retention.bytes=-1: a limit by size deletes undecided messages": (
            policy == "delete" and int(configs.get("retention.bytes", "-1")) != _FOREVER
        ),
    }
    return [f"{topic.name} {sentence}" for sentence, applies in wrong.items() if applies]


def _size_contradictions(settings: KafkaSettings, found: Mapping[str, TopicSpec]) -> list[str]:
    half = _number(found[settings.half_topic], "max.message.bytes")
    if half is None:
        return []
    lines = []
    for name in (settings.op_topic, settings.parked_topic):
        size = _number(found[name], "max.message.bytes")
        if size is not None and size < half + _OVERHEAD_BYTES:
            lines.append(
                f"{name} needs max.message.bytes of at least {half + _OVERHEAD_BYTES}: 64 KiB more "
                f"than {settings.half_topic}'s"
            )
    return lines


def _retention_contradictions(settings: KafkaSettings, found: Mapping[str, TopicSpec]) -> list[str]:
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
    # At half of the retention undecided bodies are copied, which takes time, too.
    if half != _FOREVER and window_ms * 2 > half:
        lines.append(
            f"{settings.half_topic} keeps messages for {half / 1000:g} s, but the checks take up "
            f"to {window_ms / 1000:g} s: set retention.ms to at least twice that"
        )
    return lines


def _number(topic: TopicSpec, name: str) -> int | None:
    value = topic.configs.get(name)
    return None if value is None else int(value)


# --- on a real Kafka -------------------------------------------------------------------------


async def find(admin: Admin, names: tuple[str, ...]) -> dict[str, TopicSpec]:
    """Return those of the named topics that exist.

    Raises:
        ConfigurationError: no right to describe a topic.
    """
    facts = await admin.topics(names)
    for name, fact in facts.items():
        if fact.error == Code.TOPIC_AUTHORIZATION_FAILED:
            raise ConfigurationError(f"not authorized for topic {name}: grant Describe on it")
    existing = [name for name in names if name in facts and facts[name].partitions]
    configs = await admin.configs(existing) if existing else {}
    return {
        name: TopicSpec(
            name,
            len(facts[name].partitions),
            min(fact.replicas for fact in facts[name].partitions.values()),
            configs.get(name, {}),
        )
        for name in existing
    }


async def plan_for(admin: Admin, wanted: Sequence[TopicSpec]) -> Plan:
    """Return the changes that make topics of consumers as wanted."""
    found = await find(admin, tuple(topic.name for topic in wanted))
    return plan(wanted, found, growing=True)


async def apply(admin: Admin, wanted: Plan) -> None:
    """Create and change topics; returns once the brokers return the new settings."""
    await admin.create(wanted.create)
    by_topic: dict[str, dict[str, str]] = {}
    for change in wanted.change:
        by_topic.setdefault(change.topic, {})[change.name] = change.wanted
    for topic, configs in by_topic.items():
        await admin.alter(topic, configs)
    if by_topic:
        await _wait_for_configs(admin, by_topic)


async def _wait_for_configs(admin: Admin, wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Wait until the brokers return the settings that the controller accepted."""
    backoff = Backoff(_CONFIGS_TIMEOUT_S, _PAUSE_S)
    while True:
        found = await admin.configs(wanted)
        pending = [
            topic
            for topic, configs in wanted.items()
            if not configs.items() <= found.get(topic, {}).items()
        ]
        if not pending:
            return
        if not await backoff.pause():
            raise KafkaUnavailable(
                f"the brokers do not return the changed settings of {', '.join(pending)} yet: retry"
            )
