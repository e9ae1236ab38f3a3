"""The listening server: the application on a socket, and JSON errors even for what is no HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from txbroker.addresses import parse_address
from txbroker.errors import BadRequest, ConfigurationError, RequestError
from txbroker.proxy.http.api import SHELL
from txbroker.proxy.http.operations import error_response
from txbroker.proxy.logging import get_logger

log = get_logger(__name__)

HEADER_BYTES_MAX = 16 * 1024
"""One header or request line; a token, a URL with a cursor and a browser's cookies fit."""
KEEPALIVE_S = 75.0
"""A connection on which no whole request has come for so long is closed."""
SHUTDOWN_S = 5.0
"""How long calls under way may take to end when the proxy stops."""
LINGER_S = 1.0
"""How long the rest of a refused body is read, so that its sender gets to see the answer."""
_LINE_MAX = 200


class _Connection(RequestHandler):
    """Answers what is no HTTP with an error like all others, and logs no traceback for it."""

    __slots__ = ()

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
            log.error("call failed", error=repr(exc)[:_LINE_MAX])
            error = RequestError("something went wrong inside the proxy; its log says what")
        else:
            what = (message or "").strip().partition("\n")[0][:_LINE_MAX]
            error = BadRequest(f"this is no HTTP that is understood: {what}")
        response = error_response(error)
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler, request_factory=server.request_factory, **server._kwargs
        )


@asynccontextmanager
async def serve(app: web.Application, listen: str) -> AsyncIterator[str]:
    """Listen on `host:port` (port 0 takes a free one) and yield the URL to call.

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
        site = web.TCPSite(runner, address.host, address.port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(f"cannot listen on {listen}: {reason}") from None
        url = address._replace(port=runner.addresses[0][1]).url
        shell = app[SHELL]
        if not shell.settings.advertise:
            shell.url = url
        yield url
    finally:
        await runner.cleanup()
