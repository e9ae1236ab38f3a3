"""Records of other clients that were there before any proxy was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from txbroker.core.records import Message, Record

NOISE = (
    Record(b"key", b"value"),
    Record(None, None),
    Record(b"\xff", b"{", (("txb-v", b"?"),)),
    # As if by a newer version, but no version of ours writes it.
    Record(b"key", b'{"v": 99}'),
    Record(b"key", b"value", (("txb-v", b"99"),)),
)


@pytest.mark.rule(10)
@pytest.mark.parametrize("committed", [True, False, None])
async def test_noise_before_first_claim_stops_no_partition(
    world: Any, desk: FakeEndpoint, committed: bool | None
) -> None:
    await (await world.door(partitions=2)).close()
    for name in ("half", "op"):
        for partition in (0, 1):
            await world.foreign(world.name(name), partition, *NOISE, committed=committed)
    first = Service(world, desk)
    await first.start()
    try:
        topic = await first.topic()
        for number in range(6):
            value = b"%d" % number
            id = await first.prepare(Message(topic, value, value))
            assert (await first.commit(id))["state"] == "promoted"
        assert await first.owned() == {0, 1}
    finally:
        await first.stop()
