"""How a call is carried out, by the router or by a connection itself: one endpoint for both."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial

from aiohttp import web

from txbroker import tracing
from txbroker.core.telling import safe_repr, where_raised
from txbroker.errors import KafkaDown, KafkaUnavailable, Overloaded, RequestError
from txbroker.principals import ANYBODY, Principal
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.bodies import RequestBody
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.guards import PRINCIPAL, Guard, credential_of
from txbroker.proxy.http.operations import (
    ApiCall,
    ApiReply,
    HttpAnswer,
    Operation,
    encode_json,
    refused,
    response_of,
)
from txbroker.proxy.http.posted import AnyRequest, DirectRequest
from txbroker.proxy.http.reading import BodyReader, check_media_type, decode_body, decode_query
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

SLOW_BODY_S = 1.0
"""A caller whose body took longer is authenticated again: its rights may be gone by now."""


class ApiEndpoint:
    """Carries the calls of one operation out.

    Args:
        guard: knows callers.
    """

    def __init__(self, shell: ApiContext, guard: Guard, operation: Operation) -> None:
        self.operation = operation
        self._shell = shell
        self._guard = guard
        self._changes = operation.changes
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Future[ApiReply]] = set()

    async def routed(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that the router has brought here, its caller admitted."""
        operation, principal = self.operation, request.get(PRINCIPAL, ANYBODY)
        self._check(request, principal)
        query = decode_query(request, operation.query) if request.query_string else None
        content = BodyReader(self._shell, prepare=operation.prepares)
        raw = b""
        try:
            if operation.body is not None:
                began_s = time.monotonic()
                raw = await content.read(request)
                if time.monotonic() - began_s > SLOW_BODY_S and not operation.open:
                    principal = self._guard.known(credential_of(request))
                    principal.check_role(operation.roles)
            reply = await self._run(request, request.match_info, raw, principal, query)
        except Overloaded:
            self._shell.metrics.overloaded(operation.name)
            raise
        finally:
            content.let_go()
        return response_of(_answered(operation, reply))

    def carry_out(
        self,
        request: DirectRequest,
        path: Mapping[str, str],
        raw: bytes,
        answer: Callable[[HttpAnswer | None], None],
    ) -> None:
        """Admit the caller of a request whose body is `raw`, and carry its call out.

        Args:
            answer: called once, with what goes back; with None, the connection is to end.
        """
        content = None
        try:
            principal = self._guard.admit(request)
            CALLER.set(principal.counted_as)
            self._check(request, principal)
            content = BodyReader(self._shell, prepare=self.operation.prepares)
            content.take(raw)
            # A task for those that wait for more than one answer; the others are futures.
            begun = self._run(request, path, raw, principal)
            reply = begun if isinstance(begun, asyncio.Future) else self._task(begun)
        except Exception as error:
            answer(self._ended(request, content, error))
        else:
            reply.add_done_callback(partial(self._replied, request, content, answer))

    def _task(self, begun: Awaitable[ApiReply]) -> "asyncio.Future[ApiReply]":
        task = asyncio.ensure_future(begun)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _replied(
        self,
        request: DirectRequest,
        content: BodyReader,
        answer: Callable[[HttpAnswer | None], None],
        reply: "asyncio.Future[ApiReply]",
    ) -> None:
        try:
            found = _answered(self.operation, reply.result())
        except (Exception, asyncio.CancelledError) as error:
            answer(self._ended(request, content, error))
            return
        content.let_go()
        answer(found)

    def _ended(
        self, request: DirectRequest, content: BodyReader | None, error: BaseException
    ) -> HttpAnswer | None:
        """Return what goes back of a call that ended with an error, None for nothing."""
        if content is not None:
            content.let_go()
        if isinstance(error, Overloaded):
            self._shell.metrics.overloaded(self.operation.name)
        # As the library takes them: of a connection that has ended.
        if isinstance(error, ConnectionError) or not isinstance(error, Exception):
            return None
        try:
            return refusal(request, error)
        except Exception as failure:  # such as a text that cannot be encoded
            return refusal(request, failure)

    def _check(self, request: AnyRequest, principal: Principal) -> None:
        operation = self.operation
        if not operation.open:
            principal.check_role(operation.roles)
        if self._changes:
            check_media_type(request)

    def _run(
        self,
        request: AnyRequest,
        path: Mapping[str, str],
        raw: bytes,
        principal: Principal,
        query: RequestBody | None = None,
    ) -> Awaitable[ApiReply]:
        operation = self.operation
        body = None
        if operation.body is not None:
            body = decode_body(raw, operation.body, optional=operation.body_optional)
        return operation.run(
            ApiCall(
                self._shell,
                path,
                query or operation.query(),
                body,
                request.remote or "",
                principal,
                tracing.incoming(request.headers),
            )
        )


def _answered(operation: Operation, reply: ApiReply) -> HttpAnswer:
    content = reply.content
    raw = content if isinstance(content, bytes) else encode_json(content)
    return HttpAnswer(reply.status, _fields(operation.media, reply.status), raw)


@cache
def _fields(media: str, status: int) -> tuple[tuple[str, str], ...]:
    fields = [("Content-Type", media)]
    if media.startswith("text/"):
        fields = [
            ("Content-Type", f"{media}; charset=utf-8"),
            ("X-Content-Type-Options", "nosniff"),
        ]
    if status == 503:
        fields.append(("Retry-After", "1"))
    return tuple(fields)


def refusal(request: AnyRequest, error: Exception) -> HttpAnswer:
    """Return the answer to a call that ended with an error."""
    if isinstance(error, RequestError):
        return refused(error)
    if isinstance(error, KafkaUnavailable):
        return refused(KafkaDown(str(error)))
    log.error(
        "call failed",
        method=request.method,
        path=request.path[:100],
        error=safe_repr(error),
        where=where_raised(error),
    )
    return refused(RequestError("something went wrong inside the proxy; its log says what"))
