"""Databases: result and position, or decision, in one transaction. The only package with SQL."""

from txbroker.databases.database import Database, DatabaseUnavailable
from txbroker.databases.dialect import Dialect
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.postgres import Postgres
from txbroker.databases.sessions import TransactionControlled
from txbroker.databases.sqlite import SQLite

__all__ = [
    "Database",
    "DatabaseUnavailable",
    "Dialect",
    "MariaDB",
    "Postgres",
    "SQLite",
    "TransactionControlled",
]
