"""`SQLite`: a database in a file."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from txbroker.databases.database import Database
from txbroker.databases.sessions import refuse_control
from txbroker.databases.tables import CONSUMING, TableSet
from txbroker.errors import ConfigurationError

_DEFINITIONS = (
    *("create_function", "create_aggregate", "create_window_function", "create_collation"),
    *("set_authorizer", "set_progress_handler", "enable_load_extension", "load_extension"),
)


def _watch(name: str) -> Any:
    def method(self: HandlerConnection, *arguments: Any, **options: Any) -> Any:
        self.changed = True
        return getattr(super(HandlerConnection, self), name)(*arguments, **options)

    return method


class HandlerConnection(sqlite3.Connection):
    """The connection that a handler receives: the consumer ends the transaction.

    Attributes:
        changed: the handler has defined a function or the like, which stays.
    """

    commit = rollback = executescript = __enter__ = refuse_control
    changed = False


for _name in _DEFINITIONS:
    if hasattr(sqlite3.Connection, _name):
        setattr(HandlerConnection, _name, _watch(_name))


class SQLite(Database):
    """An SQLite file.

    Args:
        file: its path.
        create_tables: create txbroker's tables at the first use.

    Raises:
        ConfigurationError: the database is in memory.
    """

    writers_max = 1

    def __init__(self, file: str | Path, *, create_tables: bool = False) -> None:
        if (
            not isinstance(file, str | Path)
            or not str(file)
            or str(file).startswith((":memory:", "file:"))
        ):
            raise ConfigurationError(
                f"SQLite({file!r}): txbroker needs a file, which several connections open: "
                "give a path"
            )
        self._path = os.path.abspath(file)
        self._may_create = create_tables

        def connect() -> sqlite3.Connection:
            if not (self._may_create or os.path.exists(self._path)):
                raise ConfigurationError(
                    f"SQLite {file} does not exist: correct its path, or create it with "
                    "create_tables=True, `txbroker databases create` or `txbroker outbox create`"
                )
            return sqlite3.connect(
                self._path,
                isolation_level=None,
                check_same_thread=False,
                factory=HandlerConnection,
            )

        super().__init__(
            connect, "sqlite", style="qmark", name=f"SQLite {file}", create_tables=create_tables
        )

    def create(self, tables: TableSet = CONSUMING) -> None:
        """Create the tables that do not exist, and the file; see `Database.create`."""
        self._may_create = True
        super().create(tables)
