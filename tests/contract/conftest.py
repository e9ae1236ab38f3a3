"""The harnesses of the contract suite: Kafka in memory and a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.kit.cluster import Proxies
from tests.kit.kafka import KafkaHarness
from tests.kit.memory import MemoryHarness
from tests.kit.service import Client, FakeEndpoint, HttpClient, SdkClient, Service
from tests.kit.until import unique
from txbroker.door.protocols import Door


def _kafka(request: pytest.FixtureRequest) -> KafkaHarness:
    return KafkaHarness(request.getfixturevalue("kafka").bootstrap)


def _memory(request: pytest.FixtureRequest) -> MemoryHarness:
    return MemoryHarness()


WORLDS: dict[str, Callable[[pytest.FixtureRequest], Any]] = {"memory": _memory, "kafka": _kafka}
"""By name, how to make a world: `name`, `door`, `create_topic`, `truncate`, `visible`, `close`."""


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A world of the test's own. When it is closed nothing of it may still run."""
    before = asyncio.all_tasks()
    made = WORLDS[request.param](request)
    yield made
    await made.close()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"still running: {left}"


@pytest.fixture
async def door(world: Any) -> Door:
    """A started door."""
    return await world.door()


# --- a whole proxy ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
async def desk() -> AsyncIterator[FakeEndpoint]:
    """The endpoints of all groups."""
    async with FakeEndpoint().serve() as running:
        yield running


@pytest.fixture(scope="module", params=WORLDS)
async def service(request: pytest.FixtureRequest, desk: FakeEndpoint) -> AsyncIterator[Service]:
    """A running proxy, shared by a module, whose tests use separate topics and groups."""
    made = WORLDS[request.param](request)
    async with Service(made, desk) as running:
        yield running
    await made.close()


@pytest.fixture
async def topic(service: Service) -> str:
    """A target of the test's own, with one partition."""
    return await service.topic()


@pytest.fixture(params=["http", "sdk"])
async def client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Client]:
    """A client of a separate group."""
    group = unique("group")
    if request.param == "http":
        yield HttpClient(service, group)
        return
    async with service.producer(group) as producer:
        yield SdkClient(producer)


# --- several proxies -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=WORLDS)
async def two(request: pytest.FixtureRequest, desk: FakeEndpoint) -> AsyncIterator[Proxies]:
    """Two proxies that share four half partitions, for all tests that move nothing."""
    made = WORLDS[request.param](request)
    running = Proxies(made, desk)
    await running.add("one", "two")
    yield running
    await running.close()
    await made.close()


@pytest.fixture
async def proxies(world: Any, desk: FakeEndpoint) -> AsyncIterator[Proxies]:
    """No proxy yet; those that a test starts end with it."""
    running = Proxies(world, desk)
    yield running
    await running.close()


@pytest.fixture
async def in_memory(desk: FakeEndpoint) -> AsyncIterator[Proxies]:
    """The same on a Kafka in memory only, for what a test cannot make happen on a real one."""
    world = MemoryHarness()
    running = Proxies(world, desk)
    yield running
    await running.close()
    await world.close()
