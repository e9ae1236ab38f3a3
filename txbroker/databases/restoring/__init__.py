"""Restores what handlers change in their session, before it handles another message.

A session that handlers use has a `Restorer`, which ends their transactions and in the same round
trip restores what the session had when it was opened. A session that cannot be restored is closed.
"""

from __future__ import annotations

from typing import Any

from txbroker.databases.restoring.base import Restorer
from txbroker.databases.restoring.mariadb import MariaRestorer
from txbroker.databases.restoring.postgres import PostgresRestorer
from txbroker.databases.restoring.sqlite import SQLiteRestorer

__all__ = ["Restorer", "restorer"]


def restorer(connection: Any, driver: str) -> Restorer:
    """Return the restorer of a driver's connection.

    Args:
        driver: see `driver_of`.
    """
    if driver in ("psycopg", "psycopg2", "pg8000", "asyncpg"):
        return PostgresRestorer(connection, driver)
    if driver == "pymysql":
        return MariaRestorer(connection, driver)
    if driver == "sqlite3" or hasattr(connection, "set_authorizer"):
        return SQLiteRestorer(connection, driver)
    return Restorer(connection)
