"""How one call of the HTTP API is declared: the router, the handlers and OpenAPI read the same."""

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
from txbroker.core.trace_context import TraceContext
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
from txbroker.proxy.http.bodies import AnswerBody, NoQuery, RequestBody
from txbroker.proxy.http.context import ApiContext

JSON = "application/json"
encode_json = msgspec.json.Encoder().encode

EVERY_ROLE = tuple(Role)
WHO_WRITES = (Role.PRODUCER, Role.OPERATOR)
WHO_LOOKS = (Role.VIEWER, Role.OPERATOR)
ONLY_OPERATORS = (Role.OPERATOR,)

Errors = tuple[type[RequestError], ...]
_ALWAYS: Errors = (BadRequest, Forbidden, CertificateRequired, Unauthorized, RequestError)
_WITH_BODY: Errors = (TooSlow, TooLarge, UnsupportedMediaType, Overloaded)


class ApiCall(Struct, frozen=True):
    """One call, as declared: its path's names, its query and its body were read already."""

    shell: ApiContext
    path: Mapping[str, str]
    query: RequestBody
    body: Struct | None
    remote: str
    principal: Principal = ANYBODY
    trace: TraceContext | None = None
    """The trace that it came with, where spans are made."""


class ApiReply(Struct, frozen=True):
    """What goes back: a JSON answer, or bytes of the operation's own media type."""

    status: int
    content: AnswerBody | bytes


Handler = Callable[[ApiCall], Awaitable[ApiReply]]


@dataclass(frozen=True)
class Operation:
    """One call of the HTTP API.

    Attributes:
        name: unique, for OpenAPI and `overloaded_total{operation}`.
        answers: what goes back by status; None for bytes of `media`.
        body: what must come with the call; `body_optional` where nothing at all is fine too.
        errors: what it can end with, beside what every call can.
        open: True where anybody may call, whatever the host name and without token.
        roles: which roles may call.
        admin: True where the call is one of operators': where there is an admin address, it is
            taken there alone.
        prepares: True where the call begins a transaction: it leaves room for those that end one.
        direct: True where a connection knows the call by its path, without the router: it is one
            of those of which each transaction makes some.
    """

    name: str
    method: str
    path: str
    summary: str
    run: Handler
    answers: Mapping[int, type[AnswerBody] | None]
    body: type[Struct] | None = None
    body_optional: bool = False
    query: type[RequestBody] = NoQuery
    errors: Errors = field(default=())
    media: str = JSON
    open: bool = False
    roles: tuple[Role, ...] = EVERY_ROLE
    admin: bool = False
    prepares: bool = False
    direct: bool = False

    @property
    def changes(self) -> bool:
        """True where the call changes state and so must say that it is JSON."""
        return self.method not in ("GET", "HEAD")

    @property
    def all_errors(self) -> Errors:
        """Everything that this call can end with."""
        always = (*_ALWAYS, AdminOnly) if self.admin else _ALWAYS
        if not self.open:
            always = (*always, NotPermitted)
        return tuple(dict.fromkeys((*always, *(_WITH_BODY if self.changes else ()), *self.errors)))


class HttpAnswer(Struct, frozen=True):
    """What goes back of a call over HTTP, whole.

    Attributes:
        headers: the media type's comes first.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def kept_alive(self) -> bytes:
        """Return it as bytes, for a connection of HTTP/1.1 that takes another request: the same as
        the library writes for `response_of`."""
        head = (
            f"{_first_lines(self.status, self.headers)}Content-Length: {len(self.body)}\r\n"
            f"Date: {rfc822_formatted_time()}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
        )
        return head.encode() + self.body


@lru_cache
def _first_lines(status: int, headers: tuple[tuple[str, str], ...]) -> str:
    fields = [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *fields, ""])


def refused(error: RequestError) -> HttpAnswer:
    """Return the answer to a call that was not carried out."""
    fields = {"code": error.code, "message": str(error), **error.details}
    # Who asked for a session gets to see nothing of the body.
    headers = [("Content-Type", JSON), (CODE_HEADER, error.code)]
    if error.retryable:
        headers.append(("Retry-After", str(error.details.get("retry_after_s", 1))))
    if error.status == Unauthorized.status:
        headers.append(("WWW-Authenticate", "Bearer"))
    return HttpAnswer(error.status, tuple(headers), encode_json({"error": fields}))


def response_of(answered: HttpAnswer) -> web.Response:
    """Return an answer for the library to send."""
    return web.Response(status=answered.status, body=answered.body, headers=dict(answered.headers))


def error_response(error: RequestError) -> web.Response:
    """Return the answer to a call that was not carried out, for the library to send."""
    return response_of(refused(error))
