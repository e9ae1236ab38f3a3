"""Producers that speak plain HTTP, each on a connection of its own, with hardly a client's cost."""

import asyncio
from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

_HEAD = (
    b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
_LENGTH = b"content-length:"
_ID = b'"id":"'
_ID_BYTES = 26


class _Lane(asyncio.Protocol):
    """One connection: prepares and commits one transaction after another.

    Args:
        numbers: of the transactions, shared by all lanes.
        over: done when there is none left, or when something goes wrong.
    """

    def __init__(self, numbers: Iterator[int], value: bytes, over: asyncio.Future[None]) -> None:
        self._numbers = numbers
        self._value = value
        self._over = over
        self._received = b""
        self._prepared = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by class
        self._prepare()

    def data_received(self, data: bytes) -> None:
        """Go on when an answer is whole."""
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        at = head.lower().find(_LENGTH)
        if at < 0 or len(body) < int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0]):
            return
        self._received = b""
        if head[9:10] != b"2":
            self._end(RuntimeError(f"a call failed: {body[:200]!r}"))
        elif self._prepared:
            self._prepare()
        else:
            self._prepared = True
            begin = body.index(_ID) + len(_ID)
            id = body[begin : begin + _ID_BYTES]
            self._post(b"/v1/transactions/%s/commit" % id, b'{"group":"bench"}')

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._end(exc or ConnectionError("the proxy has closed the connection"))

    def _prepare(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._end(None)
            return
        self._prepared = False
        message = b'{"topic":"payments","key":"key-%020d","value":"%s"}' % (number, self._value)
        self._post(b"/v1/transactions", b'{"group":"bench","messages":[%s]}' % message)

    def _post(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(_HEAD % (path, len(body)) + body)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
        assert self._transport is not None
        self._transport.close()


async def transactions_over_http(url: str, count: int, in_flight: int, size: int) -> None:
    """Prepare and commit so many transactions.

    Raises:
        RuntimeError: a call was answered with an error.
        ConnectionError: a connection has ended.
    """
    address, loop = urlsplit(url), asyncio.get_running_loop()
    numbers, value = iter(range(count)), b"x" * size
    lanes: list[asyncio.Future[None]] = [loop.create_future() for _ in range(in_flight)]

    async def dial(over: asyncio.Future[None]) -> None:
        await loop.create_connection(
            lambda: _Lane(numbers, value, over), address.hostname, address.port
        )

    await asyncio.gather(*map(dial, lanes))
    await asyncio.gather(*lanes)
