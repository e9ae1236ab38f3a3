"""A connection of aiohttp's, and the frames that arrive on it, held to bounds.

The library hands a frame out only when all of it is there, and keeps what came until then. Ten
thousand sessions with half a frame of 16 MiB each would be 80 GB, so frames are measured where
their bytes arrive: a large one is let in when all of it finds room, else its connection is not
read on until then; and one that is not whole in time ends its session.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.core.telling import safe_repr, where_raised
from txbroker.errors import BadRequest, RequestError
from txbroker.net.deadlines import Deadlines
from txbroker.proxy.http.context import ApiContext, FrameBudget
from txbroker.proxy.http.front import DirectConnection
from txbroker.proxy.http.operations import error_response
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

_LINE_MAX = 200

SMALL_BYTES = 16 * 1024
"""Frames up to this size need no room: so much a socket's own buffer holds as well."""

_FINAL, _OPCODE, _CONTROL = 0x80, 0x0F, 0x08
_LENGTH, _MASKED, _MASK_BYTES = 0x7F, 0x80, 4
_LENGTH_BYTES = {126: 2, 127: 8}


class FrameMeter:
    """Follows the frames of one connection through the bytes that arrive.

    Args:
        room: shared by all connections.
        frame_bytes_max: longer ones are refused by the library at their header.
        timeout_s: for a frame to become whole, from its first byte or from when it was let in.
        transport: of the connection, to read on or not.
        too_slow: called when the time is over.
    """

    def __init__(
        self,
        room: FrameBudget,
        frame_bytes_max: int,
        timeout_s: float,
        transport: asyncio.Transport,
        too_slow: Callable[[], None],
    ) -> None:
        self._room = room
        self._frame_bytes_max = frame_bytes_max
        self._timeout_s = timeout_s
        self._transport = transport
        self._too_slow = too_slow
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._header = bytearray()
        self._left = 0
        """Bytes of the frame's payload that did not come yet."""
        self._control = False
        self._final = False
        self._message = 0
        """Bytes of the message so far, with all of its last frame."""
        self._held = 0
        self._wanted = 0
        """Bytes for which this connection waits."""
        self._paused = False
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Follow what arrived."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                if not self._left:
                    self._frame_ended()
            else:
                self._header.append(data[at])
                at += 1
                if len(self._header) >= 2 and len(self._header) == _header_bytes(self._header[1]):
                    self._frame_begun()
        if self._wanted:
            self._paused = True
            self._transport.pause_reading()  # again: the library reads on when it likes
        elif self._left or self._header or self._message:
            self._start_timer()
        else:
            self._stop_timer()

    def admitted(self, size: int) -> None:
        """There is room: read on."""
        self._held += size
        self._wanted = 0
        self._start_timer()
        self._resume()

    def close(self) -> None:
        """The connection has ended."""
        self._closed = True
        self._stop_timer()
        if self._wanted:
            self._room.forget(self.admitted)
        held, self._held = self._held, 0
        self._room.release(held)

    def _frame_begun(self) -> None:
        header = self._header
        self._control = bool(header[0] & _CONTROL)
        self._final = bool(header[0] & _FINAL)
        width = _LENGTH_BYTES.get(header[1] & _LENGTH, 0)
        length = int.from_bytes(header[2 : 2 + width], "big") if width else header[1] & _LENGTH
        header.clear()
        self._left = length
        if not self._control:
            self._message += length
            if SMALL_BYTES < self._message <= self._frame_bytes_max:
                self._take(self._message - self._held)
        if not length:
            self._frame_ended()

    def _take(self, size: int) -> None:
        # A client that sends on while it waits has its connection read no further, but what the
        # socket had brought along is here: it is covered by what it waits for.
        if self._closed or self._wanted:
            return
        if self._room.take(self.admitted, size):
            self._held += size
        else:
            self._wanted = size
            self._stop_timer()

    def _frame_ended(self) -> None:
        if self._control or not self._final:
            return
        self._message = 0
        self._stop_timer()
        if self._wanted:
            self._wanted = 0
            self._room.forget(self.admitted)
            self._resume()
        if self._held:
            held, self._held = self._held, 0
            self._room.release(held)

    def _resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    def _start_timer(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _header_bytes(second: int) -> int:
    """Return how long a frame's header is, by its second byte."""
    mask = _MASK_BYTES if second & _MASKED else 0
    return 2 + _LENGTH_BYTES.get(second & _LENGTH, 0) + mask


class HttpConnection(RequestHandler):
    """A connection that cannot be made to hold more than it should.

    It measures the frames of a session while they arrive, drops a client that does not send the
    head of its request or does not take its answer in time, answers what is no HTTP with an error
    like all others, and logs no traceback for it.
    """

    __slots__ = ("_answering", "_heads", "_in_head", "_meter", "_shell")

    def __init__(
        self,
        server: web.Server,
        shell: ApiContext,
        answering: "Deadlines[HttpConnection | DirectConnection]",
        heads: "Deadlines[HttpConnection]",
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._shell = shell
        self._answering = answering
        self._heads = heads
        self._in_head = False
        """True while the first bytes of a request are here and its head is not whole."""
        self._meter: FrameMeter | None = None

    def set_parser(self, *parser: Any, **options: Any) -> None:
        """A session begins on this connection."""
        settings = self._shell.settings
        transport = cast(asyncio.Transport, self.transport)
        self._meter = FrameMeter(
            self._shell.receiving,
            settings.frame_bytes_max,
            settings.request_timeout_s,
            transport,
            lambda: self._drop("a frame did not come whole in time"),
        )
        self._meter.feed(self._message_tail)
        super().set_parser(*parser, **options)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._meter is not None:
            self._meter.feed(data)
            super().data_received(data)
            return
        whole = self._request_count
        super().data_received(data)
        if self._request_count != whole:
            self._end_head()
        elif not self._in_head and (whole == 0 or self._awaits_request()):
            self._in_head = True
            self._heads.begin(self)

    def _awaits_request(self) -> bool:
        """Say whether no call is being carried out, whose body these bytes could be."""
        return self._waiter is not None and not self._waiter.done()

    def _end_head(self) -> None:
        if self._in_head:
            self._in_head = False
            self._heads.end(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection has ended."""
        if self._meter is not None:
            self._meter.close()
        self._end_head()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer, to a client that takes it."""
        self._answering.begin(self)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answering.end(self)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on, where reading was paused: the library asks for it with every body."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def head_not_whole(self) -> None:
        """It has begun a request for too long, whether it is silent or sends byte by byte."""
        self._drop("the head of a request did not come whole in time")

    def _drop(self, why: str) -> None:
        drop(self.transport, why)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        if status >= 500:
            if exc is not None:
                log.error("call failed", error=safe_repr(exc), where=where_raised(exc))
            error = RequestError("something went wrong inside the proxy; its log says what")
        else:
            what = (message or "").strip().partition("\n")[0][:_LINE_MAX]
            error = BadRequest(f"this is no HTTP that is understood: {what}")
        response = error_response(error)
        response.force_close()
        return response


def drop(transport: asyncio.Transport | None, why: str) -> None:
    """Cut a connection off."""
    if transport is not None:
        peer = transport.get_extra_info("peername")
        log.warning("connection dropped", peer=str(peer), why=why)
        transport.abort()
