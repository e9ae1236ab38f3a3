"""The door to a real Kafka, put together."""

from __future__ import annotations

from aiokafka.conn import create_conn

from txbroker.door import Door, GroupStore, Membership, PartitionDoor, Targets
from txbroker.errors import ConfigurationError
from txbroker.kafka import topics
from txbroker.kafka.admin import Admin
from txbroker.kafka.client import Client, Opener
from txbroker.kafka.groups import KafkaGroupStore
from txbroker.kafka.membership import KafkaMembership
from txbroker.kafka.partition import KafkaPartitionDoor
from txbroker.kafka.settings import KafkaSettings
from txbroker.kafka.targets import KafkaTargets


class KafkaDoor(Door):
    """A `txbroker.door.Door` on a real Kafka. Made inside a running event loop.

    `opener` opens connections in place of the client library, for tests that break them.

    Raises:
        ConfigurationError: the settings contradict themselves.
    """

    targets: Targets
    groups: GroupStore
    membership: Membership

    def __init__(self, settings: KafkaSettings, opener: Opener = create_conn) -> None:
        settings.validate()
        self.settings = settings
        self.partitions = 0
        self._client = Client(settings, opener)
        self.admin = Admin(self._client)
        self.targets = self._targets = KafkaTargets(self._client, self.admin)
        self.groups = self._groups = KafkaGroupStore(self._client, self._bytes_max)
        self.membership = self._membership = KafkaMembership(self._client)
        self._own_bytes_max: dict[str, int] = {}

    async def start(self) -> None:
        """Connect, check or create txbroker's own topics, refuse settings that cannot work.

        Raises:
            KafkaUnavailable: Kafka does not answer.
            ConfigurationError: the topics' settings contradict the configuration.
        """
        if self.settings.create_topics:
            missing = await self.plan()
            await self.admin.create(missing.create)
        found = await topics.find(self.admin, self.settings.own_topics)
        refused = topics.contradictions(self.settings, found)
        if refused:
            raise ConfigurationError("; ".join(refused))
        self.partitions = found[self.settings.half_topic].partitions
        self._membership.expect(self.partitions)
        self._own_bytes_max = {
            name: int(topic.configs.get("max.message.bytes", self.settings.message_bytes_max))
            for name, topic in found.items()
        }

    async def plan(self) -> topics.Plan:
        """Return what `txbroker topics apply` would do.

        Raises:
            ConfigurationError, KafkaUnavailable
        """
        await self._client.refresh(())
        return await topics.make_plan(self.admin, self.settings, self._client.brokers)

    async def apply(self, plan: topics.Plan) -> None:
        """Create and change topics as planned.

        Raises:
            KafkaUnavailable: Kafka does not answer, or refuses.
        """
        await topics.apply(self.admin, plan)

    def partition(self, partition: int) -> PartitionDoor:
        """Return the door of one half partition; nothing is written before its `claim`."""
        return KafkaPartitionDoor(self._client, partition, self._bytes_max, self._targets.note)

    def _bytes_max(self, topic: str) -> int:
        own = self._own_bytes_max.get(topic)
        return self._targets.batch_bytes_max(topic) if own is None else own

    async def close(self) -> None:
        """Let go of everything. Does not leave the group: see `Membership.leave`."""
        await self._membership.close()
        await self._groups.close()
        await self._client.close()
