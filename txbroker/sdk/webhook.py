"""For services with a check URL: verify the call, parse the question, write the answer."""

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import msgspec

from txbroker.contract.checks import Answer, CheckRequest, Commit, NotYet
from txbroker.contract.json import MessageError, decode_messages, message_to_json
from txbroker.contract.signing import (
    ID_HEADER,
    TEST_HEADER,
    TOLERANCE_S,
    flaw,
    secret_key,
)
from txbroker.contract.signing import headers as signing_headers
from txbroker.core.records import CheckReason, Decision
from txbroker.errors import BadRequest, ConfigurationError, TxbrokerError


class SupportsItems(Protocol):
    """Anything with items, as the headers of all frameworks are."""

    def items(self) -> Iterable[tuple[str, str]]:
        """Return pairs of name and value."""


RequestHeaders: TypeAlias = SupportsItems | Iterable[tuple[str | bytes, str | bytes]]
"""The headers of a request: any mapping, or pairs, names in any case."""


class BadSignature(TxbrokerError):
    """The call was not signed with the secret, or too long ago: answer it with status 401."""


class _QuestionBody(msgspec.Struct):
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
    try:
        key = secret_key(secret)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    now_s = time.time() if now is None else now
    why = flaw(key, _by_name(headers), body, now_s=now_s, tolerance_s=tolerance_s)
    if why:
        raise BadSignature(f"the call is not signed with the secret: {why}")


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
        question = msgspec.json.decode(body, type=_QuestionBody)
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


def check_answer(
    question: CheckRequest,
    answer: Answer,
    *,
    secret: str | bytes | None = None,
    headers: RequestHeaders = (),
    now: float | None = None,
) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of the answer to a check-back, for a response with status 200.

    Args:
        question: as `parse_check` returned it: the answer names its id.
        answer: as of a check function.
        secret: the group's: the answer is signed, as groups with `signed_answers` require. None: it
            is not signed.
        headers: the request's, if `secret` is given.
        now: seconds since 1970; None: this machine's clock.

    Raises:
        TypeError: it is no answer.
        BadRequest: `headers` has no `webhook-id`.
        ConfigurationError: the secret itself is malformed.
    """
    fields: dict[str, Any] = {"id": question.id}
    match answer:
        case Decision():
            fields["decision"] = answer
        case NotYet(after_s):
            fields |= {"decision": Decision.UNKNOWN, "ask_again_s": after_s}
        case Commit(messages):
            fields["decision"] = Decision.COMMIT
            if messages is not None:
                fields["messages"] = [message_to_json(message) for message in messages]
        case _:
            raise TypeError(
                f"a check answers a Decision, Commit or NotYet, not {type(answer).__name__}"
            )
    body = msgspec.json.encode(fields)
    answered = {"content-type": "application/json"}
    if secret is not None:
        call_id = _by_name(headers).get(ID_HEADER)
        if not call_id:
            raise BadRequest(f"the call has no header {ID_HEADER}: pass its headers")
        try:
            key = secret_key(secret)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        now_s = time.time() if now is None else now
        answered |= dict(signing_headers(key, call_id, int(now_s), body))
    return body, answered


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
