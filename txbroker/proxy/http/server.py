"""The listening server: the application on a socket, and JSON errors even for what is no HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.addresses import parse_address
from txbroker.core.telling import telling, where_raised
from txbroker.deadlines import Deadlines
from txbroker.errors import BadRequest, ConfigurationError, RequestError
from txbroker.proxy.http.api import DIRECT, SHELL
from txbroker.proxy.http.frames import FrameMeter
from txbroker.proxy.http.front import HELD_S, DirectCalls, Front
from txbroker.proxy.http.operations import error_response
from txbroker.proxy.http.shell import Shell
from txbroker.proxy.logging import get_logger
from txbroker.tls import ServerTls

log = get_logger(__name__)

HEADER_BYTES_MAX = 16 * 1024
"""One header or request line; a token, a URL with a cursor and a browser's cookies fit."""
KEEPALIVE_S = 75.0
"""A connection on which no request has begun for so long is closed."""
SHUTDOWN_S = 5.0
"""How long calls under way may take to end when the proxy stops."""
LINGER_S = 1.0
"""How long the rest of a refused body is read, so that its sender gets to see the answer."""
_LINE_MAX = 200


class _Connection(RequestHandler):
    """A connection that cannot be made to hold more than it should.

    It measures the frames of a session while they arrive, drops a client that does not send the
    head of its request or does not take its answer in time, answers what is no HTTP with an error
    like all others, and logs no traceback for it.
    """

    __slots__ = ("_answering", "_heads", "_in_head", "_meter", "_shell")

    def __init__(self, server: "_Server", **options: Any) -> None:
        super().__init__(server, **options)
        self._shell = server.shell
        self._answering = server.answering
        self._heads = server.heads
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
        _drop(self.transport, why)

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
                log.error("call failed", error=telling(exc), where=where_raised(exc))
            error = RequestError("something went wrong inside the proxy; its log says what")
        else:
            what = (message or "").strip().partition("\n")[0][:_LINE_MAX]
            error = BadRequest(f"this is no HTTP that is understood: {what}")
        response = error_response(error)
        response.force_close()
        return response


class _Server(web.Server):
    shell: Shell
    direct: DirectCalls | None
    answering: Deadlines[_Connection | Front]
    heads: Deadlines[_Connection]
    idle: Deadlines[Front]
    unfinished: Deadlines[Front]

    def set_up(self, shell: Shell, direct: DirectCalls | None) -> None:
        """Begin to watch over connections."""
        self.shell, self.direct = shell, direct
        self.fronts: set[Front] = set()
        seconds = shell.settings.request_timeout_s
        self.answering = Deadlines(seconds, _not_taken)
        self.heads = Deadlines(seconds, _Connection.head_not_whole)
        self.idle = Deadlines(KEEPALIVE_S, Front.idle_too_long)
        self.unfinished = Deadlines(min(HELD_S, seconds / 2), Front.unfinished_too_long)

    def tear_down(self) -> None:
        """Watch over nothing any more."""
        for deadlines in (self.answering, self.heads, self.idle, self.unfinished):
            deadlines.close()

    def accept(self) -> asyncio.Protocol:
        """Return what a new connection begins with."""
        return self.connection() if self.direct is None else Front(self, self.direct)

    def connection(self) -> RequestHandler:
        """Return a connection of the library's."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def pre_shutdown(self) -> None:
        super().pre_shutdown()
        for front in tuple(self.fronts):
            front.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        fronts = [front.shutdown(timeout) for front in self.fronts]
        await asyncio.gather(super().shutdown(timeout), *fronts)


def _not_taken(connection: _Connection | Front) -> None:
    """A client has had its answer for too long without reading it."""
    _drop(connection.transport, "it does not read its answer")


def _drop(transport: asyncio.Transport | None, why: str) -> None:
    if transport is not None:
        peer = transport.get_extra_info("peername")
        log.warning("connection dropped", peer=str(peer), why=why)
        transport.abort()


class _Runner(web.AppRunner):
    _bounded: _Server | None = None

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._bounded is not None:
            self._bounded.tear_down()

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        bounded = self._bounded = _Server(
            server.request_handler, request_factory=server.request_factory, **server._kwargs
        )
        bounded.set_up(self.app[SHELL], self.app.get(DIRECT))
        return bounded


class _Site(web.TCPSite):
    """A listening socket that also bounds how long a TLS handshake may take."""

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
        tls: what to show and ask for; None: TLS is not spoken.
        public: False for the admin and the peer address, where no SDK calls.

    Raises:
        ConfigurationError: the address is malformed, taken or not this machine's.
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
        shell = app[SHELL]
        site = _Site(
            runner,
            address.host,
            address.port,
            reuse_address=True,
            ssl_context=None if tls is None else tls.context,
        )
        if tls is not None:  # the event loop takes none otherwise
            site.handshake_s = shell.settings.request_timeout_s
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(f"cannot listen on {listen}: {reason}") from None
        port = runner.addresses[0][1]
        url = address._replace(port=port).url_of(secure=tls is not None)
        if public and not shell.settings.advertise:
            shell.url = url
        yield url
    finally:
        await runner.cleanup()
