"""Half messages of a new installation, deleted while no proxy runs, never vanish silently."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest

from tests.kit.kafka import KafkaHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.core.records import Message
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import BodyLost
from txbroker.proxy.partition import owner, snapshots


@pytest.fixture
async def service(kafka: EmbeddedKafka) -> AsyncIterator[Service]:
    async with FakeEndpoint().serve() as desk:
        made = Service(KafkaHarness(kafka.bootstrap), desk, partitions=1)
        await made.start()
        yield made
        await made.stop()
        await made.world.close()


async def test_early_deletion_stops_the_partition(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the proxy were killed before its first snapshot."""
    monkeypatch.setattr(snapshots, "LOOK_S", 600.0)
    monkeypatch.setattr(snapshots, "LAST_S", 0.0)
    await service.restart()
    topic = await service.topic()
    await service.prepare(Message(topic, None, b"v"))
    await service.stop()
    await service.world.truncate(service.world.name("half"), 0, 1)
    monkeypatch.setattr(service, "_ready", lambda: _stopped(service))
    await service.start()
    problems = (await service.get("/readyz"))["problems"]
    assert ["truncated: the half topic begins at offset 1" in one for one in problems] == [True]


@pytest.mark.rule(28)
@pytest.mark.parametrize("noticed", [False, True])
async def test_acked_prepares_are_accounted_for_after_kill(
    service: Service, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """A turn passes what was deleted, and no snapshot holds all of it. A proxy that is killed
    writes no last one."""
    monkeypatch.setattr(snapshots, "LAST_S", 0.0)
    monkeypatch.setattr(owner, "EDGES_S", 0.1 if noticed else 600.0)
    await service.restart()
    topic = await service.topic()
    ids = [await service.prepare(Message(topic, None, b"0"))]
    await until(lambda: _has(service, "snapshot_entries", 1))
    ids += [await service.prepare(Message(topic, None, b"%d" % n)) for n in range(1, 10)]
    await service.world.truncate(service.world.name("half"), 0, 10)
    last = await service.prepare(Message(topic, None, b"last"))
    assert (await service.commit(last))["state"] == "promoted"
    if noticed:
        await until(lambda: _has(service, "snapshot_entries", 10))
    await service.stop()
    if not noticed:
        monkeypatch.setattr(service, "_ready", lambda: _stopped(service))
    await service.start()
    if not noticed:
        problems = (await service.get("/readyz"))["problems"]
        assert ["their transactions are unknown" in one for one in problems] == [True]
        return
    for id in ids:
        assert await service.state(id) == "pending"
        assert (await service.commit(id))["state"] == "promoted"
    assert await service.values(topic) == [b"last", *[b"%d" % n for n in range(10)]]


@pytest.mark.rule(28)
async def test_deletion_after_clean_stop_is_reported_lost(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no snapshot was due since then, as for the last rolled back transaction."""
    monkeypatch.setattr(snapshots, "LOOK_S", 600.0)
    await service.restart()
    topic = await service.topic()
    ids = [await service.prepare(Message(topic, None, b"v")) for _ in range(2)]
    await service.act(ids[1], "rollback")
    await service.stop()
    await service.world.truncate(service.world.name("half"), 0, 2)
    await service.start()
    shown = await service.show(ids[0])
    assert (shown["state"], shown["cause"]["code"]) == ("pending", "body_lost")
    assert await service.state(ids[1]) == "rolled_back"
    assert await service.metric("lost_undecided_total") == 1


@pytest.mark.rule(28)
async def test_lost_transaction_is_reported_with_reason(service: Service) -> None:
    topic = await service.topic()
    message = Message(topic, None, b"v")
    id = await service.prepare(message, dedup_key="one")
    await until(lambda: _has(service, "snapshot_entries", 1))
    await service.stop()
    await service.world.truncate(service.world.name("half"), 0, 1)
    for times in (1, 0):
        # The next proxy reads that it is lost, and counts it no more.
        await service.start()
        shown = await service.show(id)
        assert (shown["state"], shown["cause"]["code"]) == ("pending", "body_lost")
        assert [one["id"] for one in await service.listed()] == [id]
        assert await service.metric("lost_undecided_total") == times
        await until(partial(_has, service, "snapshot_entries", times))
        for asked in (service.act(id, "commit"), service.send(message, dedup_key="one")):
            with pytest.raises(BodyLost, match="roll it back"):
                await asked
        await service.stop()
    await service.start()
    assert (await service.act(id, "rollback"))["state"] == "rolled_back"


async def _has(service: Service, metric: str, value: float) -> bool:
    return await service.metric(metric) == value


async def _stopped(service: Service) -> bool:
    return str((await service.get("/readyz"))["partitions"]["0"]).startswith("truncated")
