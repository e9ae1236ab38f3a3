"""The door to a real Kafka for consumers, and for those who operate them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from txbroker.config.access import KafkaAccess
from txbroker.core.records import Cause, Partition, Record
from txbroker.door.consuming import (
    LATEST,
    ConsumingDoor,
    Deliver,
    Fetcher,
    FetchFailed,
    GroupDescription,
    GroupMember,
    MemberListener,
    TopicIdentity,
    TopicSpec,
)
from txbroker.door.writing import Copy, PositionRecord
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, KafkaRefused, LoginRefused, Opener, is_retriable
from txbroker.kafka.client.fetcher import KafkaFetcher
from txbroker.kafka.client.groups import Committed, committed_offsets, describe_group, list_groups
from txbroker.kafka.client.reader import READ_UNCOMMITTED, Reader, offsets_at
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.transaction import TransactionalWriter, WriterTraits, group_writer
from txbroker.kafka.door.group_member import KafkaGroupMember, MemberTiming
from txbroker.kafka.door.log import append_records
from txbroker.kafka.door.targets import OwnerSearch

_SETTLED_POLL_S = 0.1


class KafkaConsumingDoor(ConsumingDoor):
    """A `ConsumingDoor` on a real Kafka. Created in a running event loop.

    Raises:
        ConfigurationError: the settings contradict each other.
    """

    def __init__(self, settings: KafkaSettings, opener: Opener | None = None) -> None:
        settings.validate()
        self._client = Client(settings) if opener is None else Client(settings, opener)
        self._admin = Admin(self._client)
        self._owners = OwnerSearch(self._client, self._admin)

    @classmethod
    def from_access(cls, access: KafkaAccess, client_id: str = "txbroker") -> KafkaConsumingDoor:
        """Return the door for an address with its login, see `load_kafka_access`. Created in a
        running event loop.

        Args:
            client_id: name of the client in the brokers' logs and quotas.

        Raises:
            ConfigurationError: a file that it names cannot be read, or has the wrong content.
        """
        return cls(KafkaSettings.from_access(access, client_id))

    async def start(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: a broker refuses the login or the TLS handshake.
            KafkaUnavailable: no broker can be reached.
        """
        try:
            await self._client.refresh(())
        except LoginRefused as error:
            raise ConfigurationError(str(error)) from None

    async def close(self) -> None:
        """Close all connections. Members and fetchers have to be closed before."""
        await self._client.close()

    # --- topics ------------------------------------------------------------------------------

    async def topics(self, names: Collection[str] | None = None) -> dict[str, TopicIdentity]:
        """Return the facts of topics that exist; None: of all that may be read, but Kafka's own.

        Raises:
            ConfigurationError: a topic of `names` may not be read.
        """
        return await self._admin.identities(names) if names is None or names else {}

    async def target(self, topic: str, prefix: str) -> int | Cause:
        """Return a topic's number of partitions, see `ConsumingDoor.target`."""
        return await self._owners.target(topic, prefix)

    async def offsets(
        self, partitions: Collection[Partition], time_ms: int
    ) -> dict[Partition, int]:
        """Return offsets by time, see `ConsumingDoor.offsets`."""
        return await offsets_at(self._client, partitions, time_ms, "offsets")

    async def settled_end(self, partition: Partition) -> int:
        """Wait for open transactions, see `ConsumingDoor.settled_end`."""
        places = [partition]
        end = await offsets_at(self._client, places, LATEST, "offsets", READ_UNCOMMITTED)
        while True:
            if (await self.offsets(places, LATEST))[partition] >= end[partition]:
                return end[partition]
            await asyncio.sleep(_SETTLED_POLL_S)

    async def create(self, topics: Collection[TopicSpec]) -> None:
        """Create topics that do not exist.

        Raises:
            ConfigurationError: Kafka refuses; the message holds its reason.
        """
        try:
            await self._admin.create(list(topics))
        except KafkaRefused as error:
            if is_retriable(error):
                raise
            raise ConfigurationError(str(error)) from None

    # --- records -----------------------------------------------------------------------------

    def fetcher(self, deliver: Deliver, failed: FetchFailed) -> Fetcher:
        """Return a fetcher with separate connections."""
        return KafkaFetcher(self._client, deliver, failed)

    async def read(self, partition: Partition, start: int, end: int) -> list[Record]:
        """Return committed records between offsets, see `ConsumingDoor.read`."""
        topic, number = partition
        reader = Reader(self._client, topic, number, f"read/{topic}-{number}", append_time=False)
        end = min(end, (await self.offsets([partition], LATEST))[partition])
        return await reader.read_kept(start, end)

    async def append(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        """Append records outside of a transaction.

        Raises:
            RecordsRefused: a broker refused a batch; earlier ones are stored.
            KafkaUnavailable: a batch may or may not be stored.
        """
        await append_records(self._client, topic, partition, records)

    async def store(self, group: str, copies: Sequence[Copy]) -> None:
        """Append records in one Kafka transaction, see `ConsumingDoor.store`.

        Raises:
            Refused: a broker refused one; none is stored.
            KafkaUnavailable: the result is unknown.
        """
        writer = group_writer(self._client, group)
        await writer.claim()
        await writer.write(copies)
        try:
            await writer.commit()
        except BaseException:
            await writer.abort()  # readers of the topics wait for it
            raise

    def writer(
        self, transactional_id: str, position: PositionRecord, *, take: bool = False
    ) -> TransactionalWriter:
        """Return a writer, see `ConsumingDoor.writer`."""
        channel, traits = f"relay/{transactional_id}", WriterTraits("relay", take=take)
        return TransactionalWriter(self._client, transactional_id, channel, traits, position)

    # --- groups ------------------------------------------------------------------------------

    def member(
        self,
        group: str,
        instance: str | None,
        listener: MemberListener,
        *,
        exact: bool = False,
        **timing: Any,
    ) -> GroupMember:
        """Return a member that has not started, see `ConsumingDoor.member`."""
        times = MemberTiming(**timing)
        return KafkaGroupMember(self._client, group, instance, listener, times, exact=exact)

    async def groups(self) -> list[str]:
        """Return the names of all consumer groups."""
        return await list_groups(self._client)

    async def describe(self, group: str) -> GroupDescription:
        """Return a group as its coordinator describes it."""
        return await describe_group(self._client, group)

    async def committed(self, group: str) -> Committed:
        """Return all committed offsets of a group."""
        return await committed_offsets(self._client, group)
