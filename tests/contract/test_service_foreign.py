"""Records that other clients put into txbroker's own topics stop nobody."""

from __future__ import annotations

import pytest
from service_world import Service

from txbroker.core.records import Message, Record

NOISE = (Record(b"key", b"value"), Record(None, None), Record(b"\xff", b"{", (("txb-v", b"?"),)))


async def goes_through(service: Service, topic: str, count: int = 6) -> None:
    """See transactions of all half partitions decided, and visible once."""
    before = len(await service.values(topic))
    for number in range(count):
        id = await service.prepare(Message(topic, b"%d" % number, b"%d" % number))
        assert (await service.commit(id))["state"] == "promoted"
    assert await service.values(topic) == [
        *(await service.values(topic))[:before],
        *[b"%d" % number for number in range(count)],
    ]


@pytest.mark.parametrize("committed", [True, False, None])
@pytest.mark.parametrize("name", ["half", "op"])
async def test_records_of_other_clients_leave_no_gap(
    service: Service, name: str, committed: bool | None
) -> None:
    topic = await service.topic()
    await goes_through(service, topic)
    for _ in range(2):
        for partition in (0, 1):
            await service.world.foreign(
                service.world.name(name), partition, *NOISE, committed=committed
            )
        await goes_through(service, topic)
    for partition in (0, 1):
        await service.world.foreign(
            service.world.name(name), partition, *NOISE, committed=committed
        )
    await service.restart()
    await goes_through(service, topic)
    assert await service.owned() == {0, 1}
    pending = await service.prepare(Message(topic, b"k", b"pending"))
    await service.restart()
    assert await service.state(pending) == "pending"
    await service.commit(pending)
    assert (await service.values(topic))[-1] == b"pending"
