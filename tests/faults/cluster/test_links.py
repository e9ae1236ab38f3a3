"""The relays of the fault runs affect the chosen connections and no others."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tests.faults.cluster.links import (
    END_TXN,
    OVERTAKEN,
    Ends,
    Link,
    Relay,
    read_frame,
    source_of,
    transactional_id,
)
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.transactions import TXN_V1, TXN_V2, TxnProtocolV1

_FETCH, _ADD_PARTITIONS = 1, 24
_SOON_S = 10.0
_NOT_S = 0.15

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Always(random.Random):
    """Draws the lowest."""

    def random(self) -> float:
        return 0.9

    def uniform(self, a: float, b: float) -> float:
        return 0.5


def request(
    number: int,
    key: int = _FETCH,
    client: bytes = b"broker-2-fetcher-0",
    *,
    version: int = 1,
    id: bytes = b"",
) -> bytes:
    """Return a request as a client sends it, the transactional id first."""
    body = struct.pack(">hhih", key, version, number, len(client)) + client
    body += struct.pack(">h", len(id)) + id
    return struct.pack(">i", len(body)) + body


class Broker:
    """Takes requests and answers each with its number."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[int] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                frame = await read_frame(reader)
            except (OSError, EOFError):
                writer.close()
                return
            (number,) = struct.unpack_from(">i", frame, 8)
            self.got.put_nowait(number)
            writer.write(struct.pack(">ii", 4, number))


class Way:
    """A broker reached through a relay."""

    def __init__(self) -> None:
        self.link = Link("one", Always())
        self.broker = Broker()
        self.relay = Relay(lambda source: self.link)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.broker.serve, "127.0.0.1", 0)
        await self.relay.start()
        self.relay.target_port = self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        await self.relay.close()
        self.server.close()

    async def line(self) -> Line:
        return await asyncio.open_connection("127.0.0.1", self.relay.port)


@pytest.fixture
async def way() -> AsyncIterator[Way]:
    made = Way()
    await made.start()
    yield made
    await made.close()


async def arrived(way: Way) -> int:
    return await asyncio.wait_for(way.broker.got.get(), _SOON_S)


async def answered(line: Line) -> int:
    frame = await asyncio.wait_for(read_frame(line[0]), _SOON_S)
    return cast(int, struct.unpack_from(">i", frame, 4)[0])


async def nothing_comes(line: Line) -> None:
    """Nothing, not even an end, is heard for a moment."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(line[0].read(1), _NOT_S)


async def broken(line: Line) -> None:
    try:
        assert await asyncio.wait_for(line[0].read(), _SOON_S) == b""
    except ConnectionError:
        return


async def test_passes_requests_and_answers(way: Way) -> None:
    line = await way.line()
    for number in range(3):
        line[1].write(request(number))
        assert await arrived(way) == number
        assert await answered(line) == number


async def test_bytes_of_a_gone_client_arrive_after_a_cut(way: Way) -> None:
    line = await way.line()
    line[1].write(request(1))
    await answered(line)
    way.link.cut()
    line[1].write(request(2))
    await nothing_comes(line)
    line[1].close()
    assert way.broker.got.qsize() == 1
    way.link.heal()
    assert [await arrived(way), await arrived(way)] == [1, 2]


async def test_cut_direction_leaves_the_other_open(way: Way) -> None:
    line = await way.line()
    line[1].write(request(1))
    await answered(line)
    way.link.cut(requests=False)
    line[1].write(request(2))
    assert [await arrived(way), await arrived(way)] == [1, 2]
    await nothing_comes(line)
    way.link.heal()
    assert await answered(line) == 2


async def test_late_end_follows_other_connections(way: Way) -> None:
    way.link.ends = Ends.LATE
    late, other = await way.line(), await way.line()
    late[1].write(request(1, END_TXN, id=b"mine"))
    other[1].write(request(2, _ADD_PARTITIONS, id=b"another's"))
    assert [await arrived(way), await arrived(way)] == [2, 1]
    assert await answered(late) == 1
    assert +way.link.ghosts == {"late": 1}


async def test_late_end_follows_requests_of_its_producer(
    way: Way,
) -> None:
    way.link.ends = Ends.LATE
    late, other = await way.line(), await way.line()
    late[1].write(request(1, END_TXN, id=b"mine"))
    other[1].write(request(2, _ADD_PARTITIONS, id=b"mine"))
    assert [await arrived(way), await arrived(way)] == [2, 1]
    assert way.link.ghosts == {"late": 1, OVERTAKEN: 1}


async def test_late_end_arrives_after_a_reset(way: Way) -> None:
    way.link.ends = Ends.LATE_AND_RESET
    late, other = await way.line(), await way.line()
    late[1].write(request(1, END_TXN))
    await broken(late)
    other[1].write(request(2))
    assert [await arrived(way), await arrived(way)] == [2, 1]


async def test_unanswered_end_is_done(way: Way) -> None:
    way.link.ends = Ends.UNANSWERED
    line = await way.line()
    line[1].write(request(1, END_TXN))
    assert await arrived(way) == 1
    await broken(line)


async def test_reset_breaks_existing_connections_only(way: Way) -> None:
    line = await way.line()
    line[1].write(request(1))
    await answered(line)
    way.link.reset()
    await broken(line)
    line = await way.line()
    line[1].write(request(2))
    assert await answered(line) == 2


@pytest.mark.parametrize(
    ("client", "source"),
    [(b"broker-2-fetcher-0", 2), (b"raft-client-3", 3), (b"1", 1), (b"txbroker", 0), (b"", 0)],
)
def test_broker_is_identified_by_client_id(client: bytes, source: int) -> None:
    assert source_of(request(7, client=client)) == source


@pytest.mark.parametrize("protocol", [TXN_V1, TXN_V2])
def test_transactional_id_is_found_in_both_versions(protocol: TxnProtocolV1) -> None:
    whole = dict.fromkeys(range(99), (0, 99))
    requests: list[Request] = [
        protocol.init_producer_id("mine", 1000),
        protocol.produce("mine", 1000, [("topic", [(0, b"batch")])]),
        protocol.end_txn("mine", 1, 0, commit=True),
    ]
    for each in requests:
        assert transactional_id(each.frame(whole, 1, b"client")) == b"mine", each
