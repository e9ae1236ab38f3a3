"""What the tests of databases share: one database of each server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.databases.places import LEVELS, Place, sqlite_place, with_tables
from tests.kit.database_servers import MariaServer, PostgresServer


@pytest.fixture(scope="session")
def postgres_place(postgres_server: PostgresServer) -> Place:
    """A database of PostgreSQL."""
    url = postgres_server.create_database()
    return with_tables(Place(url))


@pytest.fixture(scope="session")
def mariadb_place(mariadb_server: MariaServer) -> Place:
    """A database of MariaDB."""
    url = mariadb_server.create_database()
    return with_tables(Place(url))


def _place(request: pytest.FixtureRequest, tmp_path: Path, kind: str, level: str = "") -> Place:
    if kind == "sqlite":
        return with_tables(sqlite_place(tmp_path, level or "delete"))
    name = "postgres_place" if kind == "postgresql" else "mariadb_place"
    server: Place = request.getfixturevalue(name)
    return Place(server.url, level)


def _marks(kind: str) -> list[pytest.MarkDecorator]:
    return [] if kind == "sqlite" else [pytest.mark.full]


PLACES = [
    pytest.param((kind, level), id=f"{kind}-{level}", marks=_marks(kind))
    for kind, levels in LEVELS.items()
    for level in levels
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of database at each isolation level."""
    return _place(request, tmp_path, *request.param)


@pytest.fixture(params=[each for each in PLACES if each.marks])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each server at each isolation level."""
    return _place(request, tmp_path, *request.param)


@pytest.fixture(params=[pytest.param(kind, marks=_marks(kind)) for kind in LEVELS])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of database."""
    return _place(request, tmp_path, request.param)
