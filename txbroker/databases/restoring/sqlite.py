"""Restores connections of SQLite."""

from __future__ import annotations

import sqlite3
from inspect import isawaitable

from txbroker.databases.restoring.base import Restorer
from txbroker.databases.steps import Query, Steps

_CHANGES = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_CREATE_TEMP_INDEX,
    sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
}
_READING = (
    *("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"),
    *("foreign_key_list", "foreign_key_check", "integrity_check", "quick_check"),
)
"""Pragmas whose argument is no new value."""


class SQLiteRestorer(Restorer):
    """Notes what a handler's statements change, as SQLite reports when it compiles them. A
    connection that has attached files, temporary tables or other pragmas is not clean."""

    _changed = False
    _watches = False

    def opened(self) -> Steps[None]:
        """See `Restorer.opened`."""
        yield from ()
        done = self._connection.set_authorizer(self._authorize)
        if isawaitable(done):  # aiosqlite's, in a session of SQLAlchemy
            from sqlalchemy.util import await_only

            await_only(done)
        if hasattr(self._connection, "changed"):
            self._connection.changed = False

    def _authorize(self, action: int, first: str | None, second: str | None, *_: object) -> int:
        if self._watches:
            if action == sqlite3.SQLITE_TRANSACTION:
                self.ended_by_handler = True
            elif action == sqlite3.SQLITE_PRAGMA:
                self._changed |= second is not None and first not in _READING
            elif action in _CHANGES:
                self._changed = True
        return sqlite3.SQLITE_OK

    def begun(self) -> None:
        """See `Restorer.begun`."""
        self.ended_by_handler = False
        self._watches = True

    def ending(self) -> None:
        """See `Restorer.ending`."""
        self._watches = False

    def ended(self, sql: str) -> Steps[bool]:
        """See `Restorer.ended`."""
        self._watches = False
        if sql:
            # The driver keeps compiled statements by their text: a handler's is compiled.
            yield Query(f"{sql} -- of the consumer")
        self._restore_attributes()
        # A compiled COMMIT of the handler is kept, too, and would not be reported again.
        changed = self._changed or getattr(self._connection, "changed", False)
        return not (changed or self.ended_by_handler)
