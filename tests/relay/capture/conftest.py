"""A database that is captured."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.database_servers import PostgresServer
from tests.relay.capture.pg_world import PgWorld


@pytest.fixture
async def pg(postgres_server: PostgresServer) -> AsyncIterator[PgWorld]:
    """A database of PostgreSQL; publication and slot are removed afterwards."""
    world = PgWorld(postgres_server)
    yield world
    await world.close()
