"""What the tests of relays share: a shop on each kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.databases.places import LEVELS, Place, sqlite_place
from tests.relay.shops import emptied
from tests.relay.world import Shop
from txbroker.embedded import EmbeddedKafka
from txbroker.relay.outbox import Outbox


def place_of(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Place:
    """Return a new database of a kind."""
    if kind == "sqlite":
        return sqlite_place(tmp_path, "wal")
    name = "postgres_server" if kind == "postgresql" else "mariadb_server"
    return Place(request.getfixturevalue(name).create_database())


@pytest.fixture(params=list(LEVELS))
def shop(request: pytest.FixtureRequest, tmp_path: Path, kafka: EmbeddedKafka) -> Shop:
    """A shop on each kind of database."""
    return Shop(place_of(request, tmp_path, request.param), kafka.bootstrap)


@pytest.fixture
def sqlite_shop(request: pytest.FixtureRequest, tmp_path: Path, kafka: EmbeddedKafka) -> Shop:
    """A shop on SQLite."""
    return Shop(place_of(request, tmp_path, "sqlite"), kafka.bootstrap)


@pytest.fixture
def outbox(kind: Place) -> Iterator[Outbox]:
    """The outbox of each kind of database, without rows."""
    with emptied(kind) as outbox:
        yield outbox
