"""The topics of groups and of audits in a `MemoryKafka`, as doors follow and write them."""

from collections.abc import Callable

from txbroker.core.records import Record
from txbroker.door.own_topics import LAYOUT_KEY
from txbroker.door.protocols import AppendUnknown
from txbroker.errors import KafkaUnavailable
from txbroker.testing.memory import MemoryKafka


class MemoryGroupStore:
    """A `txbroker.door.protocols.GroupStore` in memory."""

    def __init__(self, kafka: MemoryKafka, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._close: Callable[[], None] | None = None

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Read all groups, then keep following; `changed` gets each group's JSON or None.

        Raises:
            KafkaUnavailable: Kafka is down.
        """
        await self._kafka.reach()

        def tell(record: Record) -> None:
            if record.key not in (None, LAYOUT_KEY):
                changed(record.key.decode(errors="replace"), record.value)

        for record in self._kafka.visible(self._topic):
            tell(record)
        self._close = self._kafka.topics[self._topic].partitions[0].follow(tell)

    async def put(self, group: str, value: bytes | None) -> None:
        """Store or, with None, remove a group; returns once every follower was told.

        Raises:
            AppendRefused: the record is too large.
            KafkaUnavailable: it may or may not be stored.
        """
        try:
            await self._kafka.append(self._topic, 0, [Record(group.encode(), value)])
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None

    def close(self) -> None:
        """Stop following."""
        close, self._close = self._close, None
        if close is not None:
            close()


class MemoryAuditFeed:
    """A `AuditFeed` in memory. A topic that is missing is not waited for."""

    def __init__(self, kafka: MemoryKafka, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._close: Callable[[], None] | None = None

    def follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Tell what is there, then keep following; `changed` gets each key's JSON or None."""

        def tell(record: Record) -> None:
            if record.key is not None:
                changed(record.key.decode(errors="replace"), record.value)

        topic = self._kafka.topics.get(self._topic)
        if topic is None:
            return
        newest = {record.key: record for record in self._kafka.visible(self._topic)}
        for record in newest.values():
            tell(record)
        self._close = topic.partitions[0].follow(tell)

    def close(self) -> None:
        """Stop following."""
        close, self._close = self._close, None
        if close is not None:
            close()
