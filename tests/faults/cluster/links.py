"""Relays to brokers, from clients and from other brokers, in which every link breaks alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import struct
from collections import Counter
from collections.abc import Callable
from enum import Enum

END_TXN = 26
_FLEXIBLE_FROM = {0: 9, 22: 2, 24: 3, END_TXN: 3}
"""Requests whose first field is a transactional id (Produce, InitProducerId, AddPartitionsToTxn,
EndTxn), and the version from which on it is a compact string after tagged fields."""
OVERTAKEN = "overtaken"
_SIZE = struct.Struct(">i")
_HEADER = struct.Struct(">hhih")
_NUMBER = re.compile(rb"\d+")
_CHUNK_BYTES = 1 << 16
_HOST = "127.0.0.1"
_LINGER_S = 2.0
_SOON_SHARE, _SOON_S, _LATE_S = 0.4, (0.05, 1.0), (4.0, 9.0)
"""How late an end is: less than a client waits for an answer, or about as long and longer."""


class Ends(Enum):
    """What becomes of a request to end a Kafka transaction."""

    PASS = "pass"
    LATE = "late"
    """It reaches the broker seconds later; the client waits for as long as it likes."""
    LATE_AND_RESET = "late and reset"
    """The same, and the client's connection breaks at once."""
    UNANSWERED = "unanswered"
    """The broker gets it, and the client's connection breaks in place of the answer."""


class Link:
    """All connections from one source to one broker.

    Bytes sent while a direction is cut are kept and arrive after it heals, as TCP would resend them
    again: also when the client has given up long since.

    Args:
        name: for the history.
        fate: the random choices of this link.
        asked: how many requests its source sent with each transactional id, over all its links.

    Attributes:
        ghosts: number of late or unanswered ends by kind of fault; and number of
            them arrived when their sender had gone on with the same transactional id.
    """

    def __init__(self, name: str, fate: random.Random, asked: Counter[bytes] | None = None) -> None:
        self.name = name
        self.ends = Ends.PASS
        self.delay_s = 0.0
        self.ghosts: Counter[str] = Counter()
        self.asked: Counter[bytes] = Counter() if asked is None else asked
        self._fate = fate
        self._requests = asyncio.Event()
        self._answers = asyncio.Event()
        self.connections: set[Connection] = set()
        self.heal()

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Cut these directions silently."""
        if requests:
            self._requests.clear()
        if answers:
            self._answers.clear()

    def heal(self) -> None:
        """Let everything through again. Ends that are late still come when their time is there."""
        self._requests.set()
        self._answers.set()
        self.delay_s = 0.0
        self.ends = Ends.PASS

    def state(self) -> tuple[bool, bool, float, Ends]:
        """What gets through: requests, answers, how late, and what becomes of ends."""
        return self._requests.is_set(), self._answers.is_set(), self.delay_s, self.ends

    def reset(self) -> None:
        for connection in tuple(self.connections):
            connection.abort()

    async def requests_pass(self) -> None:
        await self._pass(self._requests)

    async def answers_pass(self) -> None:
        await self._pass(self._answers)

    async def _pass(self, whole: asyncio.Event) -> None:
        await whole.wait()
        if self.delay_s:
            await asyncio.sleep(self._fate.uniform(0, 2 * self.delay_s))
            await whole.wait()

    def fate_of_end(self) -> Ends:
        """Draw what becomes of one end; some pass, so that later transactions are in flight when a
        late one arrives."""
        if self.ends is Ends.PASS or self._fate.random() < 0.5:
            return Ends.PASS
        self.ghosts[self.ends.value] += 1
        return self.ends

    def late_s(self) -> float:
        """Draw how late an end is."""
        return self._fate.uniform(*(_SOON_S if self._fate.random() < _SOON_SHARE else _LATE_S))


class Connection:
    """One connection of a client, and its own to the broker."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        broker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        link: Link,
    ) -> None:
        self._from_client, self._to_client = client
        self._from_broker, self._to_broker = broker
        self._link = link
        self._lose_answer = False
        self._late: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def abort(self) -> None:
        for each in (self._to_client, self._to_broker):
            each.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def run(self, first: bytes) -> None:
        """Pass everything on; `first` is the first request, which has been read already."""
        self._link.connections.add(self)
        self._tasks = [
            asyncio.create_task(self._pass_requests(first)),
            asyncio.create_task(self._pass_answers()),
        ]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._late:
                # The client may be gone, but its bytes are still in transit.
                await asyncio.wait(self._late)
        finally:
            for task in (*self._tasks, *self._late):
                task.cancel()
            await asyncio.gather(*self._tasks, *self._late, return_exceptions=True)
            self._link.connections.discard(self)
            for each in (self._to_client, self._to_broker):
                each.close()

    async def _pass_requests(self, frame: bytes) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                await self._link.requests_pass()
                if not self._meets_a_fate(frame):
                    self._to_broker.write(frame)
                    await self._to_broker.drain()
                frame = await read_frame(self._from_client)

    def _meets_a_fate(self, frame: bytes) -> bool:
        """Whether a request is kept back."""
        key = _HEADER.unpack_from(frame, _SIZE.size)[0]
        if key not in _FLEXIBLE_FROM:
            return False
        self._link.asked[id := transactional_id(frame)] += 1
        if key != END_TXN:
            return False
        fate = self._link.fate_of_end()
        if fate is Ends.UNANSWERED:
            self._lose_answer = True
        if fate in (Ends.PASS, Ends.UNANSWERED):
            return False
        self._late.add(asyncio.create_task(self._arrive(frame, id, self._link.asked[id])))
        if fate is Ends.LATE_AND_RESET:
            self._to_client.transport.abort()
        return True

    async def _arrive(self, frame: bytes, id: bytes, asked: int) -> None:
        await asyncio.sleep(self._link.late_s())
        self._link.ghosts[OVERTAKEN] += self._link.asked[id] > asked
        with contextlib.suppress(OSError):
            self._to_broker.write(frame)
            await self._to_broker.drain()
            await asyncio.sleep(_LINGER_S)

    async def _pass_answers(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := await self._from_broker.read(_CHUNK_BYTES):
                await self._link.answers_pass()
                if self._lose_answer:
                    self._to_client.transport.abort()
                    return
                if not self._to_client.is_closing():
                    self._to_client.write(chunk)
                    await self._to_client.drain()


class Relay:
    """Leads to one listener of a broker.

    Args:
        link_of: the link of a connection, by the number that is in its client id: brokers tell
            theirs there. 0: there is none.
    """

    def __init__(self, link_of: Callable[[int], Link]) -> None:
        self._link_of = link_of
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.target_port = 0
        self.port = 0

    async def start(self) -> None:
        """Listen; the destination is set before the first connection."""
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            first = await read_frame(reader)
            link = self._link_of(source_of(first))
            await link.requests_pass()
            broker = await asyncio.open_connection(_HOST, self.target_port)
            await Connection((reader, writer), broker, link).run(first)
        except (OSError, EOFError, asyncio.CancelledError):
            # The broker is down, the client has gone, or the run is over.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one request or answer, its size in front."""
    size = await reader.readexactly(_SIZE.size)
    return size + await reader.readexactly(_SIZE.unpack(size)[0])


def transactional_id(frame: bytes) -> bytes:
    """Return the transactional id of a request that begins with one; b"" where it has none."""
    key, version, _, length = _HEADER.unpack_from(frame, _SIZE.size)
    begin = _SIZE.size + _HEADER.size + max(0, length)
    if version < _FLEXIBLE_FROM[key]:
        length = int.from_bytes(frame[begin : begin + 2], "big", signed=True)
        return frame[begin + 2 : begin + 2 + max(0, length)]
    # No client sends tagged fields; ids are shorter than what takes a second byte.
    length = max(0, frame[begin + 1] - 1)
    return frame[begin + 2 : begin + 2 + length]


def source_of(frame: bytes) -> int:
    """Return the first number in a request's client id, which in a broker's is its own."""
    *_, length = _HEADER.unpack_from(frame, _SIZE.size)
    begin = _SIZE.size + _HEADER.size
    found = _NUMBER.search(frame, begin, begin + max(0, length))
    return int(found[0]) if found else 0
