"""`Outbox`: messages as rows of a database's transaction, which a relay delivers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from txbroker.core.records import Decision, Message
from txbroker.databases import tables
from txbroker.databases.connections import JoinedAsync, JoinedTransaction, join, join_async
from txbroker.databases.database import (
    Database,
    DatabaseUnavailable,
    check_database,
    steps_in_transaction,
    steps_in_transaction_async,
)
from txbroker.databases.dialect import POSTGRESQL, SQLITE
from txbroker.databases.outbox import rows
from txbroker.databases.outbox.blocks import block_on, block_on_async
from txbroker.databases.outbox.rows import NewRow, Prepared
from txbroker.databases.outbox.table import LOCAL_COMMIT, UNKNOWN, outbox_tables
from txbroker.databases.outbox.units import UnitRow, Units
from txbroker.databases.sessions import SessionPool
from txbroker.databases.steps import Steps
from txbroker.errors import BadRequest, ConfigurationError

_TIMEOUT_MAX_S = 1e9


class Outbox:
    """The outbox table of a database; may be used from many threads and processes.

    The rows of one database transaction become visible together. Rows of one order key, else of one
    message key, keep their order: a transaction that committed before another began comes first.

    Args:
        database: that of the business data.
        name: of its relays, if the tables are created; else it must be theirs.

    Attributes:
        tables: the set of its tables. `create_tables` of an SQLite file creates them at once, of
            other databases at the first use.

    Raises:
        ConfigurationError: it is no database; the name has other characters than letters, digits,
            `.`, `_` and `-`; or tables that exist do not fit.
    """

    def __init__(self, database: Database, *, name: str | None = None) -> None:
        check_database("Outbox", database)
        self.database = database
        self.tables = outbox_tables("" if name is None else name)
        self._dialect = database.dialect
        self._units = None if self._dialect is POSTGRESQL else Units(database)
        self._sessions = SessionPool(database.open_apart)
        # Their connections end with this object.
        weakref.finalize(self, self._sessions.close)
        if self._units is not None:
            weakref.finalize(self, self._units.close)
        if self._dialect is SQLITE and database.create_tables and database.plain:
            # The first use is in a transaction of the caller's, which has the only write lock.
            with suppress(DatabaseUnavailable):  # it has already: then the first use reports it
                database.prepare(self.tables)

    def create(self) -> None:
        """Create the tables that do not exist.

        Raises:
            ConfigurationError: no right, or tables of another version.
            DatabaseUnavailable
        """
        self.database.create(self.tables)
        self.database.prepare(self.tables)

    # --- scheme 2: in the caller's transaction -----------------------------------------------

    def add(
        self,
        connection: Any,
        *messages: Message,
        order_key: str | None = None,
        timeout_s: float | None = None,
    ) -> tuple[str, ...]:
        """Insert messages in the open transaction of a connection; return their rows' ids.

        Args:
            connection: of a DB-API driver, SQLAlchemy or Django.
            order_key: rows of equal ones keep their order; without it those of equal message keys.
            timeout_s: a message that Kafka has not taken after this time, seconds, is given up and
                becomes a MESSAGE_ERROR.

        Raises:
            BadRequest: a message cannot be delivered.
            ConfigurationError: nothing was written: no transaction is open, the connection is
                asynchronous or of another kind of database, or the tables are not ready.
            DatabaseUnavailable: the tables cannot be checked.
            Exception: the driver's: roll back and repeat the transaction.
        """
        new, timeout_ms = rows.new_rows(messages, order_key), _milliseconds(timeout_s)
        return self._insert(self._join(connection), new, LOCAL_COMMIT, timeout_ms)

    async def add_async(
        self,
        connection: Any,
        *messages: Message,
        order_key: str | None = None,
        timeout_s: float | None = None,
    ) -> tuple[str, ...]:
        """`add` on a connection whose statements are awaited."""
        new, timeout_ms = rows.new_rows(messages, order_key), _milliseconds(timeout_s)
        joined = await self._join_async(connection)
        return await self._insert_async(joined, new, LOCAL_COMMIT, timeout_ms)

    # --- scheme 1: around the caller's changes -----------------------------------------------

    @contextmanager
    def transaction(
        self,
        connection: Any,
        *messages: Message,
        order_key: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Prepared]:
        """Insert messages as UNKNOWN, execute the block, and let them be LOCAL_COMMIT, all in one
        transaction. An error in the block rolls back and is raised.

        If no transaction is open on the connection, this begins one and commits it. Else the block
        is part of that transaction, and its caller commits.

        Raises: as `add`; and
            ConfigurationError: the block has ended the transaction.
        """
        new, timeout_ms = rows.new_rows(messages, order_key), _milliseconds(timeout_s)
        self.database.ready(self.tables)
        with block_on(self._dialect, connection):
            joined = self._join(connection)
            ids = self._insert(joined, new, UNKNOWN, timeout_ms)
            yield Prepared(ids)
            _check_confirmed(joined.run(rows.confirm(self._dialect, ids)), ids)

    @asynccontextmanager
    async def transaction_async(
        self,
        connection: Any,
        *messages: Message,
        order_key: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Prepared]:
        """`transaction` on a connection whose statements are awaited."""
        new, timeout_ms = rows.new_rows(messages, order_key), _milliseconds(timeout_s)
        await self.database.ready_async(self.tables)
        async with block_on_async(self._dialect, connection):
            joined = await self._join_async(connection)
            ids = await self._insert_async(joined, new, UNKNOWN, timeout_ms)
            yield Prepared(ids)
            _check_confirmed(await joined.run(rows.confirm(self._dialect, ids)), ids)

    # --- scheme 3: prepared before, decided later --------------------------------------------

    def prepare(
        self, *messages: Message, order_key: str | None = None, timeout_s: float | None = None
    ) -> Prepared:
        """Store messages as UNKNOWN, in a separate transaction; `decide` decides them.

        The relay checks rows that stay undecided.

        Raises:
            BadRequest: a message cannot be delivered.
            ConfigurationError: the tables are not ready.
            DatabaseUnavailable: the database does not answer: the rows may be stored or not. If
                they are, the relay checks them.
        """
        new, timeout_ms = rows.new_rows(messages, order_key), _milliseconds(timeout_s)
        self.database.ready(self.tables)
        with self.database.explained(tables=self.tables), self._sessions.lend() as session:
            steps_in_transaction(self._undecided(new, timeout_ms), session)
        return _prepared(new)

    async def prepare_async(
        self, *messages: Message, order_key: str | None = None, timeout_s: float | None = None
    ) -> Prepared:
        """`prepare` for asyncio."""
        if self.database.plain:
            return await asyncio.to_thread(
                lambda: self.prepare(*messages, order_key=order_key, timeout_s=timeout_s)
            )
        new, timeout_ms = rows.new_rows(messages, order_key), _milliseconds(timeout_s)
        await self.database.ready_async(self.tables)
        with self.database.explained(tables=self.tables):
            session = await self.database.open_async()
            try:
                await steps_in_transaction_async(self._undecided(new, timeout_ms), session)
            finally:
                await session.close()
        return _prepared(new)

    def decide(
        self,
        connection: Any,
        prepared: Prepared | str,
        decision: Decision,
        messages: Sequence[Message] | None = None,
    ) -> None:
        """Commit or roll back prepared messages, in the open transaction of a connection. The same
        decision again does nothing.

        Args:
            prepared: what `prepare` returned, or `str` of it.
            messages: replace the prepared ones: the same number, for the same topics, in order.

        Raises:
            TooLate: a check or an operator decided otherwise before: roll the transaction back.
            BadRequest: the decision is no COMMIT and no ROLLBACK, or the messages do not fit.
            ConfigurationError, DatabaseUnavailable, Exception: as `add`.
        """
        of_rows = _to_decide(prepared, decision)
        joined = self._join(connection)
        last = self._uncommitted(joined.driver)
        joined.run(self._decide(joined.driver, of_rows, decision, messages, last))

    async def decide_async(
        self,
        connection: Any,
        prepared: Prepared | str,
        decision: Decision,
        messages: Sequence[Message] | None = None,
    ) -> None:
        """`decide` on a connection whose statements are awaited."""
        of_rows = _to_decide(prepared, decision)
        joined = await self._join_async(connection)
        last = await self._uncommitted_async(joined.driver)
        await joined.run(self._decide(joined.driver, of_rows, decision, messages, last))

    # --- steps -------------------------------------------------------------------------------

    def _join(self, connection: Any) -> JoinedTransaction:
        joined = join(self.database, connection, self.tables)
        if self._dialect is SQLITE and not self._knows(joined.driver):
            joined.run(tables.check_file(self.database.file))
        return joined

    async def _join_async(self, connection: Any) -> JoinedAsync:
        joined = await join_async(self.database, connection, self.tables)
        if self._dialect is SQLITE and not self._knows(joined.driver):
            await joined.run(tables.check_file(self.database.file))
        return joined

    def _knows(self, driver: Any) -> bool:
        return self._units is not None and self._units.known(driver)

    def _uncommitted(self, driver: Any) -> UnitRow | None:
        """Return the first row of the unit of a connection's transaction, None if others see it."""
        if self._units is None:
            return None
        with self.database.explained(tables=self.tables):
            return self._units.uncommitted(driver)

    async def _uncommitted_async(self, driver: Any) -> UnitRow | None:
        """`_uncommitted` without blocking."""
        if self._units is None or not self._units.known(driver):
            return None
        if self.database.plain:
            return await asyncio.to_thread(self._uncommitted, driver)
        with self.database.explained(tables=self.tables):
            return await self._units.uncommitted_async(driver)

    def _insert(
        self, joined: JoinedTransaction, new: Sequence[NewRow], state: str, timeout_ms: int | None
    ) -> tuple[str, ...]:
        last = self._uncommitted(joined.driver)
        return joined.run(self._inserted(joined.driver, new, last, state, timeout_ms))

    async def _insert_async(
        self, joined: JoinedAsync, new: Sequence[NewRow], state: str, timeout_ms: int | None
    ) -> tuple[str, ...]:
        last = await self._uncommitted_async(joined.driver)
        return await joined.run(self._inserted(joined.driver, new, last, state, timeout_ms))

    def _inserted(
        self,
        driver: Any,
        new: Sequence[NewRow],
        last: UnitRow | None,
        state: str,
        timeout_ms: int | None,
    ) -> Steps[tuple[str, ...]]:
        """Insert rows of a connection's transaction; return their ids.

        Args:
            last: the first row of its unit, unless others see it.
        """
        given = (yield from last.open_unit(self._dialect)) if last is not None else ""
        unit = yield from rows.insert(
            self._dialect, new, unit=given, state=state, timeout_ms=timeout_ms
        )
        if self._units is not None and unit != given:
            self._units.note(driver, UnitRow(new[0].id, unit))
        return tuple([row.id for row in new])

    def _undecided(self, new: Sequence[NewRow], timeout_ms: int | None) -> Steps[str]:
        """Insert prepared rows, which are checked together."""
        return rows.insert(self._dialect, new, state=UNKNOWN, timeout_ms=timeout_ms)

    def _decide(
        self,
        driver: Any,
        prepared: Prepared,
        decision: Decision,
        messages: Sequence[Message] | None,
        last: UnitRow | None,
    ) -> Steps[None]:
        given = (yield from last.open_unit(self._dialect)) if last is not None else ""
        unit = yield from rows.decide(self._dialect, prepared, decision, messages, unit=given)
        if self._units is not None and unit not in ("", given):
            self._units.note(driver, UnitRow(prepared.ids[0], unit))


def _prepared(new: Sequence[NewRow]) -> Prepared:
    return Prepared(tuple(row.id for row in new))


def _to_decide(prepared: Prepared | str, decision: Decision) -> Prepared:
    if decision not in (Decision.COMMIT, Decision.ROLLBACK):
        raise BadRequest(f"decide with Decision.COMMIT or Decision.ROLLBACK, not {decision!r}")
    return Prepared.of(prepared)


def _milliseconds(timeout_s: float | None) -> int | None:
    """Return a timeout in milliseconds.

    Raises:
        BadRequest: it is not positive, or longer than thirty years.
    """
    if timeout_s is None:
        return None
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= _TIMEOUT_MAX_S:
        raise BadRequest(f"timeout_s is above 0 and at most {_TIMEOUT_MAX_S:g}, not {timeout_s!r}")
    return max(1, round(timeout_s * 1000))


def _check_confirmed(count: int, ids: Sequence[str]) -> None:
    """Raise ConfigurationError if a block has ended its transaction."""
    if count != len(ids):
        raise ConfigurationError(
            "the block of outbox.transaction has committed or rolled back: leave that to "
            "outbox.transaction, and raise an exception to roll back"
        )
