"""A database that is captured."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.database_servers import PostgresServer
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
