"""The components of the door to a real Kafka."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import structlog

from txbroker.config.settings import Settings
from txbroker.door.own_topics import Layout, encode_layout, find_layout
from txbroker.door.protocols import (
    AppendRefused,
    AuditFeed,
    Door,
    GroupStore,
    Membership,
    PartitionDoor,
    Targets,
)
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, KafkaRefused, Opener
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.door import topics
from txbroker.kafka.door.followers import KafkaAuditFeed, KafkaGroupStore
from txbroker.kafka.door.membership import KafkaMembership
from txbroker.kafka.door.partition import KafkaPartitionDoor
from txbroker.kafka.door.repair import Repair
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.door.targets import KafkaTargets

log = structlog.wrap_logger(logging.getLogger(__name__))


class KafkaDoor(Door):
    """A `Door` on a real Kafka. Created in a running event loop.

    Raises:
        ConfigurationError: the settings contradict each other.
    """

    targets: Targets
    groups: GroupStore
    audit: AuditFeed
    membership: Membership

    def __init__(self, settings: KafkaSettings, opener: Opener = open_connection) -> None:
        settings.validate()
        self.settings = settings
        self.partitions = 0
        self._client = Client(settings, opener)
        self._shared = SharedWrites(self._client)
        self._stable = StableEnds(self._client)
        self.admin = Admin(self._client)
        self.targets = self._targets = KafkaTargets(self._client, self.admin)
        self.groups = self._groups = KafkaGroupStore(self._client, self._bytes_max)
        self.audit = self._audit = KafkaAuditFeed(self._client)
        self.membership = self._membership = KafkaMembership(self._client)
        self._own_bytes_max: dict[str, int] = {}
        self._ids: dict[str, bytes] = {}
        self._layout: Layout | None = None

    @classmethod
    def from_configuration(cls, settings: Settings) -> KafkaDoor:
        """Return the door for a proxy's configuration. Created in a running event loop.

        Raises:
            ConfigurationError: a file that it names cannot be read, or settings contradict each
                other.
        """
        return cls(KafkaSettings.from_configuration(settings))

    async def start(self) -> None:
        """Connect, create missing topics if configured, and check txbroker's own topics."""
        if self.settings.create_topics:
            await self._create_missing()
        found = await topics.find(self.admin, self.settings.own_topics)
        if self.settings.groups_topic in found:
            self._layout = await self._read_layout()
        refused = topics.contradictions(self.settings, found, self._layout)
        if refused:
            raise ConfigurationError("; ".join(refused))
        half = found[self.settings.half_topic]
        self.partitions = half.partitions
        if remark := topics.partitions_remark(self.settings, half):
            log.warning("setting without effect", setting="partitions", why=remark)
        self._membership.expect(self.partitions)
        self._own_bytes_max = {
            name: int(topic.configs.get("max.message.bytes", self.settings.message_bytes_max))
            for name, topic in found.items()
        }
        self._ids = await self.admin.topic_ids(self.settings.own_topics)
        if self._layout is None:
            self._layout = await self._remember_layout()

    async def _create_missing(self) -> None:
        await self.admin.create((await self._plan(self.settings.own_topics)).create)
        # A proxy works without the audits' topics, so it needs no right to them.
        with contextlib.suppress(KafkaRefused, ConfigurationError):
            await self.admin.create((await self._plan(self.settings.audit_topics)).create)

    async def _remember_layout(self) -> Layout | None:
        try:
            await self._groups.append(encode_layout(self.partitions))
        except AppendRefused as error:
            raise ConfigurationError(
                f"cannot write to topic {self.settings.groups_topic}: {error}"
            ) from None
        return await self._read_layout()

    async def check_topics(self) -> list[str]:
        """Return, as sentences, changes of txbroker's own topics since `start` that stop it."""
        own = self.settings.own_topics
        ids = await self.admin.topic_ids(own)
        recreated = [
            f"{name} was deleted and created again, so its records are lost: restart the "
            "proxies, then check their partitions"
            for name, id in ids.items()
            if self._ids.get(name, id) != id
        ]
        try:
            found = await topics.find(self.admin, own)
        except ConfigurationError as error:
            return [*recreated, str(error)]
        return recreated + topics.contradictions(self.settings, found, self._layout)

    async def _read_layout(self) -> Layout | None:
        reader = Reader(self._client, self.settings.groups_topic, 0, "groups/layout")
        return find_layout(await reader.read_kept(0, await reader.end()))

    async def plan(self) -> topics.Plan:
        """Return the changes that `txbroker topics apply` would make."""
        return await self._plan(self.settings.own_topics + self.settings.audit_topics)

    async def _plan(self, names: tuple[str, ...]) -> topics.Plan:
        await self._client.refresh(())
        found = await topics.find(self.admin, names)
        layout = await self._read_layout() if self.settings.groups_topic in found else None
        return topics.own_plan(self.settings, len(self._client.brokers), found, layout, names)

    async def apply(self, plan: topics.Plan) -> None:
        """Create and change topics as planned."""
        await topics.apply(self.admin, plan)

    def repair(self) -> Repair:
        """Return the tool that finds and skips records that stop partitions."""
        return Repair(self._client, self._bytes_max)

    def brokers(self) -> Sequence[tuple[str, int]]:
        """Return host and port of each broker in the last metadata; sends nothing."""
        return list(self._client.brokers.values())

    def partition(self, partition: int) -> PartitionDoor:
        """Return the door of one half partition. It writes nothing before `claim`."""
        return KafkaPartitionDoor(
            self._client,
            partition,
            self._bytes_max,
            self._targets.note,
            self._shared,
            self._stable,
        )

    def _bytes_max(self, topic: str) -> int:
        own = self._own_bytes_max.get(topic)
        return self._targets.batch_bytes_max(topic) if own is None else own

    async def close(self) -> None:
        """Close everything. Does not leave the group: see `Membership.leave`."""
        await self._membership.close()
        await self._groups.close()
        await self._audit.close()
        await self._shared.close()
        await self._client.close()
