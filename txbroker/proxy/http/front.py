"""Connections that serve the calls of transactions themselves, in front of aiohttp.

aiohttp takes some 40 µs of processor time per request. So a connection begins here: a complete,
plain request for one of the operations declared `direct` is answered without aiohttp. With the
first other request (another path, slow, large, malformed or unusual), the connection and its
unanswered bytes pass to aiohttp for good, whose router ends at the same endpoints. So no request
is refused here for its HTTP, and none is accepted here that aiohttp would refuse.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from txbroker.net.timers import Deadlines
from txbroker.proxy.http.endpoints import ApiEndpoint
from txbroker.proxy.http.operations import HttpAnswer
from txbroker.proxy.http.reading import DirectRequest

HELD_BYTES_MAX = 64 * 1024
"""An incomplete request larger than this passes to aiohttp. While a call is in flight, at most so
much is read ahead, plus the rest of one read."""
HELD_S = 1.0
"""An incomplete request passes to aiohttp after this, seconds."""
HEAD_BYTES_MAX = 8 * 1024
"""A longer head passes to aiohttp, which accepts more."""
_FIELDS_MAX = 100
_LENGTH_DIGITS_MAX = 18
_END = b"\r\n\r\n"
_BEGIN = b"POST /"
_NAME = re.compile(r"\{(\w+)\}")
_PLAIN = "([0-9A-Za-z]+)"
# Requests for more than an answer, or whose body is encoded.
_UNUSUAL = frozenset(
    {"content-encoding", "expect", "sec-websocket-key1", "transfer-encoding", "upgrade"}
)


class DirectCalls:
    """The operations of one address that need no router."""

    def __init__(self, endpoints: Sequence[ApiEndpoint]) -> None:
        self._endpoints = {
            endpoint.operation.name: (endpoint, tuple(_NAME.findall(endpoint.operation.path)))
            for endpoint in endpoints
        }
        operations = [endpoint.operation for endpoint in endpoints]
        assert all(operation.method == "POST" for operation in operations)
        lines = "|".join(
            f"(?P<{operation.name}>{_NAME.sub(_PLAIN, operation.path)})" for operation in operations
        )
        self._line = re.compile(rf"POST (?:{lines}) HTTP/1\.1\r\n".encode())

    def find(self, head: bytes) -> tuple[ApiEndpoint, dict[str, str], str] | None:
        """Return the endpoint of a request line, the names in its path, and the path; None if it is
        no direct call."""
        match = self._line.match(head)
        if match is None:
            return None
        kind, first = match.lastgroup, match.lastindex
        assert kind is not None
        assert first is not None
        endpoint, names = self._endpoints[kind]
        values = {}
        for number, name in enumerate(names, first + 1):
            values[name] = match[number].decode()
        return endpoint, values, match[first].decode()


class HeadParser:
    """Parses the requests of one connection, each passed as head and body."""

    def __init__(self) -> None:
        self._fields: dict[bytes, bytes] = {}
        self._complete = False
        self.on_header = self._fields.setdefault  # the first of repeated fields
        self._parser = HttpRequestParser(self)

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._complete = True

    def head(self, raw: bytes) -> CIMultiDict[str] | None:
        """Return the fields of a head, None unless it is plain and correct."""
        self._fields.clear()
        self._complete = False
        try:
            self._parser.feed_data(raw)
            fields = {}
            for name, value in self._fields.items():
                text = value.rstrip(b" \t").decode(errors="surrogateescape")
                fields[name.decode("ascii").lower()] = text
        except (HttpParserError, HttpParserUpgrade, UnicodeDecodeError):
            return None
        # As many fields as lines: none is repeated or folded.
        usual = len(fields) == raw.count(b"\r\n") - 2 <= _FIELDS_MAX and "host" in fields
        if not usual or not _UNUSUAL.isdisjoint(fields):
            return None
        if fields.get("connection", "keep-alive").lower() != "keep-alive":
            return None
        if len(fields.get("content-length", "")) > _LENGTH_DIGITS_MAX:
            return None
        return CIMultiDict(fields)

    def ends_with(self, body: bytes) -> bool:
        """Return True if the request whose head was parsed ends with this body."""
        try:
            if body:
                self._parser.feed_data(body)
        except HttpParserError:
            return False
        return self._complete


class DirectServer(Protocol):
    """The state that connections of one address share."""

    fronts: "set[DirectConnection]"
    idle: "Deadlines[DirectConnection]"
    unfinished: "Deadlines[DirectConnection]"
    answering: Deadlines[Any]

    def connection(self) -> asyncio.Protocol:
        """Return a connection of aiohttp."""


class _Parsed(NamedTuple):
    """A request whose head is parsed; its body is from `body_at` to `end` in the held bytes."""

    endpoint: ApiEndpoint
    names: Mapping[str, str]
    request: DirectRequest
    body_at: int
    end: int


class DirectConnection(asyncio.Protocol):
    """A connection whose requests so far were all direct calls.

    A call begins when the previous one is answered. A request's bytes are held until it is carried
    out, so that they can pass to aiohttp.
    """

    __slots__ = (
        "_busy", "_closing", "_direct", "_held", "_idle", "_is_unfinished", "_loop", "_parsed",
        "_parser", "_paused", "_reading_paused", "_remote", "_server", "transport",
    )  # fmt: skip

    def __init__(self, server: DirectServer, direct: DirectCalls) -> None:
        self._server = server
        self._direct = direct
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._remote = ""
        self._parser = HeadParser()
        self._held = b""
        self._parsed: _Parsed | None = None
        self._is_unfinished = False
        """True while a request is incomplete."""
        self._busy = False
        """True while a call is in flight."""
        self._paused = False
        """True while the client does not read its answers."""
        self._reading_paused = False
        self._closing = False
        self._idle: asyncio.Future[None] | None = None
        """Done when the last call is answered, while the server stops."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0] if isinstance(peer, list | tuple) else peer or "")
        self._server.fronts.add(self)
        self._server.idle.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        self._continue()
        if len(self._held) > HELD_BYTES_MAX and not self._reading_paused:
            self._reading_paused = True
            assert self.transport is not None  # else nothing is held
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Begin no calls: the client reads its answers too slowly."""
        self._paused = True
        self._server.answering.begin(self)

    def resume_writing(self) -> None:
        """Continue: the client has read its answers."""
        self._paused = False
        self._server.answering.end(self)
        self._continue()

    def close(self) -> None:
        """Begin no more calls, and close when the last one is answered."""
        self._closing = True
        if not self._busy and self.transport is not None:
            self.transport.close()

    async def shutdown(self, timeout: float | None) -> None:
        """Close within `timeout` seconds; a call in flight may be answered until then."""
        if self._busy and self.transport is not None:
            self._idle = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._idle
        if self.transport is not None:
            self.transport.close()

    def idle_too_long(self) -> None:
        """Close an idle connection."""
        if self.transport is not None and not self._busy:
            self.transport.close()

    def unfinished_too_long(self) -> None:
        """Pass an incomplete request to aiohttp, which has its own deadline for it."""
        if self.transport is not None and not self.transport.is_closing():
            self._hand_over()

    def _continue(self) -> None:
        """Begin the next call if its request is complete and no other is in flight."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._busy or self._paused or self._closing or not self._held:
            return
        parsed = self._parsed
        if parsed is None:
            end = self._held.find(_END)
            if end < 0 or end > HEAD_BYTES_MAX:
                if end < 0 and self._may_become_direct():
                    self._wait()
                else:
                    self._hand_over()
                return
            parsed = self._parsed = self._parse_head(transport, end + len(_END))
        held = self._held
        if parsed is None or len(held) < parsed.end:
            if parsed is None or parsed.end > HELD_BYTES_MAX:
                self._hand_over()
            else:
                self._wait()
            return
        body = held[parsed.body_at : parsed.end]
        if not self._parser.ends_with(body):
            self._hand_over()
            return
        self._held = held[parsed.end :]
        self._carry_out(transport, parsed, body)

    def _may_become_direct(self) -> bool:
        """Return True if an incomplete head can still be that of a direct call."""
        held = self._held
        if len(held) > HEAD_BYTES_MAX or held[: len(_BEGIN)] != _BEGIN[: len(held)]:
            return False
        return b"\r\n" not in held or self._direct.find(held) is not None

    def _parse_head(self, transport: asyncio.Transport, size: int) -> _Parsed | None:
        raw = self._held[:size]
        target = self._direct.find(raw)
        fields = None if target is None else self._parser.head(raw)
        if target is None or fields is None:
            return None
        endpoint, names, path = target
        request = DirectRequest("POST", path, fields, transport, self._remote)
        return _Parsed(endpoint, names, request, size, size + int(fields.get("Content-Length", 0)))

    def _wait(self) -> None:
        if not self._is_unfinished:
            self._is_unfinished = True
            self._server.idle.end(self)
            self._server.unfinished.begin(self)

    def _carry_out(self, transport: asyncio.Transport, parsed: _Parsed, body: bytes) -> None:
        self._parsed = None
        self._busy = True
        self._server.idle.end(self)
        if self._is_unfinished:
            self._is_unfinished = False
            self._server.unfinished.end(self)
        if self._reading_paused and len(self._held) <= HELD_BYTES_MAX:
            self._reading_paused = False
            transport.resume_reading()
        parsed.endpoint.carry_out(parsed.request, parsed.names, body, self._answer)

    def _answer(self, answer: HttpAnswer | None) -> None:
        """Send the answer to a call; None closes the connection."""
        self._busy = False
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if answer is None:
            transport.close()
            return
        transport.write(answer.kept_alive())
        if self._closing:
            transport.close()
            return
        self._server.idle.begin(self)
        if self._held:
            # In the next iteration of the loop, so that no connection starves the others.
            self._loop.call_soon(self._continue)

    def _hand_over(self) -> None:
        """Pass this connection and its unanswered bytes to aiohttp."""
        transport, held = self.transport, self._held
        assert transport is not None
        paused = self._paused
        self._leave()
        connection = self._server.connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if paused:
            connection.pause_writing()
        if self._reading_paused:
            transport.resume_reading()
        connection.data_received(held)

    def _leave(self) -> None:
        """Unregister: the connection is closed, or aiohttp's."""
        self.transport = None
        self._held = b""
        server = self._server
        server.fronts.discard(self)
        server.idle.end(self)
        server.unfinished.end(self)
        server.answering.end(self)
