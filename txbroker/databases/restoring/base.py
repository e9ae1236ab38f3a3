"""Restores what a handler changes in the attributes of a driver's connection."""

from __future__ import annotations

from typing import Any

from txbroker.databases.steps import Query, Steps

_ATTRIBUTES = {
    "sqlite3": ("row_factory", "text_factory", "isolation_level"),
    "aiosqlite": ("row_factory", "text_factory", "isolation_level"),
    "psycopg": ("row_factory", "cursor_factory", "server_cursor_factory", "prepare_threshold"),
    "psycopg2": ("cursor_factory",),
    "pymysql": (
        *("cursorclass", "db", "charset", "collation", "encoding", "autocommit_mode"),
        *("use_unicode", "encoders", "decoders"),
    ),
}
_CONTAINERS = {
    "psycopg": ("_notice_handlers", "_notify_handlers"),
    "pymysql": ("encoders", "decoders"),
}
"""Attributes whose content changes."""


class Restorer:
    """Ends transactions of a connection whose driver has no way to restore it: it is used once.

    Args:
        connection: the driver's.

    Attributes:
        ended_by_handler: the handler has ended its transaction, perhaps to begin another one.
    """

    ended_by_handler = False

    def __init__(self, connection: Any, driver: str = "") -> None:
        self._connection = connection
        self._attributes = {
            name: getattr(connection, name)
            for name in _ATTRIBUTES.get(driver, ())
            if hasattr(connection, name)
        }
        containers = [getattr(connection, name, {}) for name in _CONTAINERS.get(driver, ())]
        self._containers = [(each, each.copy()) for each in containers]

    def opened(self) -> Steps[None]:
        """Take note of the state that is to be restored."""
        yield from ()

    def begun(self) -> None:
        """A handler is called next."""

    def ending(self) -> None:
        """The handler has returned."""

    def ended(self, sql: str) -> Steps[bool]:
        """End the transaction, and return whether the session is as it was opened.

        Args:
            sql: COMMIT or ROLLBACK; "" if no transaction is open.

        Raises: the driver's error of COMMIT or ROLLBACK.
        """
        if sql:
            yield Query(sql)
        return False

    def _restore_attributes(self) -> None:
        for name, value in self._attributes.items():
            if getattr(self._connection, name) is not value:
                setattr(self._connection, name, value)
        for found, before in self._containers:
            if found != before:
                found.clear()
                (found.update if isinstance(found, dict) else found.extend)(before)
