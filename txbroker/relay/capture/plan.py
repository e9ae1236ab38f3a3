"""`Capture`: a mapping file with its database: what it needs there, and where it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

from msgspec import Struct
from msgspec.json import decode

from txbroker.databases.database import Database
from txbroker.databases.steps import Query, one
from txbroker.databases.urls import from_url
from txbroker.errors import needs
from txbroker.relay.capture.conversion import Conversion
from txbroker.relay.capture.mapping import TableMappings, read
from txbroker.relay.capture.setup import CaptureSetup, Step
from txbroker.relay.source import DeliverySource

_LEFT: dict[str, str] = {
    "postgresql": "the position in Kafka; the role and wal_level of the server",
    "mariadb": "the position in Kafka; the settings of the server, and its binary log",
    "sqlite": "the tables and rows of the outbox, which its relay still delivers",
}
"""What `remove` leaves, by the kind of database."""


class CaptureSource(DeliverySource, Protocol):
    """A source of changes.

    Attributes:
        conversion: also counts what the source leaves out.
    """

    conversion: Conversion

    async def lag_bytes(self) -> int:
        """Return how much the database holds for it, about.

        Raises:
            DatabaseUnavailable
        """


class Capture(Struct, frozen=True):
    """A capture that is not running.

    Attributes:
        left: what `remove` leaves, for people.
    """

    mapping: TableMappings
    database: Database
    setup: CaptureSetup[Any]
    left: str

    async def plan(self) -> list[Step]:
        """Return what `apply` would do; see `CaptureSetup`."""
        return await self.setup.plan(await self.keyed(), self.database)

    async def apply(self) -> list[Step]:
        """Prepare the database; see `CaptureSetup`."""
        return await self.setup.apply(await self.keyed(), self.database)

    async def remove(self) -> list[Step]:
        """Remove what `apply` created; see `CaptureSetup`."""
        return await self.setup.remove(self.mapping, self.database)

    async def keyed(self) -> TableMappings:
        """Return the mapping with the primary keys of its tables.

        Raises:
            ConfigurationError: a table does not exist, or has no key.
            DatabaseUnavailable
        """
        return self.mapping.with_keys(await self.setup.keys(self.mapping, self.database))

    @property
    def is_outbox(self) -> bool:
        """Whether triggers write to an outbox, whose relay delivers."""
        return self.database.dialect.name == "sqlite"

    async def source(
        self, *, on_gap: Literal["stop", "skip"] = "stop", skip: Collection[str] = ()
    ) -> CaptureSource:
        """Return the source of a capture that is no outbox.

        Args:
            on_gap: "skip": go on where changes were lost.
            skip: changes that are left out.

        Raises:
            ConfigurationError: the mapping does not fit the database, or options do not.
        """
        mapping, database = await self.keyed(), self.database
        if database.dialect.name == "postgresql":
            from txbroker.databases.postgres import Postgres
            from txbroker.relay.capture.postgres import PostgresSource

            assert isinstance(database, Postgres)
            return PostgresSource(mapping, database, on_gap=on_gap, skip=skip)
        from txbroker.databases.mariadb import MariaDB
        from txbroker.relay.capture.mariadb import MariadbSource

        assert isinstance(database, MariaDB)
        return MariadbSource(mapping, database, on_gap=on_gap, skip=skip)

    async def end(self) -> Callable[[bytes], bool]:
        """Return what checks whether a position includes all that is committed now."""
        if self.database.dialect.name == "postgresql":
            from txbroker.relay.capture.pg.pgoutput import parse_lsn

            query = "SELECT pg_current_wal_flush_lsn()::text"
            lsn = parse_lsn(await self._value(query))
            return lambda position: parse_lsn(decode(position)["lsn"]) >= lsn
        from txbroker.relay.capture.maria.binlog import includes

        gtids = await self._value("SELECT @@global.gtid_binlog_pos")
        return lambda position: includes(position, gtids)

    async def _value(self, sql: str) -> str:
        found = await self.database.ask(one(Query(sql)))
        return str(found.rows[0][0])


def open_capture(file: str) -> Capture:
    """Return the capture of a mapping file.

    Raises:
        ConfigurationError: the file is invalid, or the database's driver is not installed.
    """
    mapping = read(file)
    database = from_url(mapping.database)
    name = database.dialect.name
    setup: Any
    with needs("relay"):
        if name == "postgresql":
            from txbroker.relay.capture import postgres_setup as setup
        elif name == "mariadb":
            from txbroker.relay.capture import mariadb_setup as setup
        else:
            from txbroker.relay.capture import sqlite as setup
    return Capture(mapping, database, setup, _LEFT[name])
