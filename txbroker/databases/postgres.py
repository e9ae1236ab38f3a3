"""`Postgres`: PostgreSQL through psycopg, for plain functions and coroutines."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from txbroker.databases.database import IDLE_S, LOCK_WAIT_S, Database
from txbroker.databases.dialect import POSTGRESQL
from txbroker.databases.restoring import Restorer, restorer
from txbroker.databases.sessions import in_transaction, refuse_control, tuple_cursor
from txbroker.databases.steps import Query, Result, run_async, with_placeholders
from txbroker.errors import ConfigurationError, needs

if TYPE_CHECKING:
    import psycopg

_STYLE = "pyformat"
_CONNECT_S = 10
_OF_PSYCOPG = ("prepare_threshold", "context", "row_factory", "cursor_factory")
"""Arguments of `psycopg.connect` that libpq does not know."""


def _psycopg() -> Any:
    with needs("postgres"):
        import psycopg
    return psycopg


@cache
def _handler_connection(name: str) -> Any:
    """Return the class of the connections that handlers receive: the consumer ends the
    transaction.

    Args:
        name: of psycopg's class.
    """
    methods = {"commit": refuse_control, "rollback": refuse_control}
    return type("HandlerConnection", (getattr(_psycopg(), name),), methods)


class Postgres(Database):
    """A PostgreSQL database.

    Args:
        conninfo: as libpq takes it: `dbname=shop host=…` or `postgresql://USER@HOST/shop`.
        create_tables: create txbroker's tables at the first use.
        options: further arguments of `psycopg.connect`, such as `password`.

    Raises:
        ConfigurationError: psycopg is not installed, or `conninfo` is malformed.
    """

    asynchronous = True

    def __init__(self, conninfo: str = "", *, create_tables: bool = False, **options: Any) -> None:
        module = _psycopg()
        of_libpq = {name: value for name, value in options.items() if name not in _OF_PSYCOPG}
        try:
            place = module.conninfo.conninfo_to_dict(
                module.conninfo.make_conninfo(conninfo, **of_libpq)
            )
        except (module.Error, TypeError, AttributeError):  # its text may hold the password
            raise ConfigurationError(
                "Postgres: conninfo is malformed, or an option is none of psycopg.connect: write "
                "dbname=DATABASE host=HOST or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
            ) from None
        self._conninfo = conninfo
        self._options = options

        def connect() -> psycopg.Connection[Any]:
            connection: psycopg.Connection[Any] = _handler_connection("Connection").connect(
                conninfo, autocommit=True, **options
            )
            return connection

        super().__init__(
            connect,
            "postgresql",
            style=_STYLE,
            name=f"PostgreSQL {place.get('dbname', '')}",
            create_tables=create_tables,
        )

    async def open_async(
        self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S
    ) -> PsycopgAsyncSession:
        """Open a session for asyncio, see `open`."""
        connection = await _handler_connection("AsyncConnection").connect(
            self._conninfo, autocommit=True, **self._options
        )
        session = PsycopgAsyncSession(connection)
        try:
            for sql in self.dialect.session_limits(lock_wait_s, idle_s):
                await session.execute(Query(sql))
        except BaseException:
            await session.close()
            raise
        return session

    async def open_replication(self) -> psycopg.AsyncConnection[Any]:
        """Open a connection for logical replication.

        Raises: the driver's error.
        """
        given = {name: value for name, value in self._options.items() if name not in _OF_PSYCOPG}
        options = {"connect_timeout": _CONNECT_S, **given, "replication": "database"}
        connection: psycopg.AsyncConnection[Any] = await _psycopg().AsyncConnection.connect(
            self._conninfo, autocommit=True, **options
        )
        return connection


class PsycopgAsyncSession:
    """An `AsyncSession` on a `psycopg.AsyncConnection`."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection
        self.reusable = True
        self._restorer: Restorer | None = None

    @property
    def in_transaction(self) -> bool:
        return bool(in_transaction(self.connection))

    async def lend(self) -> None:
        """Handlers will use the session, see `PlainSession.lend`."""
        self._restorer = restorer(self.connection, "psycopg")
        await run_async(self._restorer.opened(), self.execute)

    async def execute(self, query: Query) -> Result:
        """Execute a statement."""
        return await execute_async(self.connection, query)

    async def begin(self) -> None:
        """Begin a transaction."""
        self.reusable = self._restorer is None
        begin = POSTGRESQL.begin if self.reusable else POSTGRESQL.begin_marked
        await self.execute(Query(begin))

    async def commit(self) -> None:
        """Commit it."""
        await self._end("COMMIT")

    async def rollback(self) -> None:
        """Roll it back, if one is open."""
        if self.in_transaction:
            await self._end("ROLLBACK")
        elif not self.reusable:
            await self._end("")

    async def _end(self, sql: str) -> None:
        if self._restorer is None:
            await self.execute(Query(sql))
        else:
            self.reusable = await run_async(self._restorer.ended(sql), self.execute)

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()


async def execute_async(connection: psycopg.AsyncConnection[Any], query: Query) -> Result:
    """Execute a statement on an asynchronous connection."""
    async with tuple_cursor(connection) as cursor:
        await cursor.execute(with_placeholders(query.sql, _STYLE), tuple(query.values))
        while cursor.nextset():
            pass  # of several statements, the last one's result counts
        rows = await cursor.fetchall() if cursor.description else ()
        return Result(cursor.rowcount, rows)
