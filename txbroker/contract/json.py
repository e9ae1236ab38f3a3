"""Messages as JSON: in the HTTP API, in check-backs and in their answers.

`{topic, key | key_base64, value | value_base64 | value_json, headers, partition, timestamp_ms}`:
exactly one of the alternatives. A null optional field is absent, but a value must be given:
`"value": null` is a tombstone, a message without any value field is refused.
"""

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from txbroker.core.records import Header, Message

JsonObject: TypeAlias = dict[str, Any]

_FIELDS = (
    "topic",
    "key",
    "key_base64",
    "value",
    "value_base64",
    "value_json",
    "headers",
    "partition",
    "timestamp_ms",
)
_KNOWN = frozenset(_FIELDS)
TARGET_PARTITION_MAX = 2**31 - 1
"""Kafka's limit of a target's partition number; `core.routing` has that of half partitions."""
TIMESTAMP_MS_MAX = 9_200_000_000_000_000
"""In the year 293506. Audits hold timestamps in 64-bit microseconds, so these end there."""


class RepeatedKey(ValueError):
    """A JSON object has a key twice: parsers would choose different values."""


class _Key(str):
    """A key on its way into a dict, which compares only equal hashes: so equal is repeated."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if str.__eq__(self, other) is True:
            raise RepeatedKey(str(self))
        return False


def _as_key(kind: type, name: str) -> object:
    return kind(name)


_decode_raw_object = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_as_key).decode
_decode_raw_list = msgspec.json.Decoder(list[dict[_Key, msgspec.Raw]], dec_hook=_as_key).decode
_decode_named = msgspec.json.Decoder(dict[_Key, Any], dec_hook=_as_key).decode
_decode_scalar = msgspec.json.Decoder(str | bool | int | float | None).decode


class MessageError(ValueError):
    """A message in JSON is invalid.

    Attributes:
        path: for example `messages[2].headers[0]`.
        problem: in words.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class TooManyMessages(MessageError):
    """There are more messages than a transaction may have."""


# --- to JSON ---------------------------------------------------------------------------------


def message_to_json(message: Message) -> JsonObject:
    """Return a message as JSON: text if the bytes are UTF-8, else base64.

    `message_from_json` is the inverse.
    """
    shown: JsonObject = {"topic": message.topic}
    if message.key is not None:
        _show(shown, "key", message.key)
    if message.value is None:
        shown["value"] = None
    else:
        _show(shown, "value", message.value)
    if message.headers:
        shown["headers"] = headers_to_json(message.headers)
    if message.partition is not None:
        shown["partition"] = message.partition
    if message.timestamp_ms is not None:
        shown["timestamp_ms"] = message.timestamp_ms
    return shown


def _show(shown: JsonObject, name: str, value: bytes) -> None:
    try:
        shown[name] = value.decode()
    except UnicodeDecodeError:
        shown[f"{name}_base64"] = base64.b64encode(value).decode()


def headers_to_json(headers: Iterable[Header]) -> list[list[Any]]:
    """Return headers as JSON: pairs of a name, and text, null or `{"base64": text}`."""
    return [[name, _header_value(value)] for name, value in headers]


def _header_value(value: bytes | None) -> str | dict[str, str] | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


# --- from JSON -------------------------------------------------------------------------------


def decode_fields(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object, their values not decoded.

    Raises:
        RepeatedKey: a key is there twice.
        ValueError, RecursionError: it is not a JSON object.
    """
    return {str(name): value for name, value in _decode_raw_object(raw).items()}


def decode_scalar(raw: bytes | msgspec.Raw) -> object:
    """Return a JSON value; an empty one for a list or an object, which may hold millions of values.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    try:
        return _decode_scalar(raw)
    except msgspec.ValidationError:
        opening = bytes(memoryview(raw)[:1])
        if opening == b"[":
            return []
        if opening == b"{":
            return {}
        raise


def decode_messages(
    raw: bytes | msgspec.Raw, path: str = "messages", *, messages_max: int | None = None
) -> tuple[Message, ...]:
    """Return the messages of a JSON list.

    `value_json` becomes the value byte for byte, so that no number in it changes.

    Args:
        messages_max: more are refused before any is decoded; None: any number.

    Raises:
        MessageError: it is not JSON, not a list of objects, or a message is malformed.
        TooManyMessages: it has more than `messages_max`.
    """
    text = bytes(raw)
    try:
        text.decode()
        objects = _decode_raw_list(text)
    except RepeatedKey as error:
        raise MessageError(path, f"has a message with {str(error)[:40]!r} twice") from None
    except msgspec.ValidationError:
        raise MessageError(path, "must be a list of objects, one for each message") from None
    except (ValueError, RecursionError):
        raise MessageError(path, "is not JSON") from None
    if messages_max is not None and len(objects) > messages_max:
        raise TooManyMessages(path, f"has more than {messages_max} messages")
    # One at a time, so that millions of invalid objects end with the first.
    return tuple(_decode_message(obj, f"{path}[{n}]") for n, obj in enumerate(objects))


def _decode_message(obj: Mapping[_Key, msgspec.Raw], path: str) -> Message:
    fields = {str(key): _decode_field(str(key), raw, path) for key, raw in obj.items()}
    return message_from_json(fields, path)


def _decode_field(name: str, raw: msgspec.Raw, path: str) -> object:
    if name == "value_json":
        return None if bytes(raw) == b"null" else raw
    try:
        return _decode_headers(bytes(raw)) if name == "headers" else decode_scalar(raw)
    except RepeatedKey as error:
        raise MessageError(f"{path}.{name}", f"has {str(error)[:40]!r} twice") from None
    except (ValueError, RecursionError):
        shown = name if name in _FIELDS else "an unknown field"
        raise MessageError(path, f"{shown} does not read") from None


def _decode_headers(text: bytes) -> object:
    objects = text.count(b"{")
    if objects == 0:
        return msgspec.json.decode(text)
    if objects == 1 and text.startswith(b"{"):
        return {str(name): value for name, value in _decode_named(text).items()}
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RepeatedKey(repeated)
    return found


def message_from_json(obj: object, path: str = "message") -> Message:
    """Return the message of a decoded JSON object, with `value_json` as a `msgspec.Raw`.

    Raises:
        MessageError: a field is missing, unknown, given twice or of a wrong type.
    """
    if not isinstance(obj, Mapping):
        raise MessageError(path, f"must be an object, not {_kind(obj)}")
    if not obj.keys() <= _KNOWN:
        shown = next(str(name)[:40] for name in obj if name not in _KNOWN)
        raise MessageError(path, f"unknown field {shown!r}; known are {', '.join(_FIELDS)}")
    return Message(
        topic=_topic(obj, path),
        key=_key(obj, path),
        value=_value(obj, path),
        headers=headers_from_json(obj.get("headers"), f"{path}.headers"),
        partition=_integer(obj, "partition", TARGET_PARTITION_MAX, path),
        timestamp_ms=_integer(obj, "timestamp_ms", TIMESTAMP_MS_MAX, path),
    )


def _topic(obj: Mapping[str, Any], path: str) -> str:
    topic = obj.get("topic")
    if topic is None:
        raise MessageError(path, "has no topic")
    if not isinstance(topic, str):
        raise MessageError(f"{path}.topic", f"must be text, not {_kind(topic)}")
    if not topic:
        raise MessageError(f"{path}.topic", "must not be empty")
    _utf8(topic, f"{path}.topic")
    return topic


def _key(obj: Mapping[str, Any], path: str) -> bytes | None:
    given = _one_of(obj, ("key", "key_base64"), path)
    if given is None:
        return None
    return _bytes(given, obj[given], f"{path}.{given}")


def _value(obj: Mapping[str, Any], path: str) -> bytes | None:
    given = _one_of(obj, ("value", "value_base64", "value_json"), path)
    if given is None:
        if "value" in obj:
            return None
        raise MessageError(
            path,
            "has no value; give one of value, value_base64 and value_json, "
            'or "value": null for a tombstone',
        )
    if given == "value_json":
        return bytes(obj[given])
    return _bytes(given, obj[given], f"{path}.{given}")


def _one_of(obj: Mapping[str, Any], names: tuple[str, ...], path: str) -> str | None:
    found = None
    for name in names:
        if obj.get(name) is not None:
            if found is not None:
                given = [name for name in names if obj.get(name) is not None]
                raise MessageError(path, f"gives {' and '.join(given)}; give only one of them")
            found = name
    return found


def _bytes(name: str, given: object, path: str) -> bytes:
    if not isinstance(given, str):
        hint = "; use value_json for it" if name == "value" else ""
        raise MessageError(path, f"must be text, not {_kind(given)}{hint}")
    return _base64(given, path) if name.endswith("_base64") else _utf8(given, path)


def _utf8(text: str, path: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise MessageError(path, "has half of a surrogate pair, which is not text") from None


def _base64(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MessageError(path, "is not base64 (standard alphabet, with padding)") from None


def headers_from_json(given: object, path: str = "headers") -> tuple[Header, ...]:
    """Return headers from decoded JSON: an object, or a list of pairs.

    Raises:
        MessageError
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(_header(name, value, f"{path}.{name}") for name, value in given.items())
    if not isinstance(given, list | tuple):
        raise MessageError(
            path, f"must be an object or a list of [name, value] pairs, not {_kind(given)}"
        )
    headers = []
    for n, pair in enumerate(given):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise MessageError(f"{path}[{n}]", "must be a pair [name, value]")
        headers.append(_header(pair[0], pair[1], f"{path}[{n}]"))
    return tuple(headers)


def _header(name: object, value: object, path: str) -> Header:
    if not isinstance(name, str):
        raise MessageError(path, f"the name must be text, not {_kind(name)}")
    _utf8(name, path)
    if value is None:
        return name, None
    if isinstance(value, str):
        return name, _utf8(value, path)
    if isinstance(value, Mapping) and value.keys() == {"base64"}:
        encoded = value["base64"]
        if isinstance(encoded, str):
            return name, _base64(encoded, path)
    raise MessageError(
        path, f'the value must be text, null or {{"base64": text}}, not {_kind(value)}'
    )


def _integer(obj: Mapping[str, Any], name: str, largest: int, path: str) -> int | None:
    given = obj.get(name)
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool):
        raise MessageError(f"{path}.{name}", f"must be a whole number, not {_kind(given)}")
    if not 0 <= given <= largest:
        raise MessageError(f"{path}.{name}", f"must be from 0 to {largest}")
    return given


def _kind(value: object) -> str:
    """Return a JSON value's type in words; the value itself may be large or secret."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return type(value).__name__
