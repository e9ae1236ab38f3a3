"""Records of other clients in txbroker's own topics stop no partition."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.contract.door_records import claimed, commit
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.core.encoding import PROGRESS_KEY, encode_skip
from txbroker.core.records import RECORD_VERSION, Checkpoint, Message, Record
from txbroker.core.routing import make_id
from txbroker.door.protocols import PromotionTxn
from txbroker.errors import OwnerUnavailable

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


async def noise(world: Any, name: str, *records: Record, committed: bool | None) -> None:
    """Write as another client to each partition of one of our topics."""
    for partition in (0, 1):
        await world.foreign(world.name(name), partition, *records, committed=committed)


@pytest.mark.rule(2)
@pytest.mark.parametrize("committed", [True, False, None])
@pytest.mark.parametrize("name", ["half", "op"])
async def test_records_of_other_clients_leave_no_gap(
    service: Service, topic: str, name: str, committed: bool | None
) -> None:
    await goes_through(service, topic)
    for _ in range(2):
        await noise(service.world, name, *NOISE, committed=committed)
        await goes_through(service, topic)
    await noise(service.world, name, *NOISE, committed=committed)
    await service.restart()
    await goes_through(service, topic)
    assert await service.owned() == {0, 1}
    pending = await service.prepare(Message(topic, b"k", b"pending"))
    await service.restart()
    assert await service.state(pending) == "pending"
    await service.commit(pending)
    assert (await service.values(topic))[-1] == b"pending"


@pytest.mark.rule(27)
async def test_stopped_partition_resumes_after_skip(service: Service, topic: str) -> None:
    world = service.world
    await goes_through(service, topic)
    checkpoint, op = world.name("checkpoint"), world.name("op")
    id = make_id(1, 1, 1).encode()
    await world.foreign(op, 1, Record(id, b'{"v": %d}' % (RECORD_VERSION + 1)))
    await service.stop()
    door = await world.door()
    owned, mine = await claimed(door)
    newer = Checkpoint(RECORD_VERSION + 1, mine.claim, 0, 0)
    await commit(owned, PromotionTxn((), (), newer))
    await door.close()
    await service.start(ready=False)
    await until(lambda: states(service, "newer", "newer"))
    readyz = await service.get("/readyz")
    assert "docs/operate/repair.md" in readyz["problems"][0]
    written = (("checkpoint", checkpoint, PROGRESS_KEY), ("op", op, id))
    for partition, (log, name, key) in enumerate(written):
        record = [each for each in await world.visible(name, partition) if each.key == key][-1]
        skip = encode_skip(log, record, "me", "a test")
        await world.foreign(checkpoint, partition, skip)
    await until(lambda: states(service, "owned", "owned"))
    await goes_through(service, topic)
    await service.restart()
    await goes_through(service, topic)


async def states(service: Service, *wanted: str) -> bool:
    """Return whether the partitions are in these states."""
    found = (await service.get("/readyz"))["partitions"]
    return [found[str(n)].partition(":")[0] for n in range(len(wanted))] == list(wanted)


async def test_noise_in_the_checkpoint_topic_is_counted(service: Service, topic: str) -> None:
    world = service.world
    for partition in (0, 1):
        await goes_through(service, topic)
        for key in (b"progress", b"claim", b"skip/op/1", b"snapshot/0", b""):
            await world.foreign(world.name("checkpoint"), partition, Record(key, b"{"))
    await service.restart()
    await goes_through(service, topic)
    assert await service.metric("foreign_records_total", topic="checkpoint") >= 2


@pytest.mark.parametrize("name", ["half", "op"])
async def test_open_foreign_transaction_delays_nothing(
    service: Service, topic: str, name: str
) -> None:
    world = service.world
    release = await world.hang(world.name(name), 0)
    try:
        # Any answer is right: the outcome of the open transaction is unknown.
        with contextlib.suppress(OwnerUnavailable):
            await goes_through(service, topic, 2)
    finally:
        await release()
    await until(lambda: states(service, "owned", "owned"))
    fresh = await service.topic()
    await goes_through(service, fresh)
    await service.restart()
    await goes_through(service, fresh)


EARLY_NOISE = (
    *NOISE,
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
        await noise(world, name, *EARLY_NOISE, committed=committed)
    async with Service(world, desk) as service:
        await goes_through(service, await service.topic())
        assert await service.owned() == {0, 1}
