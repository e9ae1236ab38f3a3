"""The calls between proxies: calls forwarded to the owner, and sessions leased for checks.

This proxy answers them alone and never forwards them, so no call can loop. `PeerGuard` admits only
proxies of the installation, so the author of an action is the one named by the proxy that
authenticated the caller. Calls from browsers are refused.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, runtime_checkable

import msgspec
from aiohttp import web

from txbroker.checkers.base import CheckCall
from txbroker.checkers.leases import (
    CONTENT_TYPE,
    NOBODY,
    PATH,
    PROXY_HEADER,
    GroupsConnected,
    LeaseRequest,
    SessionLeases,
    to_answer,
)
from txbroker.contract.service import (
    LIST_LIMIT_MAX,
    SECONDS_MAX,
    TEXT_MAX,
    DecideRequest,
    HistoryRequest,
    ListRequest,
    PrepareRequest,
    SearchRequest,
    Service,
    execute,
)
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import (
    BadRequest,
    Forbidden,
    NotFound,
    Overloaded,
    OwnerUnavailable,
    RequestError,
    UnsupportedMediaType,
)
from txbroker.principals import Principal
from txbroker.proxy.admission import check_id, check_reason
from txbroker.proxy.cluster.forwarding import (
    OVERVIEW_PATH,
    PREFIX,
    SESSIONS_PATH,
    ById,
    encode,
    failed,
)
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import INTERNAL_ERROR, known_error
from txbroker.proxy.http.reading import BodyReader
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

ANOTHER_PROXY = Principal()
"""The caller of every forwarded call: the proxy that forwards it has checked the rights."""
T = TypeVar("T")
Answer = Callable[[], Awaitable[object]]


@runtime_checkable
class PeerDirectory(Protocol):
    """A service that knows the other proxies."""

    def knows(self, url: str) -> bool:
        """Return True if the proxy at `url` is in this proxy's group."""
        ...


class PeerApi:
    """Serves the calls of other proxies; the context's service answers for this proxy alone."""

    def __init__(self, context: ApiContext, leases: SessionLeases) -> None:
        self._context = context
        self._service: Service = context.service
        self._leases = leases

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]]:
        """Return method, path and handler of every call."""
        end = self._endpoint
        forwarded = {
            "prepare": end("prepare", PrepareRequest, self._prepare),
            "decide": end("decide", DecideRequest, self._decide),
            "check": end("check", ById, self._check),
            "revive": end("revive", ById, self._revive),
            "find": end("find", ById, self._find),
            "list": end("list", ListRequest, self._list),
            "search": end("search", SearchRequest, self._service.search),
            "history": end("history", HistoryRequest, self._history),
        }
        return [
            *[("POST", f"{PREFIX}/{name}", handler) for name, handler in forwarded.items()],
            ("GET", SESSIONS_PATH, self._sessions),
            ("GET", OVERVIEW_PATH, self._overview),
            ("POST", PATH, end("lease", LeaseRequest, self._lease)),
            ("POST", PATH + "/{lease}/ask", self._ask),
        ]

    # --- forwarded calls ---------------------------------------------------------------------

    async def _prepare(self, request: PrepareRequest) -> object:
        self._context.admission.admit(ANOTHER_PROXY, request)
        return await execute(self._service, request)

    async def _decide(self, request: DecideRequest) -> object:
        _check_by(request.by)
        self._context.admission.admit(ANOTHER_PROXY, request)
        return await execute(self._service, request)

    async def _check(self, request: ById) -> object:
        _check_by_id(request)
        return await self._service.check(
            request.id, by=request.by, reason=request.reason, group=request.group
        )

    async def _revive(self, request: ById) -> object:
        _check_by_id(request)
        return await self._service.revive(request.id, by=request.by, reason=request.reason)

    async def _find(self, request: ById) -> object:
        _check_by_id(request)
        return await self._service.find(
            request.id, bodies=request.bodies, trace=request.trace, brief=request.brief
        )

    async def _list(self, request: ListRequest) -> object:
        if request.partitions is None:
            raise BadRequest("partitions is missing: name the half partitions to list")
        if not 1 <= request.limit <= LIST_LIMIT_MAX:
            raise BadRequest(f"limit must be from 1 to {LIST_LIMIT_MAX}")
        # A repeated partition would be scanned twice.
        if len(set(request.partitions)) < len(request.partitions):
            raise BadRequest("partitions has a repeated number: name each once")
        # NaN is outside this range too.
        if not 0 <= (request.older_than_s or 0) <= SECONDS_MAX * 100:
            raise BadRequest(f"older_than_s must be from 0 to {SECONDS_MAX * 100}")
        return await self._service.list(request)

    async def _history(self, request: HistoryRequest) -> object:
        return await self._service.history(request)

    async def _overview(self, request: web.Request) -> web.Response:
        async def answer() -> object:
            self._admit(request)
            return await self._service.overview()

        return await self._respond("overview", answer)

    # --- sessions ----------------------------------------------------------------------------

    async def _sessions(self, request: web.Request) -> web.Response:
        async def answer() -> object:
            self._admit(request)
            sessions = self._context.sessions
            return GroupsConnected(sessions.instances(), sessions.instances_without_function())

        return await self._respond("sessions", answer)

    async def _lease(self, request: LeaseRequest) -> object:
        granted = self._leases.take(request)
        if granted is None:
            raise _NoSession("no session of the group is free at this proxy: try another one")
        return granted

    async def _ask(self, request: web.Request) -> web.Response:
        lease = request.match_info["lease"]

        async def ask(call: CheckCall) -> object:
            result = await self._leases.ask(lease, call)
            if result is None:
                raise NotFound("the lease has ended: take a new one")
            return to_answer(result)

        return await self._endpoint("ask", CheckCall, ask)(request)

    # --- admission and answers ---------------------------------------------------------------

    def _endpoint(
        self, name: str, kind: type[T], run: Callable[[T], Awaitable[object]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = BodyReader(self._context.limits, prepare=name == "prepare")

            async def answer() -> object:
                self._admit(request)
                return await run(_decode(await body.read(request), kind))

            try:
                return await self._respond(name, answer)
            finally:
                body.release()

        return handle

    def _admit(self, request: web.Request) -> None:
        """Refuse a call that does not come from a proxy of this proxy's group."""
        if "Origin" in request.headers:
            raise Forbidden("web pages must not call this path: only proxies may")
        if request.method != "GET" and request.content_type != CONTENT_TYPE:
            raise UnsupportedMediaType(f"proxies send {CONTENT_TYPE}")
        caller = request.headers.get(PROXY_HEADER)
        if not caller:
            raise BadRequest(f"the header {PROXY_HEADER} must name the calling proxy")
        # Addresses are reused: the caller may mean an earlier proxy at this address, of another
        # group with other transactions.
        if isinstance(self._service, PeerDirectory) and not self._service.knows(caller):
            raise OwnerUnavailable(
                f"the proxy {caller[:200]!r} is not known as one of this group: retry"
            )

    async def _respond(self, name: str, answer: Answer) -> web.Response:
        try:
            body = encode(await answer())
        except ConnectionError:
            raise
        except Exception as error:
            known = known_error(error)
            if known is None:
                log.error(
                    "call of another proxy failed",
                    call=name,
                    error=safe_repr(error),
                    where=raised_at(error),
                )
                known = RequestError(INTERNAL_ERROR)
            elif isinstance(known, Overloaded):
                self._context.metrics.overloaded(name)
            return web.Response(
                status=known.status, body=encode(failed(known)), content_type=CONTENT_TYPE
            )
        return web.Response(body=body, content_type=CONTENT_TYPE)


class _NoSession(OwnerUnavailable):
    """No session of the group is free at this proxy."""

    status = NOBODY


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(f"cannot decode the body: {str(error)[:200]}") from None


def _check_by_id(request: ById) -> None:
    check_id(request.id)
    _check_by(request.by)
    check_reason(request.reason)


def _check_by(by: str) -> None:
    if len(by) > TEXT_MAX:
        raise BadRequest(f"by has at most {TEXT_MAX} characters: shorten it", path="by")
