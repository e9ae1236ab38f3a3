"""What proxies ask of one another: calls handed on to the owner, and sessions lent for checks.

Whatever comes in here is answered by this proxy's own part alone and never handed on again, so no
call can go round in circles. `PeerGuard` lets only proxies of the installation pass, so who acts is
what the proxy says that authenticated the caller. A browser has nothing to do here at all.
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
    Leases,
    to_answer,
)
from txbroker.contract.service import (
    LIST_LIMIT_MAX,
    DecideRequest,
    ListRequest,
    PrepareRequest,
    Service,
)
from txbroker.core.records import Decision
from txbroker.core.telling import safe_repr, where_raised
from txbroker.errors import (
    BadRequest,
    Forbidden,
    KafkaDown,
    KafkaUnavailable,
    NotFound,
    Overloaded,
    OwnerUnavailable,
    RequestError,
    UnsupportedMediaType,
)
from txbroker.proxy.cluster.forwarding import (
    OVERVIEW_PATH,
    PREFIX,
    SESSIONS_PATH,
    ById,
    encode,
    failed,
)
from txbroker.proxy.http.bodies import SECONDS_MAX, TEXT_MAX
from txbroker.proxy.http.context import ApiContext, check_group, check_id, check_reason
from txbroker.proxy.http.reading import BodyReader
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")
Answer = Callable[[], Awaitable[object]]


@runtime_checkable
class PeerDirectory(Protocol):
    """A service that is one of several."""

    def knows(self, url: str) -> bool:
        """Say whether the proxy at `url` is one of this one's group."""
        ...


class PeerApi:
    """The calls of other proxies.

    Args:
        shell: what the calls of this proxy share; its service is this proxy's own part.
        leases: the sessions that other proxies have in hand.
    """

    def __init__(self, shell: ApiContext, leases: Leases) -> None:
        self._shell = shell
        self._service: Service = shell.service
        self._leases = leases

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]]:
        """Return method, path and handler of every call."""
        end = self._endpoint
        handed_on = {
            "prepare": end("prepare", PrepareRequest, self._prepare),
            "decide": end("decide", DecideRequest, self._decide),
            "check": end("check", ById, self._check),
            "revive": end("revive", ById, self._revive),
            "find": end("find", ById, self._find),
            "list": end("list", ListRequest, self._list),
        }
        return [
            *[("POST", f"{PREFIX}/{name}", handler) for name, handler in handed_on.items()],
            ("GET", SESSIONS_PATH, self._sessions),
            ("GET", OVERVIEW_PATH, self._overview),
            ("POST", PATH, end("lease", LeaseRequest, self._lease)),
            ("POST", PATH + "/{lease}/ask", self._ask),
        ]

    # --- calls handed on ---------------------------------------------------------------------

    async def _prepare(self, request: PrepareRequest) -> object:
        check_group(request.group)
        self._shell.check_prepare(request)
        return await self._service.prepare(request)

    async def _decide(self, request: DecideRequest) -> object:
        if request.decision is Decision.UNKNOWN:
            raise BadRequest("unknown is no decision")
        _check_by(request.by)
        self._shell.check_decide(request)
        return await self._service.decide(request)

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
        return await self._service.find(request.id, bodies=request.bodies)

    async def _list(self, request: ListRequest) -> object:
        if request.partitions is None:
            raise BadRequest("partitions: one proxy lists only what it is asked for")
        if not 1 <= request.limit <= LIST_LIMIT_MAX:
            raise BadRequest(f"limit must be from 1 to {LIST_LIMIT_MAX}")
        # Each is looked through as often as it is named.
        if len(set(request.partitions)) < len(request.partitions):
            raise BadRequest("partitions: one is named twice")
        # A range that a number that is none lies outside of, too.
        if not 0 <= (request.older_than_s or 0) <= SECONDS_MAX * 100:
            raise BadRequest(f"older_than_s must be from 0 to {SECONDS_MAX * 100}")
        return await self._service.list(request)

    async def _overview(self, request: web.Request) -> web.Response:
        async def answer() -> object:
            self._admit(request)
            return await self._service.overview()

        return await self._respond("overview", answer)

    # --- sessions ----------------------------------------------------------------------------

    async def _sessions(self, request: web.Request) -> web.Response:
        async def answer() -> object:
            self._admit(request)
            sessions = self._shell.sessions
            return GroupsConnected(sessions.instances(), sessions.instances_without_function())

        return await self._respond("sessions", answer)

    async def _lease(self, request: LeaseRequest) -> object:
        granted = self._leases.take(request)
        if granted is None:
            raise _Nobody("nobody of the group can be asked here now")
        return granted

    async def _ask(self, request: web.Request) -> web.Response:
        lease = request.match_info["lease"]

        async def ask(call: CheckCall) -> object:
            result = await self._leases.ask(lease, call)
            if result is None:
                raise NotFound("there is no such lease any more")
            return to_answer(result)

        return await self._endpoint("ask", CheckCall, ask)(request)

    # --- how ---------------------------------------------------------------------------------

    def _endpoint(
        self, name: str, kind: type[T], run: Callable[[T], Awaitable[object]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            content = BodyReader(self._shell, prepare=name == "prepare")

            async def answer() -> object:
                self._admit(request)
                raw = await content.read(request)
                return await run(_decoded(raw, kind))

            try:
                return await self._respond(name, answer)
            finally:
                content.let_go()

        return handle

    def _admit(self, request: web.Request) -> None:
        """Refuse what does not come from a proxy of this one's group.

        Raises:
            Forbidden, UnsupportedMediaType, BadRequest, OwnerUnavailable: says why.
        """
        if "Origin" in request.headers:
            raise Forbidden("no page has anything to call here")
        if request.method != "GET" and request.content_type != CONTENT_TYPE:
            raise UnsupportedMediaType(f"proxies talk in {CONTENT_TYPE}")
        caller = request.headers.get(PROXY_HEADER)
        if not caller:
            raise BadRequest(f"the header {PROXY_HEADER} must name the calling proxy")
        # Addresses are used again: who calls may look for a proxy that was here before, of
        # another group with other transactions.
        if isinstance(self._service, PeerDirectory) and not self._service.knows(caller):
            raise OwnerUnavailable(
                f"{caller[:200]!r} is none of this proxy's group, as far as is known here"
            )

    async def _respond(self, name: str, answer: Answer) -> web.Response:
        """Return the answer or, in the same form, the error."""
        try:
            body = encode(await answer())
        except Overloaded as error:
            self._shell.metrics.overloaded(name)
            return _refusal(error)
        except RequestError as error:
            return _refusal(error)
        except KafkaUnavailable as error:
            return _refusal(KafkaDown(str(error)))
        except ConnectionError:
            raise
        except Exception as error:
            log.error(
                "call of another proxy failed",
                call=name,
                error=safe_repr(error),
                where=where_raised(error),
            )
            return _refusal(
                RequestError("something went wrong inside the proxy; its log says what")
            )
        return web.Response(body=body, content_type=CONTENT_TYPE)


class _Nobody(OwnerUnavailable):
    """Nobody of the group can be asked here."""

    status = NOBODY


def _refusal(error: RequestError) -> web.Response:
    return web.Response(status=error.status, body=encode(failed(error)), content_type=CONTENT_TYPE)


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body does not read: {str(error)[:200]}") from None


def _check_by_id(request: ById) -> None:
    check_id(request.id)
    _check_by(request.by)
    check_reason(request.reason)


def _check_by(by: str) -> None:
    if len(by) > TEXT_MAX:
        raise BadRequest(f"by has at most {TEXT_MAX} characters", path="by")
