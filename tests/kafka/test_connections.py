"""Connections that fail: callers share one attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.protocol.api import Request
from aiokafka.protocol.metadata import MetadataRequest

from tests.kit.kafka import KafkaHarness
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, Connection, NotSent, Unanswered
from txbroker.kafka.protocol.schemas import MetadataV10, metadata

METADATA = 3


async def test_waiters_fail_with_failed_connection_attempt() -> None:
    """Heartbeats waited for dozens of others that each tried for five seconds: a proxy that was
    cut off from Kafka took itself for the owner for minutes."""
    attempts = 0
    silent = asyncio.Event()

    async def open_connection(*_: Any, **__: Any) -> Connection:
        nonlocal attempts
        attempts += 1
        await silent.wait()
        raise TimeoutError

    client = Client(KafkaHarness("127.0.0.1:1").settings(), open_connection)
    client.brokers = {1: ("127.0.0.1", 1)}
    request = MetadataRequest([], allow_auto_topic_creation=False)
    asks = [asyncio.create_task(client.ask(1, request, "metadata")) for _ in range(50)]
    while not attempts:
        await asyncio.sleep(0)
    silent.set()
    for ask in asks:
        with pytest.raises(NotSent, match="no answer in time"):
            await ask
    assert attempts == 1
    # A later caller tries again.
    with pytest.raises(NotSent):
        await client.ask(1, request, "metadata")
    assert attempts == 2


async def test_unresponsive_brokers_are_asked_last() -> None:
    """With one of three that hangs, every third first question for a new leader took its whole
    timeout, while the other two knew."""
    up: set[int] = set()
    asked: list[int] = []

    class Broker:
        def __init__(self, node: int) -> None:
            self.node = node

        def connected(self) -> bool:
            return False

        async def send(self, request: Request[Any]) -> Any:
            asked.append(self.node)
            if self.node not in up:
                raise TimeoutError
            return self.node

        def close(self, **_: Any) -> None:
            """Nothing is open."""

    async def open_connection(_host: str, port: int, **_: Any) -> Any:
        if port == 1:
            asked.append(1)
            raise OSError
        return Broker(port)

    client = Client(KafkaHarness("127.0.0.1:1").settings(), open_connection)
    client.brokers = {node: (f"broker-{node}", node) for node in (1, 2, 3)}
    request = MetadataRequest([], allow_auto_topic_creation=False)
    with pytest.raises(KafkaUnavailable):
        await client.ask_any(request, "test")
    assert set(asked) == {1, 2, 3}
    up.add(3)
    assert await client.ask_any(request, "test") == 3
    for _ in range(20):
        asked.clear()
        assert await client.ask_any(request, "test") == 3
        assert asked == [3]
    # One that answers again is as good as any.
    up.add(2)
    assert await client.ask(2, request, "test") == 2
    assert {await client.ask_any(request, "test") for _ in range(50)} == {2, 3}


@pytest.mark.rule(17)
async def test_metadata_requests_create_no_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers with automatic creation would create a mistyped target."""
    creates: list[bool] = []

    async def ask(_node: int, request: Request[Any] | MetadataV10, *_: Any) -> Any:
        if isinstance(request, MetadataV10):
            _topics, create, *_ = request.values
        else:
            create = request.prepare({METADATA: (0, 12)}).allow_auto_topic_creation
        creates.append(create)
        raise Unanswered("unreachable")

    async def open_connection(*_: Any, **__: Any) -> Connection:
        raise OSError

    client = Client(KafkaHarness("127.0.0.1:1").settings(), open_connection)
    client.brokers = {1: ("127.0.0.1", 1)}
    monkeypatch.setattr(client, "ask", ask)
    for question in (
        client.refresh(["mistyped"]),
        Admin(client).topic_ids(["mistyped"]),
        client.ask_any(metadata(["mistyped"], rights=True), "test"),
    ):
        with pytest.raises(KafkaUnavailable):
            await question
    # Each question without known brokers refreshes the metadata again.
    assert len(creates) >= 3
    assert not any(creates)
