"""A database that is captured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.kit.database_servers import MariaServer, PostgresServer
from tests.relay.capture.maria_world import BINLOG, MariaWorld
from tests.relay.capture.pg_world import PgWorld


@pytest.fixture(scope="session")
def pg_url(postgres_server: PostgresServer) -> str:
    """A database that the tests empty."""
    return postgres_server.create_database()


@pytest.fixture
async def pg(postgres_server: PostgresServer, pg_url: str) -> AsyncIterator[PgWorld]:
    """A database of PostgreSQL; publication and slot are removed afterwards."""
    world = PgWorld(postgres_server, pg_url)
    yield world
    await world.close()


@pytest.fixture(scope="session")
def server() -> Iterator[MariaServer]:
    """A server with a binary log."""
    with MariaServer(**BINLOG) as running:
        yield running


@pytest.fixture
async def maria(server: MariaServer, tmp_path: Path) -> AsyncIterator[MariaWorld]:
    """A database of MariaDB; its captures are closed afterwards."""
    world = MariaWorld(server, tmp_path)
    yield world
    await world.close()
