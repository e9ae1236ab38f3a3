"""The fixtures of the TLS tests: certificates once, a Kafka in memory for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kit.secret_files import secret_file
from tests.tls.tls_files import Authority
from tests.tls.tls_world import ADMIN_TOKEN, TOKEN, Files, TlsHarness


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Two authorities with certificates, and two tokens."""
    folder = tmp_path_factory.mktemp("tls")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    token = secret_file(folder / "token", f"{TOKEN}\n")
    admin_token = secret_file(folder / "admin-token", f"{ADMIN_TOKEN}\n")
    return Files(
        folder,
        ours,
        others,
        ours.sign("proxy"),
        ours.sign("client", "DNS:orders.example.org"),
        others.sign("stranger", "DNS:orders.example.org"),
        token,
        admin_token,
    )


@pytest.fixture
async def world(files: Files) -> AsyncIterator[TlsHarness]:
    """A Kafka in memory for proxies with TLS."""
    made = TlsHarness(files)
    await made.create_topic("payments")
    yield made
    await made.close()
