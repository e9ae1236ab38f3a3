"""Topics that an operator has reserved, when a transaction is prepared and when it is promoted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from txbroker.core.records import Message
from txbroker.errors import BadTarget


@pytest.mark.rule(17)
async def test_a_reserved_topic_is_refused_by_name_and_by_pattern(
    world: Any, desk: FakeEndpoint
) -> None:
    settings = {"reserved_topics": (world.name("a"), "*.internal-?")}
    service = Service(world, desk, **settings)
    await service.start()
    try:
        for name in ("a", "internal-1"):
            topic = await world.create_topic(name)
            with pytest.raises(BadTarget, match=r"is reserved \(reserved_topics\)"):
                await service.prepare(Message(topic, b"k", b"v"))
        free = await world.create_topic("internal-10")
        id = await service.prepare(Message(free, b"k", b"v"))
        await service.stop()
        service = Service(world, desk, reserved_topics=("*-10",))
        await service.start()
        assert (await service.commit(id))["state"] == "refused"
        assert await service.values(free) == []
    finally:
        await service.stop()
