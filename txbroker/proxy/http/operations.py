"""How an operation of the HTTP API is declared, for router, handlers and reference; the OpenAPI 3.1
document of the declared operations."""

from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE
from msgspec import Struct

from txbroker import __version__
from txbroker.contract.frames import CODE_HEADER
from txbroker.contract.groups import NAMED, SCHEMAS
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
from txbroker.proxy.http.bodies import (
    HEADER_VALUE_SCHEMA,
    MESSAGE_SCHEMA,
    ErrorBody,
    NoQuery,
    RequestBody,
    TransactionId,
)
from txbroker.proxy.http.context import ApiContext
from txbroker.tracing import TraceContext

JSON = "application/json"
encode_json = msgspec.json.Encoder().encode

Errors = tuple[type[RequestError], ...]
_ALWAYS: Errors = (BadRequest, Forbidden, CertificateRequired, Unauthorized, RequestError)
_WITH_BODY: Errors = (TooSlow, TooLarge, UnsupportedMediaType, Overloaded)


class ApiCall(Struct, frozen=True):
    """One call with its path names, query and body decoded; `trace` is the caller's context."""

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


class Handler(Protocol):
    """A function that carries out the calls of one operation."""

    __name__: str

    def __call__(self, call: ApiCall, /) -> Awaitable[ApiReply]:
        """Return the reply."""
        ...


@dataclass(frozen=True)
class Operation:
    """One operation of the HTTP API.

    Attributes:
        run: its name and the first line of its docstring are the operation's name and summary.
        route: method and path.
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

    run: Handler
    route: str
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
    def name(self) -> str:
        """Unique, for OpenAPI and `overloaded_total{operation}`."""
        return self.run.__name__.removesuffix("_")

    @property
    def method(self) -> str:
        """The HTTP method."""
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path, with names in braces."""
        return self.route.partition(" ")[2]

    @property
    def summary(self) -> str:
        """What it does, without a full stop."""
        return _first_line(self.run.__doc__).removesuffix(".")

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
    """A complete HTTP answer; the media type is the first header."""

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


# --- OpenAPI ---------------------------------------------------------------------------------

_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "id": msgspec.json.schema(TransactionId),
    "group": {"type": "string", "minLength": 1, "description": "The name of a producer group."},
}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of these operations."""
    kinds = dict.fromkeys(
        kind
        for operation in operations
        for kind in (operation.body, *operation.answers.values(), ErrorBody)
        if kind is not None
    )
    _, schemas = msgspec.json.schema_components([*kinds, *NAMED], ref_template=SCHEMAS)
    schemas["Message"] = MESSAGE_SCHEMA
    schemas["HeaderValue"] = HEADER_VALUE_SCHEMA
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in operations:
        paths[operation.path][operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "txbroker",
            "version": __version__,
            "description": "Transactional messages for Apache Kafka. Calls that change state need "
            "`content-type: application/json`. SDK sessions are WebSockets at `/v1/session`.",
        },
        "servers": [{"url": "/"}],
        "paths": dict(paths),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "If the proxy has a `token_file`.",
                },
                "certificate": {
                    "type": "mutualTLS",
                    "description": "If the proxy has a `tls_client_ca_file`.",
                },
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation)],
        "responses": _responses(operation),
    }
    if operation.admin:
        described["description"] = (
            "An operator's call: if the proxy has an `admin_listen` address, it is only accepted "
            "there."
        )
    if operation.body is not None:
        described["requestBody"] = {
            "required": not operation.body_optional,
            "content": {JSON: {"schema": {"$ref": SCHEMAS.format(name=operation.body.__name__)}}},
        }
    if not operation.open:
        described["security"] = [{"token": []}, {}]
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in names
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    _, schemas = msgspec.json.schema_components([operation.query], ref_template=SCHEMAS)
    parameters = []
    for name, schema in schemas[operation.query.__name__]["properties"].items():
        # A query has no null: unused fields are omitted.
        variants = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
        (shown,) = [schemas[v["$ref"].rpartition("/")[2]] if "$ref" in v else v for v in variants]
        described = {"name": name, "in": "query", "required": False, "schema": shown}
        parameters.append(described)
    return parameters


def _responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in operation.answers.items():
        schema = {} if kind is None else {"schema": {"$ref": SCHEMAS.format(name=kind.__name__)}}
        responses[str(status)] = {
            "description": _first_line(kind.__doc__) if kind else operation.summary,
            "content": {operation.media: schema},
        }
    by_status: dict[int, list[type[RequestError]]] = defaultdict(list)
    for error in operation.all_errors:
        by_status[error.status].append(error)
    for status, errors in sorted(by_status.items()):
        if str(status) in responses:
            continue
        responses[str(status)] = {
            "description": " ".join(f"`{e.code}`: {_first_line(e.__doc__)}" for e in errors),
            "content": {JSON: {"schema": {"$ref": SCHEMAS.format(name="ErrorBody")}}},
        }
    return responses


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
