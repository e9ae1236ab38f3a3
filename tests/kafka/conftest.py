"""A world of each test's own on the real Kafka, and relays that break its connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from tests.kafka.relay import Fate, Relay, fates
from tests.kafka.small_turns import Relayed
from tests.kit.kafka import KafkaHarness
from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka

ALL_PASS = fates(-1)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "second_protocol: of what Kafka has had since 4.0; left to newer Kafkas"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what an older Kafka does not have to newer ones."""
    version = os.environ.get("TXBROKER_TEST_KAFKA_VERSION", DEFAULT_VERSION)
    if int(version.partition(".")[0]) >= 4:
        return
    newer = [item for item in items if item.get_closest_marker("second_protocol")]
    items[:] = [item for item in items if item not in newer]
    config.hook.pytest_deselected(items=newer)


@pytest.fixture
async def world(kafka: EmbeddedKafka) -> AsyncIterator[KafkaHarness]:
    """Topics and doors of the test's own. When it is closed nothing of it may still run."""
    before = asyncio.all_tasks()
    made = KafkaHarness(kafka.bootstrap)
    yield made
    await made.close()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        # The client library cancels its readers without waiting for them.
        _, left = await asyncio.wait(left, timeout=2.0)
    assert not left, f"still running: {left}"


@pytest.fixture
async def make_relay(world: KafkaHarness) -> AsyncIterator[Callable[..., Relay]]:
    """Makes relays; closed after the test, before its world."""
    relays: list[Relay] = []

    def make(decide: Callable[[int], Fate] = ALL_PASS) -> Relay:
        relays.append(Relay(decide))
        return relays[-1]

    yield make
    for relay in relays:
        await relay.close()


@pytest.fixture
def relayed(world: KafkaHarness, make_relay: Callable[..., Relay]) -> Relayed:
    """Half partition 0 reached through a relay."""
    return Relayed(world, make_relay())
