"""The pytest plugin: fixtures for tests of services that send through txbroker.

pytest imports this at every start, so it imports nothing but pytest until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from txbroker.testing.broker import InMemoryBroker


@pytest.fixture
def txbroker_settings() -> dict[str, Any]:
    """Settings of the in-memory broker; override this fixture to change them."""
    return {}


@pytest.fixture(name="txbroker")
def _txbroker(txbroker_settings: dict[str, Any]) -> Iterator[InMemoryBroker]:
    """A running txbroker on a Kafka in memory, for one test: see `InMemoryBroker`."""
    from txbroker.testing.broker import InMemoryBroker

    with InMemoryBroker(**txbroker_settings) as broker:
        yield broker
