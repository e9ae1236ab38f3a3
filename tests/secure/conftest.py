"""What tests of logins and TLS share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.secure.secure_world import Issuer, SecureKafka
from tests.secure.token_endpoint import TokenEndpoint
from tests.tls.tls_files import Authority


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.needs_tool("openssl"))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs all that is to be trusted."""
    return Authority(tmp_path_factory.mktemp("authority"), "ca")


@pytest.fixture(scope="session")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    """Who signs tokens."""
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(scope="session")
def _listening(authority: Authority, issuer: Issuer) -> Iterator[TokenEndpoint]:
    pair = authority.sign("of-endpoint", "IP:127.0.0.1")
    with TokenEndpoint(issuer).served(*pair) as listening:
        yield listening


@pytest.fixture
def endpoint(_listening: TokenEndpoint) -> TokenEndpoint:
    """A token endpoint that works as it should, and was not asked yet."""
    _listening.asked.clear()
    _listening.life_s, _listening.answer = 3600.0, None
    return _listening


@pytest.fixture(scope="session")
def secure_kafka(
    tmp_path_factory: pytest.TempPathFactory,
    authority: Authority,
    issuer: Issuer,
    _listening: TokenEndpoint,
) -> Iterator[SecureKafka]:
    """One Kafka with every way to log in."""
    kafka = SecureKafka(tmp_path_factory.mktemp("secure"), authority, issuer, _listening.url)
    try:
        kafka.start()
        yield kafka
    finally:
        kafka.server.stop()
