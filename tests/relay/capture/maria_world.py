"""A database of a private MariaDB that is captured, without Kafka."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql

from tests.kit.database_servers import USER, MariaServer
from tests.kit.until import unique
from tests.relay.capture.deliveries import execute
from txbroker.databases.mariadb import MariaDB
from txbroker.relay.capture.mariadb import MariadbSource
from txbroker.relay.capture.plan import Capture, open_capture

BINLOG: dict[str, str | int] = {
    "log_bin": "binlog",
    "server_id": 1,
    "binlog_format": "ROW",
    "binlog_row_metadata": "FULL",
}
"""Settings of a server that can be captured."""
ALL = '["insert", "update", "delete", "truncate"]'


@dataclass
class MariaWorld:
    """One database, with the tables `orders (id, item)` and, not captured, `other`."""

    server: MariaServer
    folder: Path
    mapping: str = f'[[tables]]\ntable = "orders"\ntopic = "o"\nbefore = true\noperations = {ALL}\n'
    name: str = field(default_factory=lambda: unique("shop"))
    sources: list[MariadbSource] = field(default_factory=list)

    def __post_init__(self) -> None:
        url = self.server.create_database()
        self.url = f"{url}?ssl_disabled=1"  # a context of OpenSSL takes 40 ms
        self.database = url.rpartition("/")[2]
        self.admin(f"GRANT REPLICATION SLAVE ON *.* TO `{USER}`@`127.0.0.1`")
        self.execute("CREATE TABLE orders (id INT PRIMARY KEY, item TEXT)")
        self.execute("CREATE TABLE other (id INT)")

    @property
    def file(self) -> Path:
        """The mapping file."""
        file = self.folder / f"{self.name}.toml"
        file.write_text(f'name = "{self.name}"\ndatabase = "{self.url}"\n{self.mapping}')
        return file

    @property
    def capture(self) -> Capture:
        """The capture of the mapping file."""
        return open_capture(str(self.file))

    def connect(self, user: str = USER) -> pymysql.Connection:
        """Open a connection to the database, in autocommit mode."""
        options = {**MariaDB(self.url).options, "autocommit": True}
        if user != USER:
            options |= {"user": user, "password": ""}
        return pymysql.connect(**options)

    def execute(self, *statements: str) -> Any:
        """Execute statements on one connection; return the rows of the last."""
        return execute(self.connect(), statements)

    def admin(self, *statements: str) -> Any:
        """Execute statements as the administrator, in this database."""
        return execute(self.connect("root"), statements)

    async def source(self, position: bytes | None = None, **options: Any) -> MariadbSource:
        """Return a source that has resumed."""
        source = await self.capture.source(**options)
        assert isinstance(source, MariadbSource)
        self.sources.append(source)
        await source.resume(position)
        return source

    async def started(self) -> MariadbSource:
        """Apply, and return a source that begins there."""
        await self.capture.apply()
        return await self.source()

    async def close(self) -> None:
        """Close the sources, and remove what `apply` created."""
        for source in self.sources:
            await source.close()
        self.server.start()
        await self.capture.remove()
