"""How an operation of the HTTP API is declared; router, handlers, OpenAPI and reference use it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE
from msgspec import Struct

from txbroker.contract.frames import CODE_HEADER
from txbroker.errors import (
    AdminOnly,
    BadRequest,
    CertificateRequired,
    Forbidden,
    NotPermitted,
    Overloaded,
    RequestError,
    TooLarge,
    TooSlow,
    Unauthorized,
    UnsupportedMediaType,
)
from txbroker.principals import ANYBODY, Principal, Role
from txbroker.proxy.http.bodies import NoQuery, RequestBody
from txbroker.proxy.http.context import ApiContext
from txbroker.tracing import TraceContext

JSON = "application/json"
encode_json = msgspec.json.Encoder().encode

WRITERS = (Role.PRODUCER, Role.OPERATOR)
READERS = (Role.VIEWER, Role.OPERATOR)
ONLY_OPERATORS = (Role.OPERATOR,)

Errors = tuple[type[RequestError], ...]
_ALWAYS: Errors = (BadRequest, Forbidden, CertificateRequired, Unauthorized, RequestError)
_WITH_BODY: Errors = (TooSlow, TooLarge, UnsupportedMediaType, Overloaded)


class ApiCall(Struct, frozen=True):
    """One call with its path names, query and body decoded.

    Attributes:
        trace: the caller's trace context, where spans are recorded.
    """

    context: ApiContext
    path: Mapping[str, str]
    query: RequestBody
    body: Struct | None
    remote: str
    principal: Principal = ANYBODY
    trace: TraceContext | None = None


class ApiReply(Struct, frozen=True):
    """The result of a call: a JSON body, or bytes of the operation's media type."""

    status: int
    content: Struct | bytes


Handler = Callable[[ApiCall], Awaitable[ApiReply]]


@dataclass(frozen=True)
class Operation:
    """One operation of the HTTP API.

    Attributes:
        name: unique, for OpenAPI and `overloaded_total{operation}`.
        answers: the body by status; None for bytes of `media`.
        body: the request body; with `body_optional` it may be empty.
        errors: the errors specific to this operation.
        open: no host check and no credential needed.
        roles: the roles that may call it.
        admin: an operator's call: with an admin address, only accepted there.
        prepares: begins a transaction, so it leaves room for calls that end one.
        direct: served by the connection itself without the router, as it is called for every
            transaction.
    """

    name: str
    method: str
    path: str
    summary: str
    run: Handler
    answers: Mapping[int, type[Struct] | None]
    body: type[Struct] | None = None
    body_optional: bool = False
    query: type[RequestBody] = NoQuery
    errors: Errors = field(default=())
    media: str = JSON
    open: bool = False
    roles: tuple[Role, ...] = tuple(Role)
    admin: bool = False
    prepares: bool = False
    direct: bool = False

    @property
    def changes(self) -> bool:
        """True if it changes state, so its request must be declared as JSON."""
        return self.method not in ("GET", "HEAD")

    @property
    def all_errors(self) -> Errors:
        """All errors this operation can end with."""
        always = (*_ALWAYS, AdminOnly) if self.admin else _ALWAYS
        if not self.open:
            always = (*always, NotPermitted)
        return tuple(dict.fromkeys((*always, *(_WITH_BODY if self.changes else ()), *self.errors)))


class HttpAnswer(Struct, frozen=True):
    """A complete HTTP answer.

    Attributes:
        headers: the media type first.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def kept_alive(self) -> bytes:
        """Return it as bytes for a kept-alive HTTP/1.1 connection, as aiohttp writes it."""
        head = (
            f"{_first_lines(self.status, self.headers)}Content-Length: {len(self.body)}\r\n"
            f"Date: {rfc822_formatted_time()}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
        )
        return head.encode() + self.body

    def response(self) -> web.Response:
        """Return it as an aiohttp response."""
        return web.Response(status=self.status, body=self.body, headers=dict(self.headers))


@lru_cache
def _first_lines(status: int, headers: tuple[tuple[str, str], ...]) -> str:
    fields = [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *fields, ""])


def error_answer(error: RequestError) -> HttpAnswer:
    """Return the answer to a call that failed."""
    fields = {"code": error.code, "message": str(error), **error.details}
    # WebSocket clients do not see the body of a refused upgrade, so a header has the code too.
    headers = [("Content-Type", JSON), (CODE_HEADER, error.code)]
    if error.retryable:
        headers.append(("Retry-After", str(error.details.get("retry_after_s", 1))))
    if error.status == Unauthorized.status:
        headers.append(("WWW-Authenticate", "Bearer"))
    return HttpAnswer(error.status, tuple(headers), encode_json({"error": fields}))
