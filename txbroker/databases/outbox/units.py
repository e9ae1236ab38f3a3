"""The units of transactions where SQL does not name a transaction: SQLite and MariaDB.

All rows of one database transaction have one unit, also those of several `add` calls. The first of
them shows whether a driver's connection is still in that transaction: another connection does not
see it, and the connection does.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

from txbroker.databases.database import Database
from txbroker.databases.dialect import SQLITE, Dialect
from txbroker.databases.outbox.table import OUTBOX
from txbroker.databases.sessions import SessionPool
from txbroker.databases.steps import Query, Steps, one

_CONNECTIONS_MAX = 10_000


class UnitRow(NamedTuple):
    """The first row of a unit. A rollback to a savepoint that undoes it undoes the others, too."""

    id: str
    unit: str

    def look(self, newest: str = "") -> Query:
        """Select it.

        Args:
            newest: see `Dialect`.
        """
        return Query(f"SELECT 1 FROM {OUTBOX} WHERE id = ? AND unit = ?{newest}", self)

    def open_unit(self, dialect: Dialect) -> Steps[str]:
        """Return the unit, "" if its transaction is over; in the caller's transaction."""
        # A snapshot may have a row that was delivered and deleted since.
        return self.unit if (yield self.look(dialect.newest)).rows else ""


class Units:
    """The last units of connections; may be used from many threads.

    A new connection may get the place of one that is gone: its transaction, too, does not see the
    row, or others do.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: OrderedDict[int, UnitRow] = OrderedDict()
        self._guard = Lock()
        self._looks = SessionPool(lambda: database.open_apart(0.0))

    def known(self, driver: Any) -> bool:
        """Return whether a driver's connection has written rows before."""
        return id(driver) in self._last

    def uncommitted(self, driver: Any) -> UnitRow | None:
        """Return the first row of a connection's last unit, None if others see it.

        Raises:
            Exception: MariaDB's driver's; the order of units is that of rows there.
        """
        last = self._last.get(id(driver))
        if last is None:
            return None
        try:
            with self._looks.lend() as session:
                committed = bool(session.execute(last.look()).rows)
        except Exception:
            if self._database.dialect is not SQLITE:
                raise
            # Locked. Two transactions with one unit become visible whole; two units in one
            # transaction might not.
            committed = False
        return None if committed else last

    async def uncommitted_async(self, driver: Any) -> UnitRow | None:
        """`uncommitted` for asyncio, where all drivers are asynchronous."""
        last = self._last.get(id(driver))
        if last is None:
            return None
        try:
            committed = bool((await self._database.apart_async(one(last.look()), 0.0)).rows)
        except Exception:
            if self._database.dialect is not SQLITE:
                raise
            committed = False
        return None if committed else last

    def note(self, driver: Any, first: UnitRow) -> None:
        """Note a new unit of a connection."""
        with self._guard:
            self._last[id(driver)] = first
            self._last.move_to_end(id(driver))
            if len(self._last) > _CONNECTIONS_MAX:
                self._last.popitem(last=False)

    def close(self) -> None:
        """Close the connections that look."""
        self._looks.close()
