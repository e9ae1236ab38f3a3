"""Checks messages before they are sent: one of a wrong type would end the whole session."""

import math
from collections.abc import Iterable, Sequence

from txbroker.core.records import Header, Message
from txbroker.errors import BadRequest

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_BYTES_LIKE = (bytes, bytearray, memoryview)


def checked(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages of one transaction as they can be sent.

    Raises:
        BadRequest: there is none, or one has a field of a wrong type or range.
    """
    result = []
    # Inlined for speed: only fields of unusual types need a function call.
    for message in messages:
        if not isinstance(message, Message):
            raise BadRequest(f"a message is a txbroker.sdk.Message, not {type(message).__name__}")
        topic, key, value = message.topic, message.key, message.value
        headers, partition, timestamp_ms = message.headers, message.partition, message.timestamp_ms
        if type(topic) is not str or not topic or not topic.isascii():
            topic = checked_text("topic", topic)
        if key is not None and type(key) is not bytes:
            key = _bytes("key", key)
        if value is not None and type(value) is not bytes:
            value = _bytes("value", value)
        if headers != ():
            headers = tuple(_header(header) for header in headers)
        if partition is not None:
            partition = _whole("partition", partition, _INT32_MAX)
        if timestamp_ms is not None:
            timestamp_ms = _whole("timestamp_ms", timestamp_ms, _INT64_MAX)
        result.append(Message(topic, key, value, headers, partition, timestamp_ms))
    if not result:
        raise BadRequest("a transaction needs at least one message")
    return tuple(result)


def checked_replacement(
    prepared: Sequence[Message], messages: Iterable[Message]
) -> tuple[Message, ...]:
    """Return final messages for the prepared ones.

    Raises:
        BadRequest: see `checked`; or their number or topics differ.
    """
    result = checked(messages)
    if [message.topic for message in result] != [message.topic for message in prepared]:
        raise BadRequest("final messages must be as many as the prepared ones, for the same topics")
    return result


def checked_seconds(name: str, value: float) -> float:
    """Return a duration in seconds.

    Raises:
        BadRequest: it is not a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRequest(f"{name} is a number of seconds, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise BadRequest(f"{name} is a number of seconds above 0, not {value!r}")
    return float(value)


def checked_text(name: str, value: object) -> str:
    """Return text that can be written as UTF-8 and is not empty.

    Raises:
        BadRequest: it is not such text.
    """
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} is a text that is not empty, not {value!r}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{name} {value!r} cannot be written as UTF-8") from None
    return value


def size_of(messages: Iterable[Message]) -> int:
    """Return the approximate size of messages in memory and on the wire, bytes."""
    total = 0
    for message in messages:
        total += 64 + len(message.topic) + len(message.key or b"") + len(message.value or b"")
        for name, value in message.headers:
            total += len(name) + len(value or b"") + 8
    return total


def _bytes(name: str, value: object) -> bytes | None:
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, _BYTES_LIKE):
        return bytes(value)
    raise BadRequest(f"a message's {name} is bytes or None, not {type(value).__name__}")


def _header(header: object) -> Header:
    if not isinstance(header, (tuple, list)) or len(header) != 2:
        raise BadRequest(f"a header is a pair of name and bytes, not {header!r}")
    name, value = header
    if name == "":
        return "", _bytes("header", value)
    return checked_text("a header's name", name), _bytes("header", value)


def _whole(name: str, value: object, largest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise BadRequest(f"{name} is a whole number from 0 to {largest}, not {value!r}")
    return value
