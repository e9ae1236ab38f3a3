"""A Kafka in memory as the contract suite sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from txbroker.core.records import Record
from txbroker.door.consuming import ConsumingDoor
from txbroker.testing.consuming import MemoryConsumingDoor
from txbroker.testing.door import MemoryDoor
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import LostReply


class MemoryHarness:
    """One test's own Kafka, and the doors that it opens on it."""

    def __init__(self) -> None:
        self.kafka = MemoryKafka()
        self._doors: list[MemoryDoor] = []

    def name(self, topic: str) -> str:
        return f"test.{topic}"

    async def door(self, instance_id: str = "one", **changes: Any) -> MemoryDoor:
        """A door that is started; closed when the test ends."""
        door = self.closed_door(instance_id, message_bytes_max=1 << 20, **changes)
        await door.start()
        return door

    def closed_door(self, instance_id: str = "one", **changes: Any) -> MemoryDoor:
        """A door that is not started yet."""
        if "partitions" in changes:
            changes["half_partitions"] = changes.pop("partitions")
        door = MemoryDoor(self.kafka, instance=instance_id, topic_prefix="test", **changes)
        self._doors.append(door)
        return door

    async def consuming_door(self) -> ConsumingDoor:
        """A started door of a consumer."""
        door = MemoryConsumingDoor(self.kafka)
        await door.start()
        return door

    def made_door(self) -> ConsumingDoor:
        """A door of a consumer, which starts and closes it."""
        return MemoryConsumingDoor(self.kafka)

    async def remove_member(self, group: str, name: str) -> None:
        """Remove a member from a group of consumers, as Kafka does after a session."""
        self.kafka.group(group).expire(name)

    async def losing_door(self, group: str, *, stored: bool, copies: bool) -> ConsumingDoor:
        """A door that gets no answer to the next commit in a group; `stored`: it takes effect."""
        outcome = LostReply.DONE if stored else LostReply.NOT_DONE
        self.kafka.group(group).lose_answer_of_next_commit(outcome)
        return await self.consuming_door()

    async def create_topic(self, topic: str, partitions: int = 1, **configs: str) -> str:
        """Create a topic with settings as Kafka names them (`_` for `.`)."""
        settings: dict[str, Any] = {}
        if "max_message_bytes" in configs:
            settings["message_bytes_max"] = int(configs.pop("max_message_bytes"))
        if configs.pop("message_timestamp_type", "CreateTime") == "LogAppendTime":
            settings["log_append_time"] = True
        configs.pop("cleanup_policy", None)  # tests compact explicitly
        assert not configs, f"the Kafka in memory does not know {configs}"
        self.kafka.create_topic(self.name(topic), partitions, **settings)
        return self.name(topic)

    async def delete_topic(self, topic: str) -> None:
        self.kafka.delete_topic(topic)

    async def recreate_topic(self, topic: str) -> None:
        self.kafka.recreate_topic(topic)

    async def add_partitions(self, topic: str, total: int) -> None:
        """Give a topic (full name) more partitions, `total` in all."""
        self.kafka.add_partitions(topic, total)

    async def foreign(
        self, topic: str, partition: int, *records: Record, committed: bool | None = None
    ) -> None:
        """Write to a topic (full name) as another client, in a committed or aborted transaction or,
        with None, without one."""
        if committed is None:
            await self.kafka.append(topic, partition, records)
        else:
            self.kafka.transact(topic, partition, records, committed=committed)

    async def hang(self, topic: str, partition: int) -> Callable[[], Awaitable[None]]:
        """Leave a transaction open on a partition; the result ends it."""
        release = self.kafka.hang(topic, partition)

        async def end() -> None:
            release()

        return end

    async def lose(self, door: MemoryDoor) -> None:
        self.kafka.go_down()

    async def set_max_message_bytes(self, topic: str, size: int) -> None:
        self.kafka.set_message_bytes_max(topic, size)

    async def truncate(self, topic: str, partition: int, before: int) -> None:
        self.kafka.truncate(topic, partition, before=before)

    async def compact(self, topic: str, partition: int, before: int) -> None:
        """Lose the records of a compacted topic (full name) below an offset."""
        self.kafka.truncate(topic, partition, before=before)

    async def visible(self, topic: str, partition: int = 0) -> list[Record]:
        """Return the records of a topic (full name) that a `read_committed` consumer sees."""
        return self.kafka.visible(topic, partition)

    without_creating: ClassVar[dict[str, Any]] = {}
    """A door in memory always makes its topics."""

    async def write_audit(self, key: str, value: bytes | None) -> None:
        """Write to the topic of the audits."""
        await self.kafka.append(self.name("audit"), 0, [Record(key.encode(), value)])

    async def close(self) -> None:
        for door in self._doors:
            await door.close()
