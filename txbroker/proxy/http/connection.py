"""The connections of aiohttp, with limits for slow clients and for the bytes of frames.

aiohttp buffers a frame until it is complete. Ten thousand sessions with half a frame of 16 MiB
each would be 80 GB, so frames are measured as their bytes arrive: a large frame is admitted when
the shared budget has room for all of it, otherwise its connection is paused; a frame that is not
complete in time ends its session. See decision 0026.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import BadRequest, RequestError
from txbroker.net.timers import Deadlines
from txbroker.proxy.admission import FrameBudget
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import INTERNAL_ERROR
from txbroker.proxy.http.front import DirectConnection
from txbroker.proxy.http.operations import error_answer
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

SMALL_BYTES = 16 * 1024
"""Frames up to this size need no budget: a socket's own buffer holds as much."""

_FINAL, _OPCODE, _CONTROL = 0x80, 0x0F, 0x08
_LENGTH, _MASKED, _MASK_BYTES = 0x7F, 0x80, 4
_LENGTH_BYTES = {126: 2, 127: 8}
_LINE_MAX = 200


class FrameMeter:
    """Follows the frames of one connection through its incoming bytes.

    Args:
        budget: shared by all connections.
        frame_bytes_max: aiohttp refuses longer frames at their header.
        timeout_s: for a frame to complete, from its first byte or its admission.
        transport: the connection's, to pause and resume.
        too_slow: called on timeout.
    """

    def __init__(
        self,
        budget: FrameBudget,
        frame_bytes_max: int,
        timeout_s: float,
        transport: asyncio.Transport,
        too_slow: Callable[[], None],
    ) -> None:
        self._budget = budget
        self._frame_bytes_max = frame_bytes_max
        self._timeout_s = timeout_s
        self._transport = transport
        self._too_slow = too_slow
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._header = bytearray()
        self._left = 0
        """Payload bytes of the current frame still to arrive."""
        self._control = False
        self._final = False
        self._message = 0
        """Bytes of the message so far, with all of its last frame."""
        self._held = 0
        """Bytes reserved from the budget."""
        self._requested = 0
        """Bytes this connection waits for."""
        self._paused = False
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Follow incoming bytes."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                if not self._left:
                    self._end_frame()
            else:
                self._header.append(data[at])
                at += 1
                if len(self._header) >= 2 and len(self._header) == _header_bytes(self._header[1]):
                    self._begin_frame()
        if self._requested:
            self._paused = True
            self._transport.pause_reading()  # every time: aiohttp may have resumed it
        elif self._left or self._header or self._message:
            self._start_timer()
        else:
            self._stop_timer()

    def admitted(self, size: int) -> None:
        """Resume reading: the budget has reserved `size` bytes."""
        self._held += size
        self._requested = 0
        self._start_timer()
        self._resume()

    def close(self) -> None:
        """Return all bytes: the connection has ended."""
        self._closed = True
        self._stop_timer()
        if self._requested:
            self._budget.forget(self.admitted)
        self._release()

    def _begin_frame(self) -> None:
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
                self._reserve(self._message - self._held)
        if not length:
            self._end_frame()

    def _reserve(self, size: int) -> None:
        # While a connection waits it is paused. Bytes that had already arrived are covered by
        # the size it waits for.
        if self._closed or self._requested:
            return
        if self._budget.take(self.admitted, size):
            self._held += size
        else:
            self._requested = size
            self._stop_timer()

    def _end_frame(self) -> None:
        if self._control or not self._final:
            return
        self._message = 0
        self._stop_timer()
        if self._requested:
            self._requested = 0
            self._budget.forget(self.admitted)
            self._resume()
        if self._held:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, 0
        self._budget.release(held)

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
    """Return the length of a frame's header, by its second byte."""
    mask = _MASK_BYTES if second & _MASKED else 0
    return 2 + _LENGTH_BYTES.get(second & _LENGTH, 0) + mask


class HttpConnection(RequestHandler):
    """A connection of aiohttp with limits.

    It measures the frames of a session, drops a client that does not complete a request's head or
    does not read its answer in time, answers non-HTTP with an error in JSON, and logs no traceback
    for it.
    """

    __slots__ = ("_answering", "_context", "_heads", "_in_head", "_meter")

    def __init__(
        self,
        server: web.Server,
        context: ApiContext,
        answering: "Deadlines[HttpConnection | DirectConnection]",
        heads: "Deadlines[HttpConnection]",
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._context = context
        self._answering = answering
        self._heads = heads
        self._in_head = False
        """True while a request's head has arrived in part."""
        self._meter: FrameMeter | None = None

    def set_parser(self, *parser: Any, **options: Any) -> None:
        """Begin a session on this connection."""
        settings = self._context.settings
        transport = cast(asyncio.Transport, self.transport)
        self._meter = FrameMeter(
            self._context.limits.receiving,
            settings.frame_bytes_max,
            settings.request_timeout_s,
            transport,
            lambda: drop(self.transport, "a frame was not complete in time"),
        )
        self._meter.feed(self._message_tail)
        super().set_parser(*parser, **options)

    def data_received(self, data: bytes) -> None:
        """Handle incoming bytes."""
        if self._meter is not None:
            self._meter.feed(data)
            super().data_received(data)
            return
        count = self._request_count
        super().data_received(data)
        if self._request_count != count:
            self._end_head()
        elif not self._in_head and (count == 0 or self._awaits_request()):
            self._in_head = True
            self._heads.begin(self)

    def _awaits_request(self) -> bool:
        """Return True if no call is in flight, whose body these bytes could be."""
        return self._waiter is not None and not self._waiter.done()

    def _end_head(self) -> None:
        if self._in_head:
            self._in_head = False
            self._heads.end(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release everything: the connection has ended."""
        if self._meter is not None:
            self._meter.close()
        self._end_head()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer within the deadline for the client to read it."""
        self._answering.begin(self)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answering.end(self)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading if paused: aiohttp calls this for every body."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def head_too_slow(self) -> None:
        """Drop a client whose request head is late, whether it is silent or sends byte by byte."""
        drop(self.transport, "the head of a request was not complete in time")

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log an error after an answer in one line; not that the rest of a refused body is bad."""
        error = kwargs.get("exc_info")
        if isinstance(error, BaseException) and not isinstance(error, web.RequestPayloadError):
            log.error("call failed", error=safe_repr(error), where=raised_at(error))

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
                log.error("call failed", error=safe_repr(exc), where=raised_at(exc))
            error = RequestError(INTERNAL_ERROR)
        else:
            problem = (message or "").strip().partition("\n")[0][:_LINE_MAX]
            error = BadRequest(f"cannot parse the HTTP request: {problem}")
        response = error_answer(error).response()
        response.force_close()
        return response


def drop(transport: asyncio.Transport | None, why: str) -> None:
    """Abort a connection."""
    if transport is not None:
        peer = transport.get_extra_info("peername")
        log.warning("connection dropped", peer=str(peer), why=why)
        transport.abort()
