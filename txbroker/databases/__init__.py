"""Databases: result and position, or decision, in one transaction. The only package with SQL."""

from txbroker.core.consuming.copies import message_id
from txbroker.databases.barrier import (
    AlreadyRecorded,
    Barrier,
    MariaDBBarrier,
    PostgresBarrier,
    SqliteBarrier,
    TooLate,
)
from txbroker.databases.database import Database, DatabaseUnavailable
from txbroker.databases.django.database import from_django
from txbroker.databases.inbox import Inbox
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.postgres import Postgres
from txbroker.databases.sessions import TransactionControlled
from txbroker.databases.sqlalchemy import from_sqlalchemy
from txbroker.databases.sqlite import SQLite
from txbroker.databases.urls import from_url

__all__ = [
    "AlreadyRecorded",
    "Barrier",
    "Database",
    "DatabaseUnavailable",
    "Inbox",
    "MariaDB",
    "MariaDBBarrier",
    "Postgres",
    "PostgresBarrier",
    "SQLite",
    "SqliteBarrier",
    "TooLate",
    "TransactionControlled",
    "from_django",
    "from_sqlalchemy",
    "from_url",
    "message_id",
]
