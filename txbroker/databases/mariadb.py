"""`MariaDB`: MariaDB through PyMySQL."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from txbroker.databases.database import Database
from txbroker.databases.sessions import refuse_control
from txbroker.errors import ConfigurationError, needs

_STYLE = "pyformat"


class MariaDB(Database):
    """A MariaDB database, 10.6 or newer.

    Args:
        url: `mariadb://USER:PASSWORD@HOST:PORT/DATABASE`.
        create_tables: create txbroker's tables at the first use.
        options: further arguments of `pymysql.connect`, such as `unix_socket` or `ssl`.

    Attributes:
        options: all arguments of `pymysql.connect`, with the password.

    Raises:
        ConfigurationError: PyMySQL is not installed, or the URL is malformed.
    """

    def __init__(self, url: str = "", *, create_tables: bool = False, **options: Any) -> None:
        with needs("mariadb"):
            import pymysql
        given = {**_parsed(url), **options, "autocommit": True, "charset": "utf8mb4"}
        self.options = given

        # What a handler receives: the consumer ends the transaction.
        handler_connection = type(
            "HandlerConnection",
            (pymysql.connections.Connection,),
            dict.fromkeys(("commit", "rollback", "begin"), refuse_control),
        )

        super().__init__(
            lambda: handler_connection(**given),
            "mariadb",
            style=_STYLE,
            name=f"MariaDB {given.get('database', '')}",
            create_tables=create_tables,
        )


def _parsed(url: str) -> dict[str, Any]:
    """Return the arguments of `pymysql.connect` in a URL."""
    if url == "":
        return {}
    try:
        parts = urlsplit(url)
        port = parts.port
    except (ValueError, TypeError, AttributeError):
        parts, port = urlsplit(""), None
    if parts.scheme not in ("mariadb", "mysql"):
        raise ConfigurationError(
            "MariaDB: the URL is malformed: write mariadb://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    found = {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username or "") or None,
        "password": unquote(parts.password or "") or None,
        "database": unquote(parts.path.lstrip("/")) or None,
    }
    options = {
        name: int(text) if text.isdecimal() else text for name, text in parse_qsl(parts.query)
    }
    return {name: value for name, value in found.items() if value} | options
