"""Syntax trees live as long as these tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.lint.package import nodes, statements, tree


@pytest.fixture(autouse=True, scope="package")
def _trees() -> Iterator[None]:
    """Collect no garbage, which trees are not: it would take most of the time."""
    gc.disable()
    yield
    for kept in (nodes, statements, tree):
        kept.cache_clear()
    gc.enable()
