"""The topics of groups and of audits in a `MemoryKafka`, as doors follow and write them."""

from collections.abc import Callable, Iterable

from txbroker.core.records import Record
from txbroker.door.own_topics import LAYOUT_KEY
from txbroker.door.protocols import AppendUnknown
from txbroker.errors import KafkaUnavailable
from txbroker.testing.memory import MemoryKafka

Changed = Callable[[str, bytes | None], None]
"""Gets a key's JSON, or None for a removed one."""


class _Follower:
    """Follows the only partition of a topic."""

    def __init__(self, kafka: MemoryKafka, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._close: Callable[[], None] | None = None

    def _follow(self, records: Iterable[Record], changed: Changed) -> None:
        def follower(record: Record) -> None:
            if record.key not in (None, LAYOUT_KEY):
                changed(record.key.decode(errors="replace"), record.value)

        for record in records:
            follower(record)
        self._close = self._kafka.topics[self._topic].partitions[0].follow(follower)

    def close(self) -> None:
        """Stop following."""
        close, self._close = self._close, None
        if close is not None:
            close()


class MemoryGroupStore(_Follower):
    """A `txbroker.door.protocols.GroupStore` in memory."""

    async def load(self, changed: Changed) -> None:
        """Read all groups, then keep following."""
        await self._kafka.reach()
        self._follow(self._kafka.visible(self._topic), changed)

    async def put(self, group: str, value: bytes | None) -> None:
        """Store a group, or remove it with None; returns after every follower was called."""
        try:
            await self._kafka.append(self._topic, 0, [Record(group.encode(), value)])
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None


class MemoryAuditFeed(_Follower):
    """A `txbroker.door.protocols.AuditFeed` in memory. Does not wait for a missing topic."""

    def follow(self, changed: Changed) -> None:
        """Report each key's newest record, then keep following."""
        if self._topic in self._kafka.topics:
            newest = {record.key: record for record in self._kafka.visible(self._topic)}
            self._follow(newest.values(), changed)
