"""What the end-to-end tests share: one proxy in its own process, and endpoints of groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.proxies import ProxyProcess
from tests.kit.service import FakeEndpoint
from txbroker.embedded import EmbeddedKafka


@pytest.fixture(scope="session")
def secrets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where groups' secrets are."""
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
async def shared(kafka: EmbeddedKafka, secrets_dir: Path) -> AsyncIterator[ProxyProcess]:
    """A proxy for the tests of a module, which use separate topics and groups. A test may
    kill it if it starts it again."""
    async with ProxyProcess(kafka.bootstrap, secrets_dir=secrets_dir) as made:
        yield made


@pytest.fixture(scope="session")
async def desk() -> AsyncIterator[FakeEndpoint]:
    """The check endpoints of all groups."""
    async with FakeEndpoint().serve() as running:
        yield running
