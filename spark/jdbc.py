"""Tables of databases as Spark reads them, by JDBC."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from txbroker.databases.database import Database
from txbroker.databases.dialect import POSTGRESQL, SQLITE
from txbroker.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FETCH_ROWS = 10_000
"""Rows that a database returns at a time: the drivers' default is ten, or all of them."""
_PACKAGES = {
    "postgresql": "org.postgresql:postgresql:42.7.7",
    "mariadb": "org.mariadb.jdbc:mariadb-java-client:3.5.3",
}


def driver_package(database: Database) -> str:
    """Return the Maven coordinates of a database's JDBC driver, "" if it needs none."""
    return "" if database.dialect is SQLITE else _PACKAGES[database.dialect.name]


class JdbcTable(Struct, frozen=True):
    """A table.

    Attributes:
        url: in the form of the driver.
        options: of the connection; may hold a password. Empty ones are left out.
    """

    url: str
    table: str
    options: Mapping[str, str]

    @classmethod
    def of(cls, database: Database, table: str) -> JdbcTable:
        """Return a table of a PostgreSQL or MariaDB database.

        Raises:
            ConfigurationError: it is only reached through a Unix socket.
        """
        session = database.open_apart()
        try:
            of_kind = _postgresql if database.dialect is POSTGRESQL else _mariadb
            url, options = of_kind(session.connection)
        finally:
            session.close()
        return cls(url, table, options)

    def rows(self, spark: SparkSession, predicates: Sequence[str] = ("1 = 1",)) -> DataFrame:
        """Return the rows, read by one task for each condition in SQL."""
        options = {
            "driver": driver_class(spark, self.url),
            "fetchsize": str(_FETCH_ROWS),
            **{name: value for name, value in self.options.items() if value},
        }
        reader = spark.read.options(**options)
        return reader.jdbc(self.url, self.table, predicates=list(predicates))


def _postgresql(connection: Any) -> tuple[str, Mapping[str, str]]:
    info = connection.info
    if info.host.startswith(("/", "@")):
        raise ConfigurationError(
            f"Java does not reach PostgreSQL by the Unix socket in {info.host}: name host and port "
            "in the URL"
        )
    options = {
        "user": info.user,
        "password": info.password,
        "options": info.options,
        "sslmode": info.get_parameters().get("sslmode", ""),
    }
    return f"jdbc:postgresql://{info.host}:{info.port}/{info.dbname}", options


def _mariadb(connection: Any) -> tuple[str, Mapping[str, str]]:
    if connection.unix_socket:
        raise ConfigurationError(
            "Java does not reach MariaDB by a Unix socket: name host and port in the URL"
        )
    # Spark quotes names as MySQL does for this scheme only; in quotes of others they are texts.
    place = f"{connection.host}:{connection.port}/{connection.db.decode()}"
    options = {"user": _text(connection.user), "password": _text(connection.password)}
    return f"jdbc:mysql://{place}?permitMysqlScheme", options


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def ranges(column: str, bounds: Sequence[str]) -> list[str]:
    """Return SQL conditions of which every row meets exactly one, in any collation.

    Args:
        bounds: growing values, in SQL.
    """
    if not bounds:
        return ["1 = 1"]
    between = [
        f"{column} >= {low} AND {column} < {high}" for low, high in itertools.pairwise(bounds)
    ]
    return [f"{column} < {bounds[0]} OR {column} IS NULL", *between, f"{column} >= {bounds[-1]}"]


def quoted(url: str, name: str) -> str:
    """Return a column's name as SQL of a database has it, by Spark's dialect for its URL."""
    quote = "`" if url.lower().startswith(("jdbc:mysql:", "jdbc:databricks:")) else '"'
    return f"{quote}{name.replace(quote, quote * 2)}{quote}"


def driver_class(spark: SparkSession, url: str) -> str:
    """Return the class of the driver for a URL.

    Raises:
        ConfigurationError: Spark has none.
    """
    from txbroker.spark.launch.driver import driver_of

    driver = driver_of(spark)
    name = driver.jdbc_driver(url)
    if not name:
        kind = ":".join(url.split(":")[:2])
        package = _PACKAGES.get(url.split(":")[1], "GROUP:ARTIFACT:VERSION")
        raise ConfigurationError(
            f"Spark has no JDBC driver for {kind}: load its package: {driver.loading(package)}"
        )
    return name
