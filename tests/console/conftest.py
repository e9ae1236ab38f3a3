"""The fixtures of the console's tests: a whole proxy on a Kafka in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.console.console_world import TOKEN, Reader, reader_of
from tests.kit.cluster import Proxies
from tests.kit.memory import MemoryHarness
from tests.kit.secret_files import secret_file
from tests.kit.service import FakeEndpoint, Service


@pytest.fixture(scope="session")
async def desk() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serve() as running:
        yield running


@asynccontextmanager
async def running(desk: FakeEndpoint, **settings: Any) -> AsyncIterator[Service]:
    world = MemoryHarness()
    service = Service(world, desk, **settings)
    await service.start()
    yield service
    await service.stop()
    await world.close()


@pytest.fixture
async def service(desk: FakeEndpoint) -> AsyncIterator[Service]:
    async with running(desk) as service:
        yield service


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return secret_file(tmp_path / "token", TOKEN)


@pytest.fixture
async def guarded(desk: FakeEndpoint, token_file: Path) -> AsyncIterator[Service]:
    async with running(desk, token_file=token_file) as service:
        yield service


@pytest.fixture
async def proxies(desk: FakeEndpoint) -> AsyncIterator[Proxies]:
    world = MemoryHarness()
    proxies = Proxies(world, desk)
    yield proxies
    await proxies.close()
    await world.close()


@pytest.fixture
async def reader(service: Service) -> AsyncIterator[Reader]:
    async with reader_of(service.proxy.url) as client:
        yield client
