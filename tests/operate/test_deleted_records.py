"""Half messages of a new installation that somebody deletes while no proxy runs: never silently."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kafka_world import KafkaWorld
from service_world import Desk, Service, until

from txbroker.core.records import Message
from txbroker.embedded import EmbeddedKafka
from txbroker.proxy import snapshots


@pytest.fixture
async def service(kafka: EmbeddedKafka) -> AsyncIterator[Service]:
    async with Desk().serve() as desk:
        made = Service(KafkaWorld(kafka.bootstrap), desk, partitions=1)
        await made.start()
        yield made
        await made.stop()
        await made.world.close()


async def test_the_first_half_message_is_told_to_be_lost(service: Service) -> None:
    topic = await service.topic()
    id = await service.prepare(Message(topic, None, b"v"))
    await until(lambda: _has(service, "snapshot_entries", 1))
    await service.stop()
    await service.world.truncate(service.world.name("half"), 0, 1)
    await service.start()
    assert await service.metric("lost_undecided_total") == 1
    assert await service.state(id) == "pending"


async def test_what_was_deleted_before_anything_was_written_down_stops_the_partition(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LOOK_S", 600.0)
    await service.restart()
    topic = await service.topic()
    await service.prepare(Message(topic, None, b"v"))
    await service.stop()
    await service.world.truncate(service.world.name("half"), 0, 1)
    monkeypatch.setattr(service, "_ready", lambda: _stopped(service))
    await service.start()
    problems = (await service.get("/readyz"))["problems"]
    assert ["truncated: the half topic begins at offset 1" in one for one in problems] == [True]


async def _has(service: Service, metric: str, value: float) -> bool:
    return await service.metric(metric) == value


async def _stopped(service: Service) -> bool:
    return str((await service.get("/readyz"))["partitions"]["0"]).startswith("truncated")
