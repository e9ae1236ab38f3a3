"""A database of a private PostgreSQL that is captured, without Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psycopg

from tests.kit.database_servers import PostgresServer
from tests.kit.until import unique, until
from tests.relay.capture.deliveries import execute, read
from txbroker.core.encoding import ID_HEADER
from txbroker.core.records import Message
from txbroker.databases.postgres import Postgres
from txbroker.relay.capture import postgres_setup
from txbroker.relay.capture.changes import (
    CapturedTable,
    Change,
    Emitted,
    Operation,
    TransactionInfo,
    Unshown,
)
from txbroker.relay.capture.envelope import identified
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.postgres import PostgresSource
from txbroker.relay.capture.setup import StepState, refusals

_REPLICATION = "ALTER ROLE txbroker REPLICATION"
ALL: frozenset[Operation] = frozenset({"insert", "update", "delete", "truncate"})


def captured(
    table: str, *, before: bool = False, operations: Any = ALL, accept: Sequence[Unshown] = ()
) -> CapturedTable:
    """Return a table of schema public with key `id`."""
    return CapturedTable("public", table, frozenset(operations), ("id",), before, frozenset(accept))


@dataclass
class Recorder:
    """A mapping whose messages hold changes as JSON."""

    name: str
    tables: Sequence[CapturedTable]
    emitted: bool = True

    def messages(
        self, transaction: TransactionInfo, number: int, change: Change | Emitted
    ) -> Sequence[Message]:
        """Return one message."""
        topic = change.table if isinstance(change, Change) else "emitted"
        value = msgspec.json.encode(change)
        return [
            Message(topic, value=value, headers=((ID_HEADER, identified(transaction, number)),))
        ]


@dataclass
class PgWorld:
    """A database that has only the tables `orders (id, item)` and, not captured, `other`."""

    server: PostgresServer
    url: str
    tables: Sequence[CapturedTable] = (captured("orders"),)
    mapping: Recorder = field(init=False)
    sources: list[PostgresSource] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mapping = Recorder(unique("shop"), self.tables)
        database = self.url.rpartition("/")[2]
        self.admin(
            _REPLICATION,
            f"ALTER DATABASE {database} OWNER TO txbroker",
            f"ALTER DATABASE {database} RESET ALL",
            "DROP SCHEMA public CASCADE",
            "CREATE SCHEMA public AUTHORIZATION txbroker",
        )
        self.execute("CREATE TABLE orders (id int PRIMARY KEY, item text)")
        self.execute("CREATE TABLE other (id int)")

    @property
    def slot(self) -> str:
        """The name of slot and publication."""
        return pgfacts.name_of(self.mapping)

    @property
    def database(self) -> Postgres:
        return Postgres(self.url)

    def execute(self, *statements: str) -> Any:
        """Execute statements, each its own transaction; return the rows of the last."""
        return execute(psycopg.connect(self.url, autocommit=True), statements)

    def admin(self, *statements: str) -> Any:
        """Execute statements as the administrator, in this database."""
        url = self.url.replace("//txbroker@", "//postgres@")
        return execute(psycopg.connect(url, autocommit=True), statements)

    async def apply(self) -> None:
        """Create publication and slot."""
        refused = refusals(await postgres_setup.apply(self.mapping, self.database))
        assert not refused, refused

    async def source(self, position: bytes | None = None, **options: Any) -> PostgresSource:
        """Return a source that has resumed."""
        source = PostgresSource(self.mapping, self.database, **options)
        self.sources.append(source)
        await source.resume(position)
        return source

    async def started(self, **options: Any) -> PostgresSource:
        """Apply; return a source that has delivered its first position."""
        await self.apply()
        source = await self.source(**options)
        assert (await read(source, empty=True)).values == []
        return source

    async def close(self) -> None:
        """Close the sources, and remove publication and slot."""
        for source in self.sources:
            await source.close()
        self.server.start()
        self.admin(_REPLICATION)
        await until(self._removed)

    async def _removed(self) -> bool:
        steps = await postgres_setup.remove(self.mapping, self.database)
        return {step.state for step in steps} == {StepState.DONE}


async def take(source: PostgresSource) -> list[Any]:
    """Read the next delivery, and return what its messages hold."""
    return (await read(source)).values


def changes(values: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Return operation and key of changes, with the item after."""
    return [
        (
            value["operation"],
            (value["after"] or value["key"])["id"],
            (value["after"] or {}).get("item"),
        )
        for value in values
    ]
