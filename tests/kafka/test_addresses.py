"""Hosts that are IPv6 addresses."""

from __future__ import annotations

from typing import Any

import pytest

from txbroker.config.settings import load_kafka_access
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.settings import KafkaSettings


@pytest.mark.parametrize(("kafka", "port"), [("::1", 9092), ("[::1]", 9092), ("[::1]:9093", 9093)])
async def test_brackets_are_no_part_of_the_host(kafka: str, port: int) -> None:
    asked: list[tuple[str, int]] = []

    async def refuse(host: str, port: int, **_options: Any) -> Any:
        asked.append((host, port))
        raise ConnectionRefusedError

    access = load_kafka_access(kafka, None)
    client = Client(KafkaSettings.from_access(access), refuse)
    with pytest.raises(KafkaUnavailable, match=rf"no connection to Kafka at \[::1\]:{port}"):
        await client.refresh(())
    assert set(asked) == {("::1", port)}
    await client.close()
