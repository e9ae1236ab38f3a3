"""The topics of the audits on a real Kafka: written, followed, missing, refused."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.kafka import KafkaHarness
from txbroker.door.consuming import TopicSpec
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.followers import KafkaAuditFeed
from txbroker.kafka.door.topics import contradictions, plan, wanted_topics
from txbroker.kafka.tools.audit_results import KafkaAuditWriter


class Following:
    """A feed with a short pause, and its reports."""

    def __init__(self, world: KafkaHarness) -> None:
        self.reported: list[tuple[str, bytes | None]] = []
        self._more = asyncio.Event()
        self._client = Client(world.settings())
        self._feed = KafkaAuditFeed(self._client, pause_s=0.05)

    async def __aenter__(self) -> Following:
        self._feed.follow(self._note)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._feed.close()
        await self._client.close()

    def _note(self, key: str, value: bytes | None) -> None:
        self.reported.append((key, value))
        self._more.set()

    async def until(self, value: bytes) -> None:
        async with asyncio.timeout(40):
            while ("batch", value) not in self.reported:
                self._more.clear()
                await self._more.wait()


async def test_feed_waits_for_missing_topic_and_rereads_recreated_one(
    world: KafkaHarness,
) -> None:
    audit = world.name("audit")
    await world.door()
    await world.delete_topic(audit)
    async with Following(world) as following:
        await world.create_topic("audit")
        await world.write_audit("batch", b"first")
        await following.until(b"first")
        for number in range(3):
            await world.write_audit("batch", b"%d" % number)
        await following.until(b"2")
        await world.recreate_topic(audit)
        await world.write_audit("batch", b"again")
        await following.until(b"again")


async def test_feed_follows_records_with_any_timestamp(
    world: KafkaHarness,
) -> None:
    await world.create_topic("audit", message_timestamp_type="CreateTime")
    await world.write_audit("batch", b"mine")
    async with Following(world) as following:
        await following.until(b"mine")


async def test_refused_audit_record_is_explained(world: KafkaHarness) -> None:
    async with KafkaAuditWriter(world.settings()) as writer:
        with pytest.raises(ConfigurationError, match=r"does not exist.*topics apply"):
            await writer.put(world.name("nowhere"), "batch", b"{}")
        await world.create_topic("small", max_message_bytes="200")
        with pytest.raises(ConfigurationError, match="refused the audit"):
            await writer.put(world.name("small"), "batch", b"x" * 500)
        await writer.put(world.name("small"), "batch", b"{}")
    assert [r.value for r in await world.visible(world.name("small"))] == [b"{}"]


def test_proxy_needs_no_audit_topics() -> None:
    settings = KafkaSettings(bootstrap_servers=("127.0.0.1:9092",), instance_id="one")
    wanted = wanted_topics(settings, 1, None)
    found = {
        topic.name: TopicSpec(topic.name, topic.partitions, 1, topic.configs) for topic in wanted
    }
    del found[settings.drift_topic]
    found[settings.audit_topic] = TopicSpec(
        settings.audit_topic, 3, 1, {"cleanup.policy": "delete"}
    )
    assert contradictions(settings, found) == []
    made = plan(wanted, found)
    assert [topic.name for topic in made.create] == [settings.drift_topic]
    assert ("cleanup.policy", "delete", "compact") in [
        (change.name, change.found, change.wanted) for change in made.change
    ]
    assert len(made.remarks) == 1


def test_audit_topics_need_unique_names() -> None:
    settings = KafkaSettings(
        bootstrap_servers=("127.0.0.1:9092",), instance_id="one", audit_topic="txbroker.groups"
    )
    with pytest.raises(ConfigurationError, match="seven names"):
        settings.validate()
