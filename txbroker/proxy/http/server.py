"""The listening server: aiohttp with deadlines for connections, and JSON errors for non-HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.config.addresses import parse_address
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import BadRequest, ConfigurationError, RequestError
from txbroker.net.deadlines import Deadlines
from txbroker.net.tls import ServerTls
from txbroker.proxy.http.api import CONTEXT, DIRECT
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import INTERNAL_ERROR
from txbroker.proxy.http.front import HELD_S, DirectCalls, DirectConnection
from txbroker.proxy.http.operations import error_answer
from txbroker.proxy.http.sessions.frames import FrameMeter
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

HEADER_BYTES_MAX = 16 * 1024
"""One header or request line; a token, a URL with a cursor and a browser's cookies fit."""
KEEPALIVE_S = 75.0
"""Idle time after which a connection is closed."""
SHUTDOWN_S = 5.0
"""Maximum time for calls in flight when the proxy stops."""
LINGER_S = 1.0
"""Time to read the rest of a refused body, so that its sender can read the answer."""
_LINE_MAX = 200


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


class _Server(web.Server):
    context: ApiContext
    direct: DirectCalls | None
    answering: Deadlines[HttpConnection | DirectConnection]
    heads: Deadlines[HttpConnection]
    idle: Deadlines[DirectConnection]
    unfinished: Deadlines[DirectConnection]

    def set_up(self, context: ApiContext, direct: DirectCalls | None) -> None:
        """Start the deadlines."""
        self.context, self.direct = context, direct
        self.fronts: set[DirectConnection] = set()
        seconds = context.settings.request_timeout_s
        self.answering = Deadlines(seconds, _answer_not_read)
        self.heads = Deadlines(seconds, HttpConnection.head_too_slow)
        self.idle = Deadlines(KEEPALIVE_S, DirectConnection.idle_too_long)
        self.unfinished = Deadlines(min(HELD_S, seconds / 2), DirectConnection.unfinished_too_long)

    def tear_down(self) -> None:
        """Stop the deadlines."""
        for deadlines in (self.answering, self.heads, self.idle, self.unfinished):
            deadlines.close()

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return self.connection() if self.direct is None else DirectConnection(self, self.direct)

    def connection(self) -> RequestHandler:
        """Return a connection of aiohttp."""
        parts = self.context, self.answering, self.heads
        return HttpConnection(self, *parts, loop=self._loop, **self._kwargs)

    def pre_shutdown(self) -> None:
        super().pre_shutdown()
        for front in tuple(self.fronts):
            front.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        fronts = [front.shutdown(timeout) for front in self.fronts]
        await asyncio.gather(super().shutdown(timeout), *fronts)


def _answer_not_read(connection: HttpConnection | DirectConnection) -> None:
    drop(connection.transport, "the client does not read its answer")


class _Runner(web.AppRunner):
    _limited: _Server | None = None

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._limited is not None:
            self._limited.tear_down()

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        limited = self._limited = _Server(
            server.request_handler, request_factory=server.request_factory, **server._kwargs
        )
        limited.set_up(self.app[CONTEXT], self.app.get(DIRECT))
        return limited


class _Site(web.TCPSite):
    """A listening socket with a timeout for TLS handshakes."""

    handshake_s: float | None = None

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server = self._runner.server
        assert isinstance(server, _Server)
        self._server = await asyncio.get_running_loop().create_server(
            server.accept,
            self._host,
            self._port,
            ssl=self._ssl_context,
            ssl_handshake_timeout=self.handshake_s,
            backlog=self._backlog,
            reuse_address=self._reuse_address,
        )


@asynccontextmanager
async def serve(
    app: web.Application, listen: str, tls: ServerTls | None = None, *, public: bool = True
) -> AsyncIterator[str]:
    """Listen on `host:port` (port 0 takes a free one) and yield the URL to call.

    Args:
        tls: the server's TLS; None: plain HTTP.
        public: False for the admin and the peer address, which SDKs do not call.

    Raises:
        ConfigurationError: the address is malformed, in use or not this machine's.
    """
    address = parse_address(listen)
    options: dict[str, Any] = {
        "access_log": None,
        "keepalive_timeout": KEEPALIVE_S,
        "max_line_size": HEADER_BYTES_MAX,
        "max_field_size": HEADER_BYTES_MAX,
        "lingering_time": LINGER_S,
        "shutdown_timeout": SHUTDOWN_S,
    }
    runner = _Runner(app, handle_signals=False, **options)
    await runner.setup()
    try:
        context = app[CONTEXT]
        site = _Site(
            runner,
            address.host,
            address.port,
            reuse_address=True,
            ssl_context=None if tls is None else tls.context,
        )
        if tls is not None:  # without TLS the event loop rejects this option
            site.handshake_s = context.settings.request_timeout_s
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(f"cannot listen on {listen}: {reason}") from None
        port = runner.addresses[0][1]
        url = address._replace(port=port).url_of(secure=tls is not None)
        if public and not context.settings.advertise:
            context.url = url
        yield url
    finally:
        await runner.cleanup()
