"""The rights that `txbroker topics plan --consumer` names are enough for every policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.kit.topic_reader import ADMIN_TIMEOUT_S
from tests.kit.until import unique, until
from tests.secure.secret_proxy import words_of
from tests.secure.secure_world import AllowedWorld, SecureKafka
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.consumer import Consumer, InKafka, Message, Outputs
from txbroker.consumer import consumer as consumer_module
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.settings import group_topics
from txbroker.core.consuming.copies import DEAD_PARTITIONS, RETRY_PARTITIONS, GroupTopics
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.acls import CREATE, AclRole, Resource, Right, consumer_rights

QUICK: dict[str, Any] = {
    "session_s": 3.0,
    "lease_s": 1.5,
    "heartbeat_s": 0.2,
    "local_attempts_max": 1,
}
POLICIES: dict[str, Any] = {
    "retry": {"order": "none"},
    "wait": {"order": "partition", "on_failure": "wait"},
    "dead": {"order": "key", "on_failure": "skip"},
    "aside": {"order": "key", "on_failure": "aside"},
    "": {"mode": "at-most-once"},
}
"""Options by the topic that then gets a message that failed."""


class World(AllowedWorld):
    """A user without rights, and a topic to read."""

    def __init__(self, kafka: SecureKafka) -> None:
        super().__init__(kafka)
        self.group, self.topic = unique("stock"), ""
        self.names = GroupTopics.of(self.prefix, self.group)
        self.given = {
            name: getattr(self.login, name)
            for name in self.login.model_fields_set
            if name.startswith("kafka_")
        }

    def rights(self) -> list[Right]:
        """Rights of its consumers."""
        own = [topic.name for topic in group_topics(self.prefix, self.group, aside=True)]
        needed = consumer_rights(self.group, own, [self.topic])
        return [right for right in needed if right.role is AclRole.CONSUMER]

    def consumer(self, **options: Any) -> Consumer:
        """A consumer with this user's login."""
        return Consumer(
            self.login.kafka,
            group=self.group,
            topics=[self.topic],
            topic_prefix=self.prefix,
            security=self.given,
            **QUICK,
            **options,
        )

    async def started(self, **options: Any) -> Consumer:
        """A consumer, once the brokers know all rights."""

        async def start() -> Consumer | None:
            consumer = self.consumer(**options)
            try:
                await consumer.start()
            except ConfigurationError:
                return None
            return consumer

        found = await until(start)
        assert isinstance(found, Consumer)
        return found

    async def command(self, *arguments: str) -> int:
        """Call the command line with this user's login."""
        words = words_of({"kafka": self.login.kafka, **self.given, "topic_prefix": self.prefix})
        return await asyncio.to_thread(run, cli, [*arguments, *words])


@pytest.fixture
async def world(secure_kafka: SecureKafka) -> AsyncIterator[World]:
    made = World(secure_kafka)
    made.topic = await made.create_topic("orders")
    yield made
    await made.close()


@pytest.mark.parametrize("kind", POLICIES)
async def test_consumer_works_with_exactly_the_listed_rights(world: World, kind: str) -> None:
    await world.allow(world.rights())
    seen: list[bytes | None] = []
    broken = True

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.key)
        if broken and message.key == b"bad":
            raise ValueError("no stock")

    producer = Producer({"bootstrap.servers": world.bootstrap})
    for key in (b"bad", b"good"):
        producer.produce(world.topic, b"", key, partition=0)
    assert producer.flush(ADMIN_TIMEOUT_S) == 0
    consumer = await world.started(**POLICIES[kind])
    async with aclosing(consumer):
        running = asyncio.create_task(consumer.run(handle))
        if kind == "wait":
            await until(lambda: seen == [b"bad", b"bad"])
            broken = False
        elif kind:
            await until(lambda: has_copy(world, kind))
        await until(lambda: b"good" in seen)
        await until(lambda: consumer.statistics().lag.get((world.topic, 0)) == 0)
        if kind == "dead":
            broken = False
            retry = ("consumers", "retry", world.group, "--all", "--reason", "r", "--yes")
            assert await world.command(*retry) == 0
            await until(lambda: seen.count(b"bad") == 2)
        consumer.stop()
        await running


async def test_outputs_need_only_write(world: World) -> None:
    """Without it the message becomes a dead letter, and the others go on."""
    prices, secret = await world.create_topic("prices"), await world.create_topic("secret")
    own = [topic.name for topic in group_topics(world.prefix, world.group, aside=True)]
    needed = consumer_rights(world.group, own, [world.topic], [prices])
    describe = Right(AclRole.CONSUMER, Resource.TOPIC, secret, False, ("Describe",), "a test")
    await world.allow([*(right for right in needed if right.role is AclRole.CONSUMER), describe])

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        out.send(Message(prices, message.key))
        if message.key == b"bad":
            out.send(Message(secret, message.key))

    producer = Producer({"bootstrap.servers": world.bootstrap})
    for key in (b"1", b"bad", b"2"):
        producer.produce(world.topic, b"", key, partition=0)
    assert producer.flush(ADMIN_TIMEOUT_S) == 0
    consumer = await world.started(mode="exactly-once", store=InKafka())
    async with aclosing(consumer):
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: has_copy(world, "dead"))
        await until(lambda: consumer.statistics().lag.get((world.topic, 0)) == 0)
        consumer.stop()
        await running
    assert [record.key for record in await world.visible(prices)] == [b"1", b"2"]
    assert await world.visible(secret) == []


async def has_copy(world: World, kind: str) -> bool:
    """Return whether a topic of the group holds a copy."""
    topic = getattr(world.names, kind)
    partitions = DEAD_PARTITIONS if kind == "dead" else RETRY_PARTITIONS
    found = [await world.visible(topic, number) for number in range(partitions)]
    return [record.key for records in found for record in records] == [b"bad"]


async def test_without_create_the_start_names_the_plan(world: World) -> None:
    await world.allow(right for right in world.rights() if CREATE not in right.operations)
    command = f"`txbroker topics plan --consumer {world.group} --topic-prefix {world.prefix}`"

    async def refused() -> str:
        with pytest.raises(ConfigurationError, match="topics plan") as error:
            await world.consumer().start()
        return str(error.value) if "cannot create topic" in str(error.value) else ""

    assert f"{command} shows the topics and rights" in await until(refused)


async def test_topics_that_were_applied_need_no_create(
    world: World, secure_kafka: SecureKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--kafka", secure_kafka.inside, "--topic-prefix", world.prefix)
    what = ("--consumer", world.group, "--consumer-topic", world.topic)
    as_user = ("--principal", f"User:{world.user}", "--acls", "-o", "json")
    planning = ("topics", "plan", *where, *what, *as_user)
    assert await asyncio.to_thread(run, cli, planning) == 0
    rows = json.loads(capsys.readouterr().out)
    created = [row for row in rows if row["action"] == "create"]
    assert [row["topic"] for row in created] == list(world.names)
    assert created[0]["what"] == "16 partitions, default copies"
    allowed = [row for row in rows if row["action"] == "allow"]
    assert {row["for"] for row in allowed} == {"apply", "consumer"}
    read = {"for": "consumer", "name": world.topic, "operations": ["Read"]}
    assert any(read.items() <= row.items() for row in allowed)

    applying = ("topics", "apply", *where, *what[:2], "--yes")
    assert await asyncio.to_thread(run, cli, applying) == 0
    capsys.readouterr()
    assert await asyncio.to_thread(run, cli, (*planning[:-4], "--no-acls", "-o", "json")) == 0
    assert json.loads(capsys.readouterr().out) == []

    await world.allow(right for right in world.rights() if CREATE not in right.operations)
    async with aclosing(await world.started(on_failure="aside", order="key")):
        pass


async def test_withheld_rights_are_named_by_commands(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.allow(right for right in world.rights() if right.resource != "group")

    async def refused() -> str:
        assert await world.command("consumers", "show", world.group) == 1
        return capsys.readouterr().err

    err = await until(refused)
    assert f"`txbroker topics plan --consumer {world.group} --acls` shows the necessary" in err


@pytest.mark.parametrize("resource", ["group", "topic"])
async def test_consumer_outlasts_a_withdrawn_right(
    world: World,
    resource: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(consumer_module, "_REFRESH_S", 0.2)
    rights = world.rights()
    name = world.group if resource == "group" else world.topic
    withdrawn = next(r for r in rights if (r.resource, r.name) == (resource, name))
    await world.allow(rights)
    seen: list[bytes | None] = []

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.value)

    producer = Producer({"bootstrap.servers": world.bootstrap})

    def produce(value: bytes) -> None:
        producer.produce(world.topic, value, partition=0)
        assert producer.flush(ADMIN_TIMEOUT_S) == 0

    def lag() -> int | None:
        return consumer.statistics().lag.get((world.topic, 0))

    consumer = await world.started()
    async with aclosing(consumer):
        running = asyncio.create_task(consumer.run(handle))
        produce(b"1")
        await until(lambda: seen == [b"1"])
        await world.take(withdrawn, "Read")
        if resource == "group":
            await until(lambda: lag() is None)
        else:
            await until(lambda: "topics not refreshed" in caplog.text)
        produce(b"2")
        await world.allow([withdrawn])
        await until(lambda: b"2" in seen and lag() == 0)
        consumer.stop()
        await running
    # The right may have been withdrawn before the first commit.
    assert seen in ([b"1", b"2"], [b"1", b"1", b"2"])
