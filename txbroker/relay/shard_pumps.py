"""Pumps of an outbox's shards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from txbroker.databases.outbox.leases import Leases, RelayIdentity, rows_of_shard
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.writing import PositionRecord
from txbroker.relay.outbox_source import OutboxSource, Retries, decode_position, name_taken
from txbroker.relay.pump import Pump, PumpEvents
from txbroker.relay.sessions import DatabaseThread
from txbroker.relay.settings import RelaySettings
from txbroker.relay.sink import RelaySink
from txbroker.relay.wakeups import wakeups

if TYPE_CHECKING:
    from txbroker.relay.outbox import Outbox


class ShardPumps:
    """Opens the shards of an outbox, each with its own connection to the database."""

    def __init__(
        self,
        outbox: Outbox,
        named: RelayIdentity,
        leases: Leases,
        door: ConsumingDoor,
        settings: RelaySettings,
        events: PumpEvents,
    ) -> None:
        self._outbox = outbox
        self._named = named
        self._leases = leases
        self._door = door
        self._settings = settings
        self._events = events

    async def open(self, shard: int) -> tuple[Pump, Callable[[], Awaitable[None]]]:
        """Return the pump of a shard, and what closes it.

        Raises:
            ConfigurationError: the position in Kafka is of another outbox.
        """
        sink, source = await self._parts(shard)
        return Pump(self._key(shard), source, sink, self._events), source.close

    async def settle(self, shard: int) -> None:
        """Fence the shard's last owner, and mark what it has delivered."""
        sink, source = await self._parts(shard)
        try:
            await source.resume(await sink.claim())
        finally:
            await sink.abort()
            await source.close()

    def _key(self, shard: int) -> str:
        return f"{self._named.relay}/{shard}"

    async def _parts(self, shard: int) -> tuple[RelaySink, OutboxSource]:
        named, settings, database = self._named, self._settings, self._outbox.database
        topic = settings.positions
        writer = self._door.writer(
            f"{topic}.{named.relay}.{shard}",
            PositionRecord(topic, self._key(shard)),
            take=settings.take_position,
        )
        stored = await writer.look()
        # Before the claim, which would fence the other relay.
        if stored is not None and (other := decode_position(stored).identity) != named.identity:
            raise name_taken(other, named.identity)
        thread = DatabaseThread(database, self._outbox.tables)
        source = OutboxSource(
            named,
            WaitingRows(
                database.dialect, rows_of_shard(shard, named.shards), keep=settings.keep_s > 0
            ),
            thread,
            wakeups(thread, database),
            Retries(settings.retries_max),
            lambda: self._leases.owned(shard),
            self._events.failed,
        )
        return RelaySink(self._door, writer, settings.topic_prefix), source
