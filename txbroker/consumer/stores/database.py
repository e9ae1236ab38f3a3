"""`InDatabase`: the result of a handler and the position of its message in one transaction."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from txbroker.consumer.rounds import StoreTraits
from txbroker.consumer.stores.connections import Connections
from txbroker.consumer.stores.results import DatabaseResults
from txbroker.consumer.stores.stored import METADATA_MAX, StoredPositions
from txbroker.core.consuming.copies import GroupTopics, read_copy
from txbroker.core.consuming.position import StoredOffset, decode_metadata, encode_metadata
from txbroker.core.records import Cause, Partition
from txbroker.databases.database import Database, check_database
from txbroker.databases.dialect import Fault
from txbroker.databases.kept import DEAD, RETRY, SET_ASIDE, UNPUBLISHED, Kept, KeptTable
from txbroker.databases.positions import PositionTable
from txbroker.databases.steps import Steps
from txbroker.door.writing import Copy, Refused
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError

CONNECTIONS_MAX = 4


class InDatabase:
    """Keeps positions, failed messages and the results of handlers in one database.

    The consumer begins a transaction, calls the handler with its connection, stores the position
    and commits.

    Args:
        database: such as `SQLite`, `Postgres`, `MariaDB`, `from_sqlalchemy(engine)`.
        connections_max: transactions of handlers at the same time, at most.
        dead_letter_topic: a topic that receives dead letters, too, at least once.

    Raises:
        ConfigurationError: `database` is none.
    """

    traits = StoreTraits(exact=True, repeatable=True, metadata_max=METADATA_MAX)

    def __init__(
        self,
        database: Database,
        *,
        connections_max: int = CONNECTIONS_MAX,
        dead_letter_topic: str | None = None,
    ) -> None:
        check_database("InDatabase", database)
        if type(connections_max) is not int or connections_max < 1:
            raise ConfigurationError(
                f"connections_max is {connections_max!r}: it is a whole number of at least 1"
            )
        if not isinstance(dead_letter_topic, str | None):
            raise ConfigurationError(
                f"dead_letter_topic is {dead_letter_topic!r}: it is the name of a topic"
            )
        self.database = database
        self.dead_letter_topic = dead_letter_topic
        self._connections_max = connections_max

    async def open(self, group: str, topics: GroupTopics, session_s: float) -> OpenDatabase:
        """Check the tables, and connect.

        Raises:
            ConfigurationError: a table is missing, or may not be used.
            DatabaseUnavailable
        """
        await self.database.prepare_async()
        connections = Connections(self.database, self._connections_max, session_s)
        return OpenDatabase(connections, group, topics, publish=bool(self.dead_letter_topic))


class OpenDatabase:
    """An `InDatabase` in use by one consumer: its `Store`.

    Args:
        publish: dead letters also go to a topic.

    Attributes:
        kept: the statements for failed messages.
        results: stores the results of handlers.
    """

    def __init__(
        self, connections: Connections, group: str, topics: GroupTopics, *, publish: bool
    ) -> None:
        self.connections = connections
        database = connections.database
        self.kept = KeptTable(database.dialect, group)
        self._positions = PositionTable(database.dialect, group)
        dead = UNPUBLISHED if publish else DEAD
        self._states = {topics.retry: RETRY, topics.aside: SET_ASIDE, topics.dead: dead}
        self._stored = StoredPositions()
        self.results = DatabaseResults(connections, self._positions, self.kept, self._stored)

    async def close(self) -> None:
        """Close the connections."""
        await self.connections.close()

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Take partitions over, and return their positions; see `Store.load`."""
        now_ms = round(time.time() * 1000)
        claimed = await self.connections.transaction(
            lambda: self._positions.claim(partitions, now_ms)
        )
        self._stored.claim({place: each.rows for place, each in claimed.items()})
        return {
            place: StoredOffset(
                each.next, encode_metadata(max(0, each.next), each.metadata, METADATA_MAX)[0]
            )
            for place, each in claimed.items()
        }

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> Collection[Partition]:
        """Store positions and failed messages, see `Store.commit`."""
        first = self._stored.claimed.intersection(offsets)
        rows = {place: self._stored.replaced(place, offsets[place]) for place in offsets}
        kept: dict[Partition, list[tuple[int, Kept]]] = {}
        for index, copy in enumerate(copies):
            each = self._kept(copy)
            kept.setdefault(each.failed.source[:2], []).append((index, each))

        changed = [
            place
            for place in sorted(offsets)
            if rows[place] or place in kept or not self._stored.has(place, offsets[place])
        ]
        if not changed:
            return ()

        def steps(*, in_ascii: bool = False) -> Steps[list[Partition]]:
            fenced = []
            for place in changed:
                low, text = offsets[place]
                metadata = decode_metadata(low, text)
                assert metadata is not None
                position = (low, metadata)
                saved = yield from self._positions.save(
                    place, position, rows[place], lower=place in first
                )
                if not saved:
                    fenced.append(place)
                for index, each in kept.get(place, ()) if saved else ():
                    try:
                        yield from self.kept.keep(each, in_ascii=in_ascii)
                    except Exception as error:
                        if database.dialect.fault(error) is not Fault.OTHER:
                            raise
                        why = f"{database.name}: {safe_repr(error)}"
                        raise Refused([index], Cause("too_large", why, *place)) from error
            return fenced

        database = self.connections.database
        try:
            try:
                fenced = await self.connections.transaction(steps)
            except Refused:  # for its encoding, or for its size
                fenced = await self.connections.transaction(lambda: steps(in_ascii=True))
        except BaseException:
            self._stored.put_back(rows)
            raise
        self._stored.confirm(first)
        return fenced

    def _kept(self, copy: Copy) -> Kept:
        found = read_copy(copy.record)
        assert found is not None
        record, failed = found
        return Kept(self._states[copy.topic], failed, record)
