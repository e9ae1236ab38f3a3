"""A partition's door beyond the contract: its connections, its fetches, and damaged batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.kafka.small_turns import claim, progress
from tests.kit.kafka import KafkaHarness
from txbroker.core.records import Record
from txbroker.door.protocols import Hanging, PromotionTxn
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.protocol.batch import batch_body, encode_batch
from txbroker.kafka.protocol.fetched import Fetched


class Opened:
    """Opens connections and remembers them."""

    def __init__(self) -> None:
        self.connections: list[Any] = []

    async def __call__(self, *address: Any, **settings: Any) -> Any:
        self.connections.append(await open_connection(*address, **settings))
        return self.connections[-1]


# --- connections -----------------------------------------------------------------------------


@pytest.mark.rule(8)
async def test_old_door_closes_only_its_channels(world: KafkaHarness) -> None:
    opened = Opened()
    door = await world.door("one", opened)

    async def use(name: str) -> Any:
        partition = door.partition(0)
        await partition.claim(claim(name))
        await partition.half.append([Record(b"k", b"")])
        await partition.half.pick([0])
        await partition.store([Record(b"snapshot/0/0", b"")])
        turn = PromotionTxn((), (Record(b"id/0", b""),), progress(name, 1))
        await (await partition.write(turn)).visible()
        return partition

    shared = len(opened.connections)
    old = await use("old")
    between = len(opened.connections)
    await use("new")
    of_old, of_new = opened.connections[shared:between], opened.connections[between:]
    assert of_new
    await old.close()
    assert all(connection.connected() for connection in of_new)
    # All but the three that every partition shares: to ask for metadata, for leaders, and for
    # stable ends.
    assert sum(connection.connected() for connection in of_old) <= 3


async def test_pick_uses_few_channels(world: KafkaHarness) -> None:
    opened = Opened()
    door = await world.door("one", opened)
    log = door.partition(0).half
    for first in range(0, 3000, 100):
        await log.append([Record(b"%d" % (first + n), bytes(1000)) for n in range(100)])
    before = len(opened.connections)
    offsets = sorted(random.Random(4).sample(range(3000), 40))
    far = [0, 500, 1000, 1500, 2000, 2500, 2999, *range(100, 300)]
    for wanted in (offsets, sorted(far), range(3000)):
        picked = await log.pick(wanted)
        assert [(r.offset, r.key) for r in picked] == [(n, b"%d" % n) for n in wanted]
    assert 1 < len(opened.connections) - before <= 8


async def test_cancelled_pick_leaves_no_task(world: KafkaHarness) -> None:
    log = (await world.door()).partition(0).half
    for _ in range(10):
        await log.append([Record(b"k", bytes(1000)) for _ in range(200)])
    before = asyncio.all_tasks()
    picking = asyncio.create_task(log.pick(range(0, 2000, 100)))
    await asyncio.sleep(0)
    picking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await picking
    assert asyncio.all_tasks() == before
    assert len(await log.pick(range(0, 2000, 100))) == 20


async def test_unresponsive_kafka_is_no_hanging_transaction(world: KafkaHarness) -> None:
    door = await world.door(claim_timeout_s=0.5, write_timeout_s=0.5)
    await door.close()
    with pytest.raises(KafkaUnavailable) as error:
        await door.partition(0).claim(claim("mine"))
    assert not isinstance(error.value, Hanging)


# --- reading ahead ---------------------------------------------------------------------------


def answer(data: bytes, end: int) -> tuple[Any, ...]:
    """What a broker answers to a fetch of one partition."""
    return (0, 0, end, end, [], data)


def encoded(*records: Record) -> bytes:
    return encode_batch(batch_body(records), producer_id=1, epoch=0, sequence=0)


class Slow(Reader):
    """Reads a log of one record a fetch, and remembers which fetches were asked for."""

    def __init__(self, client: Client, end: int, broken: int = -1) -> None:
        super().__init__(client, "x", 0, "lane", append_time=False)
        self.asked: list[int] = []
        self._end = end
        self._broken = broken

    async def fetch(self, position: int, *_: Any, **__: Any) -> Fetched:
        self.asked.append(position)
        await asyncio.sleep(0)
        data = bytearray(encoded(Record(b"%d" % position, b"")))
        data[:8] = position.to_bytes(8, "big")
        if position == self._broken:
            data[-1] ^= 1
        return Fetched(self.name, position, answer(bytes(data), self._end), append_time=False)


async def test_one_fetch_is_in_flight_ahead(world: KafkaHarness) -> None:
    reader = Slow(Client(world.settings()), 5)
    seen = []
    async for records in reader.read(0, 5):
        seen += [record.offset for record in records]
        for _ in range(5):
            await asyncio.sleep(0)
        assert reader.asked == list(range(min(seen[-1] + 2, 5)))
    assert seen == [0, 1, 2, 3, 4]


async def test_failed_fetch_ahead_raises_in_order(world: KafkaHarness) -> None:
    reader = Slow(Client(world.settings()), 5, broken=2)
    reading = aiter(reader.read(0, 5))
    assert [(await anext(reading))[0].offset for _ in range(2)] == [0, 1]
    with pytest.raises(InvariantBroken, match="corrupt"):
        await anext(reading)


# --- damaged batches -------------------------------------------------------------------------

BATCH = encoded(*(Record(b"%d" % n, b"value", (("h", b"x"),)) for n in range(3)))
TAKEN: list[Callable[[Fetched], Any]] = [
    lambda fetched: fetched.records,
    lambda fetched: fetched.among([1]),
]


@pytest.mark.parametrize("take", TAKEN, ids=["all", "one"])
@pytest.mark.parametrize("at", [17, 22, 40, 61, 70, len(BATCH) - 1])
def test_corrupt_batch_yields_no_records(at: int, take: Callable[..., Any]) -> None:
    data = bytearray(BATCH)
    data[at] ^= 0x10
    with pytest.raises(InvariantBroken, match="corrupt"):
        take(Fetched("x-0", 0, answer(bytes(data), 3), append_time=False))


@pytest.mark.parametrize("size", [0, 1, 16, 60, len(BATCH) - 1])
def test_truncated_batch_is_fetched_again(size: int) -> None:
    fetched = Fetched("x-0", 0, answer(BATCH + BATCH[:size], 6), append_time=False)
    assert [record.offset for record in fetched.records] == [0, 1, 2]
    assert fetched.next_offset == 3
