"""`from_django`: a database of Django's settings."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

from txbroker.databases.database import IDLE_S, LOCK_WAIT_S, Database, DatabaseUnavailable
from txbroker.databases.dialect import SQLITE, Dialect
from txbroker.databases.restoring import Restorer, restorer
from txbroker.databases.sessions import (
    PlainSession,
    driver_of,
    execute,
    handler_ended,
    in_transaction,
)
from txbroker.databases.steps import Query, Result, run

_STYLE = "format"


def from_django(alias: str = "default") -> Database:
    """Return a database of Django's settings; handlers receive `connections[alias]` of their
    thread, within `transaction.atomic()`.

    Args:
        alias: its name in DATABASES.

    Raises:
        ConfigurationError: it is of another kind than SQLite, PostgreSQL and MariaDB.
        django.db.ConnectionDoesNotExist, django.core.exceptions.ImproperlyConfigured
    """
    return DjangoDatabase(alias)


class DjangoDatabase(Database):
    """A database of Django's settings."""

    hint = "add 'txbroker.databases.django' to INSTALLED_APPS and run `manage.py migrate`"

    def __init__(self, alias: str) -> None:
        from django.db import connections

        vendor = connections[alias].vendor
        super().__init__(
            self._connect_apart,
            vendor,
            style="qmark" if vendor == "sqlite" else _STYLE,
            name=f"Django's database {alias!r}",
        )
        self._alias = alias
        self.writers_max = 1 if self.dialect is SQLITE else self.writers_max

    def _connect_apart(self) -> Any:
        """Return a connection of the driver: one of Django's belongs to a thread."""
        from django.db import connections

        connection = connections.create_connection(self._alias)
        connection.ensure_connection()
        return connection.connection

    def open(self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S) -> PlainSession:
        """Open a session on the thread's connection, see `Database.open`."""
        from django.db import connections

        connection = connections[self._alias]
        connection.close_if_unusable_or_obsolete()
        connection.ensure_connection()
        session = DjangoSession(connection, self.dialect)
        for sql in self.dialect.session_limits(lock_wait_s, idle_s):
            session.execute(Query(sql))
        return session

    def open_apart(self, lock_wait_s: float = LOCK_WAIT_S) -> PlainSession:
        """Open a session on a connection that is not the thread's."""
        return super().open(lock_wait_s)


class DjangoSession:
    """A `PlainSession` on a thread's connection."""

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self.connection = connection
        self.dialect = dialect
        self.reusable = True
        self._driver = connection.connection
        self._atomic: AbstractContextManager[Any] | None = None
        self._restorer: Restorer | None = None

    @property
    def in_transaction(self) -> bool:
        """True while the transaction that was begun is open."""
        if self._atomic is None or handler_ended(self._restorer):
            return False
        return in_transaction(self._driver) is not False

    def lend(self) -> None:
        """Handlers will use the session, see `PlainSession.lend`."""
        self._restorer = restorer(self._driver, driver_of(self._driver))
        run(self._restorer.opened(), self.execute)

    def execute(self, query: Query) -> Result:
        """Execute a statement."""
        return execute(self.connection, query, _STYLE)

    def begin(self) -> None:
        """Begin a transaction that may write."""
        from django.db import transaction

        self.reusable = self._restorer is None
        if self.dialect is SQLITE:
            self.connection.transaction_mode = "IMMEDIATE"
        atomic = transaction.atomic(using=self.connection.alias, durable=True)
        atomic.__enter__()
        self._atomic = atomic
        if self.dialect.release or not in_transaction(self._driver):
            self.execute(Query(self.dialect.begin_by_statement))
        if self._restorer is not None:
            self._restorer.begun()

    def commit(self) -> None:
        """Commit it."""
        assert self._atomic is not None
        # Of a transaction with a caught error, Django would roll back instead, without a word.
        self.connection.validate_no_broken_transaction()
        if self._restorer is not None:
            self._restorer.ending()
            if self.dialect.release:
                self.execute(Query(self.dialect.release))
        atomic, self._atomic = self._atomic, None
        atomic.__exit__(None, None, None)
        self._restore()

    def rollback(self) -> None:
        """Roll it back, if one is open.

        Raises:
            DatabaseUnavailable: Django has opened another connection, without the session's limits.
        """
        atomic, self._atomic = self._atomic, None
        if self._restorer is not None:
            self._restorer.ending()
        if atomic is not None:
            self.connection.set_rollback(True)
            atomic.__exit__(None, None, None)
        if self.connection.connection is not self._driver:
            raise DatabaseUnavailable("the connection of Django's session was lost")
        self._restore()

    def _restore(self) -> None:
        """Restore what a handler changed: Django commits every statement outside of `atomic`."""
        if self._restorer is not None and not self.reusable:
            with suppress(Exception):
                self.reusable = run(self._restorer.ended(""), self.execute)

    def close(self) -> None:
        """Close the connection; Django opens another one when the thread needs it.

        May be called from another thread or an event loop, where Django's own `close` refuses.
        """
        driver, self.connection.connection = self.connection.connection, None
        if driver is not None:
            driver.close()
