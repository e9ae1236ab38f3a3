"""The listening server: aiohttp with deadlines for connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.config.addresses import parse_address
from txbroker.errors import ConfigurationError
from txbroker.net.timers import Deadlines
from txbroker.net.tls import ServerTls
from txbroker.proxy.http.api import CONTEXT, DIRECT
from txbroker.proxy.http.connection import HttpConnection, drop
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.front import HELD_S, DirectCalls, DirectConnection
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
