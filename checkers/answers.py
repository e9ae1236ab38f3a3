"""The body of a check-back over HTTP, and of its answer. Pure: bytes in, values out."""

from datetime import UTC, datetime, timedelta

import msgspec

from txbroker.checkers.base import Answered, CheckCall, Unclear, Unreached, shortened
from txbroker.contract.json import (
    MessageError,
    RepeatedKey,
    decode_fields,
    decode_messages,
    decode_scalar,
    message_to_json,
)
from txbroker.core.records import Decision, Message, bounded_later_s

NOT_HANDLED = frozenset({429, 502, 503})
"""By contract the question was not handled: the attempt is given back."""

TEXT_BYTES_MAX = 1024
"""Bytes that are read of an error's body: 200 characters have at most 800."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_encode_json = msgspec.json.Encoder().encode


def question(call: CheckCall) -> bytes:
    """Return the request's body."""
    return _encode_json(
        {
            "id": call.id,
            "group": call.group,
            "attempt": call.attempt,
            "attempts_max": call.attempts_max,
            "reason": call.reason,
            "prepared_at": rfc3339(call.prepared_at_ms),
            "messages": [message_to_json(message) for message in call.messages],
        }
    )


def trial_question(group: str, at_ms: int) -> bytes:
    """Return the body of a test call: no transaction, nothing to decide."""
    return _encode_json({"test": True, "group": group, "sent_at": rfc3339(at_ms)})


def rfc3339(time_ms: int) -> str:
    """Return milliseconds since 1970 as text in UTC: `2026-02-03T04:05:06.789Z`."""
    text = (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def webhook_id(call: CheckCall) -> str:
    """Return a unique id of this attempt: transaction id, round and number."""
    return f"{call.id}.{call.round}.{call.number}"


def by_status(status: int) -> Unreached | Unclear | None:
    """Return the result of an answer's status; None if the body decides."""
    if status == 200:
        return None
    if status in NOT_HANDLED:
        return Unreached(f"answered {status}: not handled")
    if 300 <= status < 400:
        return Unclear(f"answered {status}; redirects are not followed")
    return Unclear(f"answered {status}")


class _Malformed(ValueError):
    pass


def read_answer(body: bytes, id: str, messages_max: int | None = None) -> Answered | Unclear:
    """Return the result in the body of a 200 for transaction `id`, with at most `messages_max`
    messages.

    Any deviation from the contract is unclear; the detail never repeats the body, `text` does.
    """
    try:
        fields = _fields(body)
        decision = _decision(fields.get("decision"))
        _check_id(fields.get("id"), id)
        if decision is Decision.COMMIT:
            return Answered(
                decision, None, _messages(fields.get("messages"), messages_max), str(decision)
            )
        again = _ask_again(fields.get("ask_again_s")) if decision is Decision.UNKNOWN else None
    except _Malformed as problem:
        return Unclear(str(problem), text_of(body))
    detail = str(decision) if again is None else f"not yet, again in {again:g} s"
    # More than the contract asks for is a reason.
    text = text_of(body) if again is None and fields.keys() - {"decision", "id"} else ""
    return Answered(decision, again, None, detail, text)


def text_of(body: bytes) -> str:
    """Return the beginning of an answer as text that is safe to show."""
    return shortened(" ".join(body[:TEXT_BYTES_MAX].decode(errors="replace").split()))


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        body.decode()
        return decode_fields(body)
    except RepeatedKey:
        raise _Malformed("the answer repeats a key") from None
    except (ValueError, RecursionError):
        raise _Malformed("the answer is not a JSON object") from None


def _value(raw: msgspec.Raw, name: str) -> object:
    try:
        return decode_scalar(raw)
    except (ValueError, RecursionError):
        raise _Malformed(f"{name} of the answer is malformed") from None


def _check_id(raw: msgspec.Raw | None, id: str) -> None:
    """Refuse an answer without the question's id: anything that answers at the URL may decide."""
    if raw is None:
        raise _Malformed("the answer does not name the transaction: add the question's id")
    if _value(raw, "id") != id:
        raise _Malformed("the answer names another transaction")


def _decision(raw: msgspec.Raw | None) -> Decision:
    if raw is None:
        raise _Malformed("the answer has no decision")
    value = _value(raw, "decision")
    if isinstance(value, str) and value in Decision.__members__.values():
        return Decision(value)
    raise _Malformed("the answer's decision is not commit, rollback or unknown")


def _ask_again(raw: msgspec.Raw | None) -> float | None:
    if raw is None:
        return None
    value = _value(raw, "ask_again_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Malformed("ask_again_s of the answer is not a number")
    return bounded_later_s(value)


def _messages(raw: msgspec.Raw | None, messages_max: int | None) -> tuple[Message, ...] | None:
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        return decode_messages(raw, messages_max=messages_max)
    except MessageError as error:
        raise _Malformed(f"{error.path} of the answer is not a valid message") from None
