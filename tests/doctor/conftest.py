"""What the doctor's tests share."""

from __future__ import annotations

import pytest

from tests.kit.doctor import World


@pytest.fixture
def world() -> World:
    """An installation that is well."""
    return World()
