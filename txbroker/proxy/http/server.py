"""The listening server: the application on a socket, and JSON errors even for what is no HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.config.addresses import parse_address
from txbroker.errors import ConfigurationError
from txbroker.net.deadlines import Deadlines
from txbroker.net.tls import ServerTls
from txbroker.proxy.http.api import CONTEXT, DIRECT
from txbroker.proxy.http.connection import HttpConnection, drop
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.front import HELD_S, DirectCalls, DirectConnection

HEADER_BYTES_MAX = 16 * 1024
"""One header or request line; a token, a URL with a cursor and a browser's cookies fit."""
KEEPALIVE_S = 75.0
"""A connection on which no request has begun for so long is closed."""
SHUTDOWN_S = 5.0
"""How long calls under way may take to end when the proxy stops."""
LINGER_S = 1.0
"""How long the rest of a refused body is read, so that its sender gets to see the answer."""


class _Server(web.Server):
    shell: ApiContext
    direct: DirectCalls | None
    answering: Deadlines[HttpConnection | DirectConnection]
    heads: Deadlines[HttpConnection]
    idle: Deadlines[DirectConnection]
    unfinished: Deadlines[DirectConnection]

    def set_up(self, shell: ApiContext, direct: DirectCalls | None) -> None:
        """Begin to watch over connections."""
        self.shell, self.direct = shell, direct
        self.fronts: set[DirectConnection] = set()
        seconds = shell.settings.request_timeout_s
        self.answering = Deadlines(seconds, _not_taken)
        self.heads = Deadlines(seconds, HttpConnection.head_not_whole)
        self.idle = Deadlines(KEEPALIVE_S, DirectConnection.idle_too_long)
        self.unfinished = Deadlines(min(HELD_S, seconds / 2), DirectConnection.unfinished_too_long)

    def tear_down(self) -> None:
        """Watch over nothing any more."""
        for deadlines in (self.answering, self.heads, self.idle, self.unfinished):
            deadlines.close()

    def accept(self) -> asyncio.Protocol:
        """Return what a new connection begins with."""
        return self.connection() if self.direct is None else DirectConnection(self, self.direct)

    def connection(self) -> RequestHandler:
        """Return a connection of the library's."""
        parts = self.shell, self.answering, self.heads
        return HttpConnection(self, *parts, loop=self._loop, **self._kwargs)

    def pre_shutdown(self) -> None:
        super().pre_shutdown()
        for front in tuple(self.fronts):
            front.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        fronts = [front.shutdown(timeout) for front in self.fronts]
        await asyncio.gather(super().shutdown(timeout), *fronts)


def _not_taken(connection: HttpConnection | DirectConnection) -> None:
    """A client has had its answer for too long without reading it."""
    drop(connection.transport, "it does not read its answer")


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
        bounded.set_up(self.app[CONTEXT], self.app.get(DIRECT))
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
        shell = app[CONTEXT]
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
