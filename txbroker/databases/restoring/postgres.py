"""Restores sessions of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from txbroker.databases.restoring.base import Restorer
from txbroker.databases.steps import Query, Steps

_SETTINGS = Query(
    "SELECT name, setting FROM pg_catalog.pg_settings WHERE source = 'session' ORDER BY name"
)
_USERS = Query("SELECT current_setting('session_authorization'), current_setting('role')")
_PREPARED = "EXISTS (SELECT FROM pg_catalog.pg_prepared_statements WHERE from_sql)"
# As DISCARD ALL, which a transaction block refuses, but for the driver's prepared statements.
_RESTORE = (
    "CLOSE ALL; UNLISTEN *; SELECT {users}; RESET ALL; SELECT {settings}; "
    "DISCARD TEMP; DISCARD SEQUENCES; "
    f"SELECT {_PREPARED}, pg_catalog.pg_advisory_unlock_all()"
)


class PostgresRestorer(Restorer):
    """Restores a session of PostgreSQL with the statement that ends the transaction. One that has
    statements of a PREPARE is not clean: DEALLOCATE would cost the driver its own."""

    _restore = ""

    def __init__(self, connection: Any, driver: str) -> None:
        super().__init__(connection, driver)
        self._adapters: Any = None
        if driver == "psycopg":
            from psycopg.adapt import AdaptersMap

            self._adapters = AdaptersMap(connection.adapters)

    def opened(self) -> Steps[None]:
        """See `Restorer.opened`; settings that an engine's `connect` event made are restored."""
        settings = (yield _SETTINGS).rows
        ((user, role),) = (yield _USERS).rows
        self._restore = _RESTORE.format(
            users=_assignments((("session_authorization", user), ("role", role))),
            settings=_assignments(settings) or "1",
        )

    def ended(self, sql: str) -> Steps[bool]:
        """See `Restorer.ended`."""
        self._restore_attributes()
        if self._adapters is not None:  # a copy costs less than to compare them
            self._connection._adapters = type(self._adapters)(self._adapters)
        result = yield Query(f"{sql}; {self._restore}" if sql else self._restore)
        if not result.rows:  # of several statements asyncpg returns no row
            result = yield Query(f"SELECT {_PREPARED}")
        return not result.rows[0][0]


def _assignments(settings: Iterable[Sequence[str]]) -> str:
    return ", ".join(
        f"pg_catalog.set_config({_literal(name)}, {_literal(value)}, false)"
        for name, value in settings
    )


def _literal(text: str) -> str:
    """Return a text as SQL, without characters that a driver takes for placeholders."""
    return f"E'{''.join(map(_escape, text))}'"


def _escape(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\U{ord(letter):08x}"
