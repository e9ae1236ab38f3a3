"""From bytes that anybody sent to a request that is as declared, or an error that says why not."""

import asyncio
import difflib
import re
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.helpers import parse_content_type
from msgspec import Struct

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
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.posted import AnyRequest

T = TypeVar("T", bound=Struct)
CALL_BYTES = 16 * 1024
"""What a call over HTTP costs beside its body: connection, buffers, task."""
SHOWN_MAX = 60
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_PATTERN = re.compile(r"matching regex .*", re.DOTALL)


def check_media_type(request: AnyRequest) -> None:
    """Refuse what does not say that it is JSON, as a page's form could not.

    Raises:
        UnsupportedMediaType: says what to send.
    """
    given = request.headers.get("Content-Type")
    if given == "application/json":
        return  # as nearly everybody says it
    if given is None:
        raise UnsupportedMediaType
    kind, options = parse_content_type(given)
    if kind.lower() != "application/json":
        raise UnsupportedMediaType
    charset = options.get("charset")
    if charset is not None and charset.lower().replace("-", "") != "utf8":
        raise UnsupportedMediaType("JSON is UTF-8; no other charset is taken")


class BodyReader:
    """The bytes of a request's body, counted as in flight until they are let go.

    `prepare`: the request begins a transaction, and so leaves room for those that end one.
    """

    def __init__(self, shell: ApiContext, *, prepare: bool) -> None:
        self._shell = shell
        self._bytes_max = shell.settings.request_bytes_max
        self._prepare = prepare
        self._who = CALLER.get()
        self._reserved = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """Read the whole body.

        Raises:
            TooLarge: it has more bytes than are taken.
            TooSlow: it did not arrive in time.
            Overloaded: too many bytes are in flight already.
            BadRequest: it breaks off or is badly framed.
        """
        bytes_max = self._bytes_max
        if (request.content_length or 0) > bytes_max:
            raise TooLarge(f"the body has more than the {bytes_max} bytes that are taken")
        chunks: list[bytes] = []
        content = request.content
        try:
            if content.is_eof():
                # As of nearly every call: nothing is waited for, so no timer has to be set.
                whole = content.read_nowait()
                self.take(whole)
                return whole
            self._reserve(CALL_BYTES)
            async with asyncio.timeout(self._shell.settings.request_timeout_s):
                async for chunk in content.iter_any():
                    self._take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise TooSlow from None
        except (web.RequestPayloadError, ValueError) as error:
            raise BadRequest(f"the body does not read: {str(error)[:SHOWN_MAX]}") from None
        return b"".join(chunks)

    def take(self, whole: bytes) -> None:
        """Count a body that is here already.

        Raises:
            TooLarge, Overloaded: as `read`.
        """
        if len(whole) > self._bytes_max:
            raise TooLarge(f"the body has more than the {self._bytes_max} bytes that are taken")
        self._reserve(CALL_BYTES + len(whole))

    def _take(self, size: int) -> None:
        if self._reserved + size > self._bytes_max + CALL_BYTES:
            raise TooLarge(f"the body has more than the {self._bytes_max} bytes that are taken")
        self._reserve(size)

    def _reserve(self, size: int) -> None:
        if not self._shell.in_flight.reserve(size, prepare=self._prepare, who=self._who):
            raise Overloaded(
                "too many bytes are in flight, of this principal or of all callers: send the same "
                "again a little later"
            )
        self._reserved += size

    def let_go(self) -> None:
        """Say that the request was carried out or refused."""
        self._shell.in_flight.release(self._reserved, prepare=self._prepare, who=self._who)
        self._reserved = 0


def decode_body(raw: bytes, kind: type[T], *, optional: bool) -> T:
    """Return the request in a body.

    Raises:
        BadRequest: it is not JSON, or not as declared; `path` says where.
    """
    if not raw.strip():
        if optional:
            return kind()
        raise BadRequest("the body is empty; it must be a JSON object")
    try:
        raw.decode()
        return msgspec.json.decode(raw, type=kind)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start}") from None
    except msgspec.ValidationError as error:
        raise _in_words(error, kind) from None
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def decode_query(request: web.BaseRequest, kind: type[T]) -> T:
    """Return the request in a query.

    Raises:
        BadRequest: a field is unknown, given twice or malformed.
    """
    query = request.query
    fields = dict(query)
    if len(fields) != len(query):
        twice = next(name for name in fields if len(query.getall(name)) > 1)
        raise BadRequest(f"{twice[:SHOWN_MAX]} is given twice", path=twice[:SHOWN_MAX])
    try:
        found = msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _in_words(error, kind) from None
    for name in fields:
        # The word null is no value, though the library takes it for one that was not given.
        if getattr(found, name, "") is None:
            raise BadRequest(f"{name[:SHOWN_MAX]} has no value", path=name[:SHOWN_MAX])
    return found


def decode_content(raw: msgspec.Raw, messages_max: int) -> tuple[Message, ...] | None:
    """Return the messages of a request, None where there are none.

    Raises:
        BadRequest: one of them is malformed; `path` says where.
        TooLarge: there are more than `messages_max`.
    """
    if bytes(raw) == b"null":
        return None
    try:
        return decode_messages(raw, messages_max=messages_max)
    except TooManyMessages as error:
        raise TooLarge(f"the transaction {error}") from None
    except MessageError as error:
        raise BadRequest(str(error), path=error.path) from None


def _in_words(error: msgspec.ValidationError, kind: type[Struct]) -> RequestError:
    match = _WHERE.match(str(error))
    what, path = (match["what"], match["path"]) if match else (str(error), None)
    path = (path or "").lstrip(".")[:SHOWN_MAX]
    unknown = _UNKNOWN.match(what)
    if unknown:
        return _unknown_field(unknown["name"], kind)
    what = _PATTERN.sub("without control characters", what)
    what = what[0].lower() + what[1:]
    return BadRequest(f"{path}: {what}" if path else what, path=path or None)


def _unknown_field(name: str, kind: type[Struct]) -> BadRequest:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    shown = name[:SHOWN_MAX]
    near = difflib.get_close_matches(shown, known, 1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif known:
        hint = f"known are {', '.join(known)}"
    else:
        hint = "nothing is taken here"
    return BadRequest(f"there is no field {shown!r}; {hint}", path=shown)
