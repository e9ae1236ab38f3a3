"""Connections that carry the calls of transactions out themselves, in front of the web framework.

The framework takes some 40 µs of the processor for each request, whatever it asks. So a connection
begins here: a request whose path is one of a few, as declared, and which is whole and plain in all
else, is answered without the framework. With the first other one, and everything that is slow,
large, malformed or merely unusual, the connection and what it has not answered yet becomes the
framework's for good, whose router ends at the same endpoints. So nothing is refused here for what
it is as HTTP, and nothing is read here that the framework would refuse.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from txbroker.net.deadlines import Deadlines
from txbroker.proxy.http.endpoints import ApiEndpoint
from txbroker.proxy.http.operations import HttpAnswer
from txbroker.proxy.http.posted import DirectRequest

HELD_BYTES_MAX = 64 * 1024
"""A request that is larger than this and not here as a whole is the framework's; behind a call
that is being carried out, so many bytes are read ahead, and what one read brings beyond them."""
HELD_S = 1.0
"""A request that is not here as a whole for so long is the framework's, seconds."""
HEAD_BYTES_MAX = 8 * 1024
"""A longer head is the framework's, which takes more."""
_FIELDS_MAX = 100
_LENGTH_DIGITS_MAX = 18
_END = b"\r\n\r\n"
_BEGIN = b"POST /"
_NAME = re.compile(r"\{(\w+)\}")
_PLAIN = "([0-9A-Za-z]+)"
# What asks for more than an answer, or of which the body is not what it looks like.
_UNUSUAL = frozenset(
    {"content-encoding", "expect", "sec-websocket-key1", "transfer-encoding", "upgrade"}
)


class DirectCalls:
    """The calls of one address that need no router."""

    def __init__(self, endpoints: Sequence[ApiEndpoint]) -> None:
        self._endpoints = {
            each.operation.name: (each, tuple(_NAME.findall(each.operation.path)))
            for each in endpoints
        }
        lines = "|".join(
            f"(?P<{each.operation.name}>{_NAME.sub(_PLAIN, each.operation.path)})"
            for each in endpoints
        )
        assert all(each.operation.method == "POST" for each in endpoints)
        self._line = re.compile(rf"POST (?:{lines}) HTTP/1\.1\r\n".encode())

    def find(self, head: bytes) -> tuple[ApiEndpoint, dict[str, str], str] | None:
        """Return the endpoint that a request line asks for, the names in its path, and the path;
        None where it is no direct call."""
        match = self._line.match(head)
        if match is None:
            return None
        kind, first = match.lastgroup, match.lastindex
        assert kind is not None
        assert first is not None
        endpoint, names = self._endpoints[kind]
        found = {}
        for number, name in enumerate(names, first + 1):
            found[name] = match[number].decode()
        return endpoint, found, match[first].decode()


class HeadParser:
    """Reads the requests of one connection, each given as its head and its body."""

    def __init__(self) -> None:
        self._fields: dict[bytes, bytes] = {}
        self._whole = False
        self.on_header = self._fields.setdefault  # of a repeated one the first
        self._parser = HttpRequestParser(self)

    def on_message_complete(self) -> None:
        """The body is here to its end."""
        self._whole = True

    def head(self, raw: bytes) -> CIMultiDict[str] | None:
        """Return the fields of a head, None where it is not a plain one without errors."""
        self._fields.clear()
        self._whole = False
        try:
            self._parser.feed_data(raw)
            fields = {}
            for name, value in self._fields.items():
                text = value.rstrip(b" \t").decode(errors="surrogateescape")
                fields[name.decode("ascii").lower()] = text
        except (HttpParserError, HttpParserUpgrade, UnicodeDecodeError):
            return None
        # As many fields as lines, so none is repeated or folded.
        usual = len(fields) == raw.count(b"\r\n") - 2 <= _FIELDS_MAX and "host" in fields
        if not usual or not _UNUSUAL.isdisjoint(fields):
            return None
        if fields.get("connection", "keep-alive").lower() != "keep-alive":
            return None
        if len(fields.get("content-length", "")) > _LENGTH_DIGITS_MAX:
            return None
        return CIMultiDict(fields)

    def ends_with(self, body: bytes) -> bool:
        """Say whether a request of which the head was read ends with this body."""
        try:
            if body:
                self._parser.feed_data(body)
        except HttpParserError:
            return False
        return self._whole


class DirectServer(Protocol):
    """What connections of one address share."""

    fronts: "set[DirectConnection]"
    idle: "Deadlines[DirectConnection]"
    unfinished: "Deadlines[DirectConnection]"
    answering: Deadlines[Any]

    def connection(self) -> asyncio.Protocol:
        """Return a connection of the framework's."""


class _Begun(NamedTuple):
    """A request of which the head is here.

    Attributes:
        body_at, end: where in what is held its body begins and ends.
    """

    endpoint: ApiEndpoint
    names: Mapping[str, str]
    posted: DirectRequest
    body_at: int
    end: int


class DirectConnection(asyncio.Protocol):
    """A connection of which all requests so far were direct calls.

    A call begins when the one before it is answered. Bytes of a request are kept until it is
    carried out, so that the framework can have them.
    """

    __slots__ = (
        "_begun", "_busy", "_closing", "_direct", "_heads", "_held", "_is_unfinished", "_loop",
        "_over", "_paused", "_reading_paused", "_remote", "_server", "transport",
    )  # fmt: skip

    def __init__(self, server: DirectServer, direct: DirectCalls) -> None:
        self._server = server
        self._direct = direct
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._remote = ""
        self._heads = HeadParser()
        self._held = b""
        self._begun: _Begun | None = None
        self._is_unfinished = False
        """True while a request is here in part."""
        self._busy = False
        """True while a call is being carried out."""
        self._paused = False
        """True while the client does not take its answers."""
        self._reading_paused = False
        self._closing = False
        self._over: asyncio.Future[None] | None = None
        """Done when the last call is answered, while the server stops."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0] if isinstance(peer, list | tuple) else peer or "")
        self._server.fronts.add(self)
        self._server.idle.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; a call under way goes on."""
        self._leave()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._held = self._held + data if self._held else data
        self._go_on()
        if len(self._held) > HELD_BYTES_MAX and not self._reading_paused:
            self._reading_paused = True
            assert self.transport is not None  # or nothing is held
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The client does not read its answers as fast as it sends requests."""
        self._paused = True
        self._server.answering.begin(self)

    def resume_writing(self) -> None:
        """The client has read."""
        self._paused = False
        self._server.answering.end(self)
        self._go_on()

    def close(self) -> None:
        """Begin no more calls, and end when the last one is answered."""
        self._closing = True
        if not self._busy and self.transport is not None:
            self.transport.close()

    async def shutdown(self, timeout: float | None) -> None:
        """End within `timeout` seconds; a call under way may be answered until then."""
        if self._busy and self.transport is not None:
            self._over = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._over
        if self.transport is not None:
            self.transport.close()

    def idle_too_long(self) -> None:
        """No request has begun for too long."""
        if self.transport is not None and not self._busy:
            self.transport.close()

    def unfinished_too_long(self) -> None:
        """A request is not whole yet: the framework knows how long to wait for it."""
        if self.transport is not None and not self.transport.is_closing():
            self._hand_over()

    def _go_on(self) -> None:
        """Begin the next call, if it is here and its turn."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._busy or self._paused or self._closing or not self._held:
            return
        begun = self._begun
        if begun is None:
            end = self._held.find(_END)
            if end < 0 or end > HEAD_BYTES_MAX:
                if end < 0 and self._may_become_direct():
                    self._wait()
                else:
                    self._hand_over()
                return
            begun = self._begun = self._read_head(transport, end + len(_END))
        held = self._held
        if begun is None or len(held) < begun.end:
            if begun is None or begun.end > HELD_BYTES_MAX:
                self._hand_over()
            else:
                self._wait()
            return
        body = held[begun.body_at : begun.end]
        if not self._heads.ends_with(body):
            self._hand_over()
            return
        self._held = held[begun.end :]
        self._carry_out(transport, begun, body)

    def _may_become_direct(self) -> bool:
        """Say whether a head that is not whole can still turn out as one of a direct call."""
        held = self._held
        if len(held) > HEAD_BYTES_MAX or held[: len(_BEGIN)] != _BEGIN[: len(held)]:
            return False
        return b"\r\n" not in held or self._direct.find(held) is not None

    def _read_head(self, transport: asyncio.Transport, size: int) -> _Begun | None:
        raw = self._held[:size]
        found = self._direct.find(raw)
        fields = None if found is None else self._heads.head(raw)
        if found is None or fields is None:
            return None
        endpoint, names, path = found
        posted = DirectRequest("POST", path, fields, transport, self._remote)
        return _Begun(endpoint, names, posted, size, size + int(fields.get("Content-Length", 0)))

    def _wait(self) -> None:
        """Wait for the rest of a request."""
        if not self._is_unfinished:
            self._is_unfinished = True
            self._server.idle.end(self)
            self._server.unfinished.begin(self)

    def _carry_out(self, transport: asyncio.Transport, begun: _Begun, body: bytes) -> None:
        self._begun = None
        self._busy = True
        self._server.idle.end(self)
        if self._is_unfinished:
            self._is_unfinished = False
            self._server.unfinished.end(self)
        if self._reading_paused and len(self._held) <= HELD_BYTES_MAX:
            self._reading_paused = False
            transport.resume_reading()
        begun.endpoint.carry_out(begun.posted, begun.names, body, self._answer)

    def _answer(self, answered: HttpAnswer | None) -> None:
        """Send what goes back of a call; None: nothing does, and the connection ends."""
        self._busy = False
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if answered is None:
            transport.close()
            return
        transport.write(answered.kept_alive())
        if self._closing:
            transport.close()
            return
        self._server.idle.begin(self)
        if self._held:
            # In a turn of its own, so that no connection keeps the others waiting.
            self._loop.call_soon(self._go_on)

    def _hand_over(self) -> None:
        """Let the framework have this connection, and what it has not answered."""
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
        """Be no connection any more."""
        self.transport = None
        self._held = b""
        server = self._server
        server.fronts.discard(self)
        server.idle.end(self)
        server.unfinished.end(self)
        server.answering.end(self)
