"""The web applications of a proxy's addresses: routes, admission, errors as JSON."""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware
from msgspec import structs

from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import SessionLeases
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.settings import Settings
from txbroker.contract.service import History, HistoryRequest, Overview, Service
from txbroker.errors import (
    AdminOnly,
    BadRequest,
    HttpVersionNotSupported,
    MethodNotAllowed,
    NotFound,
    RequestError,
    TooLarge,
)
from txbroker.principals import READERS, Directory
from txbroker.proxy.cluster.forwarding import CALLER, CALLER_HEADER, PREFIX
from txbroker.proxy.http import groups as group_operations
from txbroker.proxy.http import transactions
from txbroker.proxy.http.bodies import HealthBody, HistoryQuery, ReadyBody
from txbroker.proxy.http.context import ApiContext, seen_by
from txbroker.proxy.http.endpoints import ApiEndpoint, failure_answer
from txbroker.proxy.http.front import DirectCalls
from txbroker.proxy.http.guards import (
    PRINCIPAL,
    Guard,
    PeerGuard,
    is_page,
    load_principals,
)
from txbroker.proxy.http.operations import (
    ApiCall,
    ApiReply,
    Operation,
    describe,
    encode_json,
    error_answer,
)
from txbroker.proxy.http.peer_api import PeerApi
from txbroker.proxy.http.sessions import SessionServer
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.metrics import OTHER, Gauges, Metrics

log = get_logger(__name__)

SESSION_PATH = "/v1/session"
OPENAPI_PATH = "/v1/openapi.json"
_VARIABLE = re.compile(r"\{(\w+)\}")
CONTEXT: web.AppKey[ApiContext] = web.AppKey("context", ApiContext)
DIRECT: web.AppKey[DirectCalls] = web.AppKey("direct", DirectCalls)

Pages = Callable[[ApiContext, Guard], Iterable[tuple[str, str, Handler]]]
"""Returns method, path and handler of every page."""


@dataclass(frozen=True)
class _Parts:
    """The parts that the applications of all addresses share; `local` answers by this proxy alone,
    `context` for all proxies."""

    local: ApiContext
    context: ApiContext
    peers: PeerGuard
    peer_api: PeerApi
    operations: tuple[Operation, ...]
    pages: Pages


_PARTS: web.AppKey[_Parts] = web.AppKey("parts", _Parts)


# --- operations on the proxy itself ----------------------------------------------------------


async def health(call: ApiCall) -> ApiReply:
    """Liveness."""
    return ApiReply(200, HealthBody(status="alive"))


async def ready(call: ApiCall) -> ApiReply:
    """Readiness: the proxy takes calls and has read the log of all its half partitions."""
    readiness = call.context.service.readiness()
    body = ReadyBody(
        ready=readiness.ready,
        partitions={str(number): state for number, state in readiness.partitions.items()},
        problems=list(readiness.problems),
    )
    return ApiReply(200 if readiness.ready else 503, body)


async def overview(call: ApiCall) -> ApiReply:
    """Proxies, half partitions, groups, and rates over the last ten seconds."""
    overview = await call.context.service.overview()
    groups = tuple(group for group in overview.groups if group.group in call.principal.groups)
    kafka = call.context.settings.kafka
    return ApiReply(200, structs.replace(overview, groups=groups, kafka=kafka))


async def history(call: ApiCall) -> ApiReply:
    """The last hour: counts, checks and latencies by step, and what happened."""
    query = cast(HistoryQuery, call.query)
    if query.group is not None:
        call.principal.check_group(query.group)
    request = HistoryRequest(query.group or "", query.since_s, query.step_s, query.actions)
    found = await call.context.service.history(request)
    return ApiReply(200, seen_by(found, call.principal))


async def metrics(call: ApiCall) -> ApiReply:
    """Metrics for Prometheus."""
    return ApiReply(200, call.context.metrics.text())


OPERATIONS = (
    Operation(health, "GET /healthz", {200: HealthBody}, open=True),
    Operation(
        ready,
        "GET /readyz",
        {200: ReadyBody, 503: ReadyBody},
        open=True,
    ),
    Operation(
        overview,
        "GET /v1/overview",
        {200: Overview},
        roles=READERS,
        admin=True,
    ),
    Operation(
        history,
        "GET /v1/history",
        {200: History},
        query=HistoryQuery,
        roles=READERS,
        admin=True,
    ),
    Operation(
        metrics,
        "GET /metrics",
        {200: None},
        media="text/plain",
        roles=READERS,
        admin=True,
    ),
)


def operations() -> tuple[Operation, ...]:
    """Return every operation of the HTTP API but the session's."""
    declared = (*transactions.OPERATIONS, *group_operations.OPERATIONS, *OPERATIONS)
    document = b""

    async def openapi(_: ApiCall) -> ApiReply:
        """This document."""
        return ApiReply(200, document)

    own = Operation(openapi, f"GET {OPENAPI_PATH}", {200: None})
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
    leases: SessionLeases | None = None,
    peers: PeerGuard | None = None,
    principals: Callable[[], Directory] | None = None,
    pages: Pages = lambda _context, _guard: (),
) -> web.Application:
    """Return the application of a proxy's main address; with an admin address configured, without
    the operators' calls.

    Args:
        service: answers the HTTP API, for all proxies.
        checks: calls check URLs.
        local: answers sessions and other proxies, for this proxy alone; None: `service`.
        leases, peers, principals: None: created here.
        pages: the console's pages, which do their own admission.

    Raises:
        ConfigurationError: the token file cannot be read.
    """
    principals = principals or load_principals(settings)
    own = ApiContext(local or service, groups, sessions, settings, metrics, checks, principals)
    # The limits are shared; only the service differs.
    context = copy.copy(own)
    context.serve(service)
    peer_api = PeerApi(own, leases or SessionLeases(sessions))
    parts = _Parts(own, context, peers or PeerGuard(settings), peer_api, operations(), pages)
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
            files_not_read=own.unusable_files(),
        )
    )
    return app


def make_admin_app(app: web.Application) -> web.Application:
    """Return the application of the admin address of `app`'s proxy: the whole HTTP API and the
    pages, without sessions and calls of other proxies."""
    parts = app[_PARTS]
    guard = Guard(parts.local.settings, admin=True, principals=parts.local.principals)
    return _application(parts, guard, admin=True)


def make_peer_app(app: web.Application) -> web.Application:
    """Return the application of the peer address of `app`'s proxy: only calls of other proxies."""
    parts = app[_PARTS]
    guard = Guard(parts.local.settings, principals=parts.local.principals)
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
        middlewares=[_admission(parts, guard, open_paths, pages=pages, internal=internal)],
        client_max_size=parts.context.settings.request_bytes_max,
    )
    app[CONTEXT] = parts.local
    parts.local.files.extend(guard.files)
    if internal:
        for method, path, handler in parts.peer_api.routes():
            app.router.add_route(method, path, handler, expect_handler=_expect)
    return app


def _application(
    parts: _Parts, guard: Guard, *, admin: bool, internal: bool = False
) -> web.Application:
    context = parts.context
    open_paths = frozenset(operation.path for operation in parts.operations if operation.open)
    app = _web_application(parts, guard, open_paths, pages=admin, internal=internal)
    endpoints = [ApiEndpoint(context, guard, operation) for operation in parts.operations]
    app[DIRECT] = DirectCalls([endpoint for endpoint in endpoints if endpoint.operation.direct])
    for endpoint in endpoints:
        operation = endpoint.operation
        handler = endpoint.routed if admin or not operation.admin else _admin_only
        methods = ("GET", "HEAD") if operation.method == "GET" else (operation.method,)
        for method in methods:
            app.router.add_route(method, _route(operation), handler, expect_handler=_expect)
    if admin:
        for method, path, page in parts.pages(context, guard):
            app.router.add_route(method, path, page, expect_handler=_expect)
    return app


def _route(operation: Operation) -> str:
    """Return the path for the router, whose default pattern excludes braces in a name."""
    return _VARIABLE.sub(r"{\1:[^/]+}", operation.path)


async def _admin_only(_: web.Request) -> web.StreamResponse:
    raise AdminOnly


_VERSIONS = (HttpVersion10, HttpVersion11)
"""aiohttp's parser also lets HTTP/0.9 and HTTP/2.0 through."""


def _admission(
    parts: _Parts, guard: Guard, open_paths: frozenset[str], *, pages: bool, internal: bool
) -> Middleware:
    """Return the middleware that admits callers and turns errors into answers."""

    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.version not in _VERSIONS:
                raise HttpVersionNotSupported
            # Pages do their own admission: they answer in HTML and have a login.
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
                raise AdminOnly("the console is at this proxy's admin address: open it there")
            return await handler(request)
        except web.HTTPException as error:
            return _http_error(request, error)
        except ConnectionError:
            raise
        except Exception as error:
            return failure_answer(request, error).response()

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await admit(request, handler)
        endpoint = getattr(request.match_info.handler, "__self__", None)
        name = endpoint.operation.name if isinstance(endpoint, ApiEndpoint) else OTHER
        parts.local.metrics.answers_of(name)[response.status // 100] += 1
        return response

    return count


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return an error of the router or of aiohttp as JSON."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _error_response(
            MethodNotAllowed(f"{request.method[:20]} is not allowed here: use {allowed}")
        )
        response.headers["Allow"] = allowed
        return response
    if isinstance(error, web.HTTPNotFound):
        return _error_response(
            NotFound(f"there is nothing at {request.path[:100]!r}: see {OPENAPI_PATH}")
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _error_response(TooLarge())
    return _error_response(BadRequest(error.reason))


def _error_response(error: RequestError) -> web.Response:
    return error_answer(error).response()


async def _expect(request: web.Request) -> web.StreamResponse | None:
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _error_response(BadRequest("the Expect header only supports 100-continue"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The interim answer must not count as the beginning of the answer.
    request.writer.output_size = 0
    return None
