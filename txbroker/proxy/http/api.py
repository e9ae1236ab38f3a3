"""The HTTP API put together: declared operations, the guard before them, errors as JSON."""

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from txbroker import tracing
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import Leases
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config import Settings
from txbroker.contract import Service
from txbroker.core.telling import telling, where_raised
from txbroker.errors import (
    AdminOnly,
    BadRequest,
    KafkaDown,
    KafkaUnavailable,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestError,
    TooLarge,
)
from txbroker.principals import ANYBODY, Directory, Principal
from txbroker.proxy.forwarding import CALLER, CALLER_HEADER, PREFIX
from txbroker.proxy.http import registration, system, transactions
from txbroker.proxy.http.direct import DirectCalls, Endpoint
from txbroker.proxy.http.guards import (
    PRINCIPAL,
    Guard,
    PeerGuard,
    credential_of,
    is_page,
    reread_principals,
)
from txbroker.proxy.http.internal import Internal
from txbroker.proxy.http.joint import JointCalls
from txbroker.proxy.http.openapi import describe
from txbroker.proxy.http.operations import (
    Answered,
    Call,
    Operation,
    Reply,
    encode_json,
    error_response,
    refused,
    response_of,
)
from txbroker.proxy.http.reading import Body, check_media_type, decode_body, decode_query
from txbroker.proxy.http.sessions import SessionServer
from txbroker.proxy.http.shell import Shell
from txbroker.proxy.logging import get_logger
from txbroker.proxy.metrics import Gauges, Metrics

log = get_logger(__name__)

SESSION_PATH = "/v1/session"
SLOW_BODY_S = 1.0
"""A caller whose body took longer is authenticated again: its rights may be gone by now."""
OPENAPI_PATH = "/v1/openapi.json"
_VARIABLE = re.compile(r"\{(\w+)\}")
SHELL: web.AppKey[Shell] = web.AppKey("shell", Shell)
DIRECT: web.AppKey[DirectCalls] = web.AppKey("direct", DirectCalls)


Pages = Callable[[Shell, Guard], Iterable[tuple[str, str, Handler]]]
"""Returns method, path and handler of every page."""


@dataclass(frozen=True)
class _Parts:
    """What the applications of the two addresses have in common."""

    own: Shell
    shell: Shell
    peers: PeerGuard
    internal: Internal
    declared: tuple[Operation, ...]
    pages: Pages


_PARTS: web.AppKey[_Parts] = web.AppKey("parts", _Parts)


def operations() -> tuple[Operation, ...]:
    """Return every call of the HTTP API but the session's."""
    declared = (*transactions.OPERATIONS, *registration.OPERATIONS, *system.OPERATIONS)
    document = b""

    async def openapi(_: Call) -> Reply:
        return Reply(200, document)

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
    principals = principals or reread_principals(settings)
    own = Shell(local or service, groups, sessions, settings, metrics, checks, principals)
    # The same in all but whom it asks: what is in flight is bounded together.
    shell = copy.copy(own)
    shell.service, shell.joint = service, JointCalls(service)
    internal = Internal(own, leases or Leases(sessions))
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
    app[SHELL] = parts.own
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
    endpoints = {
        operation.name: _endpoint(shell, guard, operation)
        for operation in parts.declared
        if admin or not operation.admin
    }
    direct = [(each, endpoints[each.name]) for each in parts.declared if each.direct]
    app[DIRECT] = DirectCalls(guard, direct, _refusal)
    for operation in parts.declared:
        endpoint = endpoints.get(operation.name)
        handler = _at_admin_address if endpoint is None else _routed(endpoint)
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


def _routed(endpoint: Endpoint) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        principal = request.get(PRINCIPAL, ANYBODY)
        return response_of(await endpoint(request, request.match_info, principal))

    return handle


def _endpoint(shell: Shell, guard: Guard, operation: Operation) -> Endpoint:
    changes = operation.changes

    async def carry_out(
        request: web.BaseRequest, path: Mapping[str, str], principal: Principal
    ) -> Answered:
        if not operation.open:
            principal.check_role(operation.roles)
        if changes:
            check_media_type(request)
        query = decode_query(request, operation.query) if request.query_string else None
        content = Body(shell, prepare=operation.prepares)
        try:
            body = None
            if operation.body is not None:
                began_s = time.monotonic()
                raw = await content.read(request)
                if time.monotonic() - began_s > SLOW_BODY_S and not operation.open:
                    principal = guard.known(credential_of(request))
                    principal.check_role(operation.roles)
                body = decode_body(raw, operation.body, optional=operation.body_optional)
            call = Call(
                shell,
                path,
                query or operation.query(),
                body,
                request.remote or "",
                principal,
                tracing.incoming(request.headers),
            )
            reply = await operation.run(call)
        except Overloaded:
            shell.metrics.overloaded(operation.name)
            raise
        finally:
            content.let_go()
        return _answered(operation, reply)

    return carry_out


def _answered(operation: Operation, reply: Reply) -> Answered:
    content = reply.content
    raw = content if isinstance(content, bytes) else encode_json(content)
    headers = [("Content-Type", operation.media)]
    if operation.media.startswith("text/"):
        headers = [
            ("Content-Type", f"{operation.media}; charset=utf-8"),
            ("X-Content-Type-Options", "nosniff"),
        ]
    if reply.status == 503:
        headers.append(("Retry-After", "1"))
    return Answered(reply.status, tuple(headers), raw)


def _refusal(request: web.BaseRequest, error: Exception) -> Answered:
    """Return the answer to a call that ended with an error."""
    if isinstance(error, RequestError):
        return refused(error)
    if isinstance(error, KafkaUnavailable):
        return refused(KafkaDown(str(error)))
    log.error(
        "call failed",
        method=request.method,
        path=request.path[:100],
        error=telling(error),
        where=where_raised(error),
    )
    return refused(RequestError("something went wrong inside the proxy; its log says what"))


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
            return response_of(_refusal(request, error))

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
