"""txbroker's own topics: required settings, differences, contradictions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.kit.kafka import KafkaHarness
from tests.kit.until import until
from txbroker.door.consuming import TopicSpec
from txbroker.door.own_topics import Layout
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.topics import (
    Plan,
    SettingChange,
    contradictions,
    op_retention_ms,
    own_plan,
    wanted_topics,
)

SETTINGS = KafkaSettings(bootstrap_servers=("127.0.0.1:9092",), instance_id="one")
HALF, OP = SETTINGS.half_topic, SETTINGS.op_topic
CHECKPOINT, PARKED, GROUPS = (
    SETTINGS.checkpoint_topic,
    SETTINGS.parked_topic,
    SETTINGS.groups_topic,
)


def as_wanted(brokers: int = 3) -> dict[str, TopicSpec]:
    """Topics as they should be."""
    return {topic.name: topic for topic in wanted_topics(SETTINGS, brokers, None)}


def changed(topic: str, **configs: str) -> dict[str, TopicSpec]:
    """The same with settings of one topic changed (`_` for `.`)."""
    found = as_wanted()
    new = {name.replace("_", "."): value for name, value in configs.items()}
    found[topic] = replace(found[topic], configs={**found[topic].configs, **new})
    return found


def planned(found: dict[str, TopicSpec]) -> Plan:
    """Return what `txbroker topics apply` would change."""
    return own_plan(SETTINGS, 3, found, None)


@pytest.mark.parametrize(("brokers", "copies", "in_sync"), [(1, 1, 1), (2, 2, 1), (5, 3, 2)])
def test_replication_is_up_to_three(brokers: int, copies: int, in_sync: int) -> None:
    for topic in wanted_topics(SETTINGS, brokers, None):
        assert topic.replication == copies
        assert topic.configs["min.insync.replicas"] == str(in_sync)


@pytest.mark.parametrize("given", [True, False])
def test_number_of_half_partitions_that_has_no_effect_is_named(given: bool) -> None:
    chosen = replace(SETTINGS, partitions=SETTINGS.partitions + 6, partitions_given=given)
    remarks = own_plan(chosen, 3, as_wanted(), None).remarks
    assert len(remarks) == given
    for remark in remarks:
        assert "partitions = " in remark
        assert "docs/operate/partition-count.md" in remark
    fitting = replace(SETTINGS, partitions_given=given)
    assert own_plan(fitting, 3, as_wanted(), None).remarks == ()
    assert own_plan(chosen, 3, {}, None).remarks == ()  # made now


def test_correct_topics_need_no_changes() -> None:
    assert planned(as_wanted()).empty
    assert contradictions(SETTINGS, as_wanted()) == []


def test_plan_names_missing_changed_and_unchangeable() -> None:
    found = changed(HALF, retention_bytes="1000")
    del found[GROUPS]
    found[OP] = replace(found[OP], partitions=3, replication=1)
    made = planned(found)
    assert [topic.name for topic in made.create] == [GROUPS]
    assert made.change == (SettingChange(HALF, "retention.bytes", "1000", "-1"),)
    assert len(made.remarks) == 2
    assert all(OP in remark for remark in made.remarks)


@pytest.mark.rule("topics")
@pytest.mark.parametrize(
    ("topic", "configs", "reason"),
    [
        (HALF, {"message_timestamp_type": "CreateTime"}, "LogAppendTime"),
        (CHECKPOINT, {"message_timestamp_type": "CreateTime"}, "LogAppendTime"),
        (OP, {"unclean_leader_election_enable": "true"}, "unclean"),
        (HALF, {"compression_type": "zstd"}, "compression.type=uncompressed"),
        (HALF, {"min_insync_replicas": "4"}, "no write could succeed"),
        (HALF, {"retention_bytes": "1000000"}, "retention.bytes=-1"),
        (HALF, {"cleanup_policy": "compact"}, "cleanup.policy=delete"),
        (CHECKPOINT, {"cleanup_policy": "delete"}, "cleanup.policy=compact"),
        (PARKED, {"cleanup_policy": "compact,delete"}, "cleanup.policy=compact"),
        (OP, {"max_message_bytes": str(8 << 20)}, "64 KiB more"),
        (PARKED, {"max_message_bytes": str(8 << 20)}, "64 KiB more"),
        (OP, {"retention_ms": "1000"}, "promote settled"),
        (HALF, {"retention_ms": "-1"}, "promote settled"),
        (HALF, {"segment_ms": str(10**12)}, "promote settled"),
        (HALF, {"retention_ms": "800000"}, "at least twice"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    topic: str, configs: dict[str, str], reason: str
) -> None:
    refused = contradictions(SETTINGS, changed(topic, **configs))
    assert len(refused) == 1
    assert reason in refused[0]


@pytest.mark.parametrize("topic", [OP, CHECKPOINT, PARKED, GROUPS])
def test_mismatched_partition_counts_are_refused(topic: str) -> None:
    found = as_wanted()
    found[topic] = replace(found[topic], partitions=5)
    assert len(contradictions(SETTINGS, found)) == 1


def test_topics_follow_limits_of_half_topic() -> None:
    found = changed(HALF, retention_ms="-1", max_message_bytes=str(16 << 20))
    made = planned(found)
    assert {(change.topic, change.name) for change in made.change} == {
        (OP, "retention.ms"),
        *((topic, "max.message.bytes") for topic in (OP, CHECKPOINT, PARKED)),
    }
    for change in made.change:
        configs = {**found[change.topic].configs, change.name: change.wanted}
        found[change.topic] = replace(found[change.topic], configs=configs)
    assert contradictions(SETTINGS, found) == []


@pytest.mark.parametrize("topics", [(HALF, OP, CHECKPOINT, PARKED), (HALF,)])
def test_changed_partition_count_is_refused_once(topics: tuple[str, ...]) -> None:
    found = as_wanted()
    made_with = Layout(1, found[HALF].partitions)
    assert contradictions(SETTINGS, found, made_with) == []
    for topic in topics:
        found[topic] = replace(found[topic], partitions=11)
    (sentence,) = contradictions(SETTINGS, found, made_with)
    assert sentence.startswith(f"{HALF} has 11 partitions")
    assert f"made with {made_with.partitions}" in sentence


@pytest.mark.parametrize(("count", "remedy"), [(7, "--partitions 8"), (9, "start again")])
def test_changed_partition_count_names_next_step(count: int, remedy: str) -> None:
    found = as_wanted()
    found[OP] = replace(found[OP], partitions=count)
    for layout in (None, Layout(1, 8)):
        (sentence,) = contradictions(SETTINGS, found, layout)
        assert sentence.startswith(f"{OP} has {count} partitions, but {HALF} has 8")
        assert remedy in sentence


def test_checkpoint_topic_takes_snapshots_at_any_batch_size() -> None:
    small = replace(SETTINGS, message_bytes_max=1000)
    sizes = {
        t.name: int(t.configs.get("max.message.bytes", 0)) for t in wanted_topics(small, 1, None)
    }
    assert sizes[CHECKPOINT] >= 512 << 10
    assert sizes[HALF] == 1000


def test_missing_topics_are_named() -> None:
    found = as_wanted()
    del found[OP], found[PARKED]
    (sentence,) = contradictions(SETTINGS, found)
    assert OP in sentence
    assert PARKED in sentence


@pytest.mark.rule("topics")
def test_markers_outlive_half_messages() -> None:
    assert op_retention_ms(1000, 100) > 1100
    assert op_retention_ms(-1, 100) == -1


# --- on a real Kafka -------------------------------------------------------------------------


async def test_door_creates_correct_topics(world: KafkaHarness) -> None:
    door = await world.door()
    assert door.partitions == 4
    assert [f"{host}:{port}" for host, port in door.brokers()] == world.bootstrap.split(",")
    made = await door.plan()
    assert made.empty
    assert made.remarks == ()
    again = await world.door("two", partitions=9)
    assert again.partitions == 4, "topics that exist keep their number of partitions"


async def test_number_without_effect_is_logged(
    world: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await world.door()
    await world.door("two", partitions=9, partitions_given=True)
    (line,) = [each for each in caplog.messages if "setting without effect" in each]
    assert "partitions = 9" in line
    assert "docs/operate/partition-count.md" in line


async def test_apply_changes_settings_and_is_idempotent(world: KafkaHarness) -> None:
    await world.create_topic(
        "half", 4, retention_bytes="1000", flush_ms="12345", compression_type="producer"
    )
    door = world.closed_door()
    made = await door.plan()
    assert len(made.create) == 6
    assert {"retention.bytes", "compression.type"} <= {change.name for change in made.change}
    await door.apply(made)
    assert (await door.plan()).empty
    kept = (await door.admin.configs([world.name("half")]))[world.name("half")]
    assert kept["flush.ms"] == "12345", "a setting that is none of ours stays"
    await door.start()


async def test_broken_settings_are_detected_while_running(world: KafkaHarness) -> None:
    door = await world.door()
    assert await door.check_topics() == []
    half = world.name("half")
    await door.admin.alter(half, {"retention.ms": "1000"})

    async def found(sentence: str) -> bool:
        return any(sentence in line for line in await door.check_topics())

    await until(lambda: found(f"{half} keeps messages for 1 s"))
    await door.admin.alter(half, {"retention.ms": "-1", "message.timestamp.type": "CreateTime"})
    await until(lambda: found("LogAppendTime"))


async def test_start_refuses_unusable_settings(world: KafkaHarness) -> None:
    await world.create_topic("half", 4)
    with pytest.raises(ConfigurationError, match=r"half needs message.timestamp.type"):
        await world.door()


async def test_start_creates_no_topics_if_disabled(world: KafkaHarness) -> None:
    with pytest.raises(ConfigurationError, match="topics apply"):
        await world.door(create_topics=False)
    with pytest.raises(ConfigurationError, match="topics apply"):
        await world.door("two", create_topics=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"bootstrap_servers": ()},
        {"partitions": 0},
        {"partitions": 1 << 16},
        {"request_timeout_s": 6.0},
        {"request_timeout_s": 5.0, "transaction_timeout_s": 9.0},
        {"op_topic": "same", "half_topic": "same"},
    ],
)
def test_contradicting_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        replace(SETTINGS, **changes).validate()
