"""What the tests of databases share: each database at each isolation level."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.databases.places import LEVELS, Place, kind_marks, place_of

PLACES = [
    pytest.param((kind, level), id=f"{kind}-{level}", marks=kind_marks(kind))
    for kind, levels in LEVELS.items()
    for level in levels
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of database at each isolation level."""
    return place_of(request, tmp_path, *request.param)


@pytest.fixture(params=[each for each in PLACES if each.marks])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each server at each isolation level."""
    return place_of(request, tmp_path, *request.param)
