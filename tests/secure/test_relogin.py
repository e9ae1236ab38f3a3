"""A proxy whose logins end every few seconds works on as if they did not."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.secure.secure_world import REAUTH_MS, AllowedWorld, SecureKafka
from txbroker.core.records import Message
from txbroker.kafka.client.acls import Role, rights_needed

LOGINS = 3


@pytest.mark.long
async def test_expired_logins_lose_no_transaction_or_partition(secure_kafka: SecureKafka) -> None:
    world = AllowedWorld(secure_kafka, "SHORT")
    await world.make_topics()
    target = await world.create_topic("target")
    needed = rights_needed(world.settings(), [target])
    await world.allow(right for right in needed if right.role is Role.PROXY)
    async with FakeEndpoint().serve() as desk:
        service = Service(world, desk, partitions=1)
        await service.start()
        clock = asyncio.get_running_loop().time
        over = clock() + LOGINS * REAUTH_MS / 1000
        count = 0
        try:
            while clock() < over:
                id = await service.prepare(Message(target, b"", b"%d" % count))
                assert (await service.commit(id))["state"] == "promoted"
                count += 1
            assert await service.metric("fenced_total") == 0
            assert await service.metric("kafka_errors_total") == 0

            async def owned() -> bool:
                return bool((await service.get("/readyz"))["ready"])

            await until(owned)
        finally:
            await service.stop()
    assert [record.value for record in await world.visible(target)] == [
        b"%d" % number for number in range(count)
    ]
    await world.close()
