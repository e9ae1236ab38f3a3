"""Databases by URL."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from txbroker.databases.database import Database
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.postgres import Postgres
from txbroker.databases.sqlite import SQLite
from txbroker.errors import ConfigurationError

FORMS = "sqlite:///FILE, postgresql://USER@HOST/DATABASE or mariadb://USER@HOST/DATABASE"


def from_url(url: str, *, create_tables: bool = False) -> Database:
    """Return the database of a URL: `sqlite:///FILE` (with four slashes an absolute path),
    `postgresql://USER:PASSWORD@HOST:PORT/DATABASE` or `mariadb://` likewise.

    Args:
        create_tables: create txbroker's tables at the first use.

    Raises:
        ConfigurationError: the URL is malformed, or its driver is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgresql", "postgres") and separator:
        return Postgres(url, create_tables=create_tables)
    if scheme in ("mariadb", "mysql") and separator:
        return MariaDB(url, create_tables=create_tables)
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return SQLite(unquote(urlsplit(url).path[1:]), create_tables=create_tables)
    # The URL may hold a password.
    raise ConfigurationError(f"the URL of a database has one of the forms {FORMS}: correct it")
