"""The HTTP API put together: declared operations, the guard before them, errors as JSON."""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import Leases
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.settings import Settings
from txbroker.contract.service import Service
from txbroker.errors import (
    AdminOnly,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    TooLarge,
)
from txbroker.principals import Directory
from txbroker.proxy.cluster.forwarding import CALLER, CALLER_HEADER, PREFIX
from txbroker.proxy.http import groups, system, transactions
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import ApiEndpoint, refusal
from txbroker.proxy.http.front import DirectCalls
from txbroker.proxy.http.guards import (
    PRINCIPAL,
    Guard,
    PeerGuard,
    is_page,
    load_principals,
)
from txbroker.proxy.http.joint import CallBatcher
from txbroker.proxy.http.openapi import describe
from txbroker.proxy.http.operations import (
    ApiCall,
    ApiReply,
    Operation,
    encode_json,
    error_response,
    response_of,
)
from txbroker.proxy.http.peer_api import PeerApi
from txbroker.proxy.http.sessions.server import SessionServer
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.metrics import Gauges, Metrics

log = get_logger(__name__)

SESSION_PATH = "/v1/session"
OPENAPI_PATH = "/v1/openapi.json"
_VARIABLE = re.compile(r"\{(\w+)\}")
CONTEXT: web.AppKey[ApiContext] = web.AppKey("shell", ApiContext)
DIRECT: web.AppKey[DirectCalls] = web.AppKey("direct", DirectCalls)


Pages = Callable[[ApiContext, Guard], Iterable[tuple[str, str, Handler]]]
"""Returns method, path and handler of every page."""


@dataclass(frozen=True)
class _Parts:
    """What the applications of the two addresses have in common."""

    own: ApiContext
    shell: ApiContext
    peers: PeerGuard
    internal: PeerApi
    declared: tuple[Operation, ...]
    pages: Pages


_PARTS: web.AppKey[_Parts] = web.AppKey("parts", _Parts)


def operations() -> tuple[Operation, ...]:
    """Return every call of the HTTP API but the session's."""
    declared = (*transactions.OPERATIONS, *groups.OPERATIONS, *system.OPERATIONS)
    document = b""

    async def openapi(_: ApiCall) -> ApiReply:
        return ApiReply(200, document)

    own = Operation(
        "openapi", "GET", OPENAPI_PATH, "This document", openapi, {200: None}
    )  # fmt: skip
    document = encode_json(describe((*declared, own)))
    return (*declared, own)


def make_app(
    service: Service,
    groups: Groups,
    sessions: SessionRegistry,
    settings: Settings,
    metrics: Metrics,
    *,
    checks: HttpChecks,
    local: Service | None = None,
    leases: Leases | None = None,
    peers: PeerGuard | None = None,
    principals: Callable[[], Directory] | None = None,
    pages: Pages = lambda _shell, _guard: (),
) -> web.Application:
    """Return the web application of one proxy; where there is an admin address, without what is
    operators'.

    Args:
        service: answers the HTTP API.
        checks: calls check URLs.
        local: answers sessions and other proxies, this proxy's own part; None: `service` too.
        leases: the sessions that other proxies have in hand; None: made here.
        peers: knows the other proxies; None: made here.
        principals: returns the principals as they are now; None: made here.
        pages: makes the pages for people, which admit by themselves.

    Raises:
        ConfigurationError: the token file cannot be read.
    """
    principals = principals or load_principals(settings)
    own = ApiContext(local or service, groups, sessions, settings, metrics, checks, principals)
    # The same in all but whom it asks: what is in flight is bounded together.
    shell = copy.copy(own)
    shell.service, shell.joint = service, CallBatcher(service)
    internal = PeerApi(own, leases or Leases(sessions))
    parts = _Parts(own, shell, peers or PeerGuard(settings), internal, operations(), pages)
    guard = Guard(settings, principals=principals)
    app = _application(
        parts, guard, admin=not settings.admin_listen, internal=not settings.peer_listen
    )
    app[_PARTS] = parts
    session_server = SessionServer(own, guard)
    app.router.add_get(
        SESSION_PATH, session_server.handle, allow_head=False, expect_handler=_expect
    )
    app.cleanup_ctx.append(session_server.lifetime)
    app.on_shutdown.append(session_server.close_all)
    own.files.extend(parts.peers.files)
    metrics.watch(
        lambda: Gauges(
            sessions=sessions.counts(),
            ready=service.readiness().ready,
            files_not_read=own.files_not_read(),
        )
    )
    return app


def make_admin_app(app: web.Application) -> web.Application:
    """Return the application of the admin address of the proxy whose application `app` is:
    the whole HTTP API and the pages, but neither sessions nor the calls of other proxies.

    Raises:
        ConfigurationError: the token file cannot be read.
    """
    parts = app[_PARTS]
    guard = Guard(parts.own.settings, admin=True, principals=parts.own.principals)
    return _application(parts, guard, admin=True)


def make_peer_app(app: web.Application) -> web.Application:
    """Return the application of the peer address of the proxy whose application `app` is: the
    calls of other proxies alone.

    Raises:
        ConfigurationError: the token file cannot be read.
    """
    parts = app[_PARTS]
    guard = Guard(parts.own.settings, principals=parts.own.principals)
    return _web_application(parts, guard, frozenset(), internal=True)


def _web_application(
    parts: _Parts,
    guard: Guard,
    open_paths: frozenset[str],
    *,
    pages: bool = False,
    internal: bool = False,
) -> web.Application:
    app = web.Application(
        middlewares=[_outermost(parts, guard, open_paths, pages=pages, internal=internal)],
        client_max_size=parts.shell.settings.request_bytes_max,
    )
    app[CONTEXT] = parts.own
    parts.own.files.extend(guard.files)
    if internal:
        for method, path, handler in parts.internal.routes():
            app.router.add_route(method, path, handler, expect_handler=_expect)
    return app


def _application(
    parts: _Parts, guard: Guard, *, admin: bool, internal: bool = False
) -> web.Application:
    shell = parts.shell
    open_paths = frozenset(operation.path for operation in parts.declared if operation.open)
    app = _web_application(parts, guard, open_paths, pages=admin, internal=internal)
    endpoints = [ApiEndpoint(shell, guard, operation) for operation in parts.declared]
    app[DIRECT] = DirectCalls([each for each in endpoints if each.operation.direct])
    for endpoint in endpoints:
        operation = endpoint.operation
        handler = endpoint.routed if admin or not operation.admin else _at_admin_address
        methods = ("GET", "HEAD") if operation.method == "GET" else (operation.method,)
        for method in methods:
            app.router.add_route(method, _route(operation), handler, expect_handler=_expect)
    if admin:
        for method, path, page in parts.pages(shell, guard):
            app.router.add_route(method, path, page, expect_handler=_expect)
    return app


def _route(operation: Operation) -> str:
    """Return the path for the router, whose own pattern takes no name with a brace."""
    return _VARIABLE.sub(r"{\1:[^/]+}", operation.path)


async def _at_admin_address(_: web.Request) -> web.StreamResponse:
    raise AdminOnly


def _outermost(
    parts: _Parts, guard: Guard, open_paths: frozenset[str], *, pages: bool, internal: bool
) -> Middleware:
    @web.middleware
    async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            # Pages admit by themselves: they answer in HTML, and have a login.
            page = is_page(request.path)
            caller = ""
            if internal and request.path.startswith(PREFIX + "/"):
                guard.admit_page(request)
                parts.peers.admit(request)
                caller = unquote(request.headers.get(CALLER_HEADER, ""))
            elif request.path not in open_paths and not page:
                request[PRINCIPAL] = guard.admit(request)
                caller = request[PRINCIPAL].counted_as
            CALLER.set(caller)
            if page and not pages:
                raise AdminOnly("the console is at this proxy's admin address")
            return await handler(request)
        except web.HTTPException as error:
            return _translated(request, error)
        except ConnectionError:
            raise
        except Exception as error:
            return response_of(refusal(request, error))

    return outermost


def _translated(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return the router's and the framework's own errors in the form of ours."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(
            MethodNotAllowed(f"{request.method[:20]} does not work here; {allowed} does")
        )
        response.headers["Allow"] = allowed
        return response
    if isinstance(error, web.HTTPNotFound):
        return error_response(
            NotFound(f"there is nothing at {request.path[:100]!r}; see {OPENAPI_PATH}")
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_response(TooLarge())
    return error_response(BadRequest(error.reason))


async def _expect(request: web.Request) -> web.StreamResponse | None:
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(BadRequest("of Expect only 100-continue is known"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # What goes before the answer is not part of it.
    request.writer.output_size = 0
    return None
