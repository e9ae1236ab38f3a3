"""Half messages that were deleted while their transactions are undecided."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import unique, until
from txbroker.core.records import Decision, Message, State
from txbroker.errors import BodyLost
from txbroker.proxy.partition import owner

HEADERS = (("h", b"1"), ("h", None))


async def lose(service: Service, id: str, before: int) -> None:
    """Delete the half messages below an offset, and wait until the proxy has noticed."""
    await service.world.truncate(service.world.name("half"), 0, before)

    async def noticed() -> bool:
        cause = (await service.show(id)).get("cause") or {}
        return bool(cause.get("code") == "body_lost")

    await until(noticed)


async def test_a_block_of_the_sdk_commits_with_its_messages(
    world: Any, desk: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit by the id alone has none."""
    monkeypatch.setattr(owner, "EDGES_S", 0.1)
    service = Service(world, desk, partitions=1, bodies_bytes_max=1)
    await service.start()
    try:
        topic = await service.topic()
        message = Message(topic, b"k", b"v", headers=HEADERS)
        async with service.producer(unique("group")) as producer:
            async with producer.transaction(message) as transaction:
                await lose(service, transaction.id, 1)
            assert transaction.outcome.decision is Decision.COMMIT
            assert (await transaction.commit("promoted")).state is State.PROMOTED
            id = await producer.prepare(Message(topic, b"k", b"w"))
            await lose(service, id, 2)
            with pytest.raises(BodyLost):
                await producer.commit(id)
            assert (await producer.rollback(id)).state is State.ROLLED_BACK
        (record,) = await service.visible(topic)
        assert (record.key, record.value) == (b"k", b"v")
        assert set(HEADERS) <= set(record.headers)
    finally:
        await service.stop()
