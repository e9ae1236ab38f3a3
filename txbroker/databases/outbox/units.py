"""The units of transactions where SQL does not name a transaction: SQLite and MariaDB.

All rows of one database transaction have one unit, also those of several `add` calls. Whether a
driver's connection is still in the transaction of its last row shows from another connection: if
that sees the row, the transaction has committed. Else the unit is used again; a transaction that
was rolled back has no rows, so the next one may have its unit.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

from txbroker.databases.database import Database
from txbroker.databases.outbox.table import OUTBOX
from txbroker.databases.sessions import SessionPool
from txbroker.databases.steps import Query, one

_CONNECTIONS_MAX = 10_000


class Units:
    """The last rows of connections; may be used from many threads.

    A new connection may get the place of one that is gone: then, too, a unit is used again only if
    its row is not visible.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._guard = Lock()
        self._looks = SessionPool(lambda: database.open_apart(0.0))

    def known(self, driver: Any) -> bool:
        """Return whether a driver's connection has written rows before."""
        return id(driver) in self._last

    def open_unit(self, driver: Any) -> str:
        """Return the unit of a connection's open transaction, "" if it has none yet."""
        last = self._last.get(id(driver))
        if last is None:
            return ""
        try:
            with self._looks.lend() as session:
                committed = bool(session.execute(_look(*last)).rows)
        except Exception:
            committed = False  # locked, or the connection is lost
        return "" if committed else last[1]

    async def open_unit_async(self, driver: Any) -> str:
        """`open_unit` for asyncio, where all drivers are asynchronous."""
        last = self._last.get(id(driver))
        if last is None:
            return ""
        try:
            committed = bool((await self._database.apart_async(one(_look(*last)), 0.0)).rows)
        except Exception:
            committed = False
        return "" if committed else last[1]

    def note(self, driver: Any, row: str, unit: str) -> None:
        """Note the last row of a connection."""
        with self._guard:
            self._last[id(driver)] = row, unit
            self._last.move_to_end(id(driver))
            if len(self._last) > _CONNECTIONS_MAX:
                self._last.popitem(last=False)

    def close(self) -> None:
        """Close the connections that look."""
        self._looks.close()


def _look(row: str, unit: str) -> Query:
    return Query(f"SELECT 1 FROM {OUTBOX} WHERE id = ? AND unit = ?", (row, unit))
