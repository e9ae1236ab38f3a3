"""Read requests: body bytes within limits, media type, JSON and query to declared structs."""

import asyncio
import difflib
import re
from typing import TypeAlias, TypeVar

import msgspec
from aiohttp import web
from aiohttp.helpers import parse_content_type
from msgspec import Struct
from multidict import CIMultiDict

from txbroker.contract.json import MessageError, TooManyMessages, decode_messages
from txbroker.core.records import Message
from txbroker.errors import (
    BadRequest,
    Overloaded,
    RequestError,
    TooLarge,
    TooSlow,
    UnsupportedMediaType,
)
from txbroker.proxy.admission import IN_FLIGHT_FULL, Budgets
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.bodies import PATTERNS

T = TypeVar("T", bound=Struct)
CALL_BYTES = 16 * 1024
"""Memory of an HTTP call besides its body: connection, buffers, task."""
SHOWN_MAX = 60
"""Characters of a caller's text that an error repeats."""
_ERROR = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)


class DirectRequest(Struct, frozen=True):
    """The head of a call that bypasses the router; its body is passed separately."""

    method: str
    path: str
    headers: CIMultiDict[str]
    transport: asyncio.Transport
    remote: str


AnyRequest: TypeAlias = web.BaseRequest | DirectRequest


def check_media_type(request: AnyRequest) -> None:
    """Refuse a call not declared as JSON, which a web page's form cannot be."""
    given = request.headers.get("Content-Type")
    if given == "application/json":
        return  # the common case, without parsing
    if given is None:
        raise UnsupportedMediaType
    kind, options = parse_content_type(given)
    if kind.lower() != "application/json":
        raise UnsupportedMediaType
    charset = options.get("charset")
    if charset is not None and charset.lower().replace("-", "") != "utf8":
        raise UnsupportedMediaType("the charset of JSON is UTF-8: encode the body as UTF-8")


class BodyReader:
    """Reads a request's body; its bytes count as in flight until `release`.

    `prepare`: the request begins a transaction, so it leaves room for requests that end one.
    """

    def __init__(self, limits: Budgets, *, prepare: bool) -> None:
        self._limits = limits
        self._bytes_max = limits.settings.request_bytes_max
        self._prepare = prepare
        self._who = CALLER.get()
        self._reserved = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """Read the whole body.

        Raises:
            TooLarge: it exceeds `request_bytes_max`.
            TooSlow: it did not arrive in time.
            Overloaded: too many bytes are in flight.
            BadRequest: it ends early or is badly framed.
        """
        if (request.content_length or 0) > self._bytes_max:
            raise self._too_large()
        chunks: list[bytes] = []
        content = request.content
        try:
            if content.is_eof():
                # The common case: the body is already here, so no timer has to be set.
                body = content.read_nowait()
                self.take(body)
                return body
            self._reserve(CALL_BYTES)
            async with asyncio.timeout(self._limits.settings.request_timeout_s):
                async for chunk in content.iter_any():
                    self._take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise TooSlow from None
        except (web.RequestPayloadError, ValueError) as error:
            cause = " ".join(str(error).removeprefix("400, message:").split())
            raise BadRequest(f"cannot read the body: {cause[:SHOWN_MAX]}") from None
        return b"".join(chunks)

    def take(self, body: bytes) -> None:
        """Count a body that has arrived; refuse one that is too large."""
        if len(body) > self._bytes_max:
            raise self._too_large()
        self._reserve(CALL_BYTES + len(body))

    def _take(self, size: int) -> None:
        if self._reserved + size > self._bytes_max + CALL_BYTES:
            raise self._too_large()
        self._reserve(size)

    def _reserve(self, size: int) -> None:
        if not self._limits.in_flight.reserve(size, prepare=self._prepare, who=self._who):
            raise Overloaded(IN_FLIGHT_FULL)
        self._reserved += size

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the body exceeds {self._bytes_max} bytes (request_bytes_max): send a smaller one"
        )

    def release(self) -> None:
        """Stop counting: the request was carried out or refused."""
        self._limits.in_flight.release(self._reserved, prepare=self._prepare, who=self._who)
        self._reserved = 0


def decode_body(raw: bytes, kind: type[T], *, optional: bool) -> T:
    """Return the decoded body; the error of a malformed one names the field in `path`."""
    if not raw.strip():
        if optional:
            return kind()
        raise BadRequest("the body is empty: send a JSON object")
    try:
        raw.decode()
        return msgspec.json.decode(raw, type=kind)
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the body is not UTF-8 at byte {error.start}: encode it as UTF-8"
        ) from None
    except msgspec.ValidationError as error:
        raise _bad_request(error, kind) from None
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply: send it flatter") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def decode_query(request: web.BaseRequest, kind: type[T]) -> T:
    """Return the decoded query; refuse an unknown, repeated or malformed field."""
    query = request.query
    fields = dict(query)
    if len(fields) != len(query):
        repeated = next(name for name in fields if len(query.getall(name)) > 1)[:SHOWN_MAX]
        raise BadRequest(f"the query has {repeated} twice: give it once", path=repeated)
    try:
        decoded = msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _bad_request(error, kind) from None
    for name in fields:
        # msgspec converts the word null to None; in a query it is no value.
        if getattr(decoded, name, "") is None:
            name = name[:SHOWN_MAX]
            raise BadRequest(f"{name} has no value: give one, or leave it out", path=name)
    return decoded


def decode_content(raw: msgspec.Raw, messages_max: int) -> tuple[Message, ...] | None:
    """Return the messages of a request, None for JSON null; refuse a malformed message or more
    than `messages_max`."""
    if bytes(raw) == b"null":
        return None
    try:
        return decode_messages(raw, messages_max=messages_max)
    except TooManyMessages as error:
        raise TooLarge(f"the transaction {error}: split it") from None
    except MessageError as error:
        raise BadRequest(str(error), path=error.path) from None


def _bad_request(error: msgspec.ValidationError, kind: type[Struct]) -> RequestError:
    match = _ERROR.match(str(error))
    problem, path = (match["problem"], match["path"]) if match else (str(error), None)
    path = (path or "").lstrip(".")[:SHOWN_MAX]
    unknown = _UNKNOWN.match(problem)
    if unknown:
        return _unknown_field(unknown["name"], kind)
    for pattern, words in PATTERNS.items():
        problem = problem.replace(f"matching regex {pattern!r}", words)
    problem = problem[0].lower() + problem[1:]
    return BadRequest(f"{path}: {problem}" if path else problem, path=path or None)


def _unknown_field(name: str, kind: type[Struct]) -> BadRequest:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    shown = name[:SHOWN_MAX]
    near = difflib.get_close_matches(shown, known, 1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif known:
        hint = f"known are {', '.join(known)}"
    else:
        hint = "this call takes no fields"
    return BadRequest(f"there is no field {shown!r}; {hint}", path=shown)
