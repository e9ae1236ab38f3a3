"""The fixtures of the HTTP tests: a running server for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.http_api import Api, running_api


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """A server with the default settings, and a secret that groups may name."""
    async with running_api(secret_env_allow=("SECRET",)) as running:
        yield running
