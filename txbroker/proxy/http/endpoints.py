"""Carry out a call of one operation, for the router and for direct connections alike."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial

from aiohttp import web

from txbroker import tracing
from txbroker.error_text import raised_at, safe_repr
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
    error_answer,
)
from txbroker.proxy.http.reading import (
    AnyRequest,
    BodyReader,
    DirectRequest,
    check_media_type,
    decode_body,
    decode_query,
)
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

SLOW_BODY_S = 1.0
"""A caller whose body takes longer is authenticated again: its rights may be withdrawn by then."""
INTERNAL_ERROR = "internal error in the proxy: see its log, and report it"


class ApiEndpoint:
    """Carries out the calls of one operation."""

    def __init__(self, context: ApiContext, guard: Guard, operation: Operation) -> None:
        self.operation = operation
        self._context = context
        self._guard = guard
        self._changes = operation.changes
        self._answered = context.metrics.answers_of(operation.name)
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Future[ApiReply]] = set()

    async def routed(self, request: web.Request) -> web.StreamResponse:
        """Answer a routed request, whose caller the guard has admitted."""
        operation, principal = self.operation, request.get(PRINCIPAL, ANYBODY)
        self._check(request, principal)
        query = decode_query(request, operation.query) if request.query_string else None
        body = BodyReader(self._context.limits, prepare=operation.prepares)
        raw = b""
        try:
            if operation.body is not None:
                began_s = time.monotonic()
                raw = await body.read(request)
                if time.monotonic() - began_s > SLOW_BODY_S and not operation.open:
                    principal = self._guard.known(credential_of(request))
                    principal.check_role(operation.roles)
            reply = await self._run(request, request.match_info, raw, principal, query)
        except Overloaded:
            self._context.metrics.overloaded(operation.name)
            raise
        finally:
            body.release()
        return _answer(operation, reply).response()

    def carry_out(
        self,
        request: DirectRequest,
        path: Mapping[str, str],
        raw: bytes,
        send: Callable[[HttpAnswer | None], None],
    ) -> None:
        """Admit the caller of a direct request with the body `raw`, and carry out its call.

        Args:
            send: called once with the answer, or with None to close the connection.
        """
        body = None
        try:
            principal = self._guard.admit(request)
            CALLER.set(principal.counted_as)
            self._check(request, principal)
            body = BodyReader(self._context.limits, prepare=self.operation.prepares)
            body.take(raw)
            # Most handlers return a future; only those that wait more than once need a task.
            result = self._run(request, path, raw, principal)
            reply = result if isinstance(result, asyncio.Future) else self._task(result)
        except Exception as error:
            send(self._failed(request, body, error))
        else:
            reply.add_done_callback(partial(self._finished, request, body, send))

    def _task(self, result: Awaitable[ApiReply]) -> "asyncio.Future[ApiReply]":
        task = asyncio.ensure_future(result)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _finished(
        self,
        request: DirectRequest,
        body: BodyReader,
        send: Callable[[HttpAnswer | None], None],
        reply: "asyncio.Future[ApiReply]",
    ) -> None:
        try:
            answer = _answer(self.operation, reply.result())
        except (Exception, asyncio.CancelledError) as error:
            send(self._failed(request, body, error))
            return
        body.release()
        self._answered[answer.status // 100] += 1
        send(answer)

    def _failed(
        self, request: DirectRequest, body: BodyReader | None, error: BaseException
    ) -> HttpAnswer | None:
        """Return the answer to a failed call, None for none."""
        if body is not None:
            body.release()
        if isinstance(error, Overloaded):
            self._context.metrics.overloaded(self.operation.name)
        # As in aiohttp: the connection has ended.
        if isinstance(error, ConnectionError) or not isinstance(error, Exception):
            return None
        try:
            answer = failure_answer(request, error)
        except Exception as failure:  # such as a text that cannot be encoded
            answer = failure_answer(request, failure)
        self._answered[answer.status // 100] += 1
        return answer

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
                self._context,
                path,
                query or operation.query(),
                body,
                request.remote or "",
                principal,
                tracing.incoming(request.headers),
            )
        )


def _answer(operation: Operation, reply: ApiReply) -> HttpAnswer:
    content = reply.content
    raw = content if isinstance(content, bytes) else encode_json(content)
    return HttpAnswer(reply.status, _headers(operation.media, reply.status), raw)


@cache
def _headers(media: str, status: int) -> tuple[tuple[str, str], ...]:
    headers = [("Content-Type", media)]
    if media.startswith("text/"):
        headers = [
            ("Content-Type", f"{media}; charset=utf-8"),
            ("X-Content-Type-Options", "nosniff"),
        ]
    if status == 503:
        headers.append(("Retry-After", "1"))
    return tuple(headers)


def known_error(error: Exception) -> RequestError | None:
    """Return an expected error as the client gets it, None for an unexpected one."""
    if isinstance(error, RequestError):
        return error
    return KafkaDown(str(error)) if isinstance(error, KafkaUnavailable) else None


def failure_answer(request: AnyRequest, error: Exception) -> HttpAnswer:
    """Return the answer to a failed call; log an unexpected error."""
    known = known_error(error)
    if known is None:
        log.error(
            "call failed",
            method=request.method,
            path=request.path[:100],
            error=safe_repr(error),
            where=raised_at(error),
        )
        known = RequestError(INTERNAL_ERROR)
    return error_answer(known)
