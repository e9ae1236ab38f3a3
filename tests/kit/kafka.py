"""A real Kafka as the contract suite sees it, looked at through a client of another make."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    OffsetSpec,
)

from tests.kafka.relay import END_TXN, OFFSET_COMMIT, Fate, Relay, fates
from tests.kit.topic_reader import (
    ADMIN_TIMEOUT_S,
    admin_of,
    create_topic,
    delete_topic,
    read_topics,
)
from tests.kit.until import until
from txbroker.core.records import Record
from txbroker.kafka import KafkaDoor, KafkaSettings
from txbroker.kafka.client.client import GROUP, Client
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.producer import Producer as TransactionalProducer
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.schemas import LeaveGroupV3
from txbroker.kafka.tools.audit_results import KafkaAuditWriter
from txbroker.net.timers import Backoff

_NUMBERS = itertools.count()


def now_ms() -> int:
    """Return the time, ms since 1970; retention takes records that are much older."""
    return round(time.time() * 1000)


class KafkaHarness:
    """One test's own topics on a shared Kafka, and the doors that it opens on them."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.prefix = f"t{os.getpid()}-{next(_NUMBERS)}"
        self._admin = admin_of(bootstrap)
        self._doors: list[KafkaDoor] = []
        self._consuming_doors: list[KafkaConsumingDoor] = []
        self._relays: list[Relay] = []

    def name(self, topic: str) -> str:
        return f"{self.prefix}.{topic}"

    def settings(self, instance_id: str = "one", **changes: Any) -> KafkaSettings:
        """Settings with this test's topics and short times."""
        given: dict[str, Any] = {
            "bootstrap_servers": (self.bootstrap,),
            "instance_id": instance_id,
            "group_id": self.name("group"),
            "half_topic": self.name("half"),
            "op_topic": self.name("op"),
            "checkpoint_topic": self.name("checkpoint"),
            "parked_topic": self.name("parked"),
            "groups_topic": self.name("groups"),
            "audit_topic": self.name("audit"),
            "drift_topic": self.name("audit.drift"),
            "partitions": 4,
            "message_bytes_max": 1 << 20,
            "watermark_timeout_s": 0.2,
        }
        return KafkaSettings(**{**given, **changes})

    async def door(
        self, instance_id: str = "one", opener: Callable[..., Any] = open_connection, **changes: Any
    ) -> KafkaDoor:
        """A door that is started; closed when the test ends.

        What only the first door of all does to make its topics never goes through `opener`.
        """
        if opener is not open_connection and not self._doors:
            await self.closed_door(instance_id).start()
        door = self.closed_door(instance_id, opener, **changes)
        await door.start()
        return door

    def closed_door(
        self, instance_id: str = "one", opener: Callable[..., Any] = open_connection, **changes: Any
    ) -> KafkaDoor:
        """A door that is not started yet."""
        door = KafkaDoor(self.settings(instance_id, **changes), opener)
        self._doors.append(door)
        return door

    async def consuming_door(
        self, opener: Callable[..., Any] = open_connection, **settings: Any
    ) -> KafkaConsumingDoor:
        """A started door of a consumer; closed when the test ends."""
        door = KafkaConsumingDoor(self.settings(**settings), opener)
        self._consuming_doors.append(door)
        await door.start()
        return door

    def made_door(
        self, opener: Callable[..., Any] = open_connection, **settings: Any
    ) -> KafkaConsumingDoor:
        """A door of a consumer, which starts and closes it."""
        return KafkaConsumingDoor(self.settings(**settings), opener)

    async def end_transaction(self, transactional_id: str) -> None:
        """Abort an open transaction, as its coordinator does when it has timed out."""
        client = Client(self.settings())
        try:
            await TransactionalProducer(client, "end", transactional_id).start(Backoff(10, 0.01))
        finally:
            await client.close()

    async def remove_member(self, group: str, name: str) -> None:
        """Remove a dynamic member from a group of consumers, as Kafka does after a session."""
        client = Client(self.settings())
        try:
            node = await client.coordinator(GROUP, group)
            answer = await client.ask(node, LeaveGroupV3(group, [(name, None)]), "leave")
            assert answer.error_code == Code.NONE
        finally:
            await client.close()

    async def losing_door(self, group: str, *, stored: bool, copies: bool) -> KafkaConsumingDoor:
        """A door that gets no answer to the next commit in a group; `stored`: it takes effect."""
        fate = Fate.LOSE_ANSWER if stored else Fate.HOLD_AND_RESET
        relay = Relay(fates(END_TXN if copies else OFFSET_COMMIT, fate))
        self._relays.append(relay)
        return await self.consuming_door(relay.open)

    async def create_topic(self, topic: str, partitions: int = 1, **configs: str) -> str:
        """Create a topic with settings (`_` for `.`); returns its full name."""
        name = self.name(topic)
        return await asyncio.to_thread(create_topic, self.bootstrap, name, partitions, **configs)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic (full name)."""
        await asyncio.to_thread(delete_topic, self.bootstrap, topic)

    async def recreate_topic(self, topic: str) -> None:
        """Delete and recreate one of txbroker's own topics (full name)."""
        await self.delete_topic(topic)
        door = self.closed_door("recreate")
        await door.apply(await door.plan())

    async def add_partitions(self, topic: str, total: int) -> None:
        """Give a topic (full name) more partitions, `total` in all."""
        done = self._admin.create_partitions([NewPartitions(topic, total)])[topic]
        await asyncio.to_thread(done.result, ADMIN_TIMEOUT_S)

        def has_all() -> bool:
            found = self._admin.list_topics(topic, ADMIN_TIMEOUT_S)
            return len(found.topics[topic].partitions) == total

        await until(lambda: asyncio.to_thread(has_all), ADMIN_TIMEOUT_S)

    async def foreign(
        self, topic: str, partition: int, *records: Record, committed: bool | None = None
    ) -> None:
        """Write to a topic (full name) as another client, in a committed or aborted transaction or,
        with None, without one."""
        await asyncio.to_thread(self._foreign, topic, partition, records, committed)

    def _foreign(
        self, topic: str, partition: int, records: tuple[Record, ...], committed: bool | None
    ) -> None:
        config: dict[str, Any] = {"bootstrap.servers": self.bootstrap, "log_level": 0}
        if committed is not None:
            config["transactional.id"] = self.name(f"foreign-{next(_NUMBERS)}")
        producer = Producer(config)
        if committed is not None:
            producer.init_transactions(ADMIN_TIMEOUT_S)
            producer.begin_transaction()
        for record in records:
            producer.produce(
                topic, record.value, record.key, partition, headers=list(record.headers)
            )
        assert producer.flush(ADMIN_TIMEOUT_S) == 0
        if committed is not None:
            end = producer.commit_transaction if committed else producer.abort_transaction
            end(ADMIN_TIMEOUT_S)
            # The coordinator answers before it has written the marker.
            deadline = time.monotonic() + ADMIN_TIMEOUT_S
            ends = (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
            while len({self._end(topic, partition, level) for level in ends}) > 1:
                assert time.monotonic() < deadline, f"{topic}: a transaction does not end"

    def _end(self, topic: str, partition: int, level: IsolationLevel) -> int:
        at = TopicPartition(topic, partition)
        asked = self._admin.list_offsets({at: OffsetSpec.latest()}, isolation_level=level)
        return int(asked[at].result(ADMIN_TIMEOUT_S).offset)

    async def hang(self, topic: str, partition: int) -> Callable[[], Awaitable[None]]:
        """Leave a transaction open on a partition; the result aborts it."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": self.name("hang"),
                "log_level": 0,
            }
        )

        def begin() -> None:
            producer.init_transactions(10)
            producer.begin_transaction()
            producer.produce(topic, key=b"hanging", value=b"", partition=partition)
            assert producer.flush(10) == 0

        await asyncio.to_thread(begin)
        return lambda: asyncio.to_thread(producer.abort_transaction, 10)

    async def lose(self, door: KafkaDoor) -> None:
        """Take Kafka away from a door."""
        await door.close()

    async def set_max_message_bytes(self, topic: str, size: int) -> None:
        await self._set(topic, "max.message.bytes", str(size))

    async def _set(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        change = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        futures = self._admin.incremental_alter_configs([change])
        await asyncio.to_thread(lambda: futures[change].result(ADMIN_TIMEOUT_S))

    async def truncate(self, topic: str, partition: int, before: int) -> None:
        at = TopicPartition(topic, partition, before)
        await asyncio.to_thread(
            lambda: self._admin.delete_records([at])[at].result(ADMIN_TIMEOUT_S)
        )

    async def compact(self, topic: str, partition: int, before: int) -> None:
        """Lose the records of a compacted topic (full name) below an offset."""
        await self._set(topic, "cleanup.policy", "compact,delete")
        # The answer to the change can come before the broker applies it.
        await until(lambda: self._truncated(topic, partition, before))
        await self._set(topic, "cleanup.policy", "compact")

    async def _truncated(self, topic: str, partition: int, before: int) -> bool:
        try:
            await self.truncate(topic, partition, before)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.POLICY_VIOLATION:
                return False
            raise
        return True

    async def visible(self, topic: str, partition: int = 0) -> list[Record]:
        """What a `read_committed` consumer sees of a topic (full name), from begin to end."""
        records = await asyncio.to_thread(read_topics, self.bootstrap, [topic])
        return [
            Record(record.key, record.value, record.headers, record.timestamp_ms, record.offset)
            for record in records
            if record.partition == partition
        ]

    without_creating: ClassVar[dict[str, Any]] = {"create_topics": False}

    async def write_audit(self, key: str, value: bytes | None) -> None:
        """Write to the topic of the audits."""
        settings = self.settings()
        async with KafkaAuditWriter(settings) as writer:
            await writer.put(settings.audit_topic, key, value)

    async def close(self) -> None:
        for door in (*self._consuming_doors, *self._doors):
            await door.close()
        for relay in self._relays:
            await relay.close()
