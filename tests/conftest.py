"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """One real Kafka for the whole session, started by the first test that asks for it."""
    version = os.environ.get("TXBROKER_TEST_KAFKA_VERSION", DEFAULT_VERSION)
    with EmbeddedKafka(version=version) as server:
        yield server
