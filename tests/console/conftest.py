"""The fixtures of the console's tests: a whole proxy on a Kafka in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.console.console_world import TOKEN, Reader, reader_of
from tests.kit.memory import MemoryHarness
from tests.kit.secret_files import secret_file
from tests.kit.service import FakeEndpoint, Service


@pytest.fixture(scope="session")
async def desk() -> AsyncIterator[FakeEndpoint]:
    """The endpoints of all groups."""
    async with FakeEndpoint().serve() as running:
        yield running


@pytest.fixture
async def service(desk: FakeEndpoint) -> AsyncIterator[Service]:
    """A running proxy of the test's own."""
    world = MemoryHarness()
    running = Service(world, desk)
    await running.start()
    yield running
    await running.stop()
    await world.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A file with the token."""
    return secret_file(tmp_path / "token", TOKEN)


@pytest.fixture
async def guarded(desk: FakeEndpoint, token_file: Path) -> AsyncIterator[Service]:
    """A running proxy that requires the token."""
    world = MemoryHarness()
    running = Service(world, desk, token_file=token_file)
    await running.start()
    yield running
    await running.stop()
    await world.close()


@pytest.fixture
async def reader(service: Service) -> AsyncIterator[Reader]:
    """A client of the pages of `service`, without scripts."""
    async with reader_of(service.proxy.url) as client:
        yield client
