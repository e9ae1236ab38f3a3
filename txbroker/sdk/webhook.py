"""For services with a check URL: verify the call, parse the question."""

import hmac
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import msgspec

from txbroker.contract.checks import CheckRequest
from txbroker.contract.json import MessageError, decode_messages
from txbroker.contract.signing import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TEST_HEADER,
    TIMESTAMP_HEADER,
    secret_key,
    sign,
)
from txbroker.core.records import CheckReason
from txbroker.errors import BadRequest, ConfigurationError, TxbrokerError

TOLERANCE_S = 300.0
"""Maximum age of a call, or its lead: allows for clock drift and limits replays."""
SIGNATURES_MAX = 16
"""Signatures that are compared: more than a change of secrets needs."""


class SupportsItems(Protocol):
    """Anything with items, as the headers of all frameworks are."""

    def items(self) -> Iterable[tuple[str, str]]:
        """Return pairs of name and value."""


RequestHeaders: TypeAlias = SupportsItems | Iterable[tuple[str | bytes, str | bytes]]
"""The headers of a request: any mapping, or pairs, names in any case."""


class BadSignature(TxbrokerError):
    """The call was not signed with the secret, or too long ago: answer it with status 401."""


class _Question(msgspec.Struct):
    id: str
    group: str
    attempt: int
    attempts_max: int
    reason: CheckReason
    prepared_at: datetime | float
    """As RFC 3339 text, or in seconds since 1970."""
    messages: msgspec.Raw


def verify_webhook(
    secret: str | bytes,
    headers: RequestHeaders,
    body: bytes,
    *,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> None:
    """Return if a check-back was signed with `secret` recently.

    Args:
        secret: the group's; one that begins with `whsec_` is base64, any other is used unchanged.
        headers: the request's: a mapping, or pairs as in ASGI; names in any case.
        body: the request's body, unchanged.
        tolerance_s: how many seconds the call may be older or newer than this machine's clock.
        now: seconds since 1970; None: this machine's clock.

    Raises:
        BadSignature: a header is missing, the time is too far off, or no signature matches.
        ConfigurationError: the secret itself is malformed.
        TypeError: `headers` are no headers, or `body` is not bytes.
    """
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError(f"body is the request's body as bytes, not {type(body).__name__}")
    given = _by_name(headers)
    call_id = _header(given, ID_HEADER)
    timestamp = _header(given, TIMESTAMP_HEADER)
    signatures = _header(given, SIGNATURE_HEADER)
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise BadSignature(f"{TIMESTAMP_HEADER} is not a number of seconds")
    off_s = (time.time() if now is None else now) - int(timestamp)
    if abs(off_s) > tolerance_s:
        raise BadSignature(f"the call is {off_s:.0f} s old; {tolerance_s:g} s are allowed")
    try:
        key = secret_key(secret)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    try:
        right = sign(key, call_id, int(timestamp), body).encode()
    except UnicodeEncodeError:
        raise BadSignature(f"{ID_HEADER} is not text") from None
    # Every signature is compared, in constant time, so that timing reveals nothing.
    matches = False
    for signature in signatures.split(" ")[:SIGNATURES_MAX]:
        matches |= hmac.compare_digest(signature.encode(errors="replace"), right)
    if not matches:
        raise BadSignature("no signature of the call matches the secret")


def is_test_call(headers: RequestHeaders) -> bool:
    """Return True for a test call: answer it with any status of 2xx.

    It asks for no decision and names no transaction. Verify its signature first, as with a
    check-back: then the test covers the secret, too.

    Args:
        headers: the request's; names in any case.
    """
    return _by_name(headers).get(TEST_HEADER) == "1"


def parse_check(body: bytes) -> CheckRequest:
    """Return the question in the body of a check-back.

    Raises:
        BadRequest: the body is not a check-back.
    """
    try:
        question = msgspec.json.decode(body, type=_Question)
        messages = decode_messages(question.messages)
    except (msgspec.MsgspecError, MessageError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not a check-back: {error}") from None
    at = question.prepared_at
    return CheckRequest(
        question.id,
        question.group,
        question.attempt,
        question.attempts_max,
        question.reason,
        at.timestamp() if isinstance(at, datetime) else at,
        messages,
    )


def _by_name(headers: RequestHeaders) -> dict[str, str]:
    """Return headers by their name in lower case."""
    items: Any = headers.items() if hasattr(headers, "items") else headers
    try:
        return {_text(name).lower(): _text(value) for name, value in items}
    except (TypeError, ValueError):
        raise TypeError(
            f"headers are a mapping of text, or pairs, not {type(headers).__name__}"
        ) from None


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise TypeError
    return value


def _header(headers: dict[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise BadSignature(f"the call has no header {name}")
    return value
